"""Jobs of a study, one run each, and the executor that runs them in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from cflat._errors import CFlatError, ConfigError, DataError
from cflat._files import write_json
from cflat.config.run_config import RunConfig
from cflat.runs.failures import TrainingDiverged
from cflat.runs.folder import RunFolder, RunSummary
from cflat.runs.run import run
from cflat.train import Observer

MAX_NAMED = 5
"""Failed jobs that a message names."""


@dataclass(frozen=True)
class Job:
    """One run of a comparison or sweep."""

    config: RunConfig
    out: Path
    num_tasks: int | None = None
    """Stop after this number of tasks, to be resumed later; None trains on the whole stream."""
    may_diverge: bool = False
    """Whether a training that diverges is a result, noted in its folder, and no error."""

    @property
    def is_finished(self) -> bool:
        """Whether its result is there already; a folder that holds another run is an error."""
        folder = RunFolder(self.out)
        if not folder.config_file.is_file():
            return False
        # Never mix results of two configurations in one table.
        if folder.load_config() != self.config:
            raise DataError(f"{str(self.out)!r} holds a run with another configuration; choose another --out.")
        if folder.is_finished or (self.may_diverge and folder.diverged_file.is_file()):
            return True
        return self.num_tasks is not None and len(folder.load_tasks()) >= self.num_tasks


class JobsFailed(CFlatError):
    """Some jobs failed, each with a sentence on the reason; all others are done."""

    def __init__(self, failures: Sequence[tuple[Job, str]], num_jobs: int) -> None:
        self.failures = tuple(failures)
        more = len(failures) - MAX_NAMED
        reasons = [f"{job.out}: {reason}" for job, reason in failures[:MAX_NAMED]]
        reasons += [f"{more} more."] if more > 0 else []
        done = "the others are done and kept" if len(failures) < num_jobs else "none is done"
        super().__init__(f"{len(failures)} of {num_jobs} runs failed, {done}. {' '.join(reasons)}")


Executor: TypeAlias = Callable[[Sequence[Job]], Iterator[Job]]
"""Runs jobs, and yields each when its result is in its run directory."""


@dataclass(frozen=True)
class SerialExecutor:
    """One job after the other, in this process."""

    observe: Callable[[Job], Sequence[Observer]] = lambda job: ()
    """Makes the observers of a job."""
    should_stop: Callable[[], bool] = lambda: False

    def __call__(self, jobs: Sequence[Job]) -> Iterator[Job]:
        """Run the jobs in order; one that was interrupted resumes from its checkpoint."""
        for job in jobs:
            require_one_process(job)
            run_job(job, self.observe(job), should_stop=self.should_stop)
            yield job


def run_job(job: Job, observers: Sequence[Observer] = (), **how: Any) -> None:
    """Run one job, with ``should_stop`` and ``patience`` as for `run`; one that was begun is resumed."""
    folder = RunFolder(job.out)
    # A folder without config.yaml was left before anything was written.
    is_begun = folder.config_file.is_file()
    try:
        run(job.config, job.out, resume=is_begun, num_tasks=job.num_tasks, observers=observers, **how)
    except TrainingDiverged as error:
        if not job.may_diverge:
            raise
        write_json(folder.diverged_file, {"reason": str(error)})


def require_one_process(job: Job) -> None:
    """Reject a job for several processes: torchrun starts one command in each, which here is more than a run."""
    runtime = job.config.runtime
    if runtime.num_ranks > 1:
        raise ConfigError(
            f"runtime.devices is {runtime.devices} and runtime.num_nodes {runtime.num_nodes}, but one of several runs "
            "is one process; set both to 1, or start cflat run with torchrun."
        )


def run_jobs(jobs: Sequence[Job], executor: Executor | None = None) -> list[RunSummary]:
    """Run the jobs whose results are missing, each to its end, and return all results in the order of the jobs.

    Jobs that share configuration and folder are one run. Without an executor they run here, one after the other.
    """
    finish_jobs(jobs, executor)
    return [RunFolder(job.out).load_summary() for job in jobs]


def finish_jobs(jobs: Sequence[Job], executor: Executor | None = None) -> None:
    """Run the jobs whose results are missing, each up to its ``num_tasks``; see `run_jobs`."""
    by_folder: dict[Path, Job] = {}
    for job in jobs:
        if by_folder.setdefault(job.out, job).config != job.config:
            raise ConfigError(f"Two different configurations would run in {str(job.out)!r}.")
    pending = [job for job in by_folder.values() if not job.is_finished]
    if pending:  # else Ray would be started for nothing
        for _ in (executor or SerialExecutor())(pending):
            pass
