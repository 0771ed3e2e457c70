"""Who is told about a run: progress bars, files and trackers implement `Observer`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from cflat.data import Batch, Task
from cflat.optim import SharpnessAware
from cflat.train.objective import Objective
from cflat.train.records import EpochRecord, TaskRecord


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


class Observer:
    """Base class with a do-nothing answer to every event; override what you need."""

    def on_run_start(self, num_tasks: int, first_task: int) -> None:
        """A run begins or goes on."""

    def on_task_start(self, task: Task) -> None:
        """A task begins or goes on."""

    def on_phase_start(self, optimizer: SharpnessAware, network: nn.Module) -> None:
        """A phase of a task begins or goes on, with an optimizer of its own."""

    def on_step_start(self, epoch: int, objective: Objective, batch: Batch) -> None:
        """A step on this prepared batch is about to begin; whoever evaluates it must leave no trace (see `Shadow`)."""

    def on_step(self, event: StepEvent) -> None:
        """A step is done; called often, must be cheap."""

    def on_epoch(self, record: EpochRecord) -> None:
        """An epoch is done."""

    def on_task_end(self, record: TaskRecord) -> None:
        """A task is learned and evaluated."""

    def on_checkpoint(self, path: str) -> None:
        """The state was saved."""

    def state(self) -> dict[str, Any]:
        """Return what must be known to go on from a checkpoint, for example the length of a log file."""
        return {}

    def load(self, state: dict[str, Any]) -> None:
        """Go back to what `state` returned."""


class Observers(Observer):
    """Tell several observers everything, in order."""

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
    def tell(self: Observers, *arguments: Any) -> None:
        for member in self.members:
            getattr(member, event)(*arguments)

    return tell


for _event in [name for name in vars(Observer) if name.startswith("on_")]:
    setattr(Observers, _event, _pass_on(_event))
