"""A whole run with C-Flat against a loop in PILOT's manner: what doing things once is worth.

    python benchmarks/whole_run.py --out whole_run.json

In PILOT's manner constants (queries, frozen features, old stages) are computed in every evaluation, images are
transformed one by one through PIL, and all seen test images are classified after every epoch; DUCT's head stage runs
forward and backward through the whole network. Ours computes constants once per step, transforms batches, and tests
once per task. The pieces of both (a step, a batch, the test of a batch) are timed in turns, in CPU time of one
thread, and added up for the protocol of CIFAR-100 B0 Inc10 with the number of epochs that PILOT has. That both learn
alike is run to the end on digits: the same training with constants computed anew in every evaluation.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision import transforms as pil

from cflat.config.presets import resolve_config
from cflat.data import Batch, BatchLoader, ImageSet, Task, train_transform
from cflat.data.pixels import ArrayPixels
from cflat.methods import Method
from cflat.methods.l2p import L2P
from cflat.runs.run import run
from cflat.train.objective import Objective
from methods import Setting, batch_of, interleaved, method_at, steppers

NUM_TASKS, TRAIN_IMAGES, TEST_IMAGES = 10, 5000, 1000
"""CIFAR-100: images of each task."""


@dataclass(frozen=True)
class Protocol:
    """What a method does in a task, and where in the stream it is timed."""

    task: int
    epochs: int
    phase: int = 0
    exemplars: int = 0
    """In the middle of the stream, at which the costs of methods that grow are those of the average task."""


PROTOCOLS = {
    "l2p": Protocol(task=5, epochs=5),
    "memo": Protocol(task=5, epochs=20, exemplars=1000),
    "duct": Protocol(task=0, epochs=5, phase=1),
}
DIGITS = {
    "data": {"name": "digits", "train_per_class": 30, "test_per_class": 30},
    "preset": "smoke",
    "optimizer": {"name": "c_flat", "rho": 0.05},
    "stream": {"initial": 5, "increment": 5},
    "train": {"epochs": 4, "batch_size": 16},
}


def cifar_like(setting: Setting) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (setting.batch, 32, 32, 3), dtype=np.uint8)


def loaders(setting: Setting) -> dict[str, Callable[[], object]]:
    """Return a training batch from 32 px images in both manners."""
    pixels = cifar_like(setting)
    images = ImageSet(ArrayPixels(pixels), np.zeros(setting.batch, np.int64))
    loader = BatchLoader(images, train_transform("pilot", setting.image_size), setting.batch, shuffle=True)
    stages = pil.Compose([pil.RandomResizedCrop(setting.image_size), pil.RandomHorizontalFlip(), pil.ToTensor()])
    return {
        "ours": lambda: next(iter(loader)),
        "pilot": lambda: torch.stack([stages(Image.fromarray(image)) for image in pixels]),
    }


def tests(setting: Setting, method: Method, batch: Batch) -> dict[str, Callable[[], object]]:
    """Return the test of a batch of known images in both manners, transforms included."""
    pixels = cifar_like(setting)
    stages = pil.Compose([pil.Resize(setting.image_size), pil.CenterCrop(setting.image_size), pil.ToTensor()])
    images = ImageSet(ArrayPixels(pixels), np.zeros(setting.batch, np.int64))
    loader = BatchLoader(images, train_transform("pilot", setting.image_size), setting.batch, shuffle=False)

    @torch.no_grad()
    def ours() -> None:
        next(iter(loader))
        method.eval().predict(batch)

    @torch.no_grad()
    def in_pilots_manner() -> None:
        torch.stack([stages(Image.fromarray(image)) for image in pixels])
        method.eval()
        if isinstance(method, L2P):  # one batch-wise answer; ours adds the instance-wise one and knows the queries
            tokens = method.network.tokens(batch.images)
            query = method.network.query(tokens)
            method.network(tokens, query, method.test_ids(query, batchwise=True))
        else:
            method.predict(batch)

    return {"ours": ours, "pilot": in_pilots_manner}


def full_steps(setting: Setting, task: Task) -> Callable[[], object]:
    """Return a C-Flat step through the whole of DUCT's network, which is what PILOT's head stage computes."""
    method, _ = method_at(setting, "duct", task.index)
    return steppers(setting, method, task, 0)["c_flat"]


def measure(name: str, setting: Setting, rounds: int) -> dict[str, object]:
    protocol = PROTOCOLS[name]
    method, task = method_at(setting, name, protocol.task)
    if name == "duct":
        method.network.backbone.requires_grad_(False)
    steps = steppers(setting, method, task, protocol.phase)
    pieces = {"ours, step": steps["c_flat"], "pilot, step": steps["c_flat, uncached"]}
    if name == "duct":
        pieces["pilot, step"] = full_steps(setting, task)
    pieces |= {f"{manner}, data": function for manner, function in loaders(setting).items()}
    if name != "duct":  # a stage within a task: it is not tested
        tested = tests(setting, method, batch_of(setting, task))
        pieces |= {f"{manner}, test": function for manner, function in tested.items()}
    seconds = {key: statistics.median(values) for key, values in interleaved(pieces, rounds).items()}
    num_steps = protocol.epochs * (TRAIN_IMAGES + protocol.exemplars) / setting.batch
    num_tested = (NUM_TASKS + 1) / 2 * TEST_IMAGES / setting.batch  # of the average task
    times = {"ours": 1, "pilot": protocol.epochs + 1}
    totals = {
        manner: num_steps * (seconds[f"{manner}, step"] + seconds[f"{manner}, data"])
        + times[manner] * num_tested * seconds.get(f"{manner}, test", 0.0)
        for manner in times
    }
    return {
        "seconds": seconds,
        "hours_per_run": {manner: total * NUM_TASKS / 3600 for manner, total in totals.items()},
        "steps_alone": seconds["pilot, step"] / seconds["ours, step"],
        "ratio": totals["pilot"] / totals["ours"],
    }


def accuracies(name: str) -> dict[str, float]:
    """Train on digits with constants once per step, and with constants in every evaluation."""
    backbone = {"name": "vit_smoke"}
    config = resolve_config({**DIGITS, "method": {"name": name}, "backbone": backbone})
    ours = run(config).headline.avg
    prepare, closure = Objective.prepare, Objective.closure

    def in_every_evaluation(self: Objective, batch: Batch) -> Callable[[], Tensor]:
        return lambda: closure(self, prepare(self, batch))()

    Objective.prepare, Objective.closure = (lambda self, batch: batch), in_every_evaluation  # type: ignore[method-assign]
    try:
        return {"ours": ours, "pilot": run(config).headline.avg}
    finally:
        Objective.prepare, Objective.closure = prepare, closure  # type: ignore[method-assign]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", choices=list(PROTOCOLS), default=list(PROTOCOLS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--backbone", default=Setting.backbone)
    parser.add_argument("--image-size", type=int, default=Setting.image_size)
    parser.add_argument("--batch", type=int, default=Setting.batch)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)  # random weights are meant
    torch.set_num_threads(1)
    setting = Setting(arguments.backbone, arguments.image_size, arguments.batch)
    print(f"Whole run with C-Flat, {setting.backbone} {setting.image_size} px, batch {setting.batch}")
    print(f"{'method':<20} {'steps alone':>12} {'whole run':>10} {'digits, ours':>13} {'in PILOT manner':>16}")
    results = {}
    for name in arguments.methods:
        row = results[name] = measure(name, setting, arguments.rounds)
        label = "duct (head stage)" if name == "duct" else name
        print(f"{label:<20} {row['steps_alone']:>12.2f} {row['ratio']:>10.2f}", end=" ", flush=True)
        row["accuracy"] = accuracies(name)
        print(f"{row['accuracy']['ours']:>13.1%} {row['accuracy']['pilot']:>16.1%}", flush=True)
        if arguments.out:
            arguments.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
