from __future__ import annotations

import os
import shutil
import struct

import numpy as np
import pytest
import torch
from PIL import Image

from cflat._errors import DataError
from cflat.data import BatchLoader, ImageSet, pixels, train_transform
from cflat.data.dataset import image_groups
from cflat.data.pixels import ArrayPixels, DecodedCache, FilePixels, decode_image
from data.synthetic import dataset, image_set


def write_image(path, size=(12, 9), mode="RGB", seed=0):
    path.parent.mkdir(parents=True, exist_ok=True)
    channels = {"RGB": 3, "RGBA": 4}.get(mode, 1)
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], channels), dtype=np.uint8)
    image = Image.fromarray(pixels.squeeze())
    (image if mode != "P" else image.convert("P")).save(path)
    return pixels


def test_selections_keep_row_label_and_domain_together():
    images = image_set([3, 1, 2, 1], domains=[0, 1, 0, 1])
    chosen = images.of_classes([1, 2]).select([2, 0])
    assert chosen.rows.tolist() == [3, 1]
    assert chosen.labels.tolist() == [1, 1]
    assert chosen.domains.tolist() == [1, 1]
    assert chosen.pixels([0, 1])[:, 0, 0, 0].tolist() == [3, 1]
    assert images.select(images.labels == 3).rows.tolist() == [0]
    assert len(images.select([])) == 0
    assert images.with_labels([0, 0, 0, 0]).rows.tolist() == [0, 1, 2, 3]


def test_concat_joins_one_split_only():
    images = image_set([0, 1, 2])
    joined = ImageSet.concat([images.select([2]), images.select([0, 2])])
    assert joined.rows.tolist() == [2, 0, 2]
    with pytest.raises(ValueError, match="one split only"):
        ImageSet.concat([images, image_set([0])])
    with pytest.raises(ValueError, match="at least one set"):
        ImageSet.concat([])


def test_columns_of_another_length_are_refused():
    store = ArrayPixels(np.zeros((2, 4, 4, 3), np.uint8))
    with pytest.raises(ValueError, match="labels must have one entry for each of 2 images"):
        ImageSet(store, [0, 1, 2])
    with pytest.raises(ValueError, match="domains must have one entry"):
        ImageSet(store, [0, 1], domains=[0])


def test_arrays_of_every_layout_become_rgb():
    grey = np.arange(2 * 4 * 5, dtype=np.uint8).reshape(2, 4, 5)
    rows = np.array([1, 0])
    for array in (grey, grey[..., None], torch.from_numpy(grey)[:, None]):
        pixels = ArrayPixels(array).read(rows)
        assert pixels.shape == (2, 3, 4, 5)
        assert all(torch.equal(pixels[:, channel], torch.from_numpy(grey[[1, 0]])) for channel in range(3))
    colour = np.random.default_rng(0).integers(0, 256, (2, 4, 5, 3), dtype=np.uint8)
    assert np.array_equal(ArrayPixels(colour).read(rows).permute(0, 2, 3, 1), colour[rows])


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((2, 4, 4, 3), np.float32), "float32 values; expected uint8"),
        (np.zeros((2, 3, 4, 4), np.uint8), r"shape \(2, 3, 4, 4\); expected"),
        (np.zeros((2, 4), np.uint8), r"shape \(2, 4\); expected"),
        (torch.zeros(2, 3, 4, 4), "float32 values; expected uint8"),
        (torch.zeros(2, 4, 4, 3, dtype=torch.uint8), r"shape \(2, 4, 4, 3\); expected"),
    ],
)
def test_wrong_arrays_are_refused(array, message):
    with pytest.raises(DataError, match=message):
        ArrayPixels(array, "x_train")


@pytest.mark.parametrize("mode", ["RGB", "L", "P", "RGBA"])
def test_files_decode_to_rgb(tmp_path, mode):
    pixels = write_image(tmp_path / "a.png", mode=mode)
    decoded = decode_image(tmp_path / "a.png")
    assert decoded.shape == (3, 9, 12)
    assert decoded.dtype == torch.uint8
    if mode in ("RGB", "RGBA"):
        assert np.array_equal(decoded.permute(1, 2, 0), pixels[..., :3])


