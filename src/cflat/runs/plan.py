"""What a run would do, without doing it."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from cflat.config.run_config import RunConfig
from cflat.optim import get_optimizer_spec
from cflat.runs.run import make_stream


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
