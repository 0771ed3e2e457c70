"""How time, arithmetic and state grow with the tasks of a stream, for each method, and how well they are predicted.

For each method, a stream of tiny tasks (two classes, 8 x 8 pixels, a tiny network) is surveyed at tasks 1, 4 and 16
(`cflat.runs.estimate`, the model behind ``cflat plan``) and then run. What the model says about the tasks after the
last one it has seen is compared with what they take: the state in bytes, the arithmetic of answering, CPU seconds.
Results of methods that are there already are kept; ``--write`` puts the tables into docs/scale.md.

    python benchmarks/scale.py --tasks 40 --methods simplecil,ease --out docs/results/scale.json --write docs/scale.md
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

from cflat.config.presets import resolve_config
from cflat.config.run_config import RunConfig
from cflat.methods import get_method_spec, list_methods
from cflat.runs.estimate import predict, survey
from cflat.runs.run import run
from cflat.train import Observer

SEEN = (0, 1, 4, 16)
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


def many_classes(path: Path, num_classes: int) -> None:
    generator = np.random.default_rng(0)
    prototypes = generator.integers(0, 256, (num_classes, 8, 8, 3))

    def images(count: int) -> tuple[np.ndarray, np.ndarray]:
        labels = np.repeat(np.arange(num_classes), count)
        noisy = prototypes[labels] + generator.normal(0, 30, (len(labels), 8, 8, 3))
        return np.clip(noisy, 0, 255).astype(np.uint8), labels

    (x_train, y_train), (x_test, y_test) = images(4), images(2)
    np.savez(path, x_train=x_train, y_train=y_train, x_test=x_test, y_test=y_test)


def configuration(method: str, data: Path) -> RunConfig:
    own = "small_cnn" if "other" in get_method_spec(method).families else "vit_smoke"
    layer: dict[str, Any] = {
        "method": {"name": method},
        "data": {"name": f"npz:{data}"},
        "preset": "smoke",
        "backbone": {"name": own, "image_size": 8},
        "stream": {"initial": 2, "increment": 2},
        "train": {"epochs": 1, "batch_size": 8},
        "runtime": {"threads": 1},
    }
    return resolve_config(layer)


class Tasks(Observer):
    """CPU seconds of each task."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.mark = 0.0

    def on_run_start(self, num_tasks: int, first_task: int) -> None:
        self.mark = time.process_time()

    def on_task_end(self, record: object) -> None:
        now = time.process_time()
        self.seconds.append(now - self.mark)
        self.mark = now


def measure(method: str, num_tasks: int) -> dict[str, Any]:
    with TemporaryDirectory() as folder:
        data = Path(folder) / "many.npz"
        many_classes(data, 2 * num_tasks)
        config = configuration(method, data)
        found = survey(config, budget=1e6, tasks=(*SEEN, num_tasks - 1))
        seen = [rate for rate in found.rates if rate.task in SEEN]
        model = predict(found.works, seen, found.evaluations, found.start)
        tasks = Tasks()
        run(config, Path(folder) / "run", observers=[tasks])
    later = slice(max(SEEN) + 1, num_tasks)
    looks = {rate.task: rate.look_flops for rate in found.rates}
    slope = (looks[16] - looks[4]) / 12
    states = np.array([work.state_bytes for work in found.works], dtype=float)
    square, linear, _ = np.polyfit([1, 4, 16], states[[1, 4, 16]], 2)
    line = np.polyval(np.polyfit([1, 4, 16], states[[1, 4, 16]], 2), num_tasks - 1)
    predicted = sum(task.cpu_seconds for task in model.tasks[later])
    measured = sum(tasks.seconds[later])
    x = np.arange(1, num_tasks)
    return {
        "tasks": num_tasks,
        "look_flops": looks[1],
        "look_flops_per_task": slope,
        "look_flops_error": (looks[16] + slope * (num_tasks - 1 - 16)) / looks[num_tasks - 1] - 1,
        "state_bytes": states[1],
        "state_bytes_per_task": linear,
        "state_bytes_per_task_squared": square,
        "state_error": line / states[-1] - 1,
        "cpu_ms_second_task": 1e3 * tasks.seconds[1],
        "cpu_ms_per_task": 1e3 * float(np.polyfit(x, tasks.seconds[1:], 1)[0]),
        "predicted_seconds": predicted,
        "measured_seconds": measured,
        "error": predicted / measured - 1,
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


def tables(rows: dict[str, dict[str, Any]]) -> str:
    lines = [
        "| method | training of task t | at its borders | tests after it | state after it |",
        "|---|---|---|---|---|",
    ]
    lines += [f"| {name} | {' | '.join(FORMULAS[name])} |" for name in FORMULAS]
    if not rows:
        return "\n".join(lines)
    num_tasks = max(row["tasks"] for row in rows.values())
    lines += [
        "",
        f"Measured on streams of {num_tasks} tasks; the model has seen tasks {', '.join(map(str, SEEN))}, "
        f"the errors are those of its predictions for what comes after them.",
        "",
        "| method | state: KiB + KiB t + KiB t^2 | error | kFLOP per answer + per task | error "
        "| CPU ms of task 1 + per task | predicted s | measured s | error |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        square, linear = row["state_bytes_per_task_squared"], row["state_bytes_per_task"]
        constant = row["state_bytes"] - linear - square
        lines.append(
            f"| {name} | {constant / 1024:.1f} + {linear / 1024:.2f} t + {square / 1024:.3f} t^2 | "
            f"{row['state_error']:+.1%} | {row['look_flops'] / 1e3:.0f} + {row['look_flops_per_task'] / 1e3:.1f} t | "
            f"{row['look_flops_error']:+.1%} | {row['cpu_ms_second_task']:.0f} + {row['cpu_ms_per_task']:.1f} t | "
            f"{row['predicted_seconds']:.1f} | {row['measured_seconds']:.1f} | {row['error']:+.1%} |"
        )
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
    parser.add_argument("--tasks", type=int, default=40)
    parser.add_argument("--methods", default=",".join(list_methods()))
    parser.add_argument("--out", type=Path, default=Path("docs/results/scale.json"))
    parser.add_argument("--write", type=Path, help="put the tables into this page")
    arguments = parser.parse_args()
    rows = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    for method in arguments.methods.split(",") if arguments.methods else ():
        if method not in rows:
            rows[method] = measure(method, arguments.tasks)
            print(method, json.dumps(rows[method]), flush=True)
            arguments.out.write_text(json.dumps(rows, indent=2) + "\n")
    if arguments.write is not None:
        put(arguments.write, tables(rows) + "\n\n**Predicted, not measured:**\n\n" + prediction_table())


if __name__ == "__main__":
    main()
