"""What a run would do (`plan_run`), and what it will cost on this machine (`estimate`).

All tasks are counted. The first two and the last are measured: a few steps of each phase, one batch of test images, one
batch of each pass at the borders, and a checkpoint. The rates of all other tasks are interpolated between these:

    seconds = start + sum over tasks  border + train_images * pass
                                    + sum over phases  steps * step + images * (evaluations * evaluation + decoding)
                                    + new_images * first_look + seen_images * next_look + checkpoints * saving
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from cflat._errors import ConfigError
from cflat.config.run_config import RunConfig
from cflat.data import ImageSet, Task, vector_size
from cflat.methods import Phase
from cflat.optim import create_optimizer, get_optimizer_spec
from cflat.runs.run import assemble, check_devices, make_backbone, make_stream, make_trainer
from cflat.train import OptimizerChoice, Runtime, Trainer
from cflat.train.checkpointer import CHEAP_BYTES, SAVING_FRACTION
from cflat.train.evaluate import Extractor
from cflat.train.meter import peak_memory_bytes
from cflat.train.trainer import Position

NUM_STEPS = 12
"""Steps of each measured phase; the first, whose arithmetic is counted, is not timed."""
ENOUGH_SECONDS = 3.0
"""A phase is not measured for longer than this."""
TOY_STEPS = 300

clock = time.perf_counter


@dataclass(frozen=True)
class TaskPlan:
    """One task."""

    index: int
    name: str
    num_classes: int
    train_images: int
    test_images: int
    validation_images: int
    steps: int
    """Of all epochs, without exemplars and the method's own phases."""
    class_names: tuple[str, ...] = ()


@dataclass(frozen=True)
class RunPlan:
    """The tasks of a run, counted without building the network."""

    tasks: tuple[TaskPlan, ...]
    evaluations: str
    """Forward and backward passes per step."""
    stream: str
    """Fingerprint of order, splits and images."""

    @property
    def steps(self) -> int:
        """Steps of all tasks."""
        return sum(task.steps for task in self.tasks)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {**asdict(self), "steps": self.steps}


def plan_run(config: RunConfig) -> RunPlan:
    """Count what a run would train on; raises if its data or its weights file cannot be used."""
    stream, train = make_stream(config), config.train
    if config.backbone.weights not in ("random", "timm"):
        try:
            make_backbone(config.backbone, vector_size(stream.tasks[0].train))
        except ValueError as error:
            raise ConfigError(str(error)) from error
    tasks = []
    for task in stream.tasks:
        epochs = train.epochs if task.index or train.first_epochs is None else train.first_epochs
        steps = epochs * math.ceil(len(task.train) / train.images_per_step)
        held_out = 0 if task.validation is None else len(task.validation)
        counts = (len(task.train), len(task.test), held_out)
        names = stream.class_names[task.classes.start : task.classes.stop]
        tasks.append(TaskPlan(task.index, task.name, task.num_classes, *counts, steps, names))
    return RunPlan(tuple(tasks), get_optimizer_spec(config.optimizer.name).evaluations, stream.fingerprint())


@dataclass(frozen=True)
class PhaseCounts:
    """What a run does in one phase of a task."""

    name: str
    epochs: int
    steps: int
    """Of all epochs."""
    images: int
    """Of one epoch, over all ranks."""


@dataclass
class TaskCost:
    """What one task does, and what that costs."""

    task: int
    train_images: int
    new_images: int
    """Evaluated images that this task brings; earlier tasks have brought the seen ones."""
    seen_images: int
    phases: tuple[PhaseCounts, ...]
    trainable_parameters: int
    """Of the last phase."""
    state_bytes: int
    """Weights and buffers of the method."""
    steps: int = 0
    evaluations: float = 0.0
    flops: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)
    """Of training, testing, the borders of task and phases, and checkpoints."""

    def apply(self, rate: dict[str, float], ranks: int) -> None:
        """Apply the formula of this module; ``ranks`` share evaluations, test images and passes at borders."""
        training, per_step = 0.0, rate["evaluations"]
        for phase in self.phases:
            step, evaluation, decoding, flops, evaluation_flops = (rate[f"{phase.name}.{one}"] for one in _PHASE_RATES)
            evaluated = phase.epochs * phase.images * per_step
            training += phase.steps * step + (evaluated * evaluation + phase.images * decoding) / ranks
            self.flops += phase.steps * (flops + per_step * evaluation_flops)
        self.evaluations = self.steps * per_step
        testing = (self.new_images * rate["first_look"] + self.seen_images * rate["next_look"]) / ranks
        borders = rate["border"] + self.train_images * rate["pass"] / ranks
        saving = rate["saving"] * (1 + sum(phase.steps > 0 for phase in self.phases))
        if rate["checkpoint_bytes"] >= CHEAP_BYTES:  # then the trainer postpones them
            saving = min(saving, SAVING_FRACTION * (training + testing + borders))
        self.seconds = {"training": training, "testing": testing, "borders": borders, "checkpoints": saving}


