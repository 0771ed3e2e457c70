"""Checkpoints are whole and unchanged, or not used."""

import hashlib
import io
import os
import resource
import signal

import pytest
import torch

from cflat import DataError
from cflat.train.checkpoint import CheckpointStore


def numbers(folder):
    return [int(path.name.partition("-")[0]) for path in sorted(folder.glob("*.pt"))]


def flip(path, position):
    content = bytearray(path.read_bytes())
    content[position] ^= 0x10
    path.write_bytes(content)


def test_the_newest_two_are_kept(tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints")
    assert store.load() is None
    for number in range(5):
        store.save({"number": number, "weights": torch.full((3,), float(number))})
        assert store.load()["number"] == number
    assert numbers(store.folder) == [4, 5]
    assert len(list(store.folder.iterdir())) == 2


@pytest.mark.parametrize("damage", [b"", b"not a checkpoint", None])
def test_a_damaged_newest_falls_back_to_the_one_before(tmp_path, damage, caplog):
    store = CheckpointStore(tmp_path)
    good = store.save({"number": 1})
    newest = store.save({"number": 2})
    newest.write_bytes(newest.read_bytes()[:-40] if damage is None else damage)
    assert CheckpointStore(tmp_path).load()["number"] == 1
    assert "The one before is used" in caplog.text
    again = CheckpointStore(tmp_path)
    again.load()
    last = again.save({"number": 3})
    assert sorted(tmp_path.iterdir()) == [good, last]  # two good ones: the damaged one is gone
    assert again.load()["number"] == 3


def test_no_flipped_bit_anywhere_in_a_file_is_accepted(tmp_path):
    """Of torch alone, most of these would load, with another number in a tensor."""
    store = CheckpointStore(tmp_path)
    store.save({"weights": torch.zeros(64)})
    newest = store.save({"weights": torch.ones(64)})
    whole = newest.read_bytes()
    for position in range(0, len(whole), 7):
        flip(newest, position)
        assert torch.equal(store.load()["weights"], torch.zeros(64)), position
        newest.write_bytes(whole)
    assert torch.equal(store.load()["weights"], torch.ones(64))


def test_nothing_readable_is_a_clear_error(tmp_path):
    store = CheckpointStore(tmp_path)
    store.save({"number": 1}).write_bytes(b"gone")
    with pytest.raises(DataError, match="all are damaged; restart the run from scratch"):
        store.load()


def with_right_name(folder, number, content):
    digest = hashlib.blake2b(content, digest_size=8).hexdigest()
    (folder / f"{number:06d}-{digest}.pt").write_bytes(content)


def torch_bytes(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


@pytest.mark.parametrize(
    "value", [[1, 2], torch.ones(3), {"weights": torch.ones(3)}, {"version": torch.ones(2)}, "text", None]
)
def test_a_file_that_holds_something_else_is_not_used(tmp_path, value):
    store = CheckpointStore(tmp_path)
    store.save({"number": 1})
    with_right_name(tmp_path, 2, torch_bytes(value))
    assert store.load()["number"] == 1


def test_strays_are_left_alone(tmp_path):
    store = CheckpointStore(tmp_path)
    store.save({"number": 1})
    (tmp_path / "000009-0123456789abcdef.pt").mkdir()
    os.mkfifo(tmp_path / "000010-0123456789abcdef.pt")
    for name in ("notes.pt", "\u00b2.pt", "best-model.pt", "000011-0123456789abcdef (1).pt", "-1.pt", "README"):
        (tmp_path / name).write_bytes(b"mine")
    assert store.load()["number"] == 1
    store.save({"number": 2})
    store.save({"number": 3})
    assert store.load()["number"] == 3
    assert len(list(tmp_path.iterdir())) == 2 + 8


def test_another_version_is_refused_not_passed_over(tmp_path):
    store = CheckpointStore(tmp_path)
    store.save({"number": 1})
    with_right_name(tmp_path, 2, torch_bytes({"version": 99}))
    with pytest.raises(DataError, match="written by another version"):
        store.load()


def test_half_written_files_are_no_checkpoints_and_are_cleared_away(tmp_path):
    (tmp_path / "000001.tmp-77").write_bytes(b"half")
    store = CheckpointStore(tmp_path)
    assert store.load() is None
    store.remove_leftovers()
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_keeps_the_last_good_one(tmp_path):
    store = CheckpointStore(tmp_path)
    store.save({"number": 1})
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        with pytest.raises(DataError, match=r"cannot be written: .+\.$"):
            store.save({"number": 2, "weights": torch.zeros(100_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert numbers(tmp_path) == [1]
    assert len(list(tmp_path.iterdir())) == 1
    assert store.load()["number"] == 1


def test_a_run_folder_that_was_removed_is_not_made_again(tmp_path):
    with pytest.raises(DataError, match="No such file"):
        CheckpointStore(tmp_path / "gone" / "checkpoints").save({"number": 1})
    assert list(tmp_path.iterdir()) == []


def test_objects_with_code_are_refused(tmp_path):
    store = CheckpointStore(tmp_path)
    store.save({"number": 1, "trick": CheckpointStore(tmp_path)})
    with pytest.raises(DataError, match="all are damaged"):
        store.load()
