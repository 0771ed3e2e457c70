"""Real processes: `cflat` commands that start in no time, and who works in a folder."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

SECONDS = 1200.0
"""Patience with a process; far more than any needs."""


class Command:
    """A `cflat` command in a process of its own, forked from one that has imported everything already.

    Args:
        arguments: What follows `cflat` on the command line.
        folder: Where it runs; what it prints goes to a file there.
    """

    def __init__(self, *arguments: str | Path, folder: Path) -> None:
        self.log = folder / f"output-{time.monotonic_ns()}.txt"
        words = [str(word) for word in arguments]
        self.process = _context().Process(target=_main, args=(words, folder, self.log), daemon=True)
        self.process.start()

    @property
    def is_alive(self) -> bool:
        return self.process.is_alive()

    def signal(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def wait(self) -> tuple[int, str]:
        """Return the exit code, negative for a signal, and what was printed."""
        self.process.join(SECONDS)
        assert not self.process.is_alive(), self.log.read_text()
        assert self.process.exitcode is not None
        return self.process.exitcode, self.log.read_text() if self.log.exists() else ""

    def wait_until(self, is_time: Callable[[], bool]) -> bool:
        """Wait for something to happen; False if the process ended before it did."""
        end = time.monotonic() + SECONDS
        while not is_time():
            if not self.is_alive:
                return False
            assert time.monotonic() < end, self.log.read_text()
            time.sleep(0.005)
        return True

    def kill(self) -> None:
        self.process.kill()
        self.process.join(SECONDS)


def _context() -> multiprocessing.context.ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["cflat.cli.main", "cflat.runs.run", "cflat.cli.progress", "cflat.studies.sweep"])
    return context


def _main(arguments: Sequence[str], folder: Path, log: Path) -> None:
    os.chdir(folder)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    sys.argv = ["cflat", *arguments]
    import torch

    from cflat.cli.main import run_app

    torch.set_num_threads(1)
    sys.exit(run_app(arguments))


def processes_in(folder: Path) -> list[int]:
    """Return the processes whose working folder this is, apart from this one; Linux only."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended meanwhile, or belongs to somebody else
            if (entry / "cwd").samefile(folder) and int(entry.name) != os.getpid():
                found.append(int(entry.name))
    return found
