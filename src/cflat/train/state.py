"""`RunState`: a run between two steps, and how it is saved, restored and stopped.

Everything random is a function of (seed, position), so a checkpoint holds weights, optimizer state and a position, and
a run that was killed anywhere ends with the same bits as one that was not. Checkpoints are taken between steps and at
the borders of phases and tasks; what a method does at those borders is repeated on resume, never saved halfway.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from cflat._errors import CFlatError, DataError
from cflat.data import BatchLoader, Split, Stream, Task, Transform
from cflat.methods import Method, Phase
from cflat.metrics.accuracy import AccuracyMatrix
from cflat.nn.surgery import has_batchnorm
from cflat.optim import SharpnessAware
from cflat.train.checkpoint import CheckpointStore, require_finite, require_same
from cflat.train.evaluate import Extractor
from cflat.train.meters import CostMeter
from cflat.train.objective import Objective
from cflat.train.observer import Observer
from cflat.train.runtime import Part, Runtime, seed_everything
from cflat.train.settings import BaseSettings, TrainSettings
from cflat.train.shards import module_parts, optimizer_parts, whole

logger = logging.getLogger(__name__)

CHEAP_BYTES = 64 << 20
"""A smaller checkpoint is written at every border of a phase or a task."""
SAVING_SHARE = 0.1
"""Larger ones take no more than this share of the time."""


class TrainingInterrupted(CFlatError):
    """The run was asked to stop; what it has a folder for is saved there."""


class StateNotSaved(CFlatError):
    """The run was asked to stop, and what it has trained is lost."""


@dataclass(frozen=True)
class Inputs:
    """How images become inputs."""

    train: Transform
    eval: Transform


@dataclass(frozen=True)
class OptimizerChoice:
    """A flatness-aware optimizer by name, with its keywords."""

    name: str = "none"
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Position:
    """The next thing to do."""

    task: int = 0
    phase: int = 0
    epoch: int = 0
    step: int = 0


@dataclass
class RunState:
    """What is learned, from what, how, and how far it has come."""

    method: Method
    stream: Stream
    base: BaseSettings
    train: TrainSettings
    runtime: Runtime
    choice: OptimizerChoice
    inputs: Inputs
    seed: int
    splits: Sequence[Split]
    observer: Observer
    folder: Path | None
    should_stop: Callable[[], bool]
    identity: dict[str, Any]

    def __post_init__(self) -> None:
        self.position = Position()
        self.meter = CostMeter()
        self.accuracy = {split: self._no_stages(split) for split in self.splits}
        self.eval_batch_size = self.train.eval_batch_size or self.train.batch_size
        self.extract = Extractor(self.method, self.inputs.eval, self.eval_batch_size, self.runtime, self._heed_stop)
        self.store = CheckpointStore(self.folder / "checkpoints") if self.folder is not None else None
        self.saved_at = time.monotonic()
        self.saving_seconds = 0.0
        self.is_postponed = False
        self.has_unsaved_steps = False
        self.save_problem: str | None = None
        self.restored: dict[str, Any] = {}
        self.is_grown = False
        self.runtime.shard(self.method.network)

    def _no_stages(self, split: Split) -> dict[str, AccuracyMatrix]:
        totals = [len(task.images(split)) for task in self.stream.tasks]
        return {name: AccuracyMatrix.start(totals) for name in self.method.scores}

    def _grow(self, task: Task) -> None:
        self._seed(Part.GROW, task.index)
        self.method.grow(task)
        self.runtime.place(self.method)

    def _num_epochs(self, task: Task, phase: Phase) -> int:
        if phase.epochs is not None:
            return phase.epochs
        if task.index == 0 and self.train.first_epochs is not None:
            return self.train.first_epochs
        return self.train.epochs

    def _train_loader(self, task: Task, phase: Phase) -> BatchLoader:
        least_last = 1
        if has_batchnorm(self.method.network):  # needs two images on all ranks together, or on each for itself
            least_last = 2 if self.runtime.settings.sync_batchnorm else 2 * self.runtime.world_size
        return BatchLoader(
            self.method.train_images(task),
            self.inputs.train if phase.augment else self.inputs.eval,
            self.train.images_per_step,
            shuffle=True,
            seed=self.seed,
            task=task.index,
            least_last=least_last,
            rank=self.runtime.rank,
            world_size=self.runtime.world_size,
            device=self.runtime.device,
            prefetch=self.runtime.settings.prefetch,
        )

    def _seed(self, part: int, *key: int) -> None:
        seed_everything(self.seed, part, *key)

    # -- checkpoints --------------------------------------------------------------------------------------------

    def restore(self) -> None:
        """Go to the newest checkpoint, if there is one; it must be of this run."""
        with self.runtime.together():
            state = self.store.load() if self.store is not None and self.runtime.is_main else None
        name = self.runtime.share(None if self.store is None or self.store.newest is None else self.store.newest.name)
        if self.store is None or name is None:
            return
        with self.runtime.together():
            try:
                if state is None:
                    state = self.store.read(name)
                else:  # rank 0 alone writes checkpoints, and knows all that it put there
                    require_same(_without_ranks(state["identity"]), self.identity)
                self._load(state)
            except (KeyError, IndexError, TypeError, ValueError, AttributeError, RuntimeError) as error:
                reason = str(error).strip().partition("\n")[0] or type(error).__name__
                raise DataError(f"The checkpoint does not fit this run ({reason:.200}); start the run anew.") from error

    def _load(self, state: dict[str, Any]) -> None:
        self.position = Position(*state["position"])
        self.is_grown = state["is_grown"]
        require_finite(state["method"])
        if not 0 <= self.position.task <= self.stream.num_tasks - self.is_grown:
            raise ValueError(f"task {self.position.task} of {self.stream.num_tasks}")
        for task in self.stream.tasks[: self.position.task + self.is_grown]:
            self._grow(task)
        self.method.load_state_dict(module_parts(state["method"], self.method))
        self.method.load_extra_state(state["extra"], self.stream.all_train)
        self.method.to(self.runtime.device)
        saved: dict[Split, Any] = {"test": state["accuracy"], "validation": state.get("validation")}
        self.accuracy = {
            split: {name: AccuracyMatrix.from_dict(_arrays(values)) for name, values in saved[split].items()}
            for split in self.splits
        }
        self.meter = CostMeter(**state["meter"])
        self.observer.load(state["observer"])
        self.restored = state["phase"]
        self._require_possible_position()

    def _require_possible_position(self) -> None:
        """Refuse a position that this run never comes to; needs the method as it is there."""
        at, is_in_phase = self.position, False
        if self.is_grown:
            task = self.stream.tasks[at.task]
            phases = self.method.phases(task)
            if at.phase < len(phases):
                phase = phases[at.phase]
                last_step = len(self._train_loader(task, phase))
                is_in_phase = 0 <= at.epoch < self._num_epochs(task, phase) and 0 < at.step <= last_step
        is_at_border = at.epoch == at.step == 0 and 0 <= at.phase <= (len(phases) if self.is_grown else 0)
        if not (is_in_phase if self.restored else is_at_border):
            raise ValueError(f"there is no phase {at.phase}, epoch {at.epoch}, step {at.step} in task {at.task}")

    def _restore_phase(self, optimizer: SharpnessAware, objective: Objective, loss_sum: Tensor) -> tuple[float, float]:
        """Load what belongs to the phase that a checkpoint was taken in; return its arithmetic per step."""
        if not self.restored:
            return 0.0, 0.0
        state, self.restored = self.restored, {}
        optimizer.load_state_dict(optimizer_parts(state["optimizer"], optimizer.all_params()))
        if objective.scaler is not None:
            objective.scaler.load_state_dict(state["scaler"])
        loss_sum.fill_(state["loss_sum"])
        per_step, per_evaluation = state["flops"]
        return per_step, per_evaluation

    def _save_if_due(
        self, optimizer: SharpnessAware, objective: Objective, loss_sum: Tensor, flops: tuple[float, float]
    ) -> None:
        self.has_unsaved_steps = True
        is_due = self.runtime.is_main and time.monotonic() - self.saved_at >= 60 * self.train.checkpoint_minutes
        stops, is_due = self.runtime.agree(self.should_stop(), is_due)
        if stops or is_due:
            phase = {
                "optimizer": optimizer.state_dict(),
                "scaler": objective.scaler.state_dict() if objective.scaler is not None else None,
                "loss_sum": float(loss_sum),
                "flops": list(flops),
            }
            self._save(phase)
        if stops:
            self._stop()

    def save_rest(self) -> None:
        """Write the checkpoint that the last border has put off."""
        if self.is_postponed:
            self._save()

    def _save_at_border(self) -> None:
        """Write a checkpoint, or put it off if short tasks would be spent on writing large ones.

        A stop then waits until the task is done, which is saved before anything else begins.
        """
        newest = self.store.newest if self.store is not None else None
        is_large = newest is not None and newest.is_file() and newest.stat().st_size >= CHEAP_BYTES
        elapsed = time.monotonic() - self.saved_at
        self.is_postponed = is_large and self.runtime.world_size == 1 and SAVING_SHARE * elapsed < self.saving_seconds
        if not self.is_postponed:
            self._save()

    def _save(self, phase: dict[str, Any] | None = None) -> None:
        """Write a checkpoint, with the state of the phase within one; should that fail, training goes on."""
        started = time.monotonic()
        self._write_checkpoint(phase or {})
        self.saved_at, self.is_postponed = time.monotonic(), False
        self.saving_seconds = self.saved_at - started

    def _write_checkpoint(self, phase: dict[str, Any]) -> None:
        if self.store is None:
            return
        weights = self.method.state_dict()
        if self.runtime.is_sharded:
            weights, phase = whole((weights, phase), keeps=self.runtime.is_main) or ({}, {})
        if not self.runtime.is_main:
            return
        try:
            path = self.store.save(
                {
                    "identity": self.identity,
                    "position": list(astuple(self.position)),
                    "is_grown": self.is_grown,
                    "method": weights,
                    "extra": self.method.extra_state(),
                    "accuracy": self._counts("test"),
                    "validation": self._counts("validation"),
                    "meter": asdict(self.meter),
                    "observer": self.observer.state(),
                    "phase": phase,
                }
            )
        except DataError as error:
            self.save_problem = str(error)
            logger.warning("%s Training goes on; should it be stopped, what is not saved is lost.", error)
            return
        self.has_unsaved_steps, self.save_problem = False, None
        self.observer.on_checkpoint(str(path))

    def _counts(self, split: Split) -> dict[str, Any]:
        matrices = self.accuracy.get(split, {})
        # Tensors: as lists, the counts of a thousand tasks would take longer to save than the weights.
        return {
            name: {"correct": torch.tensor(matrix.correct), "total": torch.tensor(matrix.total)}
            for name, matrix in matrices.items()
        }

    # -- stopping -----------------------------------------------------------------------------------------------

    def _heed_stop(self) -> None:
        """Stop between the batches of a pass, if asked to: it is repeated on resume, what came before it is saved."""
        (stops,) = self.runtime.agree(self.should_stop())
        if stops and not self.is_postponed:
            self._stop()

    def _stop(self) -> NoReturn:
        if self.store is None:
            raise TrainingInterrupted("The run was asked to stop.")
        problem = self.save_problem
        if problem is None and not (self.store.newest or self.store.folder.parent).exists():
            problem = f"{str(self.store.folder.parent)!r} was removed."
        problem = self.runtime.share(problem)  # rank 0 has saved; those that wait here end after that
        if problem is not None:
            raise StateNotSaved(f"The run was asked to stop, but what it has trained is lost: {problem}")
        raise TrainingInterrupted("The run was asked to stop; its state is saved.")


def _without_ranks(identity: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a checkpoint says of its run but for the number of ranks, which earlier versions wrote down.

    If there were several, train.batch_size was meant for each.
    """
    ranks = identity.get("number of ranks", 1)
    if ranks != 1:
        raise DataError(
            f"This run was begun on {ranks} ranks by a version of cflat in which each had train.batch_size images per "
            "step; now they share them. Start it anew."
        )
    return {key: value for key, value in identity.items() if key != "number of ranks"}


def _arrays(counts: Mapping[str, Any]) -> dict[str, Any]:
    """Return counts of a checkpoint without tensors; earlier versions saved lists."""
    return {name: value.numpy() if isinstance(value, Tensor) else value for name, value in counts.items()}