def test_palettes_with_transparency_decode_without_a_warning(tmp_path):
    image = Image.fromarray(np.zeros((4, 4), np.uint8), mode=None).convert("P")
    image.save(tmp_path / "a.png", transparency=bytes([0, 128]))
    assert decode_image(tmp_path / "a.png").shape == (3, 4, 4)


@pytest.mark.parametrize(
    ("size", "expected"),
    [((400, 300), (64, 85)), ((300, 400), (85, 64)), ((50, 60), (60, 50)), ((64, 900), (900, 64))],
)
def test_the_short_side_shrinks_and_never_grows(tmp_path, size, expected):
    write_image(tmp_path / "a.png", size)
    assert tuple(decode_image(tmp_path / "a.png", short_side=64).shape[1:]) == expected


def test_equal_files_are_stacked_and_others_listed(tmp_path):
    for name, size in (("a", (8, 8)), ("b", (8, 8)), ("c", (9, 8))):
        write_image(tmp_path / f"{name}.png", size)
    store = FilePixels(tmp_path, ["a.png", "b.png", "c.png"])
    assert store.read(np.array([1, 0])).shape == (2, 3, 8, 8)
    assert [tuple(image.shape) for image in store.read(np.array([2, 0]))] == [(3, 8, 9), (3, 8, 8)]


def test_decoded_images_stay_in_memory_within_the_budget(tmp_path):
    for name in "abc":
        write_image(tmp_path / f"{name}.png", (10, 10), seed=ord(name))
    cache = DecodedCache(budget_bytes=2 * 300 + 299)
    store = FilePixels(tmp_path, ["a.png", "b.png", "c.png"], cache=cache)
    before = store.read(np.arange(3))
    assert cache.used_bytes == 600
    assert len(cache) == 2
    for name in "ab":
        (tmp_path / f"{name}.png").unlink()
    assert torch.equal(store.read(np.arange(3)), before)


