"""What a run would do (`plan_run`), and what it will cost, predicted from a few measured steps (`estimate`).

Over all tasks t, with rates r that are measured at some tasks and interpolated between them:

    seconds = start + sum_t  r.border + train_images * r.passes
                           + sum over phases  steps * r.step + evaluated_images * r.evaluation + images * r.decoding
                           + new_images * r.first_look + seen_images * r.next_look
                           + checkpoints * r.saving      (large ones: at most a tenth of the rest)

Counts are exact but for the evaluations of optimizers that decide by what they see. Beyond the last measured task the
rates follow the line through the measured ones, which grows no faster than the arithmetic of a prediction or the state
do: these are counted and have no noise. The state is counted to the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from cflat.config.run_config import RunConfig
from cflat.optim import get_optimizer_spec
from cflat.runs.run import assemble, check_devices, evaluated_splits, make_stream
from cflat.train import OptimizerChoice, Runtime
from cflat.train.calibrate import Calibration, PhaseWork, Rates, Times, Work, clock, expected_evaluations
from cflat.train.checkpoint import KEPT
from cflat.train.meters import peak_memory_bytes
from cflat.train.state import CHEAP_BYTES, SAVING_SHARE

BUDGET_SECONDS = 30.0
"""Measurements end after so long, but not before three tasks are measured."""
EPOCH_BYTES, TASK_BYTES, SCORE_BYTES = 900, 500, 22
"""A line of ``metrics.jsonl`` for an epoch, for a task, and what each seen task adds to the latter."""


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
    """The tasks of a run, and its cost as far as it is known beforehand."""

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
    """Load the data and count what a run would train on; also finds out whether the data is there."""
    stream = make_stream(config)
    train = config.train
    images_per_step = train.images_per_step
    first_epochs = train.epochs if train.first_epochs is None else train.first_epochs
    tasks = []
    for task in stream.tasks:
        epochs = train.epochs if task.index else first_epochs
        steps = epochs * math.ceil(len(task.train) / images_per_step)
        held_out = 0 if task.validation is None else len(task.validation)
        counts = (len(task.train), len(task.test), held_out)
        names = stream.class_names[task.classes.start : task.classes.stop]
        tasks.append(TaskPlan(task.index, task.name, task.num_classes, *counts, steps, names))
    return RunPlan(tuple(tasks), get_optimizer_spec(config.optimizer.name).evaluations, stream.fingerprint())


@dataclass(frozen=True)
class TaskEstimate:
    """One task of a run that has not begun."""

    task: int
    steps: int
    evaluations: float
    flops: float
    seconds: float
    cpu_seconds: float
    state_bytes: int
    """Weights and buffers of the method."""


@dataclass(frozen=True)
class Estimate:
    """The cost of a run that has not begun."""

    tasks: tuple[TaskEstimate, ...]
    start_seconds: float
    """Reading the data and building the network."""
    seconds: float
    """Wall time on this machine, as busy as it was during the measurements."""
    cpu_seconds: float
    parts: dict[str, float]
    """CPU seconds of training, testing, the borders of tasks, and checkpoints."""
    steps: int
    evaluations: float
    """Forward and backward passes."""
    evaluations_per_step: float
    flops: float
    """Of training, as a run counts them."""
    test_flops: float
    peak_memory_bytes: int
    state_bytes: int
    """Weights and buffers of the method after the last task."""
    trainable_parameters: int
    checkpoint_bytes: int
    """The last one."""
    folder_bytes: int
    """The run directory at the end."""
    written_bytes: int
    """Everything that is written to disk on the way."""
    measured_tasks: tuple[int, ...]
    ranks: int = 1
    """Processes that train together; their communication is not counted."""


def estimate(config: RunConfig, budget: float = BUDGET_SECONDS) -> Estimate:
    """Measure a few steps of a configuration on this machine, and predict the cost of all of it.

    After ``budget`` seconds no further task is measured.
    """
    return predict(survey(config, budget), config.runtime.num_ranks)


@dataclass(frozen=True)
class Survey:
    """What is known of a run that has not begun: counts of all tasks, rates of some."""

    works: Sequence[Work]
    rates: Sequence[Rates]
    """Of the measured tasks, in ascending order."""
    evaluations: Sequence[float]
    """Per step, of every task."""
    start: Times
    """Reading the data and building the network."""
    peak_memory: int = 0
    """Bytes at most, by the end of the last measured task; 0 if it was not measured."""
    num_scores: int = 1
    """Ways to answer that the method has."""


def survey(config: RunConfig, budget: float = BUDGET_SECONDS, tasks: Sequence[int] | None = None) -> Survey:
    """Go through the stream of a configuration, measure some tasks (by default `measured_tasks`) and count all."""
    one = replace(config.runtime, devices=1, num_nodes=1, strategy="auto")
    check_devices(one)
    runtime = Runtime(one)
    started = clock()
    parts = assemble(config)
    parts.stream.fingerprint()
    start = clock() - started
    choice = OptimizerChoice(config.optimizer.name, config.optimizer.keywords())
    wanted = measured_tasks(parts.stream.num_tasks) if tasks is None else tasks
    works: list[Work] = []
    rates: list[Rates] = []
    with TemporaryDirectory(prefix="cflat-plan-") as folder:
        train = replace(config.train, checkpoint_minutes=1e6)
        settings = (config.base, train, runtime, choice, parts.inputs, config.seed, evaluated_splits(config))
        observer: Any = None  # a calibration has one of its own
        calibration = Calibration(parts.method, parts.stream, *settings, observer, Path(folder), lambda: False, {})
        for task in parts.stream.tasks:
            is_over = len(rates) > 2 and clock()[0] - started[0] > budget
            if task.index in wanted and not is_over:
                work, rate = calibration.measure(task)
                rates.append(rate)
                peak = peak_memory_bytes()
            else:
                if is_over and not calibration.is_abstract:
                    calibration.make_abstract()
                work = calibration.pass_over(task)
            works.append(work)
    known = [rate.task for rate in rates]
    steps = [sum(phase.steps for phase in works[task].phases) for task in known]
    per_step = [expected_evaluations(choice, count, task, len(works)) for task, count in zip(known, steps, strict=True)]
    evaluations = np.interp(np.arange(len(works)), known, per_step).tolist()
    return Survey(works, rates, evaluations, start, peak, len(parts.method.scores))


def measured_tasks(num_tasks: int) -> tuple[int, ...]:
    """Return the tasks to measure: the first two, the last, and some that lie farther and farther apart.

    >>> measured_tasks(20)
    (0, 1, 4, 16, 19)
    """
    powers = [4**exponent for exponent in range(20)]
    return tuple(sorted({0, *(task for task in powers if task < num_tasks), num_tasks - 1}))


def predict(found: Survey, ranks: int = 1) -> Estimate:
    """Apply the formula of this module to a survey; ``ranks`` share steps, test images and passes at borders."""
    works, rates = found.works, found.rates
    spent = {name: np.zeros(2) for name in ("training", "testing", "borders", "checkpoints")}
    tasks, written, test_flops = [], 0.0, 0.0
    growth = _growth(works, rates)
    for work, per_step in zip(works, found.evaluations, strict=True):
        at, freely = partial(_rate_at, rates, work.task, growth), partial(_rate_at, rates, work.task, np.inf)
        training = sum((_training(phase, per_step, ranks, at) for phase in work.phases), start=np.zeros(2))
        testing = (
            work.new_images * at(lambda rate: rate.first_look) + work.seen_images * at(lambda rate: rate.next_look)
        ) / ranks
        borders = freely(lambda rate: rate.border) + work.train_images * at(lambda rate: rate.passes) / ranks
        num_saved = 1 + sum(phase.steps > 0 for phase in work.phases)
        checkpoints = num_saved * at(lambda rate: rate.saving)
        if work.state_bytes >= CHEAP_BYTES:
            checkpoints = np.minimum(checkpoints, SAVING_SHARE * (training + testing + borders))
        for name, part in zip(spent, (training, testing, borders, checkpoints), strict=True):
            spent[name] += part
        steps = sum(phase.steps for phase in work.phases)
        flops = sum(
            phase.steps * float(freely(_of_phase(phase, "flops_per_step")))
            + phase.steps * per_step * float(freely(_of_phase(phase, "flops_per_evaluation")))
            for phase in work.phases
        )
        seconds, cpu_seconds = (training + testing + borders + checkpoints).tolist()
        tasks.append(TaskEstimate(work.task, steps, steps * per_step, flops, seconds, cpu_seconds, work.state_bytes))
        overhead = rates[-1].checkpoint_bytes - works[rates[-1].task].state_bytes
        share = float(checkpoints[0]) / max(num_saved * float(at(lambda rate: rate.saving)[0]), 1e-9)
        written += share * num_saved * (work.state_bytes + overhead)
        test_flops += (work.new_images + work.seen_images) * float(freely(lambda rate: rate.look_flops))
    last, measured = works[-1], works[rates[-1].task]
    checkpoint = rates[-1].checkpoint_bytes + last.state_bytes - measured.state_bytes
    lines = sum(EPOCH_BYTES * sum(phase.epochs for phase in work.phases) for work in works)
    lines += sum(TASK_BYTES + SCORE_BYTES * found.num_scores * (work.task + 1) for work in works)
    seconds, cpu_seconds = (found.start + sum(spent.values(), start=np.zeros(2))).tolist()
    steps, passes = sum(task.steps for task in tasks), sum(task.evaluations for task in tasks)
    return Estimate(
        tasks=tuple(tasks),
        start_seconds=float(found.start[0]),
        seconds=seconds,
        cpu_seconds=cpu_seconds,
        parts={name: float(part[1]) for name, part in spent.items()},
        steps=steps,
        evaluations=passes,
        evaluations_per_step=passes / steps if steps else 0.0,
        flops=sum(task.flops for task in tasks),
        test_flops=test_flops,
        peak_memory_bytes=found.peak_memory + last.state_bytes - measured.state_bytes if found.peak_memory else 0,
        state_bytes=last.state_bytes,
        trainable_parameters=next((work.trainable for work in reversed(works) if work.phases), 0),
        checkpoint_bytes=checkpoint,
        folder_bytes=min(KEPT, sum(1 + len(work.phases) for work in works)) * checkpoint + lines,
        written_bytes=int(written) + lines,
        measured_tasks=tuple(rate.task for rate in rates),
        ranks=ranks,
    )


def _training(phase: PhaseWork, evaluations: float, ranks: int, at: Callable[..., Any]) -> Times:
    """Return the time of one phase."""
    if phase.steps == 0:
        return np.zeros(2)
    images = phase.images / ranks
    step, evaluation, decoding = (at(_of_phase(phase, name)) for name in ("step", "evaluation", "decoding"))
    total: Times = phase.steps * step + phase.epochs * images * evaluations * evaluation + images * decoding
    return total


def _rate_at(rates: Sequence[Rates], task: int, growth: float, value: Callable[[Rates], Any]) -> Any:
    """Return one rate at a task: between measured tasks on the line through both, after the last on one through all.

    There it grows by at most ``growth`` per task, relative to its mean. Tasks that do not have it (None) are left out.
    """
    known = [(rate.task, np.asarray(value(rate))) for rate in rates if value(rate) is not None]
    later = [pair for pair in known if pair[0] >= task]
    (low, below), (high, above) = known[max(0, len(known) - len(later) - 1)], (later or known)[0]
    if high > low:
        return below + (above - below) * ((task - low) / (high - low))
    if task == high or len(known) < 3:
        return above
    tasks, values = np.array([place for place, _ in known[1:]]), np.stack([found for _, found in known[1:]])
    mean = values.mean(axis=0)
    slope = np.maximum(np.polyfit(tasks, values, 1)[0], 0)  # without the first task, which is unlike all others
    if np.isfinite(growth):
        slope = np.minimum(slope, mean * growth)
    return mean + slope * (task - tasks.mean())


def _growth(works: Sequence[Work], rates: Sequence[Rates]) -> float:
    """Return by how much a prediction's arithmetic or the state grow per task, relative to their means."""
    if len(rates) < 3:
        return np.inf
    tasks = np.array([rate.task for rate in rates[1:]])
    counted = ([rate.look_flops for rate in rates[1:]], [works[rate.task].state_bytes for rate in rates[1:]])
    return max(0.0, *(float(np.polyfit(tasks, values, 1)[0] / max(np.mean(values), 1)) for values in counted))


def _of_phase(phase: PhaseWork, name: str) -> Callable[[Rates], Any]:
    return lambda rate: getattr(rate.phases[phase.name], name) if phase.name in rate.phases else None
