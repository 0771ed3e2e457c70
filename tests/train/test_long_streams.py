"""Streams of many tasks: what each takes does not grow with those before, unless it must. Counts, not times."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from cflat.data import Dataset, ExemplarMemory, ImageSet, Stream, build_stream
from cflat.data.pixels import ArrayPixels
from cflat.metrics import AccuracyMatrix
from cflat.train import TrainingInterrupted, checkpointer
from cflat.train.checkpoint import CheckpointStore
from runs import tiny_method, tiny_run


def many_tasks(num_tasks: int, per_class: int = 2) -> Stream:
    labels = np.repeat(np.arange(2 * num_tasks), per_class)
    pixels = np.random.default_rng(0).integers(0, 256, (len(labels), 8, 8, 3)).astype(np.uint8)
    images = ImageSet(ArrayPixels(pixels), labels)
    return build_stream(Dataset("many", images, images, tuple(map(str, range(2 * num_tasks)))), initial=2, increment=2)


def test_tasks_hold_their_images_in_order_however_many_there_are() -> None:
    stream = many_tasks(40, per_class=3)
    for task in stream.tasks:
        assert sorted(set(task.train.labels)) == list(task.classes)
        assert task.train.rows.tolist() == sorted(task.train.rows.tolist())
    assert sorted(stream.all_train.rows) == list(range(240))


def test_a_memory_that_has_room_touches_no_exemplar_of_earlier_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, memory = many_tasks(20), ExemplarMemory(per_class=2, selection="random")
    selected = []
    select = ImageSet.select
    for task in stream.tasks:
        monkeypatch.setattr(ImageSet, "select", lambda self, chosen: selected.append(1) or select(self, chosen))
        memory.update(task.train)
        monkeypatch.setattr(ImageSet, "select", select)
    assert len(selected) == 2 * 20  # each class once
    state = memory.state()["exemplars"]
    assert state.shape == (80, 3)
    again = ExemplarMemory(per_class=2, selection="random")
    again.load_state(memory.state(), stream.all_train)
    assert torch.equal(again.state()["exemplars"], state)


def test_large_checkpoints_are_put_off_and_nothing_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = many_tasks(6)
    saved: list[int] = []
    save = CheckpointStore.save

    def counting(self: CheckpointStore, state: dict) -> Path:
        saved.append(state["position"][0])
        return save(self, state)

    monkeypatch.setattr(CheckpointStore, "save", counting)
    often = tiny_run(tiny_method("replay", stream), stream, folder=_folder(tmp_path / "often"))
    assert saved == [task + border for task in range(6) for border in (0, 1)]  # after the phase and after the task
    saved.clear()
    monkeypatch.setattr(checkpointer, "CHEAP_BYTES", 0)
    monkeypatch.setattr(checkpointer, "SAVING_FRACTION", 0.0)  # no time at all for large ones
    seldom = tiny_run(tiny_method("replay", stream), stream, folder=_folder(tmp_path / "seldom"))
    assert saved == [0, 6]  # the first, whose size nobody knew, and the last, which answers
    assert seldom.accuracy == often.accuracy
    resumed = tiny_run(tiny_method("replay", stream), stream, folder=tmp_path / "seldom", resume=True)
    assert resumed.accuracy == often.accuracy


def test_a_stop_waits_for_the_end_of_the_task_where_its_border_was_not_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = many_tasks(4)
    whole = tiny_run(tiny_method("simplecil", stream), stream)
    monkeypatch.setattr(checkpointer, "CHEAP_BYTES", 0)
    monkeypatch.setattr(checkpointer, "SAVING_FRACTION", 0.0)
    asked = iter([False] * 6)  # the stop comes in the middle of some pass
    folder = _folder(tmp_path / "cut")
    with pytest.raises(TrainingInterrupted, match="its state is saved"):
        tiny_run(tiny_method("simplecil", stream), stream, folder=folder, should_stop=lambda: next(asked, True))
    state = CheckpointStore(folder / "checkpoints").load()
    assert state is not None
    assert state["position"][1:] == [0, 0, 0]  # between tasks
    assert len(state["accuracy"]["test"]["logits"]["correct"]) == state["position"][0]
    resumed = tiny_run(tiny_method("simplecil", stream), stream, folder=folder, resume=True)
    assert resumed.accuracy == whole.accuracy


def _folder(path: Path) -> Path:
    path.mkdir()
    return path


def test_counts_are_read_from_arrays_and_from_lists() -> None:
    for matrix in (AccuracyMatrix.start([2, 3]), AccuracyMatrix.start([2, 3]).with_stage([1])):
        arrays = {"correct": matrix.correct, "total": matrix.total}
        assert AccuracyMatrix.from_dict(arrays) == AccuracyMatrix.from_dict(matrix.to_dict()) == matrix