def test_broken_files_are_named(tmp_path):
    write_image(tmp_path / "whole.png", (64, 64))
    content = (tmp_path / "whole.png").read_bytes()
    (tmp_path / "cut.png").write_bytes(content[: len(content) // 2])
    (tmp_path / "text.jpg").write_text("no image")
    (tmp_path / "empty.jpg").touch()
    os.mkfifo(tmp_path / "pipe.jpg")
    (tmp_path / "loop.jpg").symlink_to(tmp_path / "loop.jpg")
    for name, reason in {
        "cut.png": "truncated",
        "text.jpg": "not an image",
        "empty.jpg": "not an image",
        "pipe.jpg": "not a regular file",
        "loop.jpg": "symbolic links",
        "gone.jpg": "does not exist",
    }.items():
        store = FilePixels(tmp_path, [name])
        with pytest.raises(DataError, match=rf"Cannot read image '.*/{name}': .*{reason}"):
            store.read(np.array([0]))


def test_fingerprints_follow_content_and_order(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (3, 4, 4, 3), dtype=np.uint8)
    prints = [ArrayPixels(array).fingerprint() for array in (pixels, pixels.copy(), pixels[::-1], pixels[:2])]
    assert prints[0] == prints[1]
    assert len(set(prints)) == 3
    for name in ("a", "b", "ab"):
        (tmp_path / name).write_bytes(b"same")
    names = [FilePixels(tmp_path, paths).fingerprint() for paths in (["a", "b"], ["b", "a"], ["ab"])]
    assert len(set(names)) == 3


@pytest.mark.parametrize("size", [1000, 1_000_000])
def test_the_fingerprint_of_files_is_of_their_content(tmp_path, size):
    (tmp_path / "first").mkdir()
    paths = [f"{number}.jpg" for number in range(600)]
    for path in paths[1:]:
        (tmp_path / "first" / path).write_bytes(path.encode())
    changed = tmp_path / "first" / paths[0]
    changed.write_bytes(bytes(size))
    before = FilePixels(tmp_path / "first", paths).fingerprint()
    time = changed.stat()
    for position in (0, size // 2, size - 1):  # same size, same time, one byte
        content = bytearray(size)
        content[position] = 1
        changed.write_bytes(content)
        os.utime(changed, ns=(time.st_atime_ns, time.st_mtime_ns))
        assert FilePixels(tmp_path / "first", paths).fingerprint() != before
    assert FilePixels(tmp_path / "first", paths).fingerprint(np.arange(1, 600)) == (
        FilePixels(tmp_path / "first", paths[1:]).fingerprint()  # files that are not used do not matter
    )
    changed.write_bytes(bytes(size))
    shutil.move(tmp_path / "first", tmp_path / "second")
    assert FilePixels(tmp_path / "second", paths).fingerprint() == before
    with pytest.raises(DataError, match=r"Cannot read image '.*/0\.jpg': the file does not exist"):
        FilePixels(tmp_path / "first", paths).fingerprint()


def test_groups_hold_every_position_once():
    images = image_set([1, 0, 1, 0, 1], domains=[0, 1, 0, 0, 1])
    groups = {key: sorted(where.tolist()) for key, where in image_groups(images).items()}
    assert groups == {(0, 0): [3], (0, 1): [1], (1, 0): [0, 2], (1, 1): [4]}
    assert list(image_groups(image_set([1, 0]))) == [(0, -1), (1, -1)]
    assert image_groups(image_set([0]).select([])) == {}


def test_subsampling_is_per_class_and_domain_seeded_and_nested():
    source = dataset(3, train_per_class=8, test_per_class=6, num_domains=2)
    small = source.subsample(2, 5, seed=1)
    assert {len(where) for where in image_groups(small.train).values()} == {2}
    assert {len(where) for where in image_groups(small.test).values()} == {5}
    assert np.array_equal(small.train.labels, source.train.labels[small.train.rows])
    larger = source.subsample(4, None, seed=1)
    assert set(small.train.rows) < set(larger.train.rows)
    assert len(larger.test) == len(source.test)
    assert small.train.rows.tolist() == source.subsample(2, 5, seed=1).train.rows.tolist()
    assert small.train.rows.tolist() != source.subsample(2, 5, seed=2).train.rows.tolist()
    assert len(source.subsample(99, None).train) == len(source.train)
    with pytest.raises(ValueError, match="train_per_class must be"):
        source.subsample(0, None)


SCENE = np.random.default_rng(3).integers(0, 256, (7, 9), dtype=np.uint8)


def white_zero_tiff(values: np.ndarray) -> bytes:
    """Return a grey TIFF of unsigned 16-bit numbers in which 0 is white, which PIL cannot write."""
    content = values.astype("<u2").tobytes()
    height, width = values.shape
    tags = [(256, width), (257, height), (258, 16), (259, 1), (262, 0), (273, 8), (277, 1), (278, height)]
    entries = b"".join(struct.pack("<HHIHH", tag, 3, 1, value, 0) for tag, value in tags)
    sizes = struct.pack("<HHII", 279, 4, 1, len(content))
    return (
        struct.pack("<2sHI", b"II", 42, 8 + len(content)) + content + struct.pack("<H", 9) + entries + sizes + bytes(4)
    )


@pytest.mark.parametrize("suffix", ["png", "tif", "pgm"])
@pytest.mark.parametrize("factor", [256, 257])
def test_sixteen_bits_look_as_eight(tmp_path, suffix, factor):
    path = tmp_path / f"a.{suffix}"
    Image.fromarray(SCENE.astype(np.uint16) * factor).save(path)
    assert all(np.array_equal(channel, SCENE) for channel in decode_image(path))


def test_sixteen_bits_with_zero_as_white_are_inverted(tmp_path):
    (tmp_path / "a.tif").write_bytes(white_zero_tiff(257 * (255 - SCENE.astype(np.uint16))))
    assert np.array_equal(decode_image(tmp_path / "a.tif")[0], SCENE)


def test_floats_from_0_to_1_are_scaled_and_others_rejected(tmp_path):
    Image.fromarray(SCENE.astype(np.float32) / 255).save(tmp_path / "a.tif")
    assert np.array_equal(decode_image(tmp_path / "a.tif")[1], SCENE)
    for wrong in (SCENE.astype(np.float32), -SCENE.astype(np.float32), np.full((3, 3), np.nan, np.float32)):
        Image.fromarray(wrong).save(tmp_path / "a.tif")
        with pytest.raises(DataError, match=r"floats from .* to .*; scale them"):
            decode_image(tmp_path / "a.tif")


def test_32_bits_are_rejected_when_the_header_is_read(tmp_path):
    Image.fromarray(SCENE.astype(np.int32)).save(tmp_path / "a.tif")
    assert "whole numbers of 32 bits" in FilePixels(tmp_path, ["a.tif"]).header_problem(0)
    with pytest.raises(DataError, match="save it with 8 or 16 bits"):
        decode_image(tmp_path / "a.tif")


@pytest.mark.parametrize("suffix", ["png", "tif", "webp"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_images_are_turned_as_their_exif_data_says(tmp_path, suffix, orientation):
    upright = Image.fromarray(np.random.default_rng(0).integers(0, 256, (6, 4, 3), dtype=np.uint8))
    # How a camera stores what it sees upright: the inverse of what a viewer does.
    names = [
        "",
        "FLIP_LEFT_RIGHT",
        "ROTATE_180",
        "FLIP_TOP_BOTTOM",
        "TRANSPOSE",
        "ROTATE_90",
        "TRANSVERSE",
        "ROTATE_270",
    ]
    way = names[orientation - 1]
    exif = Image.Exif()
    exif[274] = orientation
    stored = upright.transpose(Image.Transpose[way]) if way else upright
    stored.save(tmp_path / f"a.{suffix}", exif=exif, **({"lossless": True} if suffix == "webp" else {}))
    assert np.array_equal(decode_image(tmp_path / f"a.{suffix}").permute(1, 2, 0), np.asarray(upright))


def test_exif_data_that_cannot_be_read_turns_nothing(tmp_path):
    Image.fromarray(SCENE).save(tmp_path / "a.png", exif=b"Exif\x00\x00MM\x00*\xff\xff\xff\xff" + bytes(9))
    assert np.array_equal(decode_image(tmp_path / "a.png")[0], SCENE)


def test_a_turned_image_has_the_same_short_side(tmp_path):
    exif = Image.Exif()
    exif[274] = 6
    Image.new("RGB", (40, 20)).save(tmp_path / "a.jpg", exif=exif)
    assert decode_image(tmp_path / "a.jpg", short_side=10).shape == (3, 20, 10)


def test_a_large_image_is_shrunk_when_it_is_decoded(tmp_path, monkeypatch):
    write_image(tmp_path / "a.png", size=(60, 40))
    monkeypatch.setattr(pixels, "LARGE_PIXELS", 1000)
    assert decode_image(tmp_path / "a.png").shape == (3, 20, 30)


def test_a_batch_of_large_files_is_transformed_in_parts(tmp_path, monkeypatch):
    for index in range(7):
        write_image(tmp_path / f"{index}.png", size=(20 + index % 2, 20), seed=index)
    images = ImageSet(FilePixels(tmp_path, [f"{index}.png" for index in range(7)]), range(7))
    loader = BatchLoader(images, train_transform("imagenet", 8), 7, shuffle=True)
    (whole,) = loader
    assert len(list(images.pixel_parts(range(7)))) == 1
    monkeypatch.setattr(pixels, "PART_BYTES", 2500)
    assert [len(part) for part in images.pixel_parts(range(7))] == [3, 3, 1]
    (parted,) = loader
    assert torch.equal(whole.images, parted.images)
    assert torch.equal(whole.labels, parted.labels)
