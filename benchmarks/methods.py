"""What computing constants once saves: ratios of steps, measured in one run.

    python benchmarks/methods.py --out methods.json              # all sections
    python benchmarks/methods.py --sections steps duct --rounds 5
    python benchmarks/methods.py --sections steps --methods l2p --backbone vit_base --image-size 224 --batch 2

steps   C-Flat step over plain step for each method, with constants computed once per step (ours) and inside every
        evaluation (what other toolboxes do), interleaved, one thread, CPU time. Beside it the same ratio counted in
        floating-point operations of matrix products, attention and convolutions, which no machine can disturb.
duct    A C-Flat step of DUCT's head stage with features once per step, against a full forward in every evaluation.
ridge   RanPAC's choice among 17 ridges by one decomposition, against dense solves.
ease    Inference with t + 1 adapter sets in one batched pass, against separate forwards.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

from cflat.data import Batch, ImageSet, Stream, Task
from cflat.data.pixels import ArrayPixels
from cflat.methods import Method, StreamInfo, create_method
from cflat.nn.adapters import AdapterSet, forward_adapters
from cflat.nn.backbone import create_backbone
from cflat.nn.ridge import RIDGES, ridge_errors
from cflat.nn.vit import embed, pool, run_blocks
from cflat.optim import create_optimizer
from cflat.train import Runtime, RuntimeSettings
from cflat.train.objective import Objective

CLASSES_PER_TASK = 10
STEPS = {"icarl": 1, "memo": 5, "l2p": 1, "dualprompt": 1, "ease": 1, "ranpac": 0}
"""Methods with the task at which they are measured."""


@dataclass(frozen=True)
class Setting:
    """What the methods run on; weights are random, since only times matter."""

    backbone: str = "vit_tiny"
    image_size: int = 112
    batch: int = 16

    def images(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1)
        return torch.randn(self.batch, 3, self.image_size, self.image_size, generator=generator)


def synthetic_stream(num_tasks: int = 10) -> Stream:
    """Tasks of ten classes with one image each; only their class ranges matter here."""
    tasks = []
    for index in range(num_tasks):
        classes = range(index * CLASSES_PER_TASK, (index + 1) * CLASSES_PER_TASK)
        images = ImageSet(ArrayPixels(np.zeros((CLASSES_PER_TASK, 8, 8, 3), np.uint8)), list(classes))
        tasks.append(Task(index, f"task {index}", classes, images, images))
    return Stream("class", tuple(tasks), num_tasks * CLASSES_PER_TASK, tuple(map(str, range(num_tasks * 10))))


def method_at(setting: Setting, name: str, task_index: int) -> tuple[Method, Task]:
    """Grow a method to a task, without training."""
    torch.manual_seed(0)
    stream = synthetic_stream()
    backbone = create_backbone(setting.backbone, image_size=setting.image_size)
    method = create_method(name, backbone, StreamInfo("class", stream.num_classes, stream.num_tasks))
    for task in stream.tasks[: task_index + 1]:
        method.grow(task)
    return method, stream.tasks[task_index]


def batch_of(setting: Setting, task: Task) -> Batch:
    generator = torch.Generator().manual_seed(2)
    labels = torch.randint(task.classes.start, task.classes.stop, (setting.batch,), generator=generator)
    return Batch(setting.images(), labels, torch.arange(setting.batch))


def steppers(setting: Setting, method: Method, task: Task, phase_index: int = 0) -> dict[str, Callable[[], object]]:
    """Return a plain step, a C-Flat step, and a C-Flat step that prepares anew in every evaluation."""
    objective = Objective(method, method.network, Runtime(RuntimeSettings(accelerator="cpu", threads=1)))
    phase = method.phases(task)[phase_index]
    params = [p for group in method.param_groups(task, phase) for p in group.params]
    method.set_train_mode()
    batch = batch_of(setting, task)
    optimizers = {
        name: create_optimizer(name, torch.optim.SGD(params, lr=1e-6, momentum=0.9), model=method.network)
        for name in ("none", "c_flat")
    }

    def once(name: str) -> None:
        optimizers[name].step(objective.closure(objective.prepare(batch)))

    def anew() -> None:
        optimizers["c_flat"].step(lambda: objective.closure(objective.prepare(batch))())

    return {"plain": lambda: once("none"), "c_flat": lambda: once("c_flat"), "c_flat, uncached": anew}


def interleaved(functions: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """CPU seconds of each function, all in every round."""
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for index in range(rounds + 1):
        for name, function in functions.items():
            start = time.process_time()
            function()
            if index:  # the first round warms up
                seconds[name].append(time.process_time() - start)
    return seconds


def ratio(seconds: dict[str, list[float]], name: str, reference: str) -> float:
    return statistics.median(a / b for a, b in zip(seconds[name], seconds[reference], strict=True))


def operations(function: Callable[[], object]) -> int:
    """Count the floating-point operations of a call."""
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


def measure_steps(setting: Setting, rounds: int, names: list[str]) -> dict[str, object]:
    print(f"\nC-Flat step over plain step, {setting.backbone} {setting.image_size} px, batch {setting.batch}")
    print(f"{'method (task)':<18} {'constants once':>15} {'in operations':>15} {'in every evaluation':>20}")
    results = {}
    for name in names:
        task_index = STEPS[name]
        method, task = method_at(setting, name, task_index)
        functions = steppers(setting, method, task)
        seconds = interleaved(functions, rounds)
        row = {
            "task": task_index,
            "rounds": rounds,
            "cached": ratio(seconds, "c_flat", "plain"),
            "operations": operations(functions["c_flat"]) / operations(functions["plain"]),
            "uncached": ratio(seconds, "c_flat, uncached", "plain"),
        }
        results[name] = row
        columns = f"{row['cached']:>15.2f} {row['operations']:>15.2f} {row['uncached']:>20.2f}"
        print(f"{name + f' ({task_index})':<18} {columns}", flush=True)
    return results


def measure_duct(setting: Setting, rounds: int) -> dict[str, float]:
    method, task = method_at(setting, "duct", 0)
    seconds = {f"head, {name}": v for name, v in interleaved(steppers(setting, method, task, 1), rounds).items()}
    method.network.backbone.requires_grad_(True)
    full, _ = method_at(setting, "duct", 0)
    seconds |= {f"full, {name}": v for name, v in interleaved(steppers(setting, full, task, 0), rounds).items()}
    results = {
        "frozen_forward_per_evaluation": ratio(seconds, "head, c_flat, uncached", "head, c_flat"),
        "full_training_step": statistics.median(seconds["full, c_flat"]) / statistics.median(seconds["head, c_flat"]),
    }
    print("\nDUCT's head stage, C-Flat step with features once per step; how many times dearer is")
    print(f"  a frozen forward in every evaluation      {results['frozen_forward_per_evaluation']:.1f}")
    print(f"  forward and backward of the whole network {results['full_training_step']:.1f}  (what PILOT computes)")
    return results


def measure_ridge(dim: int, num: int) -> dict[str, float]:
    """Time the choice of a ridge from one task's projected features; dense solves are extrapolated from one."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.relu(torch.randn(num, 192, generator=generator) @ torch.randn(192, dim, generator=generator))
    targets = torch.eye(CLASSES_PER_TASK)[torch.randint(0, CLASSES_PER_TASK, (num,), generator=generator)]
    fit = int(0.8 * num)
    start = time.process_time()
    ridge_errors(hidden[:fit], targets[:fit], hidden[fit:], targets[fit:], RIDGES)
    ours = time.process_time() - start
    start = time.process_time()
    gram, cross = hidden[:fit].T @ hidden[:fit], hidden[:fit].T @ targets[:fit]
    shared = time.process_time() - start
    start = time.process_time()
    torch.linalg.solve(gram + 100.0 * torch.eye(dim), cross)
    one = time.process_time() - start
    factor = (shared + len(RIDGES) * one) / ours
    dense = shared + len(RIDGES) * one
    print(f"\nRanPAC, M = {dim}, {num} images: one decomposition {ours:.1f} s, 17 dense solves {dense:.1f} s")
    print(f"  (one of them measured, {one:.1f} s): {factor:.1f} times faster")
    return {"dim": dim, "num": num, "seconds": ours, "dense_seconds": one, "factor": factor}


