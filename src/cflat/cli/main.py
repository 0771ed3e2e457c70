"""The application: all commands, and how errors become one sentence and an exit code."""

from __future__ import annotations

import signal
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated

import typer

import cflat
from cflat._errors import CFlatError, ConfigError, OtherRankFailed, shortened
from cflat._machine import is_out_of_memory
from cflat._plugins import load_plugins, place_in_plugin
from cflat.cli.output import is_main_process, let_main_speak, own_rank, screens, world_size

DEBUG = "--debug"
_MODULES = {"list": "listing", "check-data": "check_data"}
"""Commands whose name is no name of a module."""
STOPPED = 128
"""Exit codes from here on are for stops by a signal."""
INTERRUPTED, INTERRUPTED_TEXT = STOPPED + signal.SIGINT, "cflat: Interrupted."
PATIENCE_SECONDS = 20.0
"""How long a rank that fails waits: rank 0 may be failing as well, and reports for all."""
SHORT_PATIENCE_SECONDS = 3.0
"""How long a rank that stops waits: rank 0 has saved and is about to report it."""

app = typer.Typer(
    name="cflat",
    help="Train continual learners toward flat minima, and measure what that gains and costs.",
    epilog="""\b
Examples:
  cflat demo                SGD, C-Flat, Turbo and Forecast on digits, in two minutes
  cflat run --method icarl --data digits --optimizer c_flat_turbo
  cflat plan --method icarl --data digits --optimizer c_flat_turbo
  cflat compare --method icarl --data digits --optimizers none,c_flat,c_flat_turbo --seeds 0,1,2
  cflat sweep examples/sweep_radius.yaml
  cflat tune --method icarl --data digits --optimizers none,sam,c_flat,c_flat_turbo --trials 8
  cflat report runs/compare-icarl-digits -o report.html
  cflat reproduce table1 --scale smoke
  cflat list methods        list the available methods
  cflat doctor              what this machine can do
""",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    # Typer's Rich help joins the lines of an epilog, which would run the examples together.
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)
COMMANDS = (
    *("demo", "run", "plan", "compare", "sweep", "tune", "reproduce"),
    *("report", "analyze", "probe", "predict", "list", "doctor", "check-data", "features"),
)
"""In the order of the help."""
# The modules import nothing heavy: torch is loaded inside of the commands.
for _name in COMMANDS:
    _module = import_module(f"cflat.cli.commands.{_MODULES.get(_name, _name)}")
    app.command(_name, epilog=f"\b\nExamples:\n{_module.EXAMPLES}")(_module.command)


def _show_version(is_requested: bool) -> None:
    if is_requested:
        print(f"cflat {cflat.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error; accepted anywhere")] = False,
    plugin: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE.py|MODULE", help="Load a plug-in; accepted anywhere on the command line"),
    ] = None,
) -> None:
    """Document the options before the command; `run_app` has read them already."""
    if world_size() > 1 and context.invoked_subcommand != "run":
        raise ConfigError(
            f"Several ranks carry out one training: of the commands only 'cflat run' can be started by torchrun, not "
            f"{context.invoked_subcommand!r}."
        )


def run_app(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    2 is for wrong input, 128 + n for a stop by signal n, 3 for a stop that could not save what it had.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    with screens():
        try:
            code = _run(given)
            # A full disk may show only now; the flush at exit would be too late for a message.
            sys.stdout.flush()
        except OSError as error:  # of standard output itself, such as a full disk
            message, code = _explain(error)
            print(message, file=sys.stderr)
    return code


def _run(given: list[str]) -> int:
    words = [word for word in given if word != DEBUG]
    message = ""
    try:
        # Not standalone: errors of options are reported here, like all others, and shortened.
        code = app(args=_without_plugins(words), prog_name="cflat", standalone_mode=False)
        # typer.Exit comes back as its code; a command that just ends comes back as None.
        code = code if isinstance(code, int) else 0
        message = INTERRUPTED_TEXT if code == INTERRUPTED else ""  # typer is silent about a KeyboardInterrupt
    except SystemExit as end:  # how `stoppable` ends a command
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except (Exception, KeyboardInterrupt) as error:
        if len(words) < len(given):
            traceback.print_exc()
        message, code = _explain(error)
        if isinstance(error, OtherRankFailed) and not is_main_process():
            message = ""  # the rank that failed reports it
    if code and not is_main_process():
        is_over = let_main_speak(SHORT_PATIENCE_SECONDS if code >= STOPPED else PATIENCE_SECONDS)
        # With the launcher gone, rank 0 has reported for all.
        message = "" if is_over else message and f"rank {own_rank()}: {message}"
    if message:
        print(message, file=sys.stderr)
    return code


def _explain(error: BaseException) -> tuple[str, int]:
    """Return a sentence on what went wrong and the exit code: 1 for a bug of ours, 2 for everything else."""
    if isinstance(error, KeyboardInterrupt | typer.Abort):
        return INTERRUPTED_TEXT, INTERRUPTED
    usage = getattr(error, "format_message", None)  # an error of the command line itself; its class is typer's own
    if usage is not None:
        context = getattr(error, "ctx", None)
        hint = f"{context.get_usage()}\nTry '{context.command_path} --help' for help.\n\n" if context else ""
        return f"{hint}Error: {shortened(usage())}", int(getattr(error, "exit_code", 2))
    if isinstance(error, CFlatError):
        return f"cflat: {error}", 2
    if isinstance(error, OSError):
        where = f"{str(error.filename)!r}: " if error.filename is not None else ""
        return f"cflat: {shortened(f'{where}{error.strerror or error}')}.", 2
    if is_out_of_memory(error):
        return "cflat: There is not enough memory for this; lower the sizes among the settings.", 2
    place = place_in_plugin(error)
    if place is not None:
        return f"cflat: {type(error).__name__} in the plug-in {place}: {shortened(str(error))}", 2
    text = shortened(" ".join(str(error).split()))
    return (
        f"cflat: Unexpected {type(error).__name__}: {text.rstrip('.')}. This should not happen; the same command with "
        f"{DEBUG} shows where it comes from."
    ), 1


def _without_plugins(words: list[str]) -> list[str]:
    """Load what ``--plugin`` names, before or after the command, and return the other words."""
    others, named, rest = [], [], iter(words)
    # By hand, because typer takes options of the application only before the command.
    for word in rest:
        option, _, value = word.partition("=")
        if option != "--plugin":
            others.append(word)
            continue
        name = value or next(rest, "")
        named.append(name)
        if not name or name.startswith("-"):
            instead = f", not the option {name}" if name else ""
            raise ConfigError(f"--plugin needs the path of a Python file or the name of a module{instead}.")
    load_plugins(named)
    return others
