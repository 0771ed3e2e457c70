"""Image files that do not fit into memory: what decoding costs the process that trains, with and without workers.

Synthetic JPEGs (500 x 375, as ImageNet's) are written to a temporary folder and read for one epoch, nothing kept in
memory. CPU seconds are counted apart for the process that trains and for its workers: beside other jobs, wall time says
little. What the trainer still has to do per image bounds the speed of a GPU that it can feed; the workers' part divides
by their number.

    python benchmarks/decoding.py --images 1000 --workers 0,1,2 --out docs/results/decoding.json
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from PIL import Image

from cflat.data import BatchLoader, ImageSet, train_transform
from cflat.data.pixels import DecodedCache, FilePixels

SIZE = (500, 375)


@dataclass(frozen=True)
class Row:
    """One epoch."""

    workers: int
    images: int
    seconds: float
    trainer_ms_per_image: float
    """CPU time of the process that trains, transforms included."""
    worker_ms_per_image: float
    """CPU time of all workers."""
    rss_mib: float
    """Peak memory of the process that trains, by the end of this epoch."""


def write_images(folder: Path, count: int) -> list[str]:
    generator = np.random.default_rng(0)
    names = []
    for number in range(count):
        coarse = generator.integers(0, 256, (12, 16, 3), dtype=np.uint8)
        names.append(f"{number}.jpg")
        Image.fromarray(coarse).resize(SIZE, Image.Resampling.BICUBIC).save(folder / names[-1], quality=90)
    return names


def children_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def measure(folder: Path, names: list[str], workers: int) -> Row:
    store = FilePixels(folder, names, cache=DecodedCache(0), num_workers=workers)
    loader = BatchLoader(ImageSet(store, np.zeros(len(names))), train_transform("imagenet", 224), 64, shuffle=True)
    wall, own, others = time.perf_counter(), time.process_time(), children_seconds()
    for _ in loader.epoch(0):
        pass
    own = time.process_time() - own
    while multiprocessing.active_children():
        time.sleep(0.1)
    return Row(
        workers,
        len(names),
        time.perf_counter() - wall,
        1e3 * own / len(names),
        1e3 * (children_seconds() - others) / len(names),
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--workers", default="0,1,2", help="numbers with commas")
    parser.add_argument("--out", type=Path, help="write the numbers as JSON to this path")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    with TemporaryDirectory() as folder:
        names = write_images(Path(folder), arguments.images)
        for workers in map(int, arguments.workers.split(",")):
            rows.append(measure(Path(folder), names, workers))
            print(json.dumps(asdict(rows[-1])), flush=True)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")


if __name__ == "__main__":
    main()
