"""The accuracy matrix against naive loops over its definition."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cflat import DataError
from cflat.metrics import METRICS, AccuracyMatrix


@st.composite
def matrices(draw: st.DrawFn, min_total: int = 0, min_stages: int = 0) -> AccuracyMatrix:
    total = draw(st.lists(st.integers(min_total, 50), min_size=max(1, min_stages), max_size=7))
    matrix = AccuracyMatrix.start(total)
    looks_ahead = draw(st.booleans())
    for stage in range(draw(st.integers(min_stages, len(total)))):
        has_next = looks_ahead and stage + 1 < len(total)
        ahead = draw(st.integers(0, total[stage + 1])) if has_next else None
        matrix = matrix.with_stage([draw(st.integers(0, total[i])) for i in range(stage + 1)], ahead)
    for whole in draw(st.lists(st.integers(1, 50), max_size=4)):
        matrix = matrix.with_anytime(draw(st.integers(0, whole)), whole)
    return matrix


def naive(matrix: AccuracyMatrix) -> dict[str, float]:
    """The definitions, one loop each, in plain Python; every task has test images."""
    correct, total, stages = matrix.correct.tolist(), matrix.total.tolist(), matrix.num_stages
    pooled = [sum(correct[t][: t + 1]) / sum(total[: t + 1]) for t in range(stages)]
    task = [[correct[t][i] / total[i] for i in range(t + 1)] for t in range(stages)]
    end = stages - 1
    forgetting = [max(task[t][i] for t in range(i, stages)) - task[end][i] for i in range(end)]
    transfer = [task[end][i] - task[i][i] for i in range(end)]
    return {
        "avg": sum(pooled) / stages,
        "last": pooled[end],
        "task_mean": sum(task[end]) / stages,
        "forgetting": sum(forgetting) / end if end else 0.0,
        "backward_transfer": sum(transfer) / end if end else 0.0,
        "forward_transfer": mean([count / total[i + 1] for i, count in enumerate(matrix.ahead.tolist())]),
        "anytime": mean([right / whole for right, whole in matrix.anytime_counts.tolist()]),
    }


def mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else math.nan


@given(matrices(min_total=1, min_stages=1))
def test_numbers_follow_their_definitions(matrix: AccuracyMatrix) -> None:
    assert matrix.summary() == pytest.approx(naive(matrix), abs=1e-12, nan_ok=True)


@given(matrices())
def test_numbers_stay_in_range_or_are_unknown(matrix: AccuracyMatrix) -> None:
    numbers = matrix.summary()
    assert list(numbers) == list(METRICS)
    for name, value in numbers.items():
        low = -1 if name in ("backward_transfer", "forward_transfer") else 0
        assert math.isnan(value) or low <= value <= 1
    assert math.isnan(matrix.forgetting) or matrix.forgetting >= -min(0.0, matrix.backward_transfer) - 1e-12


@given(matrices())
def test_json_keeps_everything(matrix: AccuracyMatrix) -> None:
    assert AccuracyMatrix.from_dict(json.loads(json.dumps(matrix.to_dict()))) == matrix


@given(matrices(min_total=1, min_stages=2))
def test_an_unfinished_matrix_is_the_beginning_of_the_finished_one(matrix: AccuracyMatrix) -> None:
    before = AccuracyMatrix(matrix.correct[:-1], matrix.total)
    np.testing.assert_array_equal(before.stage_accuracy, matrix.stage_accuracy[:-1])
    assert before.last == matrix.stage_accuracy[-2]


def test_pooled_and_task_mean_differ_when_tasks_differ_in_size() -> None:
    matrix = AccuracyMatrix.start([10, 90]).with_stage([10]).with_stage([0, 90])
    assert matrix.last == 0.9
    assert matrix.task_mean == 0.5
    assert matrix.forgetting == 1.0
    assert matrix.backward_transfer == -1.0


def test_forgetting_counts_from_the_best_stage() -> None:
    matrix = AccuracyMatrix.start([10, 10, 10]).with_stage([5]).with_stage([8, 10]).with_stage([6, 10, 0])
    assert matrix.forgetting == pytest.approx(0.1)
    assert matrix.backward_transfer == pytest.approx(0.05)


def test_a_task_without_test_images_is_left_out() -> None:
    matrix = AccuracyMatrix.start([4, 0, 4]).with_stage([4], 0).with_stage([4, 0], 3).with_stage([2, 0, 4])
    assert matrix.per_task.tolist()[::2] == [0.5, 1.0]
    assert matrix.task_mean == 0.75
    assert matrix.forgetting == 0.5
    assert matrix.forward_transfer == 0.75
    assert matrix.with_anytime(0, 0).with_anytime(3, 4).anytime == 0.75
    assert math.isnan(matrix.with_anytime(0, 0).anytime)


def test_counts_cannot_be_changed_from_outside() -> None:
    counts = np.array([[1]])
    matrix = AccuracyMatrix(counts, np.array([2]))
    counts[0, 0] = 2
    assert matrix.last == 0.5
    with pytest.raises(ValueError, match="read-only"):
        matrix.correct[0, 0] = 2


@pytest.mark.parametrize(
    ("correct", "total"),
    [([[3]], [2]), ([[-1]], [2]), ([[1, 1]], [2, 2]), ([[1], [1]], [2]), ([1], [2]), ([[1]], [2, 2])],
    ids=["more than all", "negative", "unseen task", "too many stages", "one axis", "tasks missing"],
)
def test_impossible_counts_are_refused(correct: list, total: list) -> None:
    with pytest.raises(ValueError, match="correct must"):
        AccuracyMatrix(np.array(correct), np.array(total))


def test_a_stage_of_wrong_length_is_refused() -> None:
    with pytest.raises(ValueError, match="has seen 1 tasks, got 2"):
        AccuracyMatrix.start([5, 5]).with_stage([1, 1])


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"total": [1]},
        {"total": [1.5], "correct": [[1]]},
        {"total": [1], "correct": [["x"]]},
        {"total": [1], "correct": [[2]]},
        {"total": [1, 1], "correct": [[1], [1, 1]]},
        {"total": None, "correct": None},
        {"total": [10**30], "correct": [[1]]},
    ],
)
def test_foreign_values_are_no_matrix(values: dict) -> None:
    with pytest.raises(DataError, match="not an accuracy matrix"):
        AccuracyMatrix.from_dict(values)
