"""How time, arithmetic and state grow with the tasks of a stream, for each method, and how well they are predicted.

For each method, a stream of small tasks (two classes, 8 x 8 pixels, a tiny network) is surveyed at tasks 0, 1, 4 and
16 (`cflat.runs.estimate`, the model behind ``cflat plan``) and then run. What the model says about the tasks after the
last one it has seen is compared with what they take: the state in bytes, the arithmetic of a prediction, CPU seconds.
Surveys and runs take turns, ``--rounds`` runs between surveys, and each kind is averaged: on a busy machine even CPU
time doubles and recovers within seconds. Streams of more than 100 tasks have smaller tasks and are surveyed up to
task 64; there the memory of the process is recorded, too.

Results that are there already are kept; ``--write`` puts the tables into docs/scale.md.

    python benchmarks/scale.py --tasks 40 --methods simplecil,ease --write docs/scale.md
    python benchmarks/scale.py --tasks 500 --methods simplecil,replay --write docs/scale.md
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

from cflat.config.presets import resolve_config
from cflat.config.run_config import RunConfig
from cflat.methods import get_method_spec, list_methods
from cflat.runs.estimate import Survey, predict, survey
from cflat.runs.run import run
from cflat.train import Observer

LONG = 100
"""Streams of more tasks are long."""
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


def seen_tasks(num_tasks: int) -> tuple[int, ...]:
    """Return the tasks that the model sees."""
    return (0, 1, 4, 16, 64) if num_tasks > LONG else (0, 1, 4, 16)


def many_classes(path: Path, num_classes: int, num_train: int, num_test: int) -> None:
    generator = np.random.default_rng(0)
    prototypes = generator.integers(0, 256, (num_classes, 8, 8, 3))

    def images(count: int) -> tuple[np.ndarray, np.ndarray]:
        labels = np.repeat(np.arange(num_classes), count)
        noisy = prototypes[labels] + generator.normal(0, 30, (len(labels), 8, 8, 3))
        return np.clip(noisy, 0, 255).astype(np.uint8), labels

    (x_train, y_train), (x_test, y_test) = images(num_train), images(num_test)
    np.savez(path, x_train=x_train, y_train=y_train, x_test=x_test, y_test=y_test)


def configuration(method: str, data: Path, num_tasks: int) -> RunConfig:
    own = "small_cnn" if "other" in get_method_spec(method).families else "vit_smoke"
    if num_tasks > LONG and own == "small_cnn":
        own = "mlp"
    layer: dict[str, Any] = {
        "method": {"name": method},
        "data": {"name": f"npz:{data}", "train_per_class": None, "test_per_class": None},
        "preset": "smoke",
        "backbone": {"name": own, "image_size": 8},
        "stream": {"initial": 2, "increment": 2},
        "train": {"epochs": 1, "batch_size": 64} if num_tasks > LONG else {"epochs": 2, "batch_size": 8},
        "runtime": {"threads": 1},
    }
    return resolve_config(layer)


class Tasks(Observer):
    """CPU seconds of each task, and the memory of the process after it."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.resident: list[int] = []
        self.mark = 0.0

    def on_run_start(self, num_tasks: int, first_task: int) -> None:
        self.mark = time.process_time()

    def on_task_end(self, record: object) -> None:
        now = time.process_time()
        self.seconds.append(now - self.mark)
        self.resident.append(resident_bytes())
        self.mark = time.process_time()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def measure(method: str, num_tasks: int, rounds: int) -> dict[str, Any]:
    seen, surveys, runs = seen_tasks(num_tasks), [], []
    with TemporaryDirectory() as folder:
        data = Path(folder) / "many.npz"
        many_classes(data, 2 * num_tasks, *((4, 2) if num_tasks > LONG else (16, 8)))
        config = configuration(method, data, num_tasks)
        surveys.append(survey(config, budget=1e6, tasks=(*seen, num_tasks - 1)))
        for index in range(rounds):
            runs.append(Tasks())
            run(config, Path(folder) / f"run{index}", observers=[runs[-1]])
            surveys.append(survey(config, budget=1e6, tasks=seen))
    return summarize(method, surveys, [one.seconds for one in runs], runs[0].resident)


