"""How commands carry out many runs: where, with which progress, and what a signal does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from cflat._errors import ConfigError
from cflat._registry import suggest
from cflat.cli.output import note, tell_stopping

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cflat.experiments.executors import Executor, Job
    from cflat.train import Observer

__all__ = ["ExecutorName", "job_executor"]

EXECUTORS = ("local",)

ExecutorName = Annotated[str, typer.Option("--executor", help=f"Where to run: {', '.join(EXECUTORS)}")]


@contextmanager
def job_executor(name: str, is_silent: bool) -> Iterator[Executor]:
    """Give the executor of this name, with progress; a signal ends the command cleanly, to go on later.

    Args:
        name: What the user chose.
        is_silent: Whether to show no progress.

    Raises:
        ConfigError: If there is no such executor.
    """
    if name not in EXECUTORS:
        known = list(EXECUTORS)
        raise ConfigError(f"Unknown executor {name!r}.{suggest(name, known)} Known: {', '.join(known)}.")
    from cflat.cli.progress import close_all, make_progress
    from cflat.experiments.executors import SerialExecutor
    from cflat.experiments.interrupts import StopRequest
    from cflat.train import TrainingInterrupted

    shown: list[Observer] = []

    def observe(job: Job) -> Sequence[Observer]:
        if is_silent:
            return ()
        shown.append(make_progress(job.out.name, every_epoch=False))
        return shown[-1:]

    stop = StopRequest(tell_stopping)
    try:
        with stop:
            yield SerialExecutor(observe, stop)
    except TrainingInterrupted:
        note("Stopped; everything so far is saved. Go on with the same command.")
        raise typer.Exit(stop.exit_code) from None
    finally:
        close_all(shown)
