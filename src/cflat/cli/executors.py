"""How commands execute many runs: executors, progress and signals."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cflat._registry import require_known
from cflat.cli.output import duration, note, stoppable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cflat.runs.interrupts import StopRequest
    from cflat.runs.jobs import Executor, Job
    from cflat.studies.analyze import Variant
    from cflat.train import Observer

EXECUTORS = ("local", "ray")

ExecutorName = Annotated[str, typer.Option("--executor", help="local: one run at a time; ray: in parallel")]
Gpus = Annotated[float, typer.Option("--gpus", help="With ray: fraction of a GPU per run, up to 1")]


@contextmanager
def job_executor(
    name: str, folder: Path, is_silent: bool, gpus: float = 1.0, stays: bool = False
) -> Iterator[tuple[Executor, StopRequest]]:
    """Own a folder and give the executor of this name; a signal ends the command cleanly, to be continued later.

    The second value is the stop request, for training that is no job of the executor.
    With Ray, ``gpus`` is the fraction of a GPU for each run, and ``stays`` keeps it between batches of jobs.
    """
    require_known("executor", name, EXECUTORS)
    from cflat.cli.progress import RunProgress, close_all
    from cflat.runs.jobs import SerialExecutor
    from cflat.runs.lock import owned
    from cflat.runs.ray_executor import RayExecutor, ray_session

    # Lists, because batches of jobs come one after the other and are numbered through.
    shown: list[Observer] = []
    totals: list[int] = []

    def observe(job: Job) -> Sequence[Observer]:
        if is_silent:
            return ()
        close_all(shown)  # a terminal has room for one bar
        label = f"[{len(shown) + 1}/{sum(totals)}] {job.out.name}"
        shown.append(RunProgress(label, job.out, every_epoch=False))
        return shown[-1:]

    def in_order(jobs: Sequence[Job]) -> Iterator[Job]:
        totals.append(len(jobs))
        return SerialExecutor(observe, stop)(jobs)

    try:
        with owned(folder), stoppable() as stop:
            if name == "ray":
                ray = RayExecutor(gpus, stop)
                # Without a session of this process, the executor opens and closes one for every batch.
                with ray_session() if stays else nullcontext():
                    yield ray if is_silent else partial(_report_each, ray), stop
            else:
                yield in_order, stop
    finally:
        close_all(shown)


class VariantProgress:
    """Report which run of an analysis is trained now, and how long the rest will take."""

    def __init__(self, *, is_silent: bool) -> None:
        self._is_silent = is_silent
        self._trained = 0
        self._started = time.monotonic()

    def __call__(self, variant: Variant, index: int, total: int) -> None:
        """Report a variant that is about to be trained; finished ones are never reported."""
        if not self._is_silent:
            # An upper bound: variants that are finished already are among the rest.
            seconds = (time.monotonic() - self._started) / max(self._trained, 1) * (total - index)
            left = f", about {duration(round(seconds))} left" if self._trained else ""
            note(f"[{index + 1}/{total}] training {variant.name}{', recorded' if variant.is_recorded else ''}{left}")
        self._trained += 1


def _report_each(executor: Executor, jobs: Sequence[Job]) -> Iterator[Job]:
    """Run the jobs and report which are done: runs in other processes show no progress of their own."""
    note(f"{len(jobs)} runs to do, in parallel where resources allow.")
    for number, job in enumerate(executor(jobs), start=1):
        note(f"{job.out.name}: done ({number} of {len(jobs)})")
        yield job
