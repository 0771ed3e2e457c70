"""Checkpoints are whole or absent."""

import resource
import signal

import pytest
import torch

from cflat import DataError
from cflat.train.checkpoint import CheckpointStore


def test_the_newest_two_are_kept(tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints")
    assert store.load() is None
    for number in range(5):
        store.save({"number": number, "weights": torch.full((3,), float(number))})
        assert store.load()["number"] == number
    assert sorted(path.name for path in store.folder.iterdir()) == ["000004.pt", "000005.pt"]


@pytest.mark.parametrize("damage", [b"", b"not a checkpoint", None])
def test_a_damaged_newest_falls_back_to_the_one_before(tmp_path, damage):
    store = CheckpointStore(tmp_path)
    store.save({"number": 1})
    newest = store.save({"number": 2})
    newest.write_bytes(newest.read_bytes()[:-40] if damage is None else damage)
    assert store.load()["number"] == 1
    assert store.save({"number": 3}).name == "000003.pt"
    assert store.load()["number"] == 3


def test_nothing_readable_is_a_clear_error(tmp_path):
    store = CheckpointStore(tmp_path)
    store.save({"number": 1}).write_bytes(b"gone")
    with pytest.raises(DataError, match="No checkpoint"):
        store.load()


def test_half_written_files_are_not_checkpoints(tmp_path):
    (tmp_path / "000001.tmp-77").write_bytes(b"half")
    assert CheckpointStore(tmp_path).load() is None


def test_a_full_disk_keeps_the_last_good_one(tmp_path, caplog):
    store = CheckpointStore(tmp_path)
    store.save({"number": 1})
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        assert store.save({"number": 2, "weights": torch.zeros(100_000)}) is None
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert "Could not save" in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == ["000001.pt"]
    assert store.load()["number"] == 1


def test_objects_with_code_are_refused(tmp_path):
    store = CheckpointStore(tmp_path)
    store.save({"number": 1, "trick": CheckpointStore(tmp_path)})
    with pytest.raises(DataError, match="No checkpoint"):
        store.load()
