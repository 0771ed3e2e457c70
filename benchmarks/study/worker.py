"""What is left to run, in which order, and a worker that runs its part of it."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

from benchmarks.study.analysis import final_runs
from benchmarks.study.configs import Key, Places, Run
from benchmarks.study.definition import BLOCK_OF, BLOCKS, ROWS
from benchmarks.study.ledger import Ledger, Line, append, definition_hash, frozen, machine_kind, read
from benchmarks.study.runs import is_clean, perform, scratch_folder

from cflat._errors import ConfigError
from cflat.train import TrainingInterrupted

CHECKPOINTED = ("C", "P")
"""Blocks whose runs take minutes: one that was stopped goes on from its checkpoint."""


def pending(block_name: str, lines: Sequence[Line], machine: str) -> Iterator[Run]:
    """Yield what is left of a block, as far as the lines tell: trials first, then final runs, replicate by replicate.

    All rows of a replicate stand together, so that a ledger that is not complete has complete pairs.
    """
    ledger = Ledger(lines)
    yield from _trials(block_name, ledger)
    yield from _finals(block_name, ledger, machine)


def _trials(block_name: str, ledger: Ledger) -> Iterator[Run]:
    block = BLOCKS[block_name]
    done = {line.key for line in ledger.lines}
    tuned = block.streams if block.trials else ()
    needed = {(stream, row): ledger.trials(stream, row) for stream in tuned for row in block.rows}
    for replicate in range(block.tuning_replicates):
        for stream in block.streams:
            for trial in range(max(len(needed[stream, row]) for row in block.rows)):
                for row in block.rows:
                    key = Key(stream, row, replicate, "tune", trial)
                    if trial < len(needed[stream, row]) and key not in done:
                        yield Run(key, needed[stream, row][trial])


def _finals(block_name: str, ledger: Ledger, machine: str) -> Iterator[Run]:
    """Yield the final runs of streams that are tuned; a replicate that another machine has begun is run as a whole."""
    block = BLOCKS[block_name]
    done = {(line.key, line.machine) for line in ledger.lines}
    choices = {(s, row): ledger.choice(s, row) for s in block.streams for row in block.rows if block.trials}
    tuned = [s for s in block.streams if not block.trials or all(choices[s, row] for row in block.rows)]
    finals = {stream: final_runs(ledger.lines, stream) for stream in tuned}
    for replicate in block.finals:
        for stream in tuned:
            if len(finals[stream].get(replicate, {})) == len(block.rows):
                continue
            for row in block.rows:
                key = Key(stream, row, replicate, "final")
                choice = choices.get((stream, row))
                if (key, machine) not in done:
                    yield Run(key, choice.settings if choice else None)


def is_mine(key: Key, worker: int, num_workers: int) -> bool:
    """Whether a run belongs to a worker: decided by its key alone, so that workers need not talk."""
    return crc32(repr(tuple(key)).encode()) % num_workers == worker


@dataclass(frozen=True)
class Order:
    """What is asked for."""

    block: str
    places: Places
    folder: Path
    """Of the ledger."""
    worker: int = 0
    num_workers: int = 1
    minutes: float | None = None
    scratch: Path | None = None
    streams: Sequence[str] = ()
    """Only these; none named is all."""
    only_tuning: bool = False


def work(order: Order, tell: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True)) -> int:
    """Run what is left, until it is done or the time is up; return the number of runs."""
    deadline = None if order.minutes is None else time.monotonic() + 60 * order.minutes
    is_over = lambda: deadline is not None and time.monotonic() >= deadline  # noqa: E731
    machine, count = machine_kind(), 0
    while not is_over():
        lines = read(order.folder)
        todo = [run for run in pending(order.block, lines, machine) if _is_wanted(run, order)]
        mine = [run for run in todo if is_mine(run.key, order.worker, order.num_workers)]
        if not mine:
            tell("nothing left" if not todo else f"{len(todo)} runs are left to other workers")
            break
        for run in mine:
            if is_over():
                break
            require_ready(run, order.places)
            scratch = order.scratch if order.block in CHECKPOINTED else None
            try:
                line = perform(run, order.places, scratch, is_over if scratch else lambda: False)
            except TrainingInterrupted:
                tell(f"{' '.join(map(str, run.key))} was stopped; it goes on from its checkpoint")
                break
            append(line, order.folder)
            if scratch is not None:
                shutil.rmtree(scratch_folder(scratch, run.key), ignore_errors=True)
            lines.append(line)
            count += 1
            if count % 10 == 1 or line.seconds > 60:
                left = time_left(order.block, lines, machine, order.streams)
                tell(f"{_describe(line)}; {_hours(left)} of one thread left in block {order.block}")
    return count


def _is_wanted(run: Run, order: Order) -> bool:
    if order.streams and run.key.stream not in order.streams:
        return False
    return run.key.stage == "tune" or not order.only_tuning


def require_ready(run: Run, places: Places) -> None:
    """Refuse final runs before the freeze, or with other sources, and runs whose data is missing."""
    block = BLOCKS[BLOCK_OF[run.key.stream]]
    missing = places.missing(block.streams[run.key.stream])
    if missing is not None:
        raise ConfigError(f"Stream {run.key.stream} needs {missing}; see `python -m benchmarks.study run --help`.")
    if run.key.stage == "tune":
        return
    record = frozen()
    if record is None or record["hash"] != definition_hash():
        raise ConfigError(
            "Final runs need the frozen definition: its hash must be the one in benchmarks/study/frozen.json."
        )
    if not is_clean():
        raise ConfigError("Final runs need committed sources: src or benchmarks/study has changes.")


def time_left(block_name: str, lines: Sequence[Line], machine: str, streams: Sequence[str] = ()) -> float | None:
    """Return CPU seconds of what is left, also of final runs whose settings are not known yet; None if unknown.

    A stream that has not been run yet is taken to cost as much as the mean of the block's others.
    """
    block = BLOCKS[block_name]
    wanted = [stream for stream in block.streams if not streams or stream in streams]
    measured = [seconds for stream, seconds in unit_seconds(lines).items() if stream in block.streams]
    if not measured:
        return None
    rates = dict.fromkeys(wanted, sum(measured) / len(measured)) | unit_seconds(lines)
    done = {line.key for line in lines}
    finals = [Key(s, row, number, "final") for s in wanted for number in block.finals for row in block.rows]
    trials = [run.key for run in pending(block_name, lines, machine) if run.key.stage == "tune"]
    left = [key for key in (*trials, *finals) if key not in done and key.stream in wanted]
    return sum(rates[key.stream] * ROWS[key.row].cost for key in left)


def unit_seconds(lines: Sequence[Line]) -> dict[str, float]:
    """Return the CPU seconds of a run for each evaluation per step, by stream: measured, over all rows."""
    sums: dict[str, list[float]] = {}
    for line in lines:
        own = sums.setdefault(line.stream, [0.0, 0.0])
        own[0] += line.seconds
        own[1] += ROWS[line.row].cost
    return {stream: seconds / cost for stream, (seconds, cost) in sums.items()}


def _describe(line: Line) -> str:
    what = f"trial {line.trial}" if line.stage == "tune" else "final"
    return (
        f"{line.stream} {line.row} replicate {line.replicate} {what}: Avg {line.avg:.2%}, "
        f"end loss {line.end_loss:.3g}, {line.evaluations_per_step:.2f} evaluations, {line.seconds:.1f} s"
    )


def _hours(seconds: float | None) -> str:
    return "an unknown time" if seconds is None else f"{seconds / 3600:.2f} h"
