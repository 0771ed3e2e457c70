"""Progress of a run: a live bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from cflat.cli.output import percent
from cflat.data import Outline, Task
from cflat.train import EpochRecord, Observer, TaskRecord
from cflat.train.observer import StepEvent

REFRESH_SECONDS = 0.25
"""Reading the loss waits for the device, so that it is done only so often."""
LINE_SECONDS = 10.0
"""Between two lines of progress where there is no terminal."""


def make_progress(label: str = "", *, every_epoch: bool = True, folder: Path | None = None) -> Observer:
    """Return the observer that suits where standard error goes; ``folder`` knows the names of the classes."""
    return BarProgress(label, folder) if sys.stderr.isatty() else LineProgress(label, folder, every_epoch=every_epoch)


def close_all(observers: Iterable[Observer]) -> None:
    """Close the observers that hold something open: bars and trackers."""
    for observer in observers:
        close = getattr(observer, "close", None)
        if close is not None:
            close()


class RunClock(Observer):
    """How much of a run is done, and how long the rest will take at the speed so far.

    Tasks count alike, and within a task its phases; a method that trains in the first task alone turns out to be faster
    than it looked.
    """

    def __init__(self) -> None:
        RunClock.on_run_start(self, 1, 0)

    def on_run_start(self, num_tasks: int, first_task: int) -> None:
        """Begin to count."""
        self.num_tasks = num_tasks
        self.fraction = self._first = first_task / num_tasks
        self._since = time.monotonic()
        self._phases: list[str] = []
        self._num_phases = 1

    def on_step(self, event: StepEvent) -> None:
        """Move on within a task."""
        if event.phase not in self._phases:
            self._phases.append(event.phase)
        phase = self._phases.index(event.phase)
        self._num_phases = max(self._num_phases, len(self._phases))
        within = (event.epoch * event.num_steps + event.step + 1) / (event.num_epochs * event.num_steps)
        self.fraction = (event.task + (phase + within) / self._num_phases) / self.num_tasks

    def on_task_end(self, record: TaskRecord) -> None:
        """Move on to the next task."""
        self.fraction, self._phases = (record.task + 1) / self.num_tasks, []

    @property
    def left(self) -> str:
        """The time left in words; empty while it is not known and when nothing is left."""
        done = self.fraction - self._first
        if done <= 0 or self.fraction >= 1:
            return ""
        return f"about {_duration((time.monotonic() - self._since) / done * (1 - self.fraction))} left"


def _duration(seconds: float) -> str:
    """Return a time in the unit that people would choose.

    >>> _duration(42), _duration(600), _duration(9000)
    ('42 s', '10 min', '2.5 h')
    """
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


class _Progress(RunClock):
    """What both kinds of progress say: the place in the run, what its tasks are about, and how each one ended."""

    def __init__(self, label: str, folder: Path | None) -> None:
        super().__init__()
        self.label = label
        self.folder = folder
        self._outline: Outline | None = None

    def on_run_start(self, num_tasks: int, first_task: int) -> None:
        """Begin to count; the run directory is described by now."""
        super().on_run_start(num_tasks, first_task)
        if self.folder is not None:
            from cflat.runs.folder import RunFolder

            self._outline = RunFolder(self.folder).load_outline()

    def on_task_end(self, record: TaskRecord) -> None:
        """Say all scores, speed and evaluations, and how long the rest takes."""
        super().on_task_end(record)
        scores = ", ".join(
            f"{label}{name} {percent(score.stage_accuracy)} %"
            for label, found in (("", record.scores), ("validation ", record.validation))
            for name, score in found.items()
        )
        speed = f"{record.images_per_second:.0f} img/s, {record.evaluations_per_step:.2f} eval/step"
        self._say("; ".join(filter(None, [f"{self._place(record.task, record.name)}: {scores}", speed, self.left])))

    def _place(self, task: int, name: str) -> str:
        return f"task {task + 1}/{self.num_tasks} ({self._outline.title_of(task) if self._outline else name})"

    def _say(self, text: str) -> None:
        print(self.label + text, file=sys.stderr, flush=True)


class LineProgress(_Progress):
    """One line per task, and per epoch if asked for."""

    def __init__(self, label: str = "", folder: Path | None = None, *, every_epoch: bool = True) -> None:
        super().__init__(f"{label}: " if label else "", folder)
        self.every_epoch = every_epoch

    def on_run_start(self, num_tasks: int, first_task: int) -> None:
        """Say where a resumed run goes on."""
        super().on_run_start(num_tasks, first_task)
        if first_task:
            self._say(f"resumes at task {first_task + 1}/{num_tasks}")

    def on_epoch(self, record: EpochRecord) -> None:
        """Say the loss."""
        if self.every_epoch:
            phase = "" if record.phase == "train" else f" {record.phase}"
            place = f"task {record.task + 1}/{self.num_tasks}{phase} epoch {record.epoch + 1}"
            cost = f"{record.evaluations / max(1, record.steps):.2f} eval/step"
            self._say(", ".join(filter(None, [f"{place}: loss {record.loss:.4f}", cost, self.left])))


class BarProgress(_Progress):
    """A live bar over the whole run, with what it is doing, loss, images per second and time left."""

    def __init__(self, label: str = "", folder: Path | None = None) -> None:
        super().__init__(f"{label} " if label else "", folder)
        share, facts = TextColumn("{task.percentage:.0f} %"), TextColumn("{task.fields[facts]}")
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), share, facts, TimeElapsedColumn())
        self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
        self._line = self._bar.add_task(f"{self.label}reading data and network", total=1, facts="")
        self._shown = self._task_since = time.monotonic()
        self._images = self._evaluations = self._steps = 0
        self._bar.start()

    def on_task_start(self, task: Task) -> None:
        """Say what comes; speed is measured by task: what lies between tasks is not training."""
        self._task_since, self._images = time.monotonic(), 0
        self._show(f"{self._place(task.index, task.name)} preparing")

    def on_step(self, event: StepEvent) -> None:
        """Move the bar, a few times per second."""
        super().on_step(event)
        self._images += event.num_images
        self._evaluations += event.evaluations
        self._steps += 1
        is_last = event.step + 1 == event.num_steps and event.epoch + 1 == event.num_epochs
        now = time.monotonic()
        if now - self._shown < REFRESH_SECONDS and not is_last:
            return
        self._shown = now
        place = f"task {event.task + 1}/{event.num_tasks}"
        if is_last:
            self._show(f"{place} wrapping up and testing", self.left)
            return
        phase = "training" if event.phase == "train" else event.phase
        speed = f"{self._images / (now - self._task_since):.0f} img/s"
        cost = f"{self._evaluations / self._steps:.2f} eval/step"
        facts = "  ".join(filter(None, [f"loss {float(event.loss):.3f}", speed, cost, self.left]))
        self._show(f"{place} {phase}, epoch {event.epoch + 1}/{event.num_epochs}", facts)

    def on_task_end(self, record: TaskRecord) -> None:
        """Print the accuracy above the bar; after the last task, take the bar away."""
        super().on_task_end(record)
        if record.task + 1 == self.num_tasks:
            self.close()

    def close(self) -> None:
        """Take the bar away."""
        self._bar.stop()

    def _show(self, what: str, facts: str = "") -> None:
        self._bar.update(self._line, description=self.label + what, completed=self.fraction, facts=facts)

    def _say(self, text: str) -> None:
        self._bar.console.print(self.label + text, highlight=False, soft_wrap=True)


@contextmanager
def count_images(label: str, *, is_silent: bool = False) -> Iterator[Callable[[int, int], None]]:
    """Give a function that shows how many of all images are done, and how long the rest will take."""
    start = shown = time.monotonic()

    def tell(done: int, total: int) -> None:
        nonlocal shown
        now = time.monotonic()
        if now - shown >= LINE_SECONDS or done >= total:
            shown = now
            left = (now - start) / done * (total - done)
            print(f"{label}: {done} of {total} images, {left:.0f} s left", file=sys.stderr, flush=True)

    if is_silent:
        yield lambda done, total: None
    elif sys.stderr.isatty():
        columns = (TextColumn(label), BarColumn(bar_width=24), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            line = bar.add_task("", total=None)
            yield lambda done, total: bar.update(line, completed=done, total=total)
    else:
        yield tell
