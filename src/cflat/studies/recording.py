"""`Recording`: the gradients of any run as C-Flat would see them, and the landscape where its tasks end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from cflat._errors import ConfigError
from cflat._files import write_json
from cflat.analysis.hessian import spectrum_density, top_eigenvalues, trace
from cflat.analysis.landscape import connect, line, plane, random_direction
from cflat.analysis.recorder import GradientRecorder
from cflat.analysis.shadow import Shadow
from cflat.data import Batch
from cflat.optim import SharpnessAware
from cflat.train import Observer, RuntimeSettings, TaskRecord
from cflat.train.objective import Objective
from cflat.train.observer import StepEvent

REACH = 1.0
"""Slices go this far to both sides, in units of the filter norms."""


class Recording(Observer):
    """Record every few steps what exact C-Flat would compute there, whatever the optimizer is.

    A shadow of C-Flat evaluates the recorded batches, four times each; training itself is not changed by a bit. After
    the last step of each task the training loss is sampled along a random line and along the way from the weights
    where the task before ended; after the last task also over a plane, and its Hessian is measured.

    Args:
        rho: Radius at which gradients are looked at.
        every: Steps from one record to the next; also the distance of the vectors that are compared.
        has_landscapes: Whether to look at the landscape, too.
        file: Where to write what was recorded, when the last task is learned; None keeps it in memory.
    """

    def __init__(self, rho: float, every: int = 5, *, has_landscapes: bool = True, file: Path | None = None) -> None:
        self.rho = rho
        self.recorder = GradientRecorder(every=every, lag=every)
        self.landscapes: dict[str, Any] = {"lines": [], "connections": []}
        self.has_landscapes = has_landscapes
        self.file = file
        self._num_tasks = 0
        self._ends: dict[str, Tensor] = {}
        self._loss: Callable[[], Tensor] | None = None

    @property
    def watched(self) -> list[Any]:
        """What decides about a recording besides the run itself."""
        return [self.rho, self.recorder.every, self.has_landscapes]

    def on_run_start(self, num_tasks: int, first_task: int) -> None:
        """Mark the run as recorded from its first step."""
        self._num_tasks = num_tasks
        # Written by a fresh start alone: a run that was begun unrecorded must not look recorded when it is resumed.
        if self.file is not None and first_task == 0:
            write_json(self.file, {"watched": self.watched})

    def on_task_end(self, record: TaskRecord) -> None:
        """Write everything after the last task, while the run still counts as unfinished."""
        if self.file is not None and record.task + 1 == self._num_tasks:
            write_json(self.file, {"watched": self.watched, **self.to_dict()})

    def on_phase_start(self, optimizer: SharpnessAware, network: nn.Module) -> None:
        """Give this phase a shadow of its own: its parameters may be others."""
        self._real, self._network = optimizer, network
        self._shadow = Shadow("c_flat", optimizer.all_params(), network, rho=self.rho)
        self._shadow.optimizer.start_task(optimizer.task_index)
        self.recorder.attach(self._shadow.optimizer)

    def on_step_start(self, epoch: int, objective: Objective, batch: Batch) -> None:
        """Record this batch if it is its turn."""
        self._loss = lambda: objective.loss(batch)
        step = self._real.task_step
        # The recorder's own condition, checked before the shadow spends four evaluations.
        if (step + 1) % self.recorder.every == 0:
            self.recorder.epoch = epoch
            self._shadow.optimizer.task_step = step  # the recorder counts training steps, not looks of the shadow
            self._shadow.look(objective.closure(batch))

    def on_step(self, event: StepEvent) -> None:
        """Look at the landscape where a task's training ends."""
        is_end = event.epoch + 1 == event.num_epochs and event.step + 1 == event.num_steps
        # A task may have several phases; the landscape is that of the first, which trains the features.
        is_first = all(entry["task"] != event.task for entry in self.landscapes["lines"])
        if is_end and is_first and self.has_landscapes and self._loss is not None:
            # Frozen parts are in eval mode already, so train(True) afterwards would not restore the modes.
            modes = {module: module.training for module in self._network.modules()}
            self._network.eval()
            self._survey(self._loss, event.task, is_last=event.task + 1 == event.num_tasks)
            for module, mode in modes.items():
                module.training = mode

    def state(self) -> dict[str, Any]:
        """Return what was recorded so far, for the checkpoint."""
        return {"recorder": self.recorder.to_dict(), "landscapes": self.landscapes, "ends": self._ends}

    def load(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned; empty in a checkpoint of a run without recording."""
        if state:
            self.recorder.load(state["recorder"])
            self.landscapes, self._ends = state["landscapes"], state["ends"]

    def to_dict(self) -> dict[str, Any]:
        """Return histories and landscapes as plain JSON values."""
        return {"rho": self.rho, "history": self.recorder.to_dict(), "landscapes": self.landscapes}

    def _survey(self, loss: Callable[[], Tensor], task: int, *, is_last: bool) -> None:
        network, found = self._network, self.landscapes
        trained = {param for param in self._real.all_params() if param.requires_grad}
        names = {name: param for name, param in network.named_parameters() if param in trained}
        params = list(names.values())
        distances = [REACH * (index - 15) / 15 for index in range(31)]  # symmetric, with 0 in the middle
        found["lines"].append(
            {"task": task, **asdict(line(loss, params, random_direction(params, seed=0), distances, model=network))}
        )
        self._survey_connection(loss, task, names)
        if is_last:
            grid = [REACH * (index - 5) / 5 for index in range(11)]
            axes = (random_direction(params, seed=0), random_direction(params, seed=1))
            found["plane"] = asdict(plane(loss, params, axes, grid, grid, model=network))
            found["spectrum"] = asdict(spectrum_density(loss, params, probes=2, steps=16, points=301, model=network))
            top = top_eigenvalues(loss, params, 3, tolerance=1e-2, max_products=60, model=network)
            found["eigenvalues"] = {"values": top.values, "residuals": top.residuals}
            found["trace"] = asdict(trace(loss, params, samples=4, model=network))

    def _survey_connection(self, loss: Callable[[], Tensor], task: int, names: dict[str, nn.Parameter]) -> None:
        """Sample the line from where the task before ended, in the parameters that both tasks have trained."""
        before = self._ends
        self._ends = {name: param.detach().clone() for name, param in names.items()}  # the start of the next connection
        # A head that has grown has no earlier weights of its shape.
        shared = [name for name in names if name in before and before[name].shape == names[name].shape]
        if shared:
            start = [before[name].to(names[name].device) for name in shared]
            params = [names[name] for name in shared]
            found = connect(loss, params, start, [self._ends[name] for name in shared], points=21, model=self._network)
            entry = {"task": task, "num_parameters": sum(param.numel() for param in params), "barrier": found.barrier}
            self.landscapes["connections"].append({**entry, **asdict(found)})


def check_watchable(runtime: RuntimeSettings) -> None:
    """Reject settings under which a run cannot be watched."""
    if runtime.num_ranks > 1:
        raise ConfigError("Gradients are watched in one process; set runtime.devices=1 and runtime.num_nodes=1.")
    if runtime.precision == "16":
        raise ConfigError("Gradients cannot be watched through a loss scale; set runtime.precision to 32 or bf16.")
