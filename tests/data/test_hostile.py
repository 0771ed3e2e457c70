"""Data that is broken, foreign or made to harm is refused in a sentence, before it takes memory or time."""

from __future__ import annotations

import io
import os
import resource
import struct
import subprocess
import sys
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from cflat._errors import ConfigError, DataError
from cflat.cli.main import run_app
from cflat.config.presets import resolve_config
from cflat.data import BatchLoader, build_stream, check_dataset, eval_transform, load_dataset
from cflat.data.loader import warn_of_joining
from cflat.data.pixels import FilePixels, decode_image
from cflat.nn.backbone import create_backbone
from cflat.runs.run import assemble
from data.synthetic import dataset
from runs import tiny_stream

TWO_GIB = 2 << 30


def arrays(**changes: np.ndarray) -> dict[str, np.ndarray]:
    labels = np.arange(8) % 4
    images = np.zeros((8, 6, 6, 3), np.uint8)
    return {"x_train": images, "y_train": labels, "x_test": images, "y_test": labels, **changes}


def member(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def archive(path: Path, members: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", compression) as file:
        for name, content in members.items():
            file.writestr(name, content)
    return path


def header(shape: str, descr: str = "'|u1'") -> bytes:
    """Return an array file that is all promise."""
    text = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text


def png(width: int, height: int, rows: bytes = b"") -> bytes:
    """Return a grey PNG that says it has so many pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    start = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", start) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"y_train": np.full(8, 2**63, np.uint64)}, "9223372036854775808"),
        ({"y_test": np.full(8, 2**40)}, "out of range"),
        ({"x_train": np.zeros((8, 0, 6, 3), np.uint8)}, "without pixels"),
        ({"x_test": np.zeros((8, 6, 0, 1), np.uint8)}, "without pixels"),
        ({"class_names": np.array([b"\xff\xfe"] * 4)}, "ASCII or Unicode"),
        ({"x_train": np.array(3, np.uint8)}, "has shape"),
        ({"y_train": np.array(["a"] * 8)}, "whole numbers"),
        ({"y_train": np.array(3)}, "whole numbers"),
        ({"split": np.arange(3)}, r"split of .* must be two whole numbers: .* got \[0, 1, 2\]"),
        ({"split": np.array([2, 0])}, r"of each later one, at least 1; got \[2, 0\]"),
        ({"split": np.array([5, 1])}, r"0 \(as many as in the others\) to 4, .* got \[5, 1\]"),
    ],
)
def test_arrays_without_sense_are_refused(change: dict[str, np.ndarray], message: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "in.npz", **arrays(**change))
    with pytest.raises(DataError, match=message):
        load_dataset(f"npz:{tmp_path / 'in.npz'}")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no array",
        b"\x93NUMPY\x09\x00",
        header("(10000000000, 32, 32, 3)"),
        header("(8, 6, 6, 3)", "'|O'"),
        header("(8, 6, 6, 3)", "[('a', '|u1'"),
        header("(-8, 6)"),
        header("__import__('os')"),
    ],
)
def test_foreign_members_and_wrong_headers_are_refused(content: bytes, tmp_path: Path) -> None:
    members = {f"{name}.npy": member(array) for name, array in arrays().items()}
    path = archive(tmp_path / "in.npz", {**members, "x_train.npy": content, "README.txt": b"hello"})
    with pytest.raises(DataError, match=r"in\.npz"):
        load_dataset(f"npz:{path}")


def test_foreign_members_beside_the_arrays_do_no_harm(tmp_path: Path) -> None:
    members = {f"{name}.npy": member(array) for name, array in arrays().items()}
    path = archive(tmp_path / "in.npz", {**members, "README.txt": b"hello", "other/": b""}, zipfile.ZIP_DEFLATED)
    assert load_dataset(f"npz:{path}").num_classes == 4


def test_a_bomb_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    """300 MB of zeros in 300 kB, read in a process that may not take 2 GiB more."""
    members = {f"{name}.npy": member(array) for name, array in arrays().items()}
    big = member(np.zeros((100_000, 32, 32, 3), np.uint8))
    path = archive(tmp_path / "in.npz", {**members, "x_train.npy": big}, zipfile.ZIP_DEFLATED)
    del big
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DataError, match="would grow from"):
        load_dataset(f"npz:{path}")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # kB


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (png(1, 60_000, bytes(2) * 60_000), "more than 100 times the other"),
        (png(60_000, 1, bytes(60_001)), "more than 100 times the other"),
        (png(12_000, 12_000), "more than 100 million"),
        (png(100_000, 100_000), "Cannot read"),
        (png(0, 5), "Cannot read"),
        (png(8, 8), "Cannot read"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "known format"),
    ],
)
def test_images_that_would_fill_the_memory_are_refused(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(content)
    with pytest.raises(DataError, match=message):
        decode_image(tmp_path / "a.png")


def test_reading_images_leaves_the_filters_of_warnings_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All threads share them, and images are read on several."""
    (tmp_path / "large.png").write_bytes(png(12_000, 12_000))
    Image.new("RGB", (8, 8)).save(tmp_path / "small.png")
    store = FilePixels(tmp_path, ["large.png", "small.png"])
    with monkeypatch.context() as patched:
        patched.setattr("warnings.catch_warnings", None)
        assert "more than 100 million" in (store.header_problem(0) or "")
        assert store.header_problem(1) is None
        assert decode_image(tmp_path / "small.png").shape == (3, 8, 8)


def test_a_long_panorama_is_still_an_image(tmp_path: Path) -> None:
    Image.new("RGB", (900, 10)).save(tmp_path / "a.png")
    assert decode_image(tmp_path / "a.png").shape == (3, 10, 900)


@pytest.mark.parametrize("name", ["npz:in", "features:in", "domains:.", "folder:."])
def test_pipes_never_block(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for path in ("in", "a_train.txt", "a_test.txt", "train/a/x.png", "test/a/x.png"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        os.mkfifo(tmp_path / path)
    with pytest.raises(DataError):
        load_dataset(name)


@pytest.mark.parametrize("line", [". 0", f"a.png {'9' * 5000}", "a.png 99999999999", "\x00 0", "/ 0"])
def test_strange_lines_of_a_list_are_refused(line: str, tmp_path: Path) -> None:
    (tmp_path / "a_train.txt").write_text(f"{line}\n")
    (tmp_path / "a_test.txt").write_text("a.png 0\n")
    report = [finding.message for finding in check_dataset(f"domains:{tmp_path}").findings]
    assert report
    assert max(map(len, report)) < 1000


@pytest.mark.parametrize("kind", ["sparse", "meta", "complex", "packed", "list"])
def test_weights_without_plain_numbers_are_refused(kind: str, tmp_path: Path) -> None:
    state: object = create_backbone("small_cnn").model.state_dict()
    name, value = next(iter(state.items()))
    odd = {
        "sparse": lambda: value.to_sparse(),
        "meta": lambda: value.to("meta"),
        "complex": lambda: value.to(torch.complex64),
    }
    if kind in odd:
        state = {**state, name: odd[kind]()}
    torch.save([value] if kind == "list" else state, tmp_path / "w.pt")
    if kind == "packed":
        with zipfile.ZipFile(tmp_path / "w.pt") as file:
            members = {info.filename: file.read(info) for info in file.infolist()}
        archive(tmp_path / "w.pt", members, zipfile.ZIP_DEFLATED)
    with pytest.raises(DataError, match=r"w\.pt"):
        create_backbone("small_cnn", weights=tmp_path / "w.pt")


@pytest.mark.parametrize("shape", [(), (0,), (5,), (1, 0, 64), (1, 1, 64), (1, 17, 3), (2, 17, 64), (1, 18, 64)])
def test_position_embeddings_of_any_shape_are_refused_with_their_name(shape: tuple[int, ...], tmp_path: Path) -> None:
    state = create_backbone("vit_smoke").model.state_dict()
    torch.save({**state, "pos_embed": torch.zeros(shape)}, tmp_path / "w.pt")
    with pytest.raises(DataError, match="pos_embed"):
        create_backbone("vit_smoke", weights=tmp_path / "w.pt")


def test_a_task_without_test_images_is_refused_before_training() -> None:
    whole = dataset(num_classes=4)
    without = type(whole)(whole.name, whole.train, whole.test.of_classes([0, 1]), whole.class_names)
    with pytest.raises(DataError, match="has no test images"):
        build_stream(without, initial=2, increment=2, order_seed=None)
    assert build_stream(without, initial=4, increment=1).num_tasks == 1


@pytest.mark.parametrize("method", ["icarl", "replay"])
def test_domains_of_digits_can_be_rehearsed(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    smoke = ["run", "--method", method, "--data", "rotated_digits", "--preset", "smoke", "--quiet"]
    assert run_app([*smoke, "data.train_per_class=2", "data.test_per_class=1"]) == 0


@pytest.mark.parametrize(
    ("data", "settings", "message"),
    [
        ("rotated_digits", {"memory_per_class": 3}, "memory_per_class must be at least 4, one image for each domain"),
        ("rotated_digits", {"memory_total": 39}, "memory_total must be at least 40"),
        ("npz:in.npz", {"memory_total": 3}, "memory_total must be at least 4, one image for each class"),
    ],
)
def test_a_memory_without_room_is_refused_before_training(
    data: str, settings: dict[str, int], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    np.savez(tmp_path / "in.npz", **arrays())
    with pytest.raises(ConfigError, match=message):
        assemble(resolve_config({"method": {"name": "icarl", **settings}, "data": data, "preset": "smoke"}))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"memory_per_class": 4}, "memory_per_class must be at least 5, one image for each task"),
        ({"memory_total": 49}, "memory_total must be at least 50, one image for each class and task"),
    ],
)
def test_a_memory_without_room_for_classes_that_return_is_refused_before_training(
    settings: dict[str, int], message: str
) -> None:
    method, stream = {"name": "replay", **settings}, {"scenario": "blurry", "disjoint": 0.0, "blur": 1.0}
    with pytest.raises(ConfigError, match=message):
        assemble(resolve_config({"method": method, "data": "digits", "preset": "smoke", "stream": stream}))


@pytest.mark.parametrize("method", ["ranpac", "icarl", "finetune"])
def test_a_task_with_one_image_is_trained(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    labels = np.array([0, 0, 0, 1, 1, 2])  # with one class a task, the last has one image
    images = np.random.default_rng(0).integers(0, 255, (6, 16, 16, 3), dtype=np.uint8)
    np.savez(tmp_path / "in.npz", x_train=images, y_train=labels, x_test=images, y_test=labels)
    run = ["run", "--method", method, "--data", "npz:in.npz", "--preset", "smoke", "--quiet"]
    assert run_app([*run, "stream.initial=1", "stream.increment=1", "stream.order_seed=null"]) == 0


def loader(num_images: int, batch_size: int, **options: int | bool) -> BatchLoader:
    images = tiny_stream(per_class=12).all_train.select(range(num_images))
    return BatchLoader(images, eval_transform("none", 8), batch_size, shuffle=True, **options)


def test_a_last_batch_of_one_joins_the_one_before() -> None:
    joined, apart = loader(17, 8, least_last=2), loader(17, 8)
    assert [len(batch) for batch in apart] == [8, 8, 1]
    assert [len(batch) for batch in joined] == [8, 9]
    assert len(joined) == 2
    together = torch.cat([batch.rows for batch in joined])
    assert torch.equal(together, torch.cat([batch.rows for batch in apart]))
    assert [len(batch) for batch in joined.epoch(0, start_step=1)] == [9]
    assert [len(batch) for batch in loader(1, 8, least_last=2)] == [1]  # nothing to join
    for count in (16, 18, 23):  # no batch of one: the same, image by image
        pairs = zip(loader(count, 8, least_last=2), loader(count, 8), strict=True)
        assert all(torch.equal(one.images, other.images) for one, other in pairs)


@pytest.mark.parametrize("rest", [1, 2, 3])
def test_no_rank_is_left_with_one_image(rest: int) -> None:
    ranks = [loader(16 + rest, 8, least_last=4, rank=rank, world_size=2) for rank in range(2)]
    sizes = [[len(batch) for batch in one] for one in ranks]
    assert min(min(one) for one in sizes) >= 4
    assert len(sizes[0]) == len(sizes[1]) == 2


def test_batchnorm_survives_a_last_batch_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A ResNet that ends in maps of one pixel has no statistics of one image."""
    monkeypatch.chdir(tmp_path)
    warn_of_joining.cache_clear()
    run = ["run", "--method", "finetune", "--data", "digits", "--preset", "smoke", "--quiet", "backbone.name=resnet18"]
    small = ["backbone.image_size=8", "data.train_per_class=3", "data.test_per_class=1", "stream.max_tasks=2"]
    assert run_app([*run, *small, "train.batch_size=5", "stream.increment=2", "train.epochs=2"]) == 0
    assert sum("joins the batch before" in record.getMessage() for record in caplog.records) == 1


def test_batchnorm_with_batches_of_one_says_what_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run = ["run", "--method", "finetune", "--data", "digits", "--preset", "smoke", "--quiet", "backbone.name=resnet18"]
    small = ["backbone.image_size=8", "data.train_per_class=3", "data.test_per_class=1", "stream.max_tasks=1"]
    assert run_app([*run, *small, "train.batch_size=1"]) == 2
    assert "raise train.batch_size" in capsys.readouterr().err


def test_what_must_be_refused_takes_less_than_two_gigabytes(tmp_path: Path) -> None:
    """The network of 8192 pixels, refused in a process whose address space would not hold one of its layers."""
    code = (
        "import resource, sys\nfrom cflat.cli.main import run_app\nimport cflat.runs.run, sklearn.datasets\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        f"resource.setrlimit(resource.RLIMIT_AS, (used + {TWO_GIB}, -1))\n"
        "sys.exit(run_app(sys.argv[1:]))"
    )
    arguments = ["run", "--method", "finetune", "--data", "digits", "--preset", "smoke", "backbone.image_size=8192"]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert done.returncode == 2
    assert "GiB of memory" in done.stderr