def summarize(
    method: str, surveys: Sequence[Survey], runs: Sequence[Sequence[float]], memory: Sequence[int]
) -> dict[str, Any]:
    """Compare the CPU seconds of every task in some runs, and memory after it, with what the surveys say."""
    num_tasks = len(memory)
    seen = seen_tasks(num_tasks)
    models = [predict(replace(one, rates=[rate for rate in one.rates if rate.task in seen])) for one in surveys]
    found = surveys[0]
    model = np.mean([[task.cpu_seconds for task in one.tasks] for one in models], axis=0)
    taken = np.mean(runs, axis=0)
    later = np.arange(seen[-1] + 1, num_tasks)
    looks = {rate.task: rate.look_flops for rate in found.rates}
    slope = (looks[16] - looks[4]) / 12
    states = np.array([work.state_bytes for work in found.works], dtype=float)
    parabola = np.polyfit([1, 4, 16], states[[1, 4, 16]], 2)
    but_first = np.arange(1, num_tasks)
    lines = {name: np.polyfit(but_first, values[1:], 1) for name, values in (("model", model), ("run", taken))}
    resident = np.polyfit(later, np.array(memory)[later], 1)
    return {
        "method": method,
        "tasks": num_tasks,
        "look_flops": looks[1],
        "look_flops_per_task": slope,
        "look_flops_error": (looks[16] + slope * (num_tasks - 1 - 16)) / looks[num_tasks - 1] - 1,
        "state_bytes": states[1],
        "state_bytes_per_task": parabola[1],
        "state_bytes_per_task_squared": parabola[0],
        "state_error": np.polyval(parabola, num_tasks - 1) / states[-1] - 1,
        "resident_bytes_per_task": resident[0],
        "resident_bytes_last": memory[-1],
        "cpu_ms_second_task": 1e3 * taken[1],
        "cpu_ms_per_task": 1e3 * lines["run"][0],
        "cpu_ms_per_task_predicted": 1e3 * lines["model"][0],
        # 1 is linear: the time of a task is proportional to the number of tasks so far.
        "exponent": np.polyfit(np.log(later), np.log(taken[later]), 1)[0],
        "exponent_predicted": np.polyfit(np.log(later), np.log(model[later]), 1)[0],
        "predicted_seconds": model[later].sum(),
        "predicted_by_each": [sum(task.cpu_seconds for task in one.tasks[later[0] :]) for one in models],
        "measured_seconds": taken[later].sum(),
        "measured_by_each": [sum(one[later[0] :]) for one in runs],
        "error": model[later].sum() / taken[later].sum() - 1,
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
    order = list(FORMULAS)
    for num_tasks in sorted({row["tasks"] for row in rows}):
        chosen = sorted((row for row in rows if row["tasks"] == num_tasks), key=lambda row: order.index(row["method"]))
        lines += ["", *(long_table if num_tasks > LONG else short_table)(chosen, num_tasks)]
    return "\n".join(lines)


def short_table(rows: Sequence[dict[str, Any]], num_tasks: int) -> Iterator[str]:
    seen = seen_tasks(num_tasks)
    yield f"Streams of {num_tasks} tasks, 32 training and 16 test images in each. The model has seen tasks"
    yield f"{', '.join(map(str, seen))}; errors are those of its predictions for tasks {seen[-1] + 1} to the last."
    yield ""
    yield (
        "| method | state: KiB + KiB t + KiB t^2 | error | kFLOP per test image + per task | error "
        "| CPU ms of task 1 + per task | CPU s predicted | measured | error |"
    )
    yield "|---|---|---|---|---|---|---|---|---|"
    for row in rows:
        square, linear = row["state_bytes_per_task_squared"], row["state_bytes_per_task"]
        constant = row["state_bytes"] - linear - square
        yield (
            f"| {row['method']} | {constant / 1024:.1f} + {linear / 1024:.2f} t + {square / 1024:.3f} t^2 | "
            f"{row['state_error']:+.1%} | {row['look_flops'] / 1e3:.0f} + {row['look_flops_per_task'] / 1e3:.1f} t | "
            f"{row['look_flops_error']:+.1%} | {row['cpu_ms_second_task']:.0f} + {row['cpu_ms_per_task']:.1f} t | "
            f"{row['predicted_seconds']:.1f} | {row['measured_seconds']:.1f} | {row['error']:+.1%} |"
        )


def long_table(rows: Sequence[dict[str, Any]], num_tasks: int) -> Iterator[str]:
    seen = seen_tasks(num_tasks)
    yield f"A stream of {num_tasks} tasks, 8 training and 4 test images in each. The model has seen tasks"
    yield f"{', '.join(map(str, seen))}; everything but the slopes of time is about the tasks after these."
    yield ""
    yield (
        "| method | CPU ms more with each task: predicted | measured | time of task t ~ t^x: predicted x | measured x "
        "| CPU s predicted | measured | error | state, KiB per task | process memory, KiB per task | at the end, MiB |"
    )
    yield "|---|---|---|---|---|---|---|---|---|---|---|"
    for row in rows:
        yield (
            f"| {row['method']} | {row['cpu_ms_per_task_predicted']:.2f} | {row['cpu_ms_per_task']:.2f} | "
            f"{row['exponent_predicted']:.2f} | {row['exponent']:.2f} | {row['predicted_seconds']:.0f} | "
            f"{row['measured_seconds']:.0f} | {row['error']:+.1%} | {row['state_bytes_per_task'] / 1024:.1f} | "
            f"{row['resident_bytes_per_task'] / 1024:.1f} | {row['resident_bytes_last'] / 2**20:.0f} |"
        )


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
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--methods", default=",".join(list_methods()))
    parser.add_argument("--out", type=Path, default=Path("docs/results/scale.json"))
    parser.add_argument("--write", type=Path, help="put the tables into this page")
    arguments = parser.parse_args()
    rows = json.loads(arguments.out.read_text()) if arguments.out.exists() else []
    known = {(row["method"], row["tasks"]) for row in rows}
    for method in arguments.methods.split(",") if arguments.methods else ():
        if (method, arguments.tasks) not in known:
            rows.append(measure(method, arguments.tasks, arguments.rounds))
            print(json.dumps(rows[-1]), flush=True)
            arguments.out.write_text(json.dumps(rows, indent=2) + "\n")
    if arguments.write is not None:
        put(arguments.write, tables(rows) + "\n\n**Predicted, not measured:**\n\n" + prediction_table())


if __name__ == "__main__":
    main()
