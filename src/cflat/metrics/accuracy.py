"""The accuracy matrix of a run, and the numbers of the field that follow from it.

Two different quantities are called "average accuracy" in the literature: the mean over stages of the pooled accuracy
(``avg``) and the mean over tasks after the last stage (``task_mean``). Both are here, under names of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from cflat._errors import DataError

Counts: TypeAlias = npt.NDArray[np.int64]
Fractions: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Metric:
    """A number that `AccuracyMatrix` has under ``name``, and how to present it."""

    name: str
    title: str
    definition: str
    is_gain: bool = True
    """Whether larger is better."""


METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        # Pooled, as PILOT does it: a task counts by its number of test images.
        Metric("avg", "Avg", "mean over stages of the accuracy on all test images seen so far (pooled)"),
        Metric("last", "Last", "accuracy on all test images after the last task (pooled)"),
        Metric("task_mean", "Task mean", "mean over tasks of each task's accuracy after the last task"),
        Metric(
            "forgetting",
            "Forgetting",
            "mean over earlier tasks of best accuracy so far minus accuracy now",
            is_gain=False,
        ),
        Metric(
            "backward_transfer", "Backward transfer", "mean over earlier tasks of accuracy now minus when just learned"
        ),
        Metric(
            "forward_transfer",
            "Forward transfer",
            "mean over later tasks of accuracy just before learning minus chance; streams whose tasks share labels",
        ),
        Metric(
            "anytime", "Anytime", "mean accuracy on all tasks begun so far, measured at regular steps while training"
        ),
    )
}


def metric_title(name: str) -> str:
    """Return what a metric is called in tables; ``avg@nme`` is that of a certain score.

    >>> metric_title("avg@nme")
    'Avg, nme'
    """
    name, _, score = name.partition("@")
    return f"{METRICS[name].title}, {score}" if score else METRICS[name].title


HEADLINES = ("avg", "last", "forgetting")
"""The metrics that tables show."""


# Without eq: the generated comparison would ask whole arrays for one truth value.
@dataclass(frozen=True, eq=False)
class AccuracyMatrix:
    """How many test images of each task were right after each stage of the stream.

    A stage is the moment after a task. A run that is not finished has fewer stages than tasks; all numbers are then
    those of its last finished stage. Tasks without test images are left out of means; an empty mean is NaN.

    Attributes:
        correct: int64 (stages, tasks): entry (t, i) counts right answers on task i after stage t; 0 where i > t.
        total: int64 (tasks,): test images of each task.
        ahead: int64 (n,): right answers on task t + 1 after stage t, where unseen tasks can be answered; else empty.
        anytime_counts: int64 (n, 2): right answers and test images of each evaluation while training; else empty.
        chance: Accuracy of guessing, which forward transfer is measured from.

    >>> matrix = AccuracyMatrix.start([10, 30]).with_stage([9]).with_stage([6, 27])
    >>> matrix.stage_accuracy.tolist()
    [0.9, 0.825]
    >>> round(matrix.forgetting, 3)
    0.3
    """

    correct: Counts
    total: Counts
    ahead: Counts = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    anytime_counts: Counts = field(default_factory=lambda: np.zeros((0, 2), dtype=np.int64))
    chance: float = 0.0

    def __post_init__(self) -> None:
        # Copies: the caller's arrays must not become read-only, nor change the matrix later.
        total, correct, ahead, anytime = (
            np.array(counts, dtype=np.int64) for counts in (self.total, self.correct, self.ahead, self.anytime_counts)
        )
        # An empty list has lost its second axis on the way through JSON.
        correct = correct.reshape(-1, len(total)) if correct.size == 0 else correct
        anytime = anytime.reshape(-1, 2)
        if total.ndim != 1 or correct.ndim != 2 or correct.shape[1] != len(total) or len(correct) > len(total):
            raise ValueError(
                f"correct must be (stages, tasks) with at most {total.size} stages and tasks, got {correct.shape}."
            )
        if (correct < 0).any() or (correct > total).any():
            raise ValueError("correct must lie between 0 and the number of test images of the task.")
        if np.triu(correct, 1).any():
            raise ValueError("correct must be 0 for tasks that a stage has not seen.")
        if ahead.ndim != 1 or len(ahead) > len(correct):
            raise ValueError("ahead must have at most one count for each stage.")
        if (ahead < 0).any() or (ahead > total[1 : 1 + len(ahead)]).any():
            raise ValueError("ahead must count right answers on the task after each stage.")
        if (anytime < 0).any() or (anytime[:, 0] > anytime[:, 1]).any():
            raise ValueError("anytime_counts must be pairs of right answers and test images.")
        named = {"correct": correct, "total": total, "ahead": ahead, "anytime_counts": anytime}
        for name, counts in named.items():
            counts.flags.writeable = False  # a matrix is a value: with_stage() returns another one
            object.__setattr__(self, name, counts)

    @classmethod
    def start(cls, total: Sequence[int] | Counts, chance: float = 0.0) -> AccuracyMatrix:
        """Return the matrix of a stream before its first task, from the test images of each task."""
        return cls(np.zeros((0, len(total)), dtype=np.int64), np.asarray(total, dtype=np.int64), chance=chance)

    def with_stage(self, correct: Sequence[int] | Counts, ahead: int | None = None) -> AccuracyMatrix:
        """Return this matrix with one stage more, from the right answers on each task seen by then.

        ``ahead`` are those on the next task, if it can be answered before it is learned.
        """
        row = np.zeros(self.num_tasks, dtype=np.int64)
        if len(correct) != self.num_stages + 1:
            raise ValueError(
                f"Stage {self.num_stages} has seen {self.num_stages + 1} tasks, got {len(correct)} counts."
            )
        row[: len(correct)] = correct
        more = self.ahead if ahead is None else np.append(self.ahead, ahead)
        return replace(self, correct=np.vstack([self.correct, row]), ahead=more)

    def with_anytime(self, correct: int, total: int) -> AccuracyMatrix:
        """Return this matrix with an evaluation while training."""
        return replace(self, anytime_counts=np.vstack([self.anytime_counts, [correct, total]]))

    @property
    def num_tasks(self) -> int:
        """Tasks of the stream."""
        return len(self.total)

    @property
    def num_stages(self) -> int:
        """Tasks that are finished."""
        return len(self.correct)

    @property
    def accuracy(self) -> Fractions:
        """Entry (t, i): accuracy on task i after stage t; NaN where the stage has not seen the task."""
        seen = np.tri(self.num_stages, self.num_tasks, dtype=bool)
        return np.where(seen, _fractions(self.correct, self.total), np.nan)

    @property
    def stage_accuracy(self) -> Fractions:
        """A_t of each stage: right answers over all test images seen so far."""
        return _fractions(self.correct.sum(axis=1), np.cumsum(self.total)[: self.num_stages])

    @property
    def per_task(self) -> Fractions:
        """Accuracy of each seen task after the last stage."""
        return self.accuracy[-1, : self.num_stages] if self.num_stages else np.empty(0)

    @property
    def avg(self) -> float:
        """Mean of the stage accuracies."""
        return _mean(self.stage_accuracy)

    @property
    def last(self) -> float:
        """Stage accuracy after the last stage."""
        return float(self.stage_accuracy[-1]) if self.num_stages else float("nan")

    @property
    def task_mean(self) -> float:
        """Mean over tasks after the last stage; the other "average accuracy" of the field."""
        return _mean(self.per_task)

    @property
    def forgetting(self) -> float:
        """Mean over all tasks but the last of best minus present accuracy; never negative, 0 for a single task."""
        # fmax ignores the NaN of stages that had not seen the task.
        earlier = self.accuracy[:, : self._num_earlier]
        return _mean(np.fmax.reduce(earlier, axis=0) - earlier[-1]) if self._num_earlier else 0.0

    @property
    def backward_transfer(self) -> float:
        """Mean over all tasks but the last of present accuracy minus that just after learning; 0 for a single task."""
        num = self._num_earlier
        return _mean(self.per_task[:num] - np.diagonal(self.accuracy)[:num]) if num else 0.0

    @property
    def forward_transfer(self) -> float:
        """Mean accuracy on tasks that are not learned yet, minus chance; NaN where they cannot be answered."""
        return _mean(_fractions(self.ahead, self.total[1 : 1 + len(self.ahead)])) - self.chance

    @property
    def anytime(self) -> float:
        """Mean accuracy of the evaluations while training; NaN without any."""
        return _mean(_fractions(self.anytime_counts[:, 0], self.anytime_counts[:, 1]))

    def summary(self) -> dict[str, float]:
        """Return every number of `METRICS`."""
        return {name: getattr(self, name) for name in METRICS}

    def to_dict(self) -> dict[str, Any]:
        """Return the counts as plain lists, for JSON and checkpoints."""
        return {
            "correct": self.correct.tolist(),
            "total": self.total.tolist(),
            "ahead": self.ahead.tolist(),
            "anytime_counts": self.anytime_counts.tolist(),
            "chance": self.chance,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> AccuracyMatrix:
        """Take over what `to_dict` returned.

        Raises:
            DataError: If the lists are missing or are no counts.
        """
        try:
            total, correct = np.array(values["total"]), np.array(values["correct"])
            # np.array() would turn 0.5 into 0 when it is asked for integers.
            if total.dtype.kind != "i" or (correct.size and correct.dtype.kind != "i"):
                raise ValueError("correct and total must hold whole numbers.")
            ahead, anytime = (values.get(key, ()) for key in ("ahead", "anytime_counts"))
            return cls(correct, total, ahead, anytime, float(values.get("chance", 0.0)))
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise DataError(f"This is not an accuracy matrix: {error}") from error

    @property
    def _num_earlier(self) -> int:
        return max(0, self.num_stages - 1)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, AccuracyMatrix):
            return NotImplemented
        return self.to_dict() == other.to_dict()


def _fractions(correct: Counts, total: Counts) -> Fractions:
    """Return right answers over images; NaN where there are no images."""
    # np.where evaluates both branches, so the first must not divide by zero.
    return np.where(total > 0, correct / np.maximum(total, 1), np.nan)


def _mean(values: Fractions) -> float:
    # Not nanmean, which warns about an empty mean.
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else float("nan")