@dataclass(frozen=True)
class Estimate:
    """The cost of a run that has not begun."""

    tasks: tuple[TaskCost, ...]
    start_seconds: float
    """Reading the data and building the network."""
    seconds: float
    """Wall time on this machine, as busy as it was during the measurements."""
    parts: dict[str, float]
    """Seconds of training, testing, borders and checkpoints."""
    steps: int
    evaluations: float
    """Forward and backward passes."""
    evaluations_per_step: float
    flops: float
    """Of training, as a run counts them."""
    peak_memory_bytes: int
    state_bytes: int
    """Weights and buffers of the method after the last task."""
    trainable_parameters: int
    checkpoint_bytes: int
    """The last one; two are kept."""
    measured_tasks: tuple[int, ...]
    ranks: int = 1
    """Processes that train together; their communication is not counted."""


def estimate(config: RunConfig) -> Estimate:
    """Measure a few steps of a configuration on this machine, and predict the cost of all of it."""
    one = replace(config.runtime, devices=1, num_nodes=1, strategy="auto")
    check_devices(one)
    started = clock()
    parts = assemble(config)
    # A run hashes its images before it starts.
    parts.stream.fingerprint()
    start_seconds = clock() - started
    num_tasks = parts.stream.num_tasks
    # Teachers exist from the second task on, and tests grow with every task: the first alone is not enough.
    measured = {0, min(1, num_tasks - 1), num_tasks - 1}
    tasks: list[TaskCost] = []
    rates: dict[int, dict[str, float]] = {}
    with TemporaryDirectory(prefix="cflat-plan-") as folder:
        trainer = make_trainer(config, parts, Runtime(one), folder=Path(folder))
        # Passes over whole sets (features, exemplars) would take as long as in the run.
        trainer.extract = few = _OneBatch(trainer.method, trainer.inputs.eval, trainer.eval_batch_size, trainer.runtime)
        for task in parts.stream.tasks:
            if task.index in measured:
                counted, rates[task.index] = _measure(trainer, few, task)
            else:
                trainer.grow(task)
                counted = _count(trainer, task)
                trainer.method.skip_task(task)
            tasks.append(counted)
    for cost in tasks:
        cost.apply(interpolated(rates, cost.task), config.runtime.num_ranks)
    spent = {name: sum(cost.seconds[name] for cost in tasks) for name in tasks[0].seconds}
    steps, evaluations = sum(cost.steps for cost in tasks), sum(cost.evaluations for cost in tasks)
    return Estimate(
        tasks=tuple(tasks),
        start_seconds=start_seconds,
        seconds=start_seconds + sum(spent.values()),
        parts=spent,
        steps=steps,
        evaluations=evaluations,
        evaluations_per_step=evaluations / steps if steps else 0.0,
        flops=sum(cost.flops for cost in tasks),
        peak_memory_bytes=peak_memory_bytes(trainer.runtime.device),
        state_bytes=tasks[-1].state_bytes,
        trainable_parameters=next((cost.trainable_parameters for cost in reversed(tasks) if cost.phases), 0),
        checkpoint_bytes=int(rates[num_tasks - 1]["checkpoint_bytes"]),
        measured_tasks=tuple(sorted(rates)),
        ranks=config.runtime.num_ranks,
    )


def _count(trainer: Trainer, task: Task) -> TaskCost:
    method, phases, groups = trainer.method, [], []
    for phase in method.phases(task):
        loader, epochs = trainer.train_loader(task, phase), trainer.num_epochs(task, phase)
        phases.append(PhaseCounts(phase.name, epochs, epochs * len(loader), len(loader.images)))
        groups = method.param_groups(task, phase)
    earlier = trainer.stream.tasks[: task.index]
    return TaskCost(
        task=task.index,
        train_images=len(task.train),
        new_images=sum(len(task.images(split)) for split in trainer.splits),
        seen_images=sum(len(one.images(split)) for split in trainer.splits for one in earlier),
        phases=tuple(phases),
        trainable_parameters=sum(parameter.numel() for group in groups for parameter in group.params),
        state_bytes=sum(value.numel() * value.element_size() for value in method.state_dict().values()),
        steps=sum(phase.steps for phase in phases),
    )


def interpolated(rates: dict[int, dict[str, float]], task: int) -> dict[str, float]:
    """Return the rates at a task; a phase that some tasks do not have is interpolated between those that have it."""
    found = {}
    for name in {name for measured in rates.values() for name in measured}:
        # np.interp holds the first and the last value outside of what it knows: nothing is extrapolated.
        known = {at: measured[name] for at, measured in sorted(rates.items()) if name in measured}
        found[name] = float(np.interp(task, list(known), list(known.values())))
    return found


_PHASE_RATES = ("step", "evaluation", "decoding", "flops", "evaluation_flops")


