"""Real processes: `cflat` commands that start in no time, and who works in a folder."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

SECONDS = 1200.0
"""Patience with a process; far more than any needs."""


class Command:
    """A `cflat` command in a process of its own, forked from one that has imported everything already.

    Args:
        arguments: What follows `cflat` on the command line.
        folder: Where it runs; what it prints goes to a file there.
        environment: Variables that it sees besides those of this process.
        apart: Whether what it prints to standard error goes to a file of its own.
    """

    def __init__(
        self, *arguments: str | Path, folder: Path, environment: dict[str, str] | None = None, apart: bool = False
    ) -> None:
        self.log = folder / f"output-{time.monotonic_ns()}.txt"
        self.errors = self.log.with_suffix(".err.txt") if apart else self.log
        words = [str(word) for word in arguments]
        logs = (self.log, self.errors)
        self.process = _context().Process(target=_main, args=(words, folder, logs, environment or {}), daemon=True)
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


class Ranks:
    """A `cflat` command as torchrun starts it, several times in an environment of ranks, but at once.

    Args:
        number: How many ranks.
        arguments: What follows `cflat` on the command line.
        folder: Where they run.
    """

    def __init__(self, number: int, *arguments: str | Path, folder: Path) -> None:
        self.members = [
            Command(*arguments, folder=folder, environment=environment) for environment in _environments(number)
        ]

    @property
    def is_alive(self) -> bool:
        return all(member.is_alive for member in self.members)

    def wait(self) -> tuple[list[int], str]:
        """Return the exit codes and everything that was printed."""
        ended = [member.wait() for member in self.members]
        return [code for code, _ in ended], "".join(output for _, output in ended)

    def wait_until(self, is_time: Callable[[], bool]) -> bool:
        return self.members[0].wait_until(is_time)

    def kill(self) -> None:
        for member in self.members:
            member.kill()


@contextmanager
def interrupted(is_time: Callable[[], bool]) -> Iterator[None]:
    """Press Ctrl-C once in this process, as soon as it is time; never if it ends before."""
    has_ended = threading.Event()

    def press() -> None:
        while not has_ended.wait(0.005):
            if is_time():
                os.kill(os.getpid(), signal.SIGINT)
                return

    thread = threading.Thread(target=press)
    thread.start()
    try:
        yield
    finally:
        has_ended.set()
        thread.join()


def in_ranks(number: int, function: Callable[..., None], *arguments: Any) -> None:
    """Call a function in several processes that are ranks, and wait until all have done it."""
    members = [
        _context().Process(target=_as_rank, args=(environment, function, *arguments), daemon=True)
        for environment in _environments(number)
    ]
    for member in members:
        member.start()
    for member in members:
        member.join(SECONDS)
    codes = [member.exitcode for member in members]
    for member in members:
        member.kill()
    assert codes == [0] * number, codes


def _as_rank(environment: dict[str, str], function: Callable[..., None], *arguments: Any) -> None:
    os.environ.update(environment)
    function(*arguments)


def _environments(number: int) -> list[dict[str, str]]:
    """Return what torchrun tells each of its ranks."""
    shared = {"WORLD_SIZE": str(number), "LOCAL_WORLD_SIZE": str(number), "TORCHELASTIC_RUN_ID": "test"}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "GROUP_RANK": "0"}
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(number)]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


PRELOADED = (
    *("cflat.cli.main", "cflat.runs.run", "cflat.cli.progress", "cflat.studies.sweep"),
    # What a run imports on the way: three seconds of every command otherwise, of which half a second remains.
    *("lightning_fabric", "sklearn.datasets", "timm", "torch._dynamo", "torch.utils.flop_counter"),
)


def _context() -> multiprocessing.context.ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    return context


def finished(*arguments: str, folder: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a `cflat` command to its end, as `subprocess.run` would, without the seconds that imports take."""
    command = Command(*arguments, folder=folder, environment=environment, apart=True)
    code, output = command.wait()
    return subprocess.CompletedProcess(arguments, code, output, command.errors.read_text())


def _main(arguments: Sequence[str], folder: Path, logs: tuple[Path, Path], environment: dict[str, str]) -> None:
    os.chdir(folder)
    os.environ.update(environment)
    for stream, log in enumerate(logs, start=1):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666), stream)
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
