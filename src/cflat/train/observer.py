"""The events of a run, and who observes them: progress bars, files and trackers implement `Observer`.

Epochs and tasks are records, which ``metrics.jsonl`` holds and `read_records` reads back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError
from torch import Tensor, nn

from cflat._errors import DataError
from cflat._settings import Measured
from cflat.data import Batch, Split, Task
from cflat.metrics.accuracy import AccuracyMatrix
from cflat.optim import SharpnessAware, Telemetry
from cflat.train.meter import Cost
from cflat.train.objective import Objective


@dataclass(frozen=True)
class StepEvent:
    """One completed step."""

    task: int
    num_tasks: int
    phase: str
    epoch: int
    num_epochs: int
    step: int
    num_steps: int
    """Steps per epoch."""
    num_images: int
    loss: Tensor
    """First-evaluation loss, still on its device: reading it synchronises."""
    evaluations: int


def _without_nulls(telemetry: Any) -> Any:
    """Put back NaN, for which JSON has no number."""
    if isinstance(telemetry, Mapping) and isinstance(telemetry.get("surrogate"), Mapping):
        numbers = {key: math.nan if value is None else value for key, value in telemetry["surrogate"].items()}
        return {**telemetry, "surrogate": numbers}
    return telemetry


@dataclass(frozen=True, kw_only=True)
class EpochRecord:
    """The mean loss of an epoch, and the optimizer's counters since its phase began."""

    event: Literal["epoch"] = "epoch"
    task: int
    phase: str
    epoch: int
    loss: Measured
    lr: Measured = math.nan
    telemetry: Annotated[Telemetry, BeforeValidator(_without_nulls)]


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
    cost: Cost
    """Of the run so far."""
    evaluation_seconds: Measured = 0.0


Record: TypeAlias = Annotated[EpochRecord | TaskRecord, Field(discriminator="event")]
_RECORDS: TypeAdapter[list[EpochRecord | TaskRecord]] = TypeAdapter(list[Record])


def epoch_record(task: int, phase: str, epoch: int, loss: float, optimizer: SharpnessAware) -> EpochRecord:
    """Return what is known at the end of an epoch."""
    lr, telemetry = optimizer.param_groups[0]["lr"], deepcopy(optimizer.telemetry)  # which continues to count
    return EpochRecord(task=task, phase=phase, epoch=epoch, loss=loss, lr=lr, telemetry=telemetry)


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
        cost=cost,
        evaluation_seconds=evaluation_seconds,
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


class Observer:
    """Base class that ignores every event; override what you need."""

    def on_run_start(self, num_tasks: int, first_task: int) -> None:
        """A run begins or is resumed."""

    def on_task_start(self, task: Task) -> None:
        """A task begins or is resumed."""

    def on_phase_start(self, optimizer: SharpnessAware, network: nn.Module) -> None:
        """A phase of a task begins or is resumed, with an optimizer of its own."""

    def on_step_start(self, epoch: int, objective: Objective, batch: Batch) -> None:
        """A step on this prepared batch is about to begin; an evaluation here must leave no trace (see `Shadow`)."""

    def on_step(self, event: StepEvent) -> None:
        """A step is done; called often, must be cheap."""

    def on_epoch(self, record: EpochRecord) -> None:
        """An epoch is done."""

    def on_task_end(self, record: TaskRecord) -> None:
        """A task is learned and evaluated."""

    def on_checkpoint(self, path: str) -> None:
        """The state was saved."""

    def state(self) -> dict[str, Any]:
        """Return what must be known to resume from a checkpoint, for example the length of a log file."""
        return {}

    def load(self, state: dict[str, Any]) -> None:
        """Go back to what `state` returned."""


class Observers(Observer):
    """Forward every event to several observers, in order."""

    def __init__(self, members: Sequence[Observer]) -> None:
        self.members = list(members)

    def state(self) -> dict[str, Any]:
        """Return the members' states by name."""
        return {name: member.state() for name, member in self._named().items()}

    def load(self, state: dict[str, Any]) -> None:
        """Give the members that were there their states back; others may have come or gone since."""
        for name, member in self._named().items():
            if name in state:
                member.load(state[name])

    def _named(self) -> dict[str, Observer]:
        """Return the members by the name of their class; further ones of a class are numbered."""
        named: dict[str, Observer] = {}
        for member in self.members:
            name = type(member).__name__
            number = sum(other.split("#")[0] == name for other in named)
            named[f"{name}#{number}" if number else name] = member
        return named


def _pass_on(event: str) -> Callable[..., None]:
    def forward(self: Observers, *arguments: Any) -> None:
        for member in self.members:
            getattr(member, event)(*arguments)

    return forward


# Generated: an event that is added to `Observer` reaches all members without a second list here.
for _event in [name for name in vars(Observer) if name.startswith("on_")]:
    setattr(Observers, _event, _pass_on(_event))
