"""How cost grows with the tasks of a stream, by formula, and how well `cflat plan` predicts a run.

For each method, a stream of small tasks (two classes, 8 x 8 pixels, a tiny network) is planned (`cflat.runs.plan`) and
then run; CPU seconds are compared, since wall time says little on a busy machine.

    python benchmarks/scale.py --tasks 10 --methods simplecil,ease --write docs/scale.md
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

from cflat.config.presets import resolve_config
from cflat.config.run_config import RunConfig
from cflat.methods import get_method_spec, list_methods
from cflat.runs import plan
from cflat.runs.run import run

BEGIN, END = "<!-- benchmarks/scale.py -->", "<!-- end of benchmarks/scale.py -->"

FORMULAS = {
    "finetune": ("E n e 3F", "-", "t q F", "P + C D"),
    "replay": ("E (n + m) e 3F", "n F", "t q F", "P + C D"),
    "icarl": ("E (n + m) (F + e 3F)", "(n + m) F", "t q F", "2P + C D"),
    "memo": ("E (n + m) (G + t S + e 3S)", "(n + m) (G + t S)", "t q (G + t S)", "P + t P_s + t C D"),
    "simplecil": ("-", "n F", "t q F", "P + C D"),
    "aper": ("E n e 3F, first task", "n 2F", "t q 2F", "P + 2A + 2 C D"),
    "ranpac": ("E n e 3F, first task", "n F + n M^2 + M^3 / 3", "t q (F + D M + M C)", "P + M^2 + 2 M C"),
    "ease": ("E n (F / L + e 3F)", "n t F + C^2 D t / 6", "t q t F", "P + t A + t C D"),
    "l2p": ("E n (F + e 3F)", "-", "q F + t q 2F", "P + pool"),
    "dualprompt": ("E n (F + e 3F)", "-", "q F + t q 2F", "P + t prompts"),
    "duct": ("E n e 3F + R n F", "n 2F + t transports", "t q F", "3P + C D"),
}
"""Training, borders of a task, tests after it, and state, for task t."""


def many_classes(path: Path, num_classes: int, num_train: int, num_test: int) -> None:
    generator = np.random.default_rng(0)
    prototypes = generator.integers(0, 256, (num_classes, 8, 8, 3))

    def images(count: int) -> tuple[np.ndarray, np.ndarray]:
        labels = np.repeat(np.arange(num_classes), count)
        noisy = prototypes[labels] + generator.normal(0, 30, (len(labels), 8, 8, 3))
        return np.clip(noisy, 0, 255).astype(np.uint8), labels

    (x_train, y_train), (x_test, y_test) = images(num_train), images(num_test)
    np.savez(path, x_train=x_train, y_train=y_train, x_test=x_test, y_test=y_test)


def configuration(method: str, data: Path) -> RunConfig:
    layer: dict[str, Any] = {
        "method": {"name": method},
        "data": {"name": f"npz:{data}", "train_per_class": None, "test_per_class": None},
        "preset": "smoke",
        "backbone": {
            "name": "small_cnn" if "other" in get_method_spec(method).families else "vit_smoke",
            "image_size": 8,
        },
        "stream": {"initial": 2, "increment": 2},
        "train": {"epochs": 2, "batch_size": 8},
        "runtime": {"threads": 1},
    }
    return resolve_config(layer)


def measure(method: str, num_tasks: int) -> dict[str, Any]:
    """Plan a stream and run it; return both in CPU seconds."""
    plan.clock = time.process_time
    with TemporaryDirectory() as folder:
        data = Path(folder) / "many.npz"
        many_classes(data, 2 * num_tasks, 16, 8)
        config = configuration(method, data)
        found = plan.estimate(config)
        started = time.process_time()
        done = run(config, Path(folder) / "run")
        seconds = time.process_time() - started
    return {
        "method": method,
        "tasks": num_tasks,
        "steps": found.steps == done.cost.steps,
        "flops": found.flops / done.cost.flops - 1 if done.cost.flops else 0.0,
        "predicted_seconds": found.seconds,
        "measured_seconds": seconds,
        "error": found.seconds / seconds - 1,
    }


# -- predictions ----------------------------------------------------------------------------------------------------

PEAK, USED = 312e12, 0.35
BANDWIDTH = {1: float("inf"), 8: 200e9, 64: 25e9}
NUM_TASKS, CLASSES, TRAIN, TEST, EPOCHS, BATCH, MEMORY, EVALUATIONS = 1000, 2, 100, 20, 5, 64, 2000, 4
MODELS = {"ViT-B": ("vit_base_patch16_224", 12, 768), "ViT-L": ("vit_large_patch16_224", 24, 1024)}
PREDICTED = ("simplecil", "ranpac", "l2p", "ease", "duct", "icarl", "memo")


def forward_flops(name: str) -> tuple[float, int]:
    import timm

    with torch.device("meta"):
        model = timm.create_model(name, num_classes=0)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(torch.empty(1, 3, 224, 224))
    return float(counter.get_total_flops()), sum(parameter.numel() for parameter in model.parameters())


def run_flops(method: str, flops: float, layers: int, width: int) -> tuple[float, float]:
    """Return the arithmetic of a whole stream: of training, and of everything else."""
    n, q, projections, e3 = CLASSES * TRAIN, CLASSES * TEST, 10_000, 3 * EVALUATIONS
    stage, train, rest = flops / layers, 0.0, 0.0
    for t in range(1, NUM_TASKS + 1):
        classes = CLASSES * t
        old = MEMORY if t > 1 else 0
        once = {
            "simplecil": (0, n * flops, flops),
            "ranpac": (
                EPOCHS * n * e3 * flops if t == 1 else 0,
                n * flops + 2 * n * projections**2 + projections**3 / 3,
                flops + 2 * projections * (width + classes),
            ),
            "l2p": (EPOCHS * n * (1 + e3) * flops, q * flops, 2 * flops),
            "ease": (
                EPOCHS * n * (1 / layers + e3) * flops,
                n * t * flops + classes**2 * width * t / 6,
                t * flops,
            ),
            "duct": (EPOCHS * n * (e3 + 1) * flops, 2 * n * flops, flops),
            "icarl": (EPOCHS * (n + old) * (1 + e3) * flops, (n + old) * flops, flops),
            "memo": (
                EPOCHS * (n + old) * (flops - stage + (t + e3) * stage),
                (n + old) * (flops + t * stage),
                flops + t * stage,
            ),
        }[method]
        train += once[0]
        rest += once[1] + t * q * once[2]
    return train, rest


def trained_parameters(method: str, parameters: int, layers: int, width: int) -> float:
    adapters = layers * 2 * width * 64
    few = {"simplecil": 0, "ranpac": 0, "l2p": 50 * width, "ease": adapters, "memo": parameters / layers}
    return float(few.get(method, parameters))


def hours(method: str, model: str, gpus: int) -> float:
    name, layers, width = MODELS[model]
    flops, parameters = forward_flops(name)
    train, rest = run_flops(method, flops, layers, width)
    share = min(1.0, BATCH / gpus / 8)  # fewer than 8 images leave most of a GPU idle
    seconds = (train / share + rest) / (gpus * PEAK * USED)
    images = CLASSES * TRAIN + (MEMORY if method in ("icarl", "memo") else 0)
    steps = 0 if method in ("simplecil", "ranpac") else NUM_TASKS * EPOCHS * -(-images // BATCH)
    sent = 2 * 4 * trained_parameters(method, parameters, layers, width) * (gpus - 1) / gpus
    return (seconds + steps * EVALUATIONS * sent / BANDWIDTH[gpus]) / 3600


# -- the page -------------------------------------------------------------------------------------------------------


def tables(rows: Sequence[dict[str, Any]]) -> str:
    lines = [
        "| method | training of task t | at its borders | tests after it | state after it |",
        "|---|---|---|---|---|",
    ]
    lines += [f"| {name} | {' | '.join(FORMULAS[name])} |" for name in FORMULAS]
    lines += ["", "| method | tasks | CPU s predicted | measured | error |", "|---|---|---|---|---|"]
    for row in rows:
        seconds = f"{row['predicted_seconds']:.1f} | {row['measured_seconds']:.1f}"
        lines.append(f"| {row['method']} | {row['tasks']} | {seconds} | {row['error']:+.0%} |")
    return "\n".join(lines)


def prediction_table() -> str:
    head = [f"{model}, {gpus}" for model in MODELS for gpus in BANDWIDTH]
    lines = [f"| hours with C-Flat | {' | '.join(head)} |", f"|---{'|---' * len(head)}|"]
    for method in PREDICTED:
        cells = [f"{hours(method, model, gpus):.1f}" for model in MODELS for gpus in BANDWIDTH]
        lines.append(f"| {method} | {' | '.join(cells)} |")
    return "\n".join(lines)


def put(page: Path, text: str) -> None:
    before, _, rest = page.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=10)
    parser.add_argument("--methods", default=",".join(list_methods()))
    parser.add_argument("--out", type=Path, default=Path("docs/results/scale.json"))
    parser.add_argument("--write", type=Path, help="put the tables into this page")
    arguments = parser.parse_args()
    rows = json.loads(arguments.out.read_text()) if arguments.out.exists() else []
    known = {(row["method"], row["tasks"]) for row in rows}
    for method in arguments.methods.split(",") if arguments.methods else ():
        if (method, arguments.tasks) not in known:
            rows.append(measure(method, arguments.tasks))
            print(json.dumps(rows[-1]), flush=True)
            arguments.out.write_text(json.dumps(rows, indent=2) + "\n")
    if arguments.write is not None:
        put(arguments.write, tables(rows) + "\n\n**Predicted, not measured:**\n\n" + prediction_table())


if __name__ == "__main__":
    main()