class _OneBatch(Extractor):
    """Apply a function to one batch of a set, repeat its outputs for all others, and sum up what all would cost."""

    spent = predicted = 0.0

    def __call__(self, images: ImageSet, function: Callable[..., Tensor], **options: bool) -> Tensor:
        with self._one_batch(images, self.batch_size) as few:
            outputs = super().__call__(few, function, **options)
        return outputs[torch.arange(len(images), device=outputs.device) % len(few)]

    def sum(self, images: ImageSet, function: Callable[..., Tensor], **options: Any) -> Tensor:
        with self._one_batch(images, options.get("batch_size") or self.batch_size) as few:
            total = super().sum(few, function, **options)
        return total * (len(images) / len(few))

    @contextmanager
    def _one_batch(self, images: ImageSet, size: int) -> Iterator[ImageSet]:
        few = images.select(np.arange(min(len(images), size)))
        started = clock()
        yield few
        self.spent += clock() - started
        self.predicted += (clock() - started) * len(images) / len(few)


def _measure(trainer: Trainer, few: _OneBatch, task: Task) -> tuple[TaskCost, dict[str, float]]:
    """Count what a task does, do a little of it, and return what each part costs."""
    trainer.position, trainer.is_grown = Position(task.index), False
    few.spent = few.predicted = 0.0
    border = _seconds(lambda: trainer.start_task(task))
    counted = _count(trainer, task)
    rate = {"evaluations": expected_evaluations(trainer.optimizer, counted.steps, task.index, trainer.stream.num_tasks)}
    for index, phase in enumerate(trainer.method.phases(task)):
        trainer.position = Position(task.index, index)
        seconds, rates = _measure_phase(trainer, task, phase)
        border += seconds
        rate |= {f"{phase.name}.{name}": value for name, value in zip(_PHASE_RATES, rates, strict=True)}
    trainer.method.eval()
    border += _seconds(lambda: trainer.method.finish_task(task, few))
    rate |= {"border": max(border - few.spent, 0.0), "pass": few.predicted / max(1, len(task.train))}
    # A task of a blurry stream may have no test images, while others have some: any images show what testing costs.
    images = task.images(trainer.splits[0]) or task.train
    some = images.select(np.argsort(images.labels, kind="stable")[: trainer.eval_batch_size])
    # The first look decodes image files; later ones find them in memory.
    looks = [_seconds(lambda: few.count_correct_of_task(trainer.stream, task, some)) / len(some) for _ in range(4)]
    rate |= {"first_look": looks[0], "next_look": median(looks[1:])}
    trainer.position, trainer.is_grown = Position(task.index + 1), False
    rate["saving"], store = _seconds(trainer.save), trainer.checkpointer.store
    rate["checkpoint_bytes"] = 0.0 if store is None or store.newest is None else float(store.newest.stat().st_size)
    return counted, rate


def _measure_phase(trainer: Trainer, task: Task, phase: Phase) -> tuple[float, Sequence[float]]:
    """Train a few steps; return the time that it took to begin, and the rates of the phase."""
    started = clock()
    active = trainer.start_phase(task, phase)
    begun, loader = clock() - started, active.loader
    if trainer.num_epochs(task, phase) == 0 or len(loader) == 0:
        return begun, [0.0] * len(_PHASE_RATES)
    # Files are decoded once and cached: only the first epoch pays for it.
    first, again = (_seconds(lambda: next(loader.epoch(0))) for _ in range(2))
    durations, since = [], clock()
    for index in range(NUM_STEPS):
        batch = next(islice(loader.epoch(index // len(loader), index % len(loader)), 1))
        used = active.optimizer.telemetry.evaluations
        seconds = _seconds(lambda batch=batch: trainer.train_step(active, batch))  # type: ignore[misc]
        durations.append((seconds, active.optimizer.telemetry.evaluations - used))
        if index > 2 and clock() - since > ENOUGH_SECONDS:
            break
    # Optimizers evaluate now once and now four times: a step is its evaluations and a constant rest.
    closure = active.objective.closure(active.objective.prepare(batch))
    evaluation = median(_seconds(closure) for _ in range(5))
    trainer.method.network.zero_grad()
    step = median(seconds - number * evaluation for seconds, number in durations[1:]) + again
    decoding = max(first - again, 0.0) / len(batch)
    return begun, (max(step, 0.0), evaluation / len(batch), decoding, *(active.flops or (0.0, 0.0)))


def _seconds(function: Callable[[], object]) -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    started = clock()
    function()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return clock() - started


def expected_evaluations(choice: OptimizerChoice, steps: int, task: int, num_tasks: int) -> float:
    """Return the evaluations per step that an optimizer takes by its rules over the steps of a task.

    It steps through a small regression: schedules and coins fall as in the real run, and rules that look at gradients
    see noisy ones.
    """
    choice = choice.for_task(task)
    generator = torch.Generator().manual_seed(task)
    weight = nn.Parameter(torch.randn(8, 2, generator=generator))
    optimizer = create_optimizer(choice.name, torch.optim.SGD([weight], lr=0.05, momentum=0.9), **choice.settings)
    optimizer.start_task(task, num_tasks)

    def closure() -> Tensor:
        loss = (inputs @ weight - noise).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    for _ in range(min(max(1, steps), TOY_STEPS)):
        inputs, noise = torch.randn(16, 8, generator=generator), torch.randn(16, 2, generator=generator)
        optimizer.step(closure)
    return optimizer.telemetry.evaluations_per_step
