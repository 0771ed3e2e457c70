"""Where the time of a training step goes: forward and backward, data, the optimizer's own work, the loop.

    python benchmarks/trainer.py --out trainer.json
    python benchmarks/trainer.py --ways plain channels_last compile bf16 --backbone vit_tiny --image-size 112

Runs the real trainer (replay, CIFAR-style ResNet-18, random 32 px images, batch 32) with several optimizers and splits
the CPU time of every step, one thread, warm-up excluded. "Outside" is all that is neither an evaluation nor data: the
base optimizer's update, the flatness-aware vector work, and the loop itself.

With --ways it times one evaluation (forward and backward) of a network computed in several ways, in turns: as it is,
with convolutions in channels-last order, compiled by torch.compile, in bfloat16; the first call, which compiles, apart.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from cflat.data import ImageSet, Stream, Task, eval_transform, train_transform
from cflat.data.loader import BatchLoader
from cflat.data.pixels import ArrayPixels
from cflat.methods import StreamInfo, create_method
from cflat.nn.backbone import create_backbone
from cflat.optim import SharpnessAware
from cflat.train import (
    BaseSettings,
    Inputs,
    Observer,
    OptimizerChoice,
    Runtime,
    RuntimeSettings,
    Trainer,
    TrainSettings,
)
from cflat.train.objective import Objective

WARMUP = 3


class Clock(Observer):
    """Collects the parts of each step; patched methods report to it."""

    def __init__(self) -> None:
        self.parts: dict[str, float] = defaultdict(float)
        self.steps: list[dict[str, float]] = []
        self.start = time.process_time()

    def timed(self, part: str, function, *args, **kwargs):
        start = time.process_time()
        try:
            return function(*args, **kwargs)
        finally:
            self.parts[part] += time.process_time() - start

    def on_step(self, event) -> None:
        now = time.process_time()
        self.steps.append({**self.parts, "total": now - self.start})
        self.parts.clear()
        self.start = time.process_time()


def patch(clock: Clock):
    """Time evaluations, preparation, batches and base updates where they happen."""
    originals = (Objective.closure, BatchLoader._batch, SharpnessAware.step)

    def closure(self, batch):
        evaluate = originals[0](self, batch)
        return lambda: clock.timed("evaluations", evaluate)

    def batch(self, *args):
        return clock.timed("data", originals[1], self, *args)

    Objective.closure, BatchLoader._batch = closure, batch
    return originals


def run(name: str, steps: int, batch_size: int) -> dict[str, float]:
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (steps * batch_size, 32, 32, 3), dtype=np.uint8)
    train = ImageSet(ArrayPixels(pixels), rng.integers(0, 10, len(pixels)))
    test = ImageSet(ArrayPixels(pixels[:32]), rng.integers(0, 10, 32))
    stream = Stream("class", (Task(0, "all", range(10), train, test),), 10, tuple("abcdefghij"))
    torch.manual_seed(0)
    method = create_method("finetune", create_backbone("resnet18_cifar"), StreamInfo("class", 10, 1))
    clock = Clock()
    originals = patch(clock)
    try:
        Trainer(
            method,
            stream,
            base=BaseSettings(lr=0.01),
            train=TrainSettings(epochs=1, batch_size=batch_size),
            runtime=Runtime(RuntimeSettings(accelerator="cpu", threads=1)),
            optimizer=OptimizerChoice(name),
            inputs=Inputs(train_transform("cifar", 32), eval_transform("cifar", 32)),
            observer=clock,
        ).run()
    finally:
        Objective.closure, BatchLoader._batch = originals[0], originals[1]
    kept = clock.steps[WARMUP:]
    shares = defaultdict(list)
    for step in kept:
        outside = step["total"] - step["evaluations"] - step["data"]
        shares["evaluations"].append(step["evaluations"] / step["total"])
        shares["data"].append(step["data"] / step["total"])
        shares["outside"].append(outside / step["total"])
    return {part: statistics.median(values) for part, values in shares.items()} | {
        "seconds": statistics.median(step["total"] for step in kept)
    }


def make_evaluation(way: str, network: nn.Module, images: Tensor) -> Callable[[], float]:
    """Return one forward and backward pass of a copy of the network, computed in some way."""
    network = copy.deepcopy(network)
    if way == "channels_last":
        network, images = (what.to(memory_format=torch.channels_last) for what in (network, images))
    model = torch.compile(network) if way == "compile" else network

    def evaluate() -> float:
        network.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=way == "bf16"):
            loss = model(images).float().square().mean()
        loss.backward()
        return float(loss.detach())

    return evaluate


def race(ways: list[str], backbone: str, image_size: int, batch_size: int, rounds: int) -> dict[str, dict[str, float]]:
    """Time evaluations in all ways in turns; return CPU seconds, the first call's too, and losses."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    network = create_backbone(backbone, image_size=image_size).train()
    evaluations = {w: make_evaluation(w, network, torch.randn(batch_size, 3, image_size, image_size)) for w in ways}
    results, seconds = {}, defaultdict(list)
    for index in range(rounds + 1):
        for way, evaluate in evaluations.items():
            start = time.process_time()
            loss = evaluate()
            elapsed = time.process_time() - start
            if index:
                seconds[way].append(elapsed)
            else:
                results[way] = {"loss": loss, "first": elapsed}
    for way, row in results.items():
        row["seconds"] = statistics.median(seconds[way])
        row["speedup"] = statistics.median(a / b for a, b in zip(seconds[ways[0]], seconds[way], strict=True))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--optimizers", nargs="+", default=["none", "sam", "c_flat", "c_flat_turbo"])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--ways", nargs="+", choices=["plain", "channels_last", "compile", "bf16"])
    parser.add_argument("--backbone", default="resnet18_cifar", help="for --ways")
    parser.add_argument("--image-size", type=int, default=32, help="for --ways")
    arguments = parser.parse_args()
    results = {}
    if arguments.ways:
        raced = race(arguments.ways, arguments.backbone, arguments.image_size, arguments.batch, arguments.steps)
        for way, row in raced.items():
            print(f"{way:<14} {row['seconds']:>8.3f} s {row['speedup']:>6.2f} x, first call {row['first']:.1f} s")
        if arguments.out:
            arguments.out.write_text(json.dumps(raced, indent=1))
        return
    print(f"{'optimizer':<14} {'evaluations':>12} {'data':>8} {'outside':>8} {'CPU s/step':>11}")
    for name in arguments.optimizers:
        row = results[name] = run(name, arguments.steps, arguments.batch)
        shares = f"{row['evaluations']:>11.1%} {row['data']:>8.1%} {row['outside']:>8.1%}"
        print(f"{name:<14} {shares} {row['seconds']:>11.2f}", flush=True)
    if arguments.out:
        arguments.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
