"""Output of commands: a console for people, one JSON object for scripts."""

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

# C0 and C1 controls but tab and newline, and Unicode's marks that reverse the direction of text.
_OBEYED = r"\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069"
_CONTROLS, _ALL_CONTROLS = re.compile(f"[{_OBEYED}]"), re.compile(rf"[{_OBEYED}\r\n]")
# Lets colour codes pass: on a terminal Rich prints its tables with them.
_COLOURED = re.compile(rf"(?!\x1b\[[\d;]*m)[{_OBEYED}]")


def printable(text: str, controls: re.Pattern[str] = _ALL_CONTROLS) -> str:
    r"""Return text with control characters escaped: a terminal would execute them.

    >>> printable("a\x1b[31mb")
    'a\\x1b[31mb'
    """
    return controls.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class Screen:
    """A standard stream for untrusted text: names of classes and files may hold control characters.

    These are escaped, except colours on a terminal, and so are characters that the encoding lacks. A closed stream, or
    a reader that has gone, is no error: the command continues.
    """

    def __init__(self, stream: TextIO | None, name: str) -> None:
        # Python starts with None in place of a stream whose descriptor is closed.
        self.stream: TextIO = io.StringIO() if stream is None else stream
        self._name = name
        self._controls = _COLOURED if self.stream.isatty() else _CONTROLS

    def write(self, text: str) -> int:
        """Write text with control characters escaped."""
        encoding = self.stream.encoding or "utf-8"  # a StringIO has none
        shown = printable(text, self._controls).encode(encoding, "backslashreplace").decode(encoding)
        with self._excused():
            self.stream.write(shown)
        return len(text)

    def flush(self) -> None:
        """Flush the stream."""
        with self._excused():
            self.stream.flush()

    @contextmanager
    def _excused(self) -> Iterator[None]:
        try:
            yield
        except (BrokenPipeError, ValueError):  # a closed file raises a ValueError
            self._discard_rest()
            self.stream = io.StringIO()
        except OSError as error:
            self._discard_rest()
            # Errors of a stream carry no file name, so the message would not say what is full.
            raise OSError(error.errno, error.strerror, self._name) from error

    def _discard_rest(self) -> None:
        """Send what is still buffered nowhere: Python flushes again at exit, and would fail with exit code 120."""
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextmanager
def screens() -> Iterator[None]:
    """Replace standard output and standard error by `Screen`s."""
    before = sys.stdout, sys.stderr
    out, err = Screen(sys.stdout, "standard output"), Screen(sys.stderr, "standard error")
    sys.stdout, sys.stderr = out, err  # type: ignore[assignment]
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def console() -> Console:
    """Return a console on standard output: plain, wide text when it is no terminal."""
    # Stated explicitly: FORCE_COLOR would make Rich write colours to a pipe, where `Screen` escapes them.
    is_terminal = sys.stdout.isatty()
    width = None if is_terminal else PLAIN_WIDTH
    return Console(highlight=False, markup=False, soft_wrap=True, width=width, force_terminal=is_terminal)


def live_console() -> Console:
    """Return a console on standard error that may move the cursor; what it shows must be `printable`."""
    # `Screen` would escape the codes that move the cursor.
    return Console(file=getattr(sys.stderr, "stream", sys.stderr))


def note(text: str) -> None:
    """Print a message that is no result, once for all ranks, to standard error: pipes stay clean."""
    if is_main_process():
        print(text, file=sys.stderr, flush=True)


def acknowledge_stop() -> None:
    """Answer the first Ctrl-C."""
    if not is_main_process():
        return
    # Under torchrun `StopRequest` ignores further signals.
    again = b"" if "TORCHELASTIC_RUN_ID" in os.environ else b"; press Ctrl-C again to end at once"
    with suppress(OSError):
        # The signal may have interrupted a print: Python's files are not reentrant, the descriptor is.
        os.write(STANDARD_ERROR, b"Stopping at the next step or batch" + again + b".\n")


@contextmanager
def stoppable(how_to_go_on: str = "Run the same command again to continue.") -> Iterator[StopRequest]:
    """Let a signal end what is inside cleanly: it saves and stops, and the command exits.

    The exit code is 128 + n if signal n ended it and everything is saved, `NOT_SAVED` if something is not.
    """
    from cflat.runs.interrupts import StopRequest
    from cflat.train import StateNotSaved, TrainingInterrupted

    stop = StopRequest(acknowledge_stop)
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
    """Return the rank of this process among those that train together, from its launcher; 0 if it is alone."""
    rank = os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0"))
    return int(rank) if rank.isdecimal() else 0


def world_size() -> int:
    """Return the number of processes that train together, from their launcher; 1 if this one is alone."""
    size = os.environ.get("WORLD_SIZE", "1")
    return int(size) if size.isdecimal() else 1


def is_main_process() -> bool:
    """Whether this process may print: the only one, or rank 0."""
    return own_rank() == 0


def let_main_speak(seconds: float) -> bool:
    """Wait for rank 0 to report why all ranks end; return whether the launcher is gone by then.

    A launcher that sees one rank fail ends the others: rank 0 must be the first to exit.
    """
    launcher, end = os.getppid(), time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(POLL_SECONDS)
        # A process that has lost its parent is adopted by another one.
        if os.getppid() != launcher:
            return True
    return False


def emit_json(values: Any) -> None:
    """Print the result of a command for scripts; NaN becomes null."""
    print(json.dumps(plain_values(values), indent=2, allow_nan=False))


def next_command(command: str | Sequence[str]) -> None:
    """Print the next useful command, ready to be pasted; words are quoted where a shell needs it."""
    words = command if isinstance(command, str) else shlex.join(command)
    # Names of a plug-in are unknown to a command that does not load it.
    needs_plugins = words.startswith("cflat ")
    print(f"Next: {words}{''.join(f' {shlex.quote(word)}' for word in plugin_options() if needs_plugins)}")


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], num_text: int = 1) -> Table:
    """Return a table whose first ``num_text`` columns are text and the others numbers."""
    made = Table(title=title or None, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for index, column in enumerate(columns):
        widest = max((len(printable(row[index])) for row in rows), default=0)  # numbers are never folded
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


def duration(seconds: float) -> str:
    """Return a time in readable units.

    >>> [duration(seconds) for seconds in (0.26, 75, 7300)]
    ['0.26 s', '75 s', '2 h 02 min']
    """
    if seconds < 600:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2g} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min"


def spread_columns(further: Sequence[str]) -> list[str]:
    """Return the columns of runs that differ in their seed alone, with metrics of scores that are not the headline."""
    from cflat.metrics import metric_title

    return [*SPREAD_COLUMNS, *map(metric_title, further)]


def spread_cells(spreads: Mapping[str, Spread], further: Sequence[str]) -> list[str]:
    """Return the cells of `spread_columns`."""
    return [
        *(spreads[name].text(scale=100) for name in ("avg", "last", "forgetting")),
        spreads["images_per_second"].text(digits=0),
        spreads["evaluations_per_step"].text(),
        spreads["eigenvalue"].text(digits=1),
        *(spreads[name].text(scale=100) if name in spreads else "-" for name in further),
    ]
