"""The one training loop: tasks, phases, epochs, steps, for every method and every optimizer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from cflat.data import Batch, Split, Stream, Task
from cflat.methods import Method, Phase
from cflat.metrics.accuracy import AccuracyMatrix
from cflat.optim import SharpnessAware, StepOptions, create_optimizer
from cflat.train.meters import Cost, StopWatch, count_flops
from cflat.train.objective import Objective
from cflat.train.observer import Observer, StepEvent
from cflat.train.records import epoch_record, task_record
from cflat.train.runtime import Part, Runtime
from cflat.train.schedules import lr_factor, make_base, set_lr
from cflat.train.settings import BaseSettings, TrainSettings
from cflat.train.state import Inputs, OptimizerChoice, Position, RunState


@dataclass(frozen=True)
class RunResult:
    """What a run has learned and what it cost."""

    accuracy: dict[str, AccuracyMatrix]
    """On test images, by score, the headline first; without stages if they were not looked at."""
    cost: Cost
    validation: dict[str, AccuracyMatrix] = field(default_factory=dict)
    """On validation images; empty if they were not looked at."""


def run_stream(
    method: Method,
    stream: Stream,
    *,
    base: BaseSettings,
    train: TrainSettings,
    runtime: Runtime,
    optimizer: OptimizerChoice,
    inputs: Inputs,
    seed: int = 0,
    splits: Sequence[Split] = ("test",),
    num_tasks: int | None = None,
    observer: Observer | None = None,
    folder: Path | None = None,
    resume: bool = False,
    should_stop: Callable[[], bool] = lambda: False,
    identity: Mapping[str, Any] | None = None,
) -> RunResult:
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
        splits: Images to measure accuracy on; no others are looked at.
        num_tasks: Come back after so many tasks; ``resume`` goes on from there as if there had been no break.
        observer: Who is told.
        folder: The run directory; checkpoints go below it. None keeps none.
        resume: Go on from the newest checkpoint in ``folder``, if there is one.
        should_stop: Asked after every step and between the batches of all other passes; True saves and raises.
        identity: What else decides the result, by dotted key: a checkpoint with another value is refused.

    Raises:
        TrainingInterrupted: When ``should_stop`` said so.
        StateNotSaved: When it said so and the state could not be saved.
        DataError: If the checkpoints of ``folder`` are damaged or of another run.
    """
    run = _Run(
        method,
        stream,
        base,
        train,
        runtime,
        optimizer,
        inputs,
        seed,
        splits,
        observer or Observer(),
        folder,
        should_stop,
        {**(identity or {}), "seed": seed},
    )
    if resume:
        run.restore()
    run.observer.on_run_start(stream.num_tasks, run.position.task)
    for task in stream.tasks[run.position.task : num_tasks]:
        run.start_task(task)
        for phase in run.remaining_phases(task):
            run.train_phase(task, phase)
        run.finish_task(task)
    run.save_rest()
    return run.result()


