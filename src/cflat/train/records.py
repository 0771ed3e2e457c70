"""What observers are told at the end of an epoch and of a task, and how it is read back from ``metrics.jsonl``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field, TypeAdapter, ValidationError

from cflat._errors import DataError
from cflat._settings import Measured
from cflat.data import Split, Task
from cflat.metrics.accuracy import AccuracyMatrix
from cflat.optim import SharpnessAware
from cflat.train.meters import Cost

_COSTS = ("steps", "images", "evaluations", "images_per_second", "evaluations_per_step")


@dataclass(frozen=True, kw_only=True)
class EpochRecord:
    """The mean loss of an epoch, and the optimizer's counters since its phase began."""

    event: Literal["epoch"] = "epoch"
    task: int
    phase: str
    epoch: int
    loss: Measured
    lr: Measured = math.nan
    steps: int
    evaluations: int
    sharpness: dict[str, int]
    flatness: dict[str, int]
    cache_age: dict[str, int]
    surrogate: dict[str, Measured] = field(default_factory=dict)
    nonfinite: int = 0
    shortened: int = 0
    last: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Score:
    """Accuracies of one way to answer."""

    stage_accuracy: Measured
    """On everything seen so far."""
    per_task: list[Measured]


@dataclass(frozen=True, kw_only=True)
class TaskRecord:
    """The accuracies after a task, and the cost of the run so far."""

    event: Literal["task"] = "task"
    task: int
    name: str
    scores: dict[str, Score]
    """On test images, the headline first; empty if the run does not look at them."""
    validation: dict[str, Score] = field(default_factory=dict)
    steps: int = 0
    images: int = 0
    evaluations: int = 0
    images_per_second: Measured = 0.0
    evaluations_per_step: Measured = 0.0
    evaluation_seconds: Measured = 0.0

    @property
    def headline(self) -> Score:
        """The first score, on validation images if no test image was looked at."""
        return next(iter((self.scores or self.validation).values()))


Record: TypeAlias = Annotated[EpochRecord | TaskRecord, Field(discriminator="event")]
_RECORDS: TypeAdapter[list[EpochRecord | TaskRecord]] = TypeAdapter(list[Record])


def epoch_record(task: int, phase: str, epoch: int, loss: float, optimizer: SharpnessAware) -> EpochRecord:
    """Return what is known at the end of an epoch."""
    lr, counters = optimizer.param_groups[0]["lr"], asdict(optimizer.telemetry)
    return EpochRecord(task=task, phase=phase, epoch=epoch, loss=loss, lr=lr, **counters)


def task_record(
    task: Task, accuracy: Mapping[Split, Mapping[str, AccuracyMatrix]], cost: Cost, evaluation_seconds: float
) -> TaskRecord:
    """Return what is known at the end of a task."""
    scores = {
        split: {
            name: Score(float(matrix.stage_accuracy[-1]), [float(value) for value in matrix.per_task])
            for name, matrix in matrices.items()
        }
        for split, matrices in accuracy.items()
    }
    return TaskRecord(
        task=task.index,
        name=task.name,
        scores=scores.get("test", {}),
        validation=scores.get("validation", {}),
        evaluation_seconds=evaluation_seconds,
        **{name: getattr(cost, name) for name in _COSTS},
    )


def read_records(lines: Sequence[Mapping[str, Any]]) -> list[EpochRecord | TaskRecord]:
    """Return the records that were written as JSON."""
    try:
        return _RECORDS.validate_python(lines)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        number, *where = first["loc"]
        place = ".".join(str(part) for part in where) or "record"
        raise DataError(f"line {int(number) + 1}: {place}: {first['msg'].lower()}") from error
