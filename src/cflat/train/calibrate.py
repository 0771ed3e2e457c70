"""Measure on this machine what the parts of a run cost: a few real steps, a pass over a few images, a checkpoint.

The trainer's own loop is driven through the whole stream, on few images of a few tasks; all other tasks are passed
over, so that memories, heads and adapters are as large as they would be. What comes out are counts of every task, and
rates of the measured ones; `cflat.runs.estimate` makes a prediction of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from cflat.data import Batch, BatchLoader, ImageSet, Task
from cflat.methods import Phase
from cflat.optim import SharpnessAware, create_optimizer
from cflat.train.evaluate import Extractor
from cflat.train.loop import _Run
from cflat.train.meters import count_flops
from cflat.train.objective import Objective
from cflat.train.observer import Observer, StepEvent
from cflat.train.state import OptimizerChoice, Position

Times: TypeAlias = npt.NDArray[np.float64]
"""Wall seconds and CPU seconds: beside other jobs, the second is the one that can be trusted."""

NUM_STEPS = 12
"""Steps of each measured phase; the first two are not timed."""
LEAST_STEPS = 3
ENOUGH_SECONDS = 3.0
"""A phase that has taken so long is not measured any further."""
BLOCK_SECONDS, BLOCKS = 0.05, 3
"""What is short is measured in blocks of calls that take so long, and the median of the blocks is taken."""
TOY_STEPS = 300


@dataclass(frozen=True)
class PhaseWork:
    """What one phase of a task does."""

    name: str
    epochs: int
    steps: int
    """Of all epochs."""
    images: int
    """Of one epoch, over all ranks."""


@dataclass(frozen=True)
class Work:
    """What a run does in one task, counted and not measured."""

    task: int
    train_images: int
    """Of the task alone, without exemplars."""
    new_images: int
    """Images to test on that this task brings."""
    seen_images: int
    """Those that earlier tasks have brought."""
    phases: tuple[PhaseWork, ...]
    state_bytes: int
    """Weights and buffers."""
    trainable: int
    """Parameters trained in the last phase."""


@dataclass(frozen=True)
class PhaseRates:
    """What a phase costs on this machine."""

    step: Times
    """Each step, besides its evaluations."""
    evaluation: Times
    """Each image of an evaluation."""
    decoding: Times
    """What an image takes longer when it is read for the first time."""
    flops_per_step: float
    flops_per_evaluation: float


@dataclass(frozen=True)
class Rates:
    """What the parts of one task cost on this machine."""

    task: int
    border: Times
    """Everything at the beginning and the end of task and phases, besides passes over images."""
    passes: Times
    """Passes of the method over images at these borders, for each image of the task."""
    first_look: Times
    """Answering for an image for the first time."""
    next_look: Times
    """Answering for it again in a later task."""
    saving: Times
    """Each checkpoint."""
    checkpoint_bytes: int
    look_flops: float
    """Arithmetic of answering for one image."""
    phases: dict[str, PhaseRates]


def clock() -> Times:
    """Return the present time, with all work of a GPU done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return np.array([time.perf_counter(), time.process_time()])


