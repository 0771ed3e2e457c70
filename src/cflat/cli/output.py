"""How commands talk: a console for people, one JSON object for scripts."""

from __future__ import annotations

import io
import json
import math
import os
import re
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TextIO

from rich.console import Console
from rich.table import Table

from cflat._files import plain_values
from cflat._plugins import plugin_options

if TYPE_CHECKING:
    from cflat.metrics import Spread
    from cflat.runs.interrupts import StopRequest

STANDARD_ERROR = 2
NOT_SAVED = 3
"""Exit code of a command that was stopped and could not save."""
POLL_SECONDS = 0.1
PLAIN_WIDTH = 200
"""Columns for output into a file or pipe: tables are not folded there."""


SPREAD_COLUMNS = ("Avg", "Last", "Forgetting", "img/s", "evaluations/step", "largest eigenvalue")
"""Numbers over several seeds; accuracies in percent. The eigenvalue is the Hessian's at the end: small is flat."""


_OBEYED = r"\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069"
_CONTROLS, _ALL_CONTROLS = re.compile(f"[{_OBEYED}]"), re.compile(rf"[{_OBEYED}\r\n]")
_COLOURED = re.compile(rf"(?!\x1b\[[\d;]*m)[{_OBEYED}]")


def printable(text: str, controls: re.Pattern[str] = _ALL_CONTROLS) -> str:
    r"""Return text in which characters are spelled out that a terminal would obey instead of showing them.

    >>> printable("a\x1b[31mb")
    'a\\x1b[31mb'
    """
    return controls.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class Screen:
    """A standard stream for text of any origin: names of classes and files may hold what a terminal would obey.

    Control characters are spelled out, but for colours on a terminal, and so are characters that the encoding lacks.
    That the stream is closed, or its reader has gone, is no error: the command goes on to its end.
    """

    def __init__(self, stream: TextIO | None, name: str) -> None:
        self.stream: TextIO = io.StringIO() if stream is None else stream
        self._name = name
        self._controls = _COLOURED if self.stream.isatty() else _CONTROLS

    def write(self, text: str) -> int:
        """Write what can be shown."""
        encoding = self.stream.encoding or "utf-8"
        shown = printable(text, self._controls).encode(encoding, "backslashreplace").decode(encoding)
        with self._excused():
            self.stream.write(shown)
        return len(text)

    def flush(self) -> None:
        """Let everything so far be seen."""
        with self._excused():
            self.stream.flush()

    @contextmanager
    def _excused(self) -> Iterator[None]:
        try:
            yield
        except (BrokenPipeError, ValueError):  # Python says of a closed file that the value is wrong
            with suppress(OSError, ValueError):  # or Python would try again at the end, and complain
                os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())
            self.stream = io.StringIO()
        except OSError as error:
            raise OSError(error.errno, error.strerror, self._name) from error

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextmanager
def screens() -> Iterator[None]:
    """Let standard output and standard error be `Screen`s."""
    before = sys.stdout, sys.stderr
    out, err = Screen(sys.stdout, "standard output"), Screen(sys.stderr, "standard error")
    sys.stdout, sys.stderr = out, err  # type: ignore[assignment]
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def console() -> Console:
    """Return the console of this moment's standard output: plain, wide text when it is no terminal."""
    is_terminal = sys.stdout.isatty()
    width = None if is_terminal else PLAIN_WIDTH
    return Console(highlight=False, markup=False, soft_wrap=True, width=width, force_terminal=is_terminal)


def live_console() -> Console:
    """Return a console on standard error that may move the cursor; what it shows must be `printable`."""
    return Console(file=getattr(sys.stderr, "stream", sys.stderr))


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
        raise SystemExit(stop.exit_code) from None
    except StateNotSaved as error:
        note(f"cflat: {error}")
        raise SystemExit(NOT_SAVED) from None


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
    words = command if isinstance(command, str) else shlex.join(command)
    needs_plugins = words.startswith("cflat ")
    print(f"Next: {words}{''.join(f' {shlex.quote(word)}' for word in plugin_options() if needs_plugins)}")


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], num_text: int = 1) -> Table:
    """Return a table whose first ``num_text`` columns are text and the others numbers."""
    made = Table(title=title or None, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for index, column in enumerate(columns):
        widest = max((len(printable(row[index])) for row in rows), default=0)
        is_number = index >= num_text
        is_whole = is_number or index == 0
        least = widest if is_whole else None
        made.add_column(column, justify="right" if is_number else "left", no_wrap=is_whole, min_width=least)
    for row in rows:
        made.add_row(*map(printable, row))
    return made


def percent(value: float) -> str:
    """Return a fraction as percent.

    >>> percent(0.8234)
    '82.34'
    """
    return "-" if math.isnan(value) else f"{100 * value:.2f}"


def spread_columns(further: Sequence[str]) -> list[str]:
    """Return the columns of runs that differ in their seed alone, with metrics of scores that are not the headline."""
    from cflat.metrics import metric_title

    return [*SPREAD_COLUMNS, *map(metric_title, further)]


def spread_cells(spreads: Mapping[str, Spread], further: Sequence[str]) -> list[str]:
    """Return what `spread_columns` say."""
    return [
        *(spreads[name].text(scale=100) for name in ("avg", "last", "forgetting")),
        spreads["images_per_second"].text(digits=0),
        spreads["evaluations_per_step"].text(),
        "-" if math.isnan(spreads["eigenvalue"].mean) else spreads["eigenvalue"].text(digits=1),
        *(spreads[name].text(scale=100) if name in spreads else "-" for name in further),
    ]
