"""Decoding in worker processes: the same bits as without, bounded memory, a clean end."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from cflat._errors import DataError
from cflat.data import BatchLoader, ImageSet, train_transform
from cflat.data.pixels import DecodedCache, FilePixels
from cflat.methods._alignment import ClassGaussians
from cflat.runs.folder import RunFolder
from data.test_images import write_image

NUM_IMAGES = 13
TRANSFORM = train_transform("pilot", 8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Image files of two sizes."""
    root = tmp_path_factory.mktemp("files")
    for number in range(NUM_IMAGES):
        write_image(root / f"{number}.png", (20, 16) if number % 3 else (17, 23), seed=number)
    return root


def file_images(folder: Path, workers: int, cache_bytes: int = 0) -> ImageSet:
    paths = [f"{number}.png" for number in range(NUM_IMAGES)]
    store = FilePixels(folder, paths, cache=DecodedCache(cache_bytes), num_workers=workers)
    return ImageSet(store, np.arange(NUM_IMAGES) % 2)


def batches(images: ImageSet, epoch: int = 0, start: int = 0, **settings) -> list:
    return list(BatchLoader(images, TRANSFORM, 4, shuffle=True, seed=3, **settings).epoch(epoch, start))


def assert_equal(some: list, others: list) -> None:
    assert len(some) == len(others)
    for one, other in zip(some, others, strict=True):
        assert all(torch.equal(getattr(one, name), getattr(other, name)) for name in ("images", "labels", "rows"))


@pytest.mark.parametrize(("workers", "cache_bytes"), [(1, 0), (2, 0), (2, 5_000), (1, 1 << 20)])
def test_batches_are_the_same_bits_for_any_number_of_workers(folder: Path, workers: int, cache_bytes: int) -> None:
    plain, worked = file_images(folder, 0), file_images(folder, workers, cache_bytes)
    for epoch in range(2):
        assert_equal(batches(worked, epoch), batches(plain, epoch))
        assert worked.store.cache.used_bytes <= cache_bytes
    assert_equal(batches(worked, 1, start=2), batches(plain, 1)[2:])
    assert_equal(batches(worked, rank=1, world_size=2), batches(plain, rank=1, world_size=2))
    assert not multiprocessing.active_children()


def test_what_is_kept_is_not_decoded_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = file_images(folder, 1, 1 << 20)
    first = batches(images)
    assert len(images.store.cache) == NUM_IMAGES
    assert not images.store.missing(images.rows).size
    monkeypatch.setattr("cflat.data.workers.DataLoader", None)  # no process is needed now
    assert_equal(batches(images), first)


def test_random_numbers_that_a_method_draws_do_not_depend_on_workers_or_the_cache(folder: Path) -> None:
    drawn = []
    for images in (file_images(folder, 0), file_images(folder, 2), file_images(folder, 1, 1 << 20)):
        torch.manual_seed(0)
        for epoch in range(2):  # in the second, a cache that is large enough starts no worker
            batches(images, epoch)
        gaussians = ClassGaussians(2)  # SLCA's, behind the passes over the images of a task
        gaussians.grow(1)
        gaussians.fit(torch.eye(2), torch.zeros(2, dtype=torch.long))
        drawn.append(gaussians.sample(3, torch.ones(1))[0])
    assert torch.equal(drawn[0], drawn[1])
    assert torch.equal(drawn[0], drawn[2])


def test_an_epoch_that_is_left_ends_its_workers(folder: Path) -> None:
    epoch = BatchLoader(file_images(folder, 2), TRANSFORM, 2, shuffle=True).epoch(0)
    next(epoch)
    assert len(multiprocessing.active_children()) == 2
    epoch.close()
    assert not multiprocessing.active_children()


def test_a_broken_file_is_named(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "broken.png").write_bytes(b"nothing")
    images = ImageSet(FilePixels(tmp_path, ["broken.png"], num_workers=1), [0])
    with pytest.raises(DataError, match=r"^Cannot read image '.*broken.png': it is not an image in a known format\.$"):
        batches(images)


@pytest.mark.slow
def test_ctrl_c_ends_a_run_with_workers_cleanly_and_it_goes_on_to_the_same_result(tmp_path: Path) -> None:
    for split, count in (("train", 12), ("test", 2)):
        for label in range(4):
            for number in range(count):
                write_image(tmp_path / "photos" / split / str(label) / f"{number}.png", seed=100 * label + number)
    words = ["--method", "replay", "--data", "folder:photos", "--preset", "smoke", "backbone.name=small_cnn"]
    words += ["backbone.image_size=8", "train.epochs=60", "data.cache_mib=0", "--quiet"]
    command = [sys.executable, "-m", "cflat", "run"]
    subprocess.run([*command, *words, "--out", "whole"], cwd=tmp_path, check=True, capture_output=True)
    process = subprocess.Popen(
        [*command, *words, "--out", "cut", "data.workers=2"],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    metrics = tmp_path / "cut" / "metrics.jsonl"
    while not metrics.exists() or metrics.stat().st_size == 0:
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the workers, too
    _, errors = process.communicate()
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert "everything so far is saved" in errors
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)  # no worker is left
    resumed = [*command, "--resume", "cut", "data.workers=1", "--quiet"]
    subprocess.run(resumed, cwd=tmp_path, check=True, capture_output=True)
    whole, cut = (RunFolder(tmp_path / name).load_summary() for name in ("whole", "cut"))
    assert whole.accuracy == cut.accuracy
    losses = [
        [line["loss"] for line in RunFolder(tmp_path / name).load_metrics() if line["event"] == "epoch"]
        for name in ("whole", "cut")
    ]
    assert losses[0] == losses[1]
