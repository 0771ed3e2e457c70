"""Who is told about a run: progress bars, files and trackers implement `Observer`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from cflat.data import Batch, Task
from cflat.optim import SharpnessAware
from cflat.train.objective import Objective

__all__ = ["Observer", "Observers", "StepEvent"]


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
    """Base class with a do-nothing answer to every event; override what you need.

    Records are flat dictionaries of plain numbers and strings, ready for JSON.
    """

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

    def on_epoch(self, record: dict[str, Any]) -> None:
        """An epoch is done."""

    def on_task_end(self, record: dict[str, Any]) -> None:
        """A task is learned and evaluated."""

    def on_checkpoint(self, path: str) -> None:
        """The state was saved."""

    def state(self) -> dict[str, Any]:
        """Return what must be known to go on from a checkpoint, for example the length of a log file."""
        return {}

    def load(self, state: dict[str, Any]) -> None:
        """Go back to what `state` returned."""


class Observers(Observer):
    """Tell several observers, in order."""

    def __init__(self, members: Sequence[Observer]) -> None:
        self.members = list(members)

    def on_run_start(self, num_tasks: int, first_task: int) -> None:
        """Pass on."""
        for member in self.members:
            member.on_run_start(num_tasks, first_task)

    def on_task_start(self, task: Task) -> None:
        """Pass on."""
        for member in self.members:
            member.on_task_start(task)

    def on_phase_start(self, optimizer: SharpnessAware, network: nn.Module) -> None:
        """Pass on."""
        for member in self.members:
            member.on_phase_start(optimizer, network)

    def on_step_start(self, epoch: int, objective: Objective, batch: Batch) -> None:
        """Pass on."""
        for member in self.members:
            member.on_step_start(epoch, objective, batch)

    def on_step(self, event: StepEvent) -> None:
        """Pass on."""
        for member in self.members:
            member.on_step(event)

    def on_epoch(self, record: dict[str, Any]) -> None:
        """Pass on."""
        for member in self.members:
            member.on_epoch(record)

    def on_task_end(self, record: dict[str, Any]) -> None:
        """Pass on."""
        for member in self.members:
            member.on_task_end(record)

    def on_checkpoint(self, path: str) -> None:
        """Pass on."""
        for member in self.members:
            member.on_checkpoint(path)

    def state(self) -> dict[str, Any]:
        """Return the members' states by position."""
        return {str(index): member.state() for index, member in enumerate(self.members)}

    def load(self, state: dict[str, Any]) -> None:
        """Give the members their states back."""
        for index, member in enumerate(self.members):
            member.load(state.get(str(index), {}))