def measure_ease(setting: Setting, rounds: int, num_sets: int = 10) -> dict[str, float]:
    torch.manual_seed(0)
    backbone = create_backbone(setting.backbone, image_size=setting.image_size).eval()
    sets = [AdapterSet(backbone).eval() for _ in range(num_sets)]
    images = setting.images()
    with torch.no_grad():
        seconds = interleaved(
            {
                "batched": lambda: forward_adapters(backbone, embed(backbone, images), sets),
                "separate": lambda: [
                    pool(backbone, run_blocks(backbone, embed(backbone, images), adapters=adapters))
                    for adapters in sets
                ],
            },
            rounds,
        )
    value = ratio(seconds, "batched", "separate")
    print(f"\nEASE inference with {num_sets} adapter sets: one batched pass costs {value:.2f} of separate forwards")
    return {"sets": num_sets, "ratio": value}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", nargs="+", default=["steps", "duct", "ridge", "ease"])
    parser.add_argument("--methods", nargs="+", choices=list(STEPS), default=list(STEPS), help="for the section steps")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ridge-dim", type=int, default=10_000)
    parser.add_argument("--ridge-images", type=int, default=5_000)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--backbone", default=Setting.backbone)
    parser.add_argument("--image-size", type=int, default=Setting.image_size)
    parser.add_argument("--batch", type=int, default=Setting.batch)
    arguments = parser.parse_args()
    setting = Setting(arguments.backbone, arguments.image_size, arguments.batch)
    logging.getLogger("cflat.nn.backbone").setLevel(logging.ERROR)  # random weights are meant
    torch.set_num_threads(1)
    sections = {
        "steps": lambda: measure_steps(setting, arguments.rounds, arguments.methods),
        "duct": lambda: measure_duct(setting, arguments.rounds),
        "ridge": lambda: measure_ridge(arguments.ridge_dim, arguments.ridge_images),
        "ease": lambda: measure_ease(setting, arguments.rounds),
    }
    results = {}
    for name in arguments.sections:
        results[name] = sections[name]()
        if arguments.out:
            arguments.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
