"""An executor that tells what it was given."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cflat.runs.jobs import Job, SerialExecutor


class Counting:
    """The serial executor, counting what it was given."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []

    def __call__(self, jobs: Sequence[Job]) -> Iterator[Job]:
        self.jobs += jobs
        return SerialExecutor()(jobs)
