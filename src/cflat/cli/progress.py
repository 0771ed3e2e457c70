"""Progress of a run: a live bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from cflat.cli.output import percent
from cflat.data import Task
from cflat.train import Observer
from cflat.train.observer import StepEvent

__all__ = ["BarProgress", "LineProgress", "close_all", "count_images", "make_progress"]

REFRESH_SECONDS = 0.25
"""Reading the loss waits for the device, so that it is done only so often."""
LINE_SECONDS = 10.0
"""Between two lines of progress where there is no terminal."""


def make_progress(label: str = "", *, every_epoch: bool = True) -> Observer:
    """Return the observer that suits where standard error goes."""
    return BarProgress(label) if sys.stderr.isatty() else LineProgress(label, every_epoch=every_epoch)


def close_all(observers: Iterable[Observer]) -> None:
    """Close the observers that hold something open: bars and trackers."""
    for observer in observers:
        close = getattr(observer, "close", None)
        if close is not None:
            close()


class LineProgress(Observer):
    """One line per task, and per epoch if asked for."""

    def __init__(self, label: str = "", *, every_epoch: bool = True) -> None:
        self.label = f"{label}: " if label else ""
        self.every_epoch = every_epoch
        self.num_tasks = 0

    def on_run_start(self, num_tasks: int, first_task: int) -> None:
        """Say where a resumed run goes on."""
        self.num_tasks = num_tasks
        if first_task:
            self._say(f"goes on with task {first_task + 1}/{num_tasks}")

    def on_epoch(self, record: dict[str, Any]) -> None:
        """Say the loss."""
        if self.every_epoch:
            evaluations = record["evaluations"] / max(1, record["steps"])
            self._say(
                f"task {record['task'] + 1}/{self.num_tasks} epoch {record['epoch'] + 1}: "
                f"loss {record['loss']:.4f}, {evaluations:.2f} eval/step"
            )

    def on_task_end(self, record: dict[str, Any]) -> None:
        """Say the accuracy."""
        self._say(describe_task(record, self.num_tasks))

    def _say(self, text: str) -> None:
        print(self.label + text, file=sys.stderr, flush=True)


class BarProgress(Observer):
    """A live bar with task, epoch, step, loss, images per second and evaluations per step."""

    def __init__(self, label: str = "") -> None:
        self.label = f"{label} " if label else ""
        self.num_tasks = 0
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[facts]}"),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._line = self._bar.add_task("", total=1, facts="")
        self._shown = self._since = time.monotonic()
        self._images = self._evaluations = self._steps = 0

    def on_run_start(self, num_tasks: int, first_task: int) -> None:
        """Show the bar."""
        self.num_tasks = num_tasks
        self._bar.start()

    def on_task_start(self, task: Task) -> None:
        """Measure speed by task: what lies between tasks is not training."""
        self._since, self._images = time.monotonic(), 0

    def on_step(self, event: StepEvent) -> None:
        """Move the bar, a few times per second."""
        self._images += event.num_images
        self._evaluations += event.evaluations
        self._steps += 1
        now = time.monotonic()
        if now - self._shown < REFRESH_SECONDS:
            return
        speed = self._images / (now - self._since)
        place = f"task {event.task + 1}/{event.num_tasks} epoch {event.epoch + 1}/{event.num_epochs}"
        self._bar.update(
            self._line,
            description=self.label + place,
            completed=event.step + 1,
            total=event.num_steps,
            facts=f"loss {float(event.loss):.3f}  {speed:.0f} img/s  {self._evaluations / self._steps:.2f} eval/step",
        )
        self._shown = now

    def on_task_end(self, record: dict[str, Any]) -> None:
        """Print the accuracy above the bar; after the last task, take the bar away."""
        self._bar.console.print(self.label + describe_task(record, self.num_tasks), highlight=False)
        if record["task"] + 1 == self.num_tasks:
            self.close()

    def close(self) -> None:
        """Take the bar away."""
        self._bar.stop()


def describe_task(record: dict[str, Any], num_tasks: int) -> str:
    """Return one line about a finished task: all scores, speed and evaluations."""
    found = [
        (f"{label}{name}", value["stage_accuracy"])
        for label, part in (("", record), ("validation ", record.get("validation", {})))
        for name, value in part.items()
        if isinstance(value, dict) and "stage_accuracy" in value
    ]
    scores = ", ".join(f"{name} {percent(accuracy)} %" for name, accuracy in found)
    return (
        f"task {record['task'] + 1}/{num_tasks} ({record['name']}): {scores}; "
        f"{record['images_per_second']:.0f} img/s, {record['evaluations_per_step']:.2f} eval/step"
    )


@contextmanager
def count_images(label: str, *, is_silent: bool = False) -> Iterator[Callable[[int, int], None]]:
    """Give a function that shows how many of all images are done, and how long the rest will take."""
    if is_silent:
        yield lambda done, total: None
    elif sys.stderr.isatty():
        columns = (TextColumn(label), BarColumn(bar_width=24), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            line = bar.add_task("", total=None)
            yield lambda done, total: bar.update(line, completed=done, total=total)
    else:
        yield _LineCounter(label)


class _LineCounter:
    """A line every so often, with the time left at the speed so far."""

    def __init__(self, label: str) -> None:
        self.label = label
        self._start = self._shown = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self._shown < LINE_SECONDS and done < total:
            return
        self._shown = now
        left = (now - self._start) / done * (total - done)
        print(f"{self.label}: {done} of {total} images, {left:.0f} s left", file=sys.stderr, flush=True)
