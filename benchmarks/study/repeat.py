"""`make study-check`: run two lines of the ledger again and compare."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.study.configs import Places, Run
from benchmarks.study.definition import STREAMS
from benchmarks.study.ledger import Line, machine_kind, read
from benchmarks.study.runs import perform
from benchmarks.study.tuning import Settings

TOLERANCE = 0.02
"""On another machine: of Avg, as a fraction, since rounding grows over a run; of evaluations per step too."""


def repeat_runs(folder: Path, places: Places, count: int) -> bool:
    """Repeat lines that can be run here, the cheapest of two streams, and say what came out."""
    lines = [line for line in read(folder) if STREAMS[line.stream].exhibit is None]
    lines = [line for line in lines if places.missing(STREAMS[line.stream]) is None]
    chosen = choose_lines(lines, count)
    if not chosen:
        print("The ledger has no run whose data is here.")
    found = [_is_repeated(line, places) for line in chosen]
    return all(found)


def choose_lines(lines: Sequence[Line], count: int) -> list[Line]:
    """Return runs of different rows, of different streams as far as possible: final ones first, then quick ones."""
    here = machine_kind()
    ordered = sorted(lines, key=lambda line: (line.machine != here, line.stage != "final", line.seconds, line.finished))
    chosen: list[Line] = []
    for line in ordered:
        if all(line.row != other.row and line.stream != other.stream for other in chosen):
            chosen.append(line)
    return (chosen + [line for line in ordered if line not in chosen])[:count]


def _is_repeated(line: Line, places: Places) -> bool:
    again = perform(Run(line.key, Settings(line.lr, line.rho)), places)
    is_same_machine = again.machine == line.machine
    if is_same_machine:
        # As text: the end loss of a run that diverged is NaN, which equals nothing.
        numbers = ("avg", "last", "end_loss", "evaluations")
        is_equal = all(repr(getattr(again, name)) == repr(getattr(line, name)) for name in numbers)
    else:
        is_equal = (
            abs(again.avg - line.avg) <= TOLERANCE
            and abs(again.evaluations_per_step - line.evaluations_per_step) <= TOLERANCE * line.evaluations_per_step
        )
    if not is_equal and again.code != line.code:
        print(f"src/cflat is not what the study was run with: check out commit {line.commit[:10]} and compare there.")
    wanted = "bit for bit" if is_same_machine else f"within {TOLERANCE} on another machine"
    print(
        f"{' '.join(map(str, line.key))}: Avg {again.avg:.4f}, ledger {line.avg:.4f}; "
        f"{'as expected' if is_equal else 'DIFFERENT, expected'} {wanted}"
    )
    return is_equal
