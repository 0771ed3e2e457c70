"""How commands do many runs: where, with which progress, and what a signal does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cflat._registry import require_known
from cflat.cli.output import note, tell_stopping

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cflat.runs.interrupts import StopRequest
    from cflat.runs.jobs import Executor, Job
    from cflat.studies.analyze import Variant
    from cflat.train import Observer

EXECUTORS = ("local", "ray")
NOT_SAVED = 3
"""Exit code of a command that was stopped and could not save."""

ExecutorName = Annotated[str, typer.Option("--executor", help="local: one run at a time; ray: in parallel")]
Gpus = Annotated[float, typer.Option("--gpus", help="With ray: fraction of a GPU per run, up to 1")]


@contextmanager
def job_executor(
    name: str, folder: Path, is_silent: bool, gpus: float = 1.0, stays: bool = False
) -> Iterator[Executor]:
    """Own a folder and give the executor of this name; a signal ends the command cleanly, to go on later.

    With Ray, ``gpus`` is the share of a GPU for each run, and ``stays`` keeps it between batches of jobs.
    """
    require_known("executor", name, EXECUTORS)
    from cflat.cli.progress import close_all, make_progress
    from cflat.runs.jobs import SerialExecutor
    from cflat.runs.lock import owned
    from cflat.runs.ray_executor import RayExecutor, ray_session

    shown: list[Observer] = []
    totals: list[int] = []

    def observe(job: Job) -> Sequence[Observer]:
        if is_silent:
            return ()
        close_all(shown)
        label = f"[{len(shown) + 1}/{sum(totals)}] {job.out.name}"
        shown.append(make_progress(label, every_epoch=False, folder=job.out))
        return shown[-1:]

    def in_order(jobs: Sequence[Job]) -> Iterator[Job]:
        totals.append(len(jobs))
        return SerialExecutor(observe, stop)(jobs)

    try:
        with owned(folder), stoppable() as stop:
            if name == "ray":
                ray = RayExecutor(gpus, stop)
                with ray_session() if stays else nullcontext():
                    yield ray if is_silent else partial(_tell_each, ray)
            else:
                yield in_order
    finally:
        close_all(shown)


@contextmanager
def stoppable(how_to_go_on: str = "Run the same command again to continue.") -> Iterator[StopRequest]:
    """Let a signal end what is inside cleanly: it is asked to save and stop, and the command's exit code says why.

    128 + n says that signal n ended it and everything is saved, `NOT_SAVED` that something could not be saved.
    """
    from cflat.runs.interrupts import StopRequest
    from cflat.train import StateNotSaved, TrainingInterrupted

    stop = StopRequest(tell_stopping)
    try:
        with stop:
            yield stop
    except TrainingInterrupted:
        note(f"Stopped; everything so far is saved. {how_to_go_on}")
        raise typer.Exit(stop.exit_code) from None
    except StateNotSaved as error:
        note(f"cflat: {error}")
        raise typer.Exit(NOT_SAVED) from None


def tell_variant(variant: Variant, index: int, total: int, *, is_silent: bool) -> None:
    """Say which run of an analysis is trained now."""
    if not is_silent:
        note(f"[{index + 1}/{total}] training {variant.name}{', watched' if variant.is_recorded else ''}")


def _tell_each(executor: Executor, jobs: Sequence[Job]) -> Iterator[Job]:
    """Run the jobs, and say which are done: runs in other processes show no progress of their own."""
    note(f"{len(jobs)} runs to do, in parallel where resources allow.")
    for number, job in enumerate(executor(jobs), start=1):
        note(f"{job.out.name}: done ({number} of {len(jobs)})")
        yield job