class _Run(RunState):
    """The parts of the loop."""

    def result(self) -> RunResult:
        """Return what has been learned so far."""
        test = self.accuracy.get("test") or self._no_stages("test")
        return RunResult(test, self.meter.summary(), self.accuracy.get("validation", {}))

    # -- a task -------------------------------------------------------------------------------------------------

    def start_task(self, task: Task) -> None:
        """Grow the method and let it prepare, unless a checkpoint has put it into the middle of this task."""
        if self.is_postponed and self.should_stop():
            self._save()
        self._heed_stop()
        self.observer.on_task_start(task)
        if self.is_grown:
            return
        self._grow(task)
        self._seed(Part.START, task.index)
        self.method.start_task(task, self.extract)
        self.runtime.share_state(self.method)
        self.is_grown = True

    def remaining_phases(self, task: Task) -> Iterator[Phase]:
        """Yield the phases of a task that are not done yet."""
        phases = self.method.phases(task)
        while self.position.phase < len(phases):
            yield phases[self.position.phase]
            self.position = Position(task.index, self.position.phase + 1)
            if self.has_unsaved_steps:  # a stop in what follows, be it merging or testing, finds everything saved
                self._save_at_border()

    def train_phase(self, task: Task, phase: Phase) -> None:
        """Train the method's parameters for the epochs of one phase."""
        self._seed(Part.START, task.index, 1 + self.position.phase)
        if not self.restored:
            self.method.start_phase(task, phase, self.extract)
            self.runtime.share_state(self.method)
        self.method.enter_phase(task, phase)
        optimizer = self._make_optimizer(task, phase)
        model, scaler = self.runtime.wrap(self.method.network), self.runtime.make_scaler()
        objective = Objective(self.method, model, self.runtime, scaler, self.train.accumulate)
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.runtime.device)
        flops = self._restore_phase(optimizer, objective, loss_sum)
        self.observer.on_phase_start(optimizer, self.method.network)
        num_epochs = self._num_epochs(task, phase)
        loader = self._train_loader(task, phase)
        for epoch in range(self.position.epoch, num_epochs):
            set_lr(optimizer.base, lr_factor(self.base, epoch, num_epochs, is_first_task=task.index == 0))
            watch = StopWatch(self.runtime.device, is_exact=self.runtime.settings.exact_times)
            for step, batch in enumerate(loader.epoch(epoch, self.position.step), start=self.position.step):
                data_seconds = watch.lap()
                self.method.set_train_mode()
                self._seed(Part.STEP, task.index, self.position.phase, epoch, step, self.runtime.rank)
                if step == 0 and epoch == 0:
                    flops = self._inspect_first_batch(objective, objective.prepare(batch))
                    watch.lap()
                    self._seed(Part.STEP, task.index, self.position.phase, epoch, step, self.runtime.rank)
                prepared = objective.prepare(batch)
                step_seconds = watch.lap()
                self.observer.on_step_start(epoch, objective, prepared)
                watch.lap()  # what observers do is no cost of training
                loss = optimizer.step(objective.closure(prepared), scaler=objective.scaler)
                if objective.scaler is not None:
                    objective.scaler.update()
                num_images = len(batch) if batch.total is None else batch.total
                loss = self.runtime.mean_over_ranks(loss)
                loss_sum += loss * num_images
                step_seconds += watch.lap()
                self.meter.add_step(num_images, step_seconds, data_seconds)
                event = StepEvent(
                    task.index,
                    self.stream.num_tasks,
                    phase.name,
                    epoch,
                    num_epochs,
                    step,
                    len(loader),
                    num_images,
                    loss,
                    optimizer.telemetry.last["evaluations"],
                )
                self.observer.on_step(event)
                self.position = replace(self.position, task=task.index, epoch=epoch, step=step + 1)
                self._save_if_due(optimizer, objective, loss_sum, flops)
                watch.lap()
            mean_loss = float(loss_sum) / len(loader.images)
            if not watch.is_exact:
                self.meter.add_wait(watch.lap())  # reading the loss has waited for the device
            self.observer.on_epoch(epoch_record(task.index, phase.name, epoch, mean_loss, optimizer))
            loss_sum.zero_()
            self.position = replace(self.position, epoch=epoch + 1, step=0)
        self.meter.add_phase(optimizer.telemetry, *flops)

    def finish_task(self, task: Task) -> None:
        """Let the method wrap up, evaluate it on all seen tasks, and save."""
        self._seed(Part.FINISH, task.index)
        self.method.eval()
        self.method.finish_task(task, self.extract)
        self._share_method()
        started = time.perf_counter()
        for split in self.splits:
            self._seed(Part.EVALUATE, task.index)
            counts = self.extract.count_correct(self.stream, task.index, split)
            before = self.accuracy[split]
            self.accuracy[split] = {name: before[name].with_stage(correct) for name, correct in counts.items()}
        self.position, self.is_grown = Position(task.index + 1), False
        seconds = time.perf_counter() - started
        self.observer.on_task_end(task_record(task, self.accuracy, self.meter.summary(), seconds))
        self._save_at_border()

    # -- parts of a phase ---------------------------------------------------------------------------------------

    def _make_optimizer(self, task: Task, phase: Phase) -> SharpnessAware:
        groups = self.method.param_groups(task, phase)
        self.meter.trainable_parameters = sum(p.numel() for group in groups for p in group.params)
        settings = dict(self.choice.settings)
        if self.train.clip_norm is not None:
            settings["options"] = StepOptions(max_norm=self.train.clip_norm)
        base = make_base(groups, self.base, is_first_task=task.index == 0)
        optimizer = create_optimizer(self.choice.name, base, model=self.method.network, **settings)
        optimizer.start_task(task.index, self.stream.num_tasks)
        return optimizer

    def _share_method(self) -> None:
        """Give all ranks what rank 0 has made of a task: weights, statistics, exemplars."""
        self.runtime.share_state(self.method)
        extra = self.runtime.share(self.method.extra_state())
        if extra and not self.runtime.is_main:
            self.method.load_extra_state(extra, self.stream.all_train)

    def _inspect_first_batch(self, objective: Objective, batch: Batch) -> tuple[float, float]:
        """Check purity if asked, and count the arithmetic of one preparation and one evaluation."""
        if self.train.check_purity:
            objective.check_purity(batch)
        self.method.eval()  # counts alike, and leaves running statistics alone
        per_step = count_flops(lambda: objective.prepare(batch))
        per_evaluation = count_flops(objective.closure(batch))
        self.method.network.zero_grad()
        self.method.set_train_mode()
        own = [0.0, 0.0] if batch.is_filler else [per_step, per_evaluation]
        per_step, per_evaluation = self.runtime.sum_over_ranks(torch.tensor(own, dtype=torch.float64)).tolist()
        return per_step, per_evaluation
