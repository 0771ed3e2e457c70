"""Throughput of loading and transforms, and their share of a training step.

Each measured step loads one batch and then trains on it, so that both parts see the same machine. The step is one
evaluation (forward and backward) and an SGD update: the cheapest step there is, hence the largest share that data
can have; sharpness-aware optimizers evaluate two to four times per batch.

    python benchmarks/data.py --out data.json                      # arrays of random pixels
    python benchmarks/data.py --root /data --out data.json         # real CIFAR-100, and CUB-200 files if they are there
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import timm
import torch
from torch import nn
from torchvision.models import resnet18

from cflat.data import Batch, BatchLoader, ImageSet, Transform, load_dataset, train_transform
from cflat.data.pixels import ArrayPixels

TARGET_SHARE = 0.05


@dataclass(frozen=True)
class Case:
    """One combination of data and model."""

    name: str
    images: Callable[[Path | None], ImageSet]
    transform: Transform
    batch_size: int
    model: Callable[[], nn.Module]
    trained: str = "all"


@dataclass(frozen=True)
class Row:
    """What one case measured; times are medians over the steps."""

    name: str
    batch_size: int
    trained: str
    data_milliseconds: float
    step_milliseconds: float
    images_per_second: float
    share: float


def cifar_images(root: Path | None) -> ImageSet:
    if root is not None:
        return load_dataset("cifar100", root).train
    pixels = np.random.default_rng(0).integers(0, 256, (5000, 32, 32, 3), dtype=np.uint8)
    return ImageSet(ArrayPixels(pixels), np.arange(5000) % 100)


def cub_images(root: Path | None) -> ImageSet:
    images = load_dataset("cub200", root).train
    for start in range(0, len(images), 100):  # decode once: the first epoch of a run, not what is measured here
        images.pixels(range(start, min(start + 100, len(images))))
    return images


def cifar_resnet() -> nn.Module:
    model = resnet18(num_classes=200)
    model.conv1 = nn.Conv2d(3, 64, kernel_size=3, padding=1, bias=False)
    model.maxpool = nn.Identity()
    return model


def tiny_vit() -> nn.Module:
    return timm.create_model("vit_tiny_patch16_224", img_size=112, num_classes=200)


def norms_only(model: nn.Module) -> nn.Module:
    """Train the LayerNorms alone: gradients pass through every block, as they do for adapters."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name or "head" in name)
    return model


HALF = (0.5, 0.5, 0.5)
CASES = (
    Case("CIFAR 32 px, ResNet-18", cifar_images, train_transform("cifar", 32), 32, cifar_resnet),
    Case("CIFAR 32 px, ResNet-18", cifar_images, train_transform("cifar", 32), 128, cifar_resnet),
    Case("CIFAR to 112 px, ViT-Tiny", cifar_images, train_transform("timm", 112, HALF, HALF), 16, tiny_vit),
    Case(
        "CIFAR to 112 px, ViT-Tiny",
        cifar_images,
        train_transform("timm", 112, HALF, HALF),
        16,
        lambda: norms_only(tiny_vit()),
        trained="norms",
    ),
    Case(
        "CUB files to 112 px, ViT-Tiny",
        cub_images,
        train_transform("timm", 112, HALF, HALF),
        16,
        lambda: norms_only(tiny_vit()),
        trained="norms",
    ),
)


def endless(loader: BatchLoader) -> Iterator[Batch]:
    epoch = 0
    while True:
        yield from loader.epoch(epoch)
        epoch += 1


def measure(case: Case, images: ImageSet, num_steps: int) -> Row:
    model = case.model()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01, momentum=0.9)
    batches = endless(BatchLoader(images, case.transform, case.batch_size, shuffle=True, drop_last=True))
    data_seconds, step_seconds = [], []
    for step in range(num_steps + 2):
        started = time.perf_counter()
        batch = next(batches)
        loaded = time.perf_counter()
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(batch.images), batch.labels).backward()
        optimizer.step()
        finished = time.perf_counter()
        if step >= 2:  # the first steps allocate
            data_seconds.append(loaded - started)
            step_seconds.append(finished - loaded)
    return Row(
        name=case.name,
        batch_size=case.batch_size,
        trained=case.trained,
        data_milliseconds=1e3 * statistics.median(data_seconds),
        step_milliseconds=1e3 * statistics.median(step_seconds),
        images_per_second=case.batch_size / statistics.median(data_seconds),
        share=sum(data_seconds) / (sum(data_seconds) + sum(step_seconds)),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, help="data root with real images")
    parser.add_argument("--steps", type=int, default=12, help="measured steps per case")
    parser.add_argument("--threads", type=int, help="torch threads; by default torch decides")
    parser.add_argument("--out", type=Path, help="write the numbers as JSON to this path")
    arguments = parser.parse_args()
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)

    print(f"{'case':<32}{'batch':>6}{'trained':>9}{'data ms':>10}{'step ms':>10}{'img/s':>9}{'share':>8}")
    rows = []
    for case in CASES:
        if case.images is cub_images and (arguments.root is None or not (arguments.root / "cub200").is_dir()):
            continue
        row = measure(case, case.images(arguments.root), arguments.steps)
        rows.append(row)
        print(
            f"{row.name:<32}{row.batch_size:>6}{row.trained:>9}{row.data_milliseconds:>10.2f}"
            f"{row.step_milliseconds:>10.1f}{row.images_per_second:>9.0f}{row.share:>8.1%}",
            flush=True,
        )
    worst = max(row.share for row in rows)
    print(f"largest share {worst:.1%}, target below {TARGET_SHARE:.0%}: {'met' if worst < TARGET_SHARE else 'MISSED'}")
    if arguments.out is not None:
        machine = {
            "processor": platform.processor() or platform.machine(),
            "threads": torch.get_num_threads(),
        }
        result = {"machine": machine, "torch": torch.__version__, "rows": [asdict(row) for row in rows]}
        arguments.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