class Calibration(_Run):
    """A run that trains a few steps of the tasks it is asked for, and passes over the others."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.extract = self.few = _FewImages(self.method, self.inputs.eval, self.eval_batch_size, self.runtime)
        self.observer = self.recorded = _Steps()
        self.is_abstract = False

    def pass_over(self, task: Task) -> Work:
        """Count what a task does, and leave the method as large as it would be after it."""
        if self.is_abstract:
            with torch.device("meta"):
                self.method.grow(task)
        else:
            self._grow(task)
        work = self._count(task)
        self.method.skip_task(task)
        return work

    def make_abstract(self) -> None:
        """Give up all values: from here on tasks can only be passed over, and take no memory."""
        self.method.to("meta")
        self.is_abstract = True

    def measure(self, task: Task) -> tuple[Work, Rates]:
        """Count what a task does, do a little of it, and return what that cost."""
        self.position, self.is_grown = Position(task.index), False
        self.few.passes, self.few.spent = np.zeros(2), np.zeros(2)
        elapsed = _elapsed(lambda: self.start_task(task))
        work = self._count(task)
        phases = {}
        for index, phase in enumerate(self.method.phases(task)):
            self.position = Position(task.index, index)
            phases[phase.name], outside = self._measure_phase(task, phase)
            elapsed = elapsed + outside
        self.method.eval()
        elapsed = elapsed + _elapsed(lambda: self.method.finish_task(task, self.extract))
        first_look, next_look, look_flops = self._measure_looks(task)
        self.position = Position(task.index + 1)
        saving = _elapsed(self._save)
        return work, Rates(
            task.index,
            np.maximum(elapsed - self.few.spent, 0),
            self.few.passes / max(1, len(task.train)),
            first_look,
            next_look,
            saving,
            0 if self.store is None or self.store.newest is None else self.store.newest.stat().st_size,
            look_flops,
            phases,
        )

    # -- counts -------------------------------------------------------------------------------------------------

    def _count(self, task: Task) -> Work:
        phases, groups = [], []
        for phase in self.method.phases(task):
            loader = super()._train_loader(task, phase)
            epochs = super()._num_epochs(task, phase)
            phases.append(PhaseWork(phase.name, epochs, epochs * len(loader), len(loader.images)))
            groups = self.method.param_groups(task, phase)
        new = [len(task.images(split)) for split in self.splits]
        seen = [len(before.images(split)) for split in self.splits for before in self.stream.tasks[: task.index]]
        state = [value for value in self.method.state_dict().values() if isinstance(value, Tensor)]
        return Work(
            task.index,
            len(task.train),
            sum(new),
            sum(seen),
            tuple(phases),
            sum(value.numel() * value.element_size() for value in state),
            sum(parameter.numel() for group in groups for parameter in group.params),
        )

    # -- measurements -------------------------------------------------------------------------------------------

    def _num_epochs(self, task: Task, phase: Phase) -> int:
        return -(-NUM_STEPS // len(self._train_loader(task, phase)))

    def _train_loader(self, task: Task, phase: Phase) -> BatchLoader:
        loader = super()._train_loader(task, phase)
        few = min(len(loader.images), NUM_STEPS * loader.batch_size)
        chosen = np.linspace(0, len(loader.images) - 1, few).astype(np.int64)
        return _Impatient(**{**vars(loader), "images": loader.images.select(chosen)})

    def _measure_phase(self, task: Task, phase: Phase) -> tuple[PhaseRates, Times]:
        """Train a few steps; return their rates, and the time spent around them."""
        loader = self._train_loader(task, phase)
        first, again = _elapsed(lambda: next(loader.epoch(0))), _elapsed(lambda: next(loader.epoch(0)))
        decoding = np.maximum(first - again, 0)
        flops_before = self.meter.flops
        elapsed = _elapsed(lambda: self.train_phase(task, phase))
        steps = self.recorded
        # The steps that were not timed are steps all the same, and no part of what surrounds them.
        typical = np.median([spent for spent, _ in steps.durations], axis=0)
        outside = elapsed - steps.spent - steps.num_untimed * typical
        evaluation, batch = steps.evaluation, min(loader.batch_size, len(loader.images))
        step = np.median([spent - images * evaluation for spent, images in steps.durations], axis=0) - decoding
        self.meter.flops = flops_before
        flops = (steps.flops_per_step, steps.flops_per_evaluation)
        return PhaseRates(np.maximum(step, 0), evaluation, decoding / batch, *flops), np.maximum(outside, 0)

    def _inspect_first_batch(self, objective: Objective, batch: Batch) -> tuple[float, float]:
        flops = super()._inspect_first_batch(objective, batch)
        self.recorded.flops_per_step, self.recorded.flops_per_evaluation = flops
        return flops

    def _measure_looks(self, task: Task) -> tuple[Times, Times, float]:
        """Test on one batch several times; return what one image takes, first and later, and its arithmetic."""
        self.method.eval()
        images = task.images(self.splits[0])
        few = images.select(np.argsort(images.labels, kind="stable")[: self.eval_batch_size])

        def look() -> None:
            self.extract.count_correct_of_task(self.stream, task, few)

        first, again = _elapsed(look), _typical(look)
        return first / len(few), again / len(few), count_flops(look) / len(few)


class _FewImages(Extractor):
    """Apply a function to one batch of a set, repeat its outputs for all others, and say what all would have cost."""

    passes: Times
    spent: Times

    def __call__(self, images: ImageSet, function: Callable[[Tensor], Tensor]) -> Tensor:
        few = images.select(np.arange(min(len(images), self.batch_size)))
        started = clock()
        outputs = super().__call__(few, function)
        spent = clock() - started
        self.spent = self.spent + spent
        self.passes = self.passes + spent * (len(images) / len(few))
        return outputs[torch.arange(len(images), device=outputs.device) % len(few)]


class _Steps(Observer):
    """Take the times of steps: of the first two none, since one is inspected and one evaluated apart."""

    flops_per_step = flops_per_evaluation = 0.0

    def on_phase_start(self, optimizer: SharpnessAware, network: nn.Module) -> None:
        self.durations: list[tuple[Times, int]] = []  # with the images of all evaluations
        self.evaluation, self.spent = np.zeros(2), np.zeros(2)
        self.num_untimed = self._num_begun = 0
        self._mark = clock()

    def on_step_start(self, epoch: int, objective: Objective, batch: Batch) -> None:
        self._num_begun += 1
        if self._num_begun == 2:
            started = clock()
            self.evaluation = _typical(objective.closure(batch)) / len(batch)
            objective.method.network.zero_grad()
            self.spent = self.spent + clock() - started

    def on_step(self, event: StepEvent) -> None:
        now = clock()
        if self._num_begun > 2:
            self.durations.append((now - self._mark, event.num_images * event.evaluations))
            self.spent = self.spent + now - self._mark
        else:
            self.num_untimed += 1
        self._mark = now


class _Impatient(BatchLoader):
    """Load batches until the measurements have taken long enough, but at least those that they need."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.num_loaded, self.started = 0, time.perf_counter()

    def epoch(self, index: int, start_step: int = 0, every: int = 1) -> Iterator[Batch]:
        """Yield the batches of an epoch until it is enough."""
        for batch in super().epoch(index, start_step, every):
            if self.num_loaded > LEAST_STEPS and time.perf_counter() - self.started > ENOUGH_SECONDS:
                return
            self.num_loaded += 1
            yield batch


