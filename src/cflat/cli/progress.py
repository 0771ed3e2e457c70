"""Progress of a run on standard error: a live bar on a terminal, and a line for each task (and epoch) everywhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from cflat.cli.output import duration, live_console, percent, printable
from cflat.data import Outline, Task
from cflat.train import EpochRecord, Observer, TaskRecord
from cflat.train.observer import StepEvent

REFRESH_SECONDS = 0.25
"""Between two updates of the bar: reading the loss waits for the device."""
LINE_SECONDS = 10.0
"""Between two lines of progress where there is no terminal."""


def close_all(observers: Iterable[Observer]) -> None:
    """Close the observers that hold something open: bars and trackers."""
    for observer in observers:
        close = getattr(observer, "close", None)
        if close is not None:
            close()


class RunProgress(Observer):
    """Show the progress of a run, its speed, and the time left at the speed so far.

    All tasks count alike: the time left of a method that trains in the first task alone is too long at first.

    Args:
        label: Begins every line, to distinguish runs.
        folder: The run directory, which knows the names of the classes.
        every_epoch: Whether epochs have lines of their own where there is no terminal.
    """

    def __init__(self, label: str = "", folder: Path | None = None, *, every_epoch: bool = True) -> None:
        self.label = f"{label}: " if label else ""
        self.folder = folder
        self.num_tasks, self.fraction = 1, 0.0
        self._first, self._since = 0.0, time.monotonic()
        self._outline: Outline | None = None
        self._steps = self._evaluations = 0
        self._console = live_console()
        # A terminal has the bar; a log file needs lines.
        self._shows_epochs = every_epoch and not self._console.is_terminal
        done, facts = TextColumn("{task.percentage:.0f} %"), TextColumn("{task.fields[facts]}")
        # Rich would read square brackets in class names as markup.
        what = TextColumn("{task.description}", markup=False)
        columns = (what, BarColumn(bar_width=24), done, facts, TimeElapsedColumn())
        self._bar = Progress(
            *columns, console=self._console, transient=True, disable=not self._console.is_terminal, refresh_per_second=4
        )
        self._line = self._bar.add_task(f"{self.label}reading data and network", total=1, facts="")
        self._shown = 0.0
        self._bar.start()

    @property
    def left(self) -> str:
        """The time left in words; empty while it is unknown and at the end."""
        done = self.fraction - self._first
        if done <= 0 or self.fraction >= 1:
            return ""
        return f"about {duration(round((time.monotonic() - self._since) / done * (1 - self.fraction)))} left"

    def on_run_start(self, num_tasks: int, first_task: int) -> None:
        """Begin to count; the run directory is described by now."""
        self.num_tasks, self._since = num_tasks, time.monotonic()
        # Tasks that were learned before the resume say nothing about the speed of this process.
        self.fraction = self._first = first_task / num_tasks
        if self.folder is not None:
            from cflat.runs.folder import RunFolder

            self._outline = RunFolder(self.folder).load_outline()
        if first_task:
            self._print(f"resumes at task {first_task + 1}/{num_tasks}")

    def on_task_start(self, task: Task) -> None:
        """Name the task; speed is measured by task."""
        self._steps = self._evaluations = 0
        self._show(f"{self._place(task.index, task.name)} preparing")

    def on_step(self, event: StepEvent) -> None:
        """Move the bar, a few times per second; further phases of a task leave it where it is."""
        within = (event.epoch * event.num_steps + event.step + 1) / (event.num_epochs * event.num_steps)
        # How many phases a task has is not known before it is over.
        self.fraction = max(self.fraction, (event.task + within) / self.num_tasks)
        self._steps += 1
        self._evaluations += event.evaluations
        now = time.monotonic()
        if self._console.is_terminal and now - self._shown >= REFRESH_SECONDS:
            self._shown = now
            cost = f"{self._evaluations / self._steps:.2f} eval/step"
            facts = "  ".join(filter(None, [f"loss {float(event.loss):.3f}", cost, self.left]))
            phase = "training" if event.phase == "train" else event.phase
            place = f"task {event.task + 1}/{event.num_tasks} {phase}"
            self._show(f"{place}, epoch {event.epoch + 1}/{event.num_epochs}", facts)

    def on_epoch(self, record: EpochRecord) -> None:
        """Print the loss."""
        if self._shows_epochs:
            phase = "" if record.phase == "train" else f" {record.phase}"
            place = f"task {record.task + 1}/{self.num_tasks}{phase} epoch {record.epoch + 1}"
            cost = f"{self._evaluations / max(1, self._steps):.2f} eval/step"
            self._print(", ".join(filter(None, [f"{place}: loss {record.loss:.4f}", cost, self.left])))

    def on_task_end(self, record: TaskRecord) -> None:
        """Print all scores, speed and evaluations, and how long the rest takes; the last task ends the bar."""
        self.fraction = (record.task + 1) / self.num_tasks
        scores = ", ".join(
            f"{label}{name} {percent(score.stage_accuracy)} %"
            for label, found in (("", record.scores), ("validation ", record.validation))
            for name, score in found.items()
        )
        speed = f"{record.cost.images_per_second:.0f} img/s, {record.cost.evaluations_per_step:.2f} eval/step"
        self._print("; ".join(filter(None, [f"{self._place(record.task, record.name)}: {scores}", speed, self.left])))
        if record.task + 1 == self.num_tasks:
            self.close()

    def close(self) -> None:
        """Remove the bar."""
        self._bar.stop()

    def _place(self, task: int, name: str) -> str:
        return f"task {task + 1}/{self.num_tasks} ({self._outline.title_of(task) if self._outline else name})"

    def _show(self, what: str, facts: str = "") -> None:
        self._bar.update(self._line, description=printable(self.label + what), completed=self.fraction, facts=facts)

    def _print(self, text: str) -> None:
        self._console.print(printable(self.label + text), markup=False, highlight=False, soft_wrap=True)


@contextmanager
def count_images(label: str, *, is_silent: bool = False) -> Iterator[Callable[[int, int], None]]:
    """Give a function that shows how many images are done, and the time left."""
    console = live_console()
    console.quiet = is_silent
    columns = (TextColumn(label), BarColumn(bar_width=24), MofNCompleteColumn(), TimeRemainingColumn())
    shown = time.monotonic()

    def show(done: int, total: int) -> None:
        nonlocal shown
        bar.update(line, completed=done, total=total)
        now = time.monotonic()
        if not console.is_terminal and (now - shown >= LINE_SECONDS or done >= total):
            shown = now
            console.print(f"{label}: {done} of {total} images")

    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        line = bar.add_task("", total=None)
        yield show
