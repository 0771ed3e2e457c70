"""`Trainer`: tasks, phases, epochs, steps, for every method and every optimizer.

Read `Trainer.run`, `Trainer.train_phase` and `Trainer.train_step`, in this order. The parts know nothing of each other:
`ActivePhase` holds what one phase trains with, `Meter` counts and times, `Checkpointer` saves.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, asdict, astuple, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cflat._plugins import is_from_plugin
from cflat.data import Batch, BatchLoader, Split, Stream, Task, Transform
from cflat.methods import Method, ParamGroup, Phase
from cflat.metrics.accuracy import AccuracyMatrix
from cflat.nn.surgery import has_batchnorm
from cflat.optim import SharpnessAware
from cflat.train.averaging import WeightAverage, fresh_batchnorm
from cflat.train.checkpoint import require_plain, translate_load_errors
from cflat.train.checkpointer import Checkpointer
from cflat.train.evaluate import Extractor
from cflat.train.meter import Cost, Meter
from cflat.train.objective import Objective
from cflat.train.observer import Observer, StepEvent, epoch_record, task_record
from cflat.train.optimizers import OptimizerChoice, lr_factor, make_optimizer, set_lr
from cflat.train.perturb import require_perturbed
from cflat.train.phase import ActivePhase
from cflat.train.runtime import Part, Runtime, seed_everything
from cflat.train.settings import BaseSettings, TrainSettings
from cflat.train.shards import module_parts


@dataclass(frozen=True)
class Inputs:
    """How images become inputs."""

    train: Transform
    eval: Transform


@dataclass(frozen=True)
class Position:
    """The next thing to do."""

    task: int = 0
    phase: int = 0
    epoch: int = 0
    step: int = 0


@dataclass(frozen=True)
class RunResult:
    """What a run has learned and what it cost."""

    accuracy: dict[str, AccuracyMatrix]
    """On test images, by score, the headline first; without stages if they were not evaluated."""
    cost: Cost
    validation: dict[str, AccuracyMatrix] = field(default_factory=dict)
    """On validation images; empty if they were not evaluated."""


@dataclass
class Trainer:
    """Train a method on every task of a stream and evaluate it after each.

    Args:
        method: What is learned.
        stream: From what.
        base: The torch optimizer and its learning rate.
        train: Epochs, batch size, checkpoints.
        runtime: Device, precision, ranks.
        optimizer: The flatness-aware wrapper.
        inputs: Transforms for training and testing.
        seed: Decides everything random.
        splits: Images to measure accuracy on; no others are evaluated.
        observer: Receives all events.
        folder: The run directory; checkpoints are saved below it. None saves none.
        should_stop: Asked after every step and between the batches of all other passes; True saves and raises.
        identity: What else decides the result, by dotted key: a checkpoint with another value is rejected.
    """

    method: Method
    stream: Stream
    _: KW_ONLY
    base: BaseSettings
    train: TrainSettings
    runtime: Runtime
    optimizer: OptimizerChoice
    inputs: Inputs
    seed: int = 0
    splits: Sequence[Split] = ("test",)
    observer: Observer = field(default_factory=Observer)
    folder: Path | None = None
    should_stop: Callable[[], bool] = lambda: False
    identity: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.position = Position()
        self.is_grown = False
        """Whether the method has grown for the task at ``position`` and has started it."""
        self.phase: ActivePhase | None = None
        self.meter = Meter(self.runtime.device, is_exact=self.runtime.settings.exact_times)
        self.accuracy = {split: self._no_stages(split) for split in self.splits}
        self.eval_batch_size = self.train.eval_batch_size or self.train.batch_size
        self.extract = Extractor(self.method, self.inputs.eval, self.eval_batch_size, self.runtime, self.check_stop)
        identity = {**self.identity, "seed": self.seed}
        self.checkpointer = Checkpointer(self.folder, self.runtime, self.train.checkpoint_minutes, identity)
        # Of the phase that a checkpoint was taken in; kept until that phase is built.
        self._phase_state: dict[str, Any] = {}
        self.runtime.shard(self.method.network)

    def run(self, *, resume: bool = False, num_tasks: int | None = None) -> RunResult:
        """Train on all tasks and return the result.

        Args:
            resume: Continue from the newest checkpoint in ``folder``, if there is one.
            num_tasks: Stop after so many tasks; a later ``resume`` ends as if there had been no break.

        Raises:
            TrainingInterrupted: If ``should_stop`` returned True.
            StateNotSaved: If it did and the state could not be saved.
            DataError: If the checkpoints of ``folder`` are damaged or of another run.
        """
        if resume:
            self.checkpointer.restore(self._load)
        self.observer.on_run_start(self.stream.num_tasks, self.position.task)
        for task in self.stream.tasks[self.position.task : num_tasks]:
            self.start_task(task)
            for phase in self.remaining_phases(task):
                self.train_phase(task, phase)
            self.finish_task(task)
        # The last border may have been postponed, and nothing follows that would save it.
        if self.checkpointer.is_postponed:
            self.save()
        return self.result()

    def result(self) -> RunResult:
        """Return what has been learned so far."""
        test = self.accuracy.get("test") or self._no_stages("test")
        return RunResult(test, self.meter.summary(), self.accuracy.get("validation", {}))

    # -- a task -------------------------------------------------------------------------------------------------

    def start_task(self, task: Task) -> None:
        """Grow the method and let it prepare, unless a checkpoint was taken in the middle of this task."""
        # The last border may not be saved; nothing of this task is done yet, hence the place to stop.
        if self.checkpointer.is_postponed and self.should_stop():
            self.save()
        self.check_stop()
        self.observer.on_task_start(task)
        if self.is_grown:
            return
        self.grow(task)
        # Every part draws from a stream of its own: a resumed run repeats it without saved generators.
        self._seed(Part.START, task.index)
        self.method.start_task(task, self.extract)
        self.runtime.share_state(self.method)  # passes over images need not be bit-identical on all ranks
        self.is_grown = True

    def grow(self, task: Task) -> None:
        """Extend the method for a task."""
        self._seed(Part.GROW, task.index)
        self.method.grow(task)
        self.runtime.place(self.method)

    def remaining_phases(self, task: Task) -> Iterator[Phase]:
        """Yield the phases of a task that are not done yet."""
        phases = self.method.phases(task)
        while self.position.phase < len(phases):
            yield phases[self.position.phase]
            self.position = Position(task.index, self.position.phase + 1)
            if self.checkpointer.has_unsaved_steps:  # a stop while merging or testing loses no step
                self._save_at_border()

    def finish_task(self, task: Task) -> None:
        """Let the method wrap up, evaluate it on all seen tasks, and save."""
        self._seed(Part.FINISH, task.index)
        self.method.eval()
        self.method.finish_task(task, self.extract)
        self._share_method()
        started = time.perf_counter()
        for split in self.splits:
            # Anew for each split: accuracies must not depend on which other images are evaluated.
            self._seed(Part.EVALUATE, task.index)
            counts = self.extract.count_correct(self.stream, task.index, split)
            ahead = self._count_ahead(task.index + 1, split)
            before = self.accuracy[split]
            self.accuracy[split] = {
                name: before[name].with_stage(correct, ahead.get(name)) for name, correct in counts.items()
            }
        self.position, self.is_grown = Position(task.index + 1), False
        seconds = time.perf_counter() - started
        # Before the checkpoint, which vouches for the log so far: in the other order a kill could lose this record.
        self.observer.on_task_end(task_record(task, self.accuracy, self.meter.summary(), seconds))
        self._save_at_border()

    def _count_ahead(self, index: int, split: Split) -> dict[str, int]:
        """Return the right answers on the next task by score, if its labels are known before it is learned."""
        if not self.stream.shares_labels or index == self.stream.num_tasks:
            return {}
        task = self.stream.tasks[index]
        counts = self.extract.count_correct_of_task(self.stream, task, task.images(split))
        return dict(zip(self.method.scores, counts, strict=True))

    def _evaluate_anytime(self, num_images: int) -> None:
        """Evaluate on all tasks begun so far, every so many training images."""
        every, seen = self.train.anytime_every, self.meter.counters.all.images
        if every is None or (seen - num_images) // every == seen // every:
            return
        extract = replace(self.extract, check_stop=lambda: None)  # a stop is heeded between steps, where it saves
        for split in self.splits:
            counts = extract.count_correct(self.stream, self.position.task, split)
            before = self.accuracy[split]
            total = int(next(iter(before.values())).total[: self.position.task + 1].sum())
            self.accuracy[split] = {
                name: before[name].with_anytime(sum(correct), total) for name, correct in counts.items()
            }

    # -- a phase ------------------------------------------------------------------------------------------------

    def train_phase(self, task: Task, phase: Phase) -> None:
        """Train the method's parameters for the epochs of one phase."""
        self.phase = active = self.start_phase(task, phase)
        for epoch in range(self.position.epoch, active.num_epochs):
            set_lr(active.optimizer.base, lr_factor(self.base, epoch, active.num_epochs, is_first_task=task.index == 0))
            for batch in self.meter.loading(active.loader.epoch(epoch, self.position.step)):
                self.train_step(active, batch)
                self._evaluate_anytime(batch.num_images)
                self._save_if_due()
            self._finish_epoch(active)
        # A phase without epochs must not measure BatchNorm's statistics anew.
        if active.average is not None and active.num_epochs > 0:
            self._use_average(active, active.average)
        self.meter.add_phase(active.optimizer.telemetry, active.flops)
        self.phase = None

    def start_phase(self, task: Task, phase: Phase) -> ActivePhase:
        """Return what a phase trains with, in the state of the checkpoint if one was taken within it."""
        # 1 +: NumPy pads short keys with zeros, so phase 0 would repeat the random numbers of `start_task`.
        self._seed(Part.START, task.index, 1 + self.position.phase)
        if not self._phase_state:  # else the checkpoint holds what it has made
            self.method.start_phase(task, phase, self.extract)
            self.runtime.share_state(self.method)
        self.method.enter_phase(task, phase)
        # A new optimizer for each phase, as the toolboxes make one for each task: no momentum is carried over.
        optimizer = self._make_optimizer(task, self.method.param_groups(task, phase))
        # After enter_phase: DDP registers the parameters that require gradients at the time it wraps them.
        model, scaler = self.runtime.wrap(self.method.network), self.runtime.make_scaler()
        objective = Objective(self.method, model, self.runtime, scaler, self.train.accumulate)
        loader = self.train_loader(task, phase)
        average = None if self.base.ema is None else WeightAverage(optimizer.all_params(), self.base.ema)
        active = ActivePhase(task, phase, self.num_epochs(task, phase), loader, optimizer, objective, average)
        if self._phase_state:
            with translate_load_errors():
                active.load_state_dict(self._phase_state)
            self._phase_state = {}
        self.observer.on_phase_start(optimizer, self.method.network)
        return active

    def train_step(self, active: ActivePhase, batch: Batch) -> None:
        """Make one step of the optimizer, with as many evaluations of the batch as it asks for."""
        at, objective = self.position, active.objective
        active.set_train_mode()
        batch = active.with_replay(batch, at.epoch, at.step)
        if active.flops is None:
            self._seed_step()
            check_purity = self.train.check_purity or is_from_plugin(type(self.method))
            active.inspect(objective.prepare(batch), check_purity=check_purity)
        self._seed_step()  # again: the inspection has drawn
        with self.meter.training():
            prepared = objective.prepare(batch)
        self.observer.on_step_start(at.epoch, objective, prepared)  # not timed: observers are no cost of training
        with self.meter.training():
            loss = active.update(batch, prepared)
        self.meter.add_step(batch.num_images)
        self.observer.on_step(self._event(active, loss, batch.num_images))
        self.position = replace(at, step=at.step + 1)
        self.checkpointer.has_unsaved_steps = True

    def _event(self, active: ActivePhase, loss: Tensor, num_images: int) -> StepEvent:
        return StepEvent(
            task=self.position.task,
            num_tasks=self.stream.num_tasks,
            phase=active.phase.name,
            epoch=self.position.epoch,
            num_epochs=active.num_epochs,
            step=self.position.step,
            num_steps=len(active.loader),
            num_images=num_images,
            loss=loss,
            evaluations=active.optimizer.telemetry.last["evaluations"],
        )

    def _finish_epoch(self, active: ActivePhase) -> None:
        with self.meter.training():  # reading the loss waits for the device
            mean_loss = float(active.loss_sum) / len(active.loader.images)
        at = self.position
        self.observer.on_epoch(epoch_record(at.task, active.phase.name, at.epoch, mean_loss, active.optimizer))
        active.loss_sum.zero_()
        self.position = replace(at, epoch=at.epoch + 1, step=0)

    def _use_average(self, active: ActivePhase, average: WeightAverage) -> None:
        """Replace the trained weights by their average, and the statistics of BatchNorm by those of the average."""
        average.replace_weights()
        active.set_train_mode()
        at, objective = self.position, active.objective
        with self.meter.training(), fresh_batchnorm(self.method.network) as has_statistics:
            if has_statistics:
                # One epoch behind the last: an order and random numbers that no step has used.
                for step, fresh in enumerate(active.loader.epoch(active.num_epochs)):
                    batch = active.with_replay(fresh, active.num_epochs, step)
                    self._seed(Part.STEP, at.task, at.phase, active.num_epochs, step, self.runtime.rank)
                    objective.forward(objective.prepare(batch))

    # -- parts of a phase ---------------------------------------------------------------------------------------

    def num_epochs(self, task: Task, phase: Phase) -> int:
        """Return the epochs of a phase."""
        if phase.epochs is not None:
            return phase.epochs
        if task.index == 0 and self.train.first_epochs is not None:
            return self.train.first_epochs
        return self.train.epochs

    def train_loader(self, task: Task, phase: Phase) -> BatchLoader:
        """Return the batches of a phase."""
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

    def _make_optimizer(self, task: Task, groups: list[ParamGroup]) -> SharpnessAware:
        network, counters = self.method.network, self.meter.counters
        counters.trainable_parameters = sum(p.numel() for group in groups for p in group.params)
        counters.total_parameters = sum(p.numel() for p in network.parameters())
        if task.index == self.position.phase == 0:
            require_perturbed(groups, network, self.optimizer.perturb)
        place = {"task": task.index, "num_tasks": self.stream.num_tasks}
        return make_optimizer(self.optimizer, groups, self.base, network, **place, clip_norm=self.train.clip_norm)

    def _share_method(self) -> None:
        """Give all ranks what rank 0 has made of a task: weights, statistics, exemplars."""
        self.runtime.share_state(self.method)
        extra = self.runtime.share(self.method.extra_state())
        if extra and not self.runtime.is_main:
            self.method.load_extra_state(extra, self.stream.all_train)

    def _seed_step(self) -> None:
        at = self.position
        self._seed(Part.STEP, at.task, at.phase, at.epoch, at.step, self.runtime.rank)

    def _seed(self, part: int, *key: int) -> None:
        seed_everything(self.seed, part, *key)

    def _no_stages(self, split: Split) -> dict[str, AccuracyMatrix]:
        totals = [len(task.images(split)) for task in self.stream.tasks]
        chance = 1 / self.stream.num_classes if self.stream.shares_labels else 0.0
        return {name: AccuracyMatrix.start(totals, chance) for name in self.method.scores}

    # -- saving, restoring and stopping -------------------------------------------------------------------------

    def check_stop(self) -> None:
        """Stop between the batches of a pass if asked to: on resume it is repeated, and what came before is saved."""
        (stops,) = self.runtime.agree(self.should_stop())
        if stops and not self.checkpointer.is_postponed:
            self.checkpointer.stop()

    def _save_if_due(self) -> None:
        stops, is_due = self.runtime.agree(self.should_stop(), self.checkpointer.is_due)
        if stops or is_due:
            self.save()
        if stops:
            self.checkpointer.stop()

    def _save_at_border(self) -> None:
        if not self.checkpointer.should_postpone():
            self.save()

    def save(self) -> None:
        """Write a checkpoint of the run as it is between two steps."""
        phase = {} if self.phase is None else self.phase.state_dict()
        path = self.checkpointer.save({"method": self.method.state_dict(), "phase": phase}, self._progress)
        if path is not None:
            self.observer.on_checkpoint(str(path))

    def _progress(self) -> dict[str, Any]:
        """Return what a checkpoint holds besides the weights and the state of the phase."""
        return {
            "position": list(astuple(self.position)),
            "is_grown": self.is_grown,
            "extra": self.method.extra_state(),
            "accuracy": {split: _counts(matrices) for split, matrices in self.accuracy.items()},
            "meter": asdict(self.meter.counters),
            "observer": self.observer.state(),
        }

    def _load(self, state: dict[str, Any]) -> None:
        self.position = Position(*state["position"])
        self.is_grown = state["is_grown"]
        require_plain(state["method"], is_finite=True)  # NaN would train on without an error
        require_plain(state)
        if not 0 <= self.position.task <= self.stream.num_tasks - self.is_grown:
            raise ValueError(f"task {self.position.task} of {self.stream.num_tasks}")
        for task in self.stream.tasks[: self.position.task + self.is_grown]:
            self.grow(task)  # structure is not saved: it follows from the tasks
        self.method.load_state_dict(module_parts(state["method"], self.method))
        self.method.load_extra_state(state["extra"], self.stream.all_train)
        self.method.to(self.runtime.device)
        self.accuracy = {split: _matrices(state["accuracy"][split]) for split in self.splits}
        self.meter.load(state["meter"])
        self.observer.load(state["observer"])
        self._phase_state = state["phase"]
        self._require_possible_position()

    def _require_possible_position(self) -> None:
        """Reject a position that this run never reaches; needs the method as it is there."""
        at, is_in_phase = self.position, False
        if self.is_grown:
            task = self.stream.tasks[at.task]
            phases = self.method.phases(task)
            if at.phase < len(phases):
                phase = phases[at.phase]
                last_step = len(self.train_loader(task, phase))
                # A checkpoint after the last step of an epoch is taken before the epoch is counted, hence <=.
                is_in_phase = 0 <= at.epoch < self.num_epochs(task, phase) and 0 < at.step <= last_step
        is_at_border = at.epoch == at.step == 0 and 0 <= at.phase <= (len(phases) if self.is_grown else 0)
        if not (is_in_phase if self._phase_state else is_at_border):
            raise ValueError(f"there is no phase {at.phase}, epoch {at.epoch}, step {at.step} in task {at.task}")


def _counts(matrices: Mapping[str, AccuracyMatrix]) -> dict[str, Any]:
    # Tensors: as lists, the counts of a thousand tasks would take longer to save than the weights.
    arrays = ("correct", "total", "ahead", "anytime_counts")
    return {
        name: {key: torch.tensor(getattr(matrix, key)) for key in arrays} | {"chance": matrix.chance}
        for name, matrix in matrices.items()
    }


def _matrices(counts: Mapping[str, Any]) -> dict[str, AccuracyMatrix]:
    return {
        name: AccuracyMatrix.from_dict(
            {key: value.numpy() if isinstance(value, Tensor) else value for key, value in values.items()}
        )
        for name, values in counts.items()
    }