def expected_evaluations(choice: OptimizerChoice, steps: int, task: int, num_tasks: int) -> float:
    """Return the evaluations per step that an optimizer takes by its rules, over so many steps of a task.

    It steps through a small regression: schedules and coins fall as in the real run, and rules that look at gradients
    see noisy ones.
    """
    generator = torch.Generator().manual_seed(task)
    weight = nn.Parameter(torch.randn(8, 2, generator=generator))
    optimizer = create_optimizer(choice.name, torch.optim.SGD([weight], lr=0.05, momentum=0.9), **choice.settings)
    optimizer.start_task(task, num_tasks)
    target = torch.randn(8, 2, generator=generator)
    for _ in range(min(max(1, steps), TOY_STEPS)):
        inputs = torch.randn(16, 8, generator=generator)
        outputs = inputs @ target + torch.randn(16, 2, generator=generator)

        def closure(inputs: Tensor = inputs, outputs: Tensor = outputs) -> Tensor:
            loss = (inputs @ weight - outputs).square().mean()
            loss.backward()  # type: ignore[no-untyped-call]
            return loss.detach()

        optimizer.step(closure)
    return optimizer.telemetry.evaluations_per_step


def _elapsed(function: Callable[[], object]) -> Times:
    started = clock()
    function()
    return clock() - started


def _typical(function: Callable[[], object]) -> Times:
    """Return what a call takes after the first: the median of several blocks, each timed as a whole.

    Single calls of a millisecond look slower than they are in a loop: the clock's own time is added to each of them.
    """
    function()
    once = _elapsed(function)
    count = int(BLOCK_SECONDS / max(float(once[1]), 1e-6))
    if count < 2:
        return np.minimum(once, _elapsed(function))
    blocks = [_elapsed(lambda: [function() for _ in range(count)]) / count for _ in range(BLOCKS)]
    median: Times = np.median(blocks, axis=0)
    return median
