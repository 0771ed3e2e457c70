"""How commands talk: a console for people, one JSON object for scripts."""

from __future__ import annotations

import json
import math
import os
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from cflat._files import plain_values

if TYPE_CHECKING:
    from cflat.metrics import Spread

STANDARD_ERROR = 2
POLL_SECONDS = 0.1
PLAIN_WIDTH = 200
"""Columns for output into a file or pipe: tables are not folded there."""


SPREAD_COLUMNS = ("Avg", "Last", "Forgetting", "img/s", "evaluations/step")
"""Numbers over several seeds; accuracies in percent."""


def console() -> Console:
    """Return the console of this moment's standard output: plain, wide text when it is no terminal."""
    is_terminal = sys.stdout.isatty()
    return Console(highlight=False, markup=False, soft_wrap=True, width=None if is_terminal else PLAIN_WIDTH)


def note(text: str) -> None:
    """Tell a person something that is no result, once for all ranks; goes to standard error: pipes stay clean."""
    if is_main_process():
        print(text, file=sys.stderr, flush=True)


def tell_stopping() -> None:
    """Answer the first Ctrl-C.

    Called by a signal handler, which may have interrupted somebody who is printing: Python's files refuse to be entered
    twice, so this writes to the descriptor itself.
    """
    if not is_main_process():
        return
    again = b"" if "TORCHELASTIC_RUN_ID" in os.environ else b"; press Ctrl-C again to end at once"
    with suppress(OSError):
        os.write(STANDARD_ERROR, b"Stopping at the next step or batch" + again + b".\n")


def own_rank() -> int:
    """Return which of the processes that train together this is, as its launcher has told it; 0 if it is alone."""
    rank = os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0"))
    return int(rank) if rank.isdecimal() else 0


def is_main_process() -> bool:
    """Whether this process may print: the only one, or the first of those that train together."""
    return own_rank() == 0


def let_main_speak(seconds: float) -> bool:
    """Wait for the first rank to say why all of them end, and for its launcher to end this one; False if it does not.

    A launcher that sees one rank fail ends the others, so the first one must not be overtaken.
    """
    launcher, end = os.getppid(), time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(POLL_SECONDS)
        if os.getppid() != launcher:
            return True
    return False


def emit_json(values: Any) -> None:
    """Print the result of a command for scripts; NaN becomes null."""
    print(json.dumps(plain_values(values), indent=2, allow_nan=False))


def next_command(command: str | Sequence[str]) -> None:
    """End a command with the next useful one, ready to be pasted; words are quoted where a shell needs it."""
    print(f"Next: {command if isinstance(command, str) else shlex.join(command)}")


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], num_text: int = 1) -> Table:
    """Return a table whose first ``num_text`` columns are text and the others numbers."""
    made = Table(title=title or None, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for index, column in enumerate(columns):
        widest = max((len(row[index]) for row in rows), default=0)
        is_number = index >= num_text
        is_whole = is_number or index == 0
        least = widest if is_whole else None
        made.add_column(column, justify="right" if is_number else "left", no_wrap=is_whole, min_width=least)
    for row in rows:
        made.add_row(*row)
    return made


def percent(value: float) -> str:
    """Return a fraction as percent.

    >>> percent(0.8234)
    '82.34'
    """
    return "-" if math.isnan(value) else f"{100 * value:.2f}"


def spread_cells(spreads: Mapping[str, Spread]) -> list[str]:
    """Return what `SPREAD_COLUMNS` say about runs that differ in their seed alone."""
    return [
        *(spreads[name].text(scale=100) for name in ("avg", "last", "forgetting")),
        spreads["images_per_second"].text(digits=0),
        spreads["evaluations_per_step"].text(),
    ]
