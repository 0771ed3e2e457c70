"""The application: all commands, and how errors become one sentence and an exit code."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import typer

from cflat._errors import CFlatError
from cflat.cli import (
    analyze,
    check_data,
    compare,
    demo,
    doctor,
    features,
    listing,
    predict,
    probe,
    report,
    reproduce,
    run,
    sweep,
)

__all__ = ["app", "run_app"]

app = typer.Typer(
    name="cflat",
    help="Train continual learners toward flat minima, and measure what it gains and costs.",
    epilog="""\b
Examples:
  cflat demo                what C-Flat and C-Flat Turbo do, on digits, in two minutes
  cflat run --method icarl --data digits --optimizer c_flat_turbo
  cflat compare --method icarl --data digits --optimizers none,c_flat,c_flat_turbo --seeds 0,1,2
  cflat sweep examples/sweep_radius.yaml
  cflat report runs/compare-icarl-digits -o report.html
  cflat reproduce table1 --scale smoke
  cflat list methods        what there is to choose from
  cflat doctor              what this machine can do
""",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)
for _name, _module in (
    ("demo", demo),
    ("run", run),
    ("compare", compare),
    ("sweep", sweep),
    ("reproduce", reproduce),
    ("report", report),
    ("analyze", analyze),
    ("probe", probe),
    ("predict", predict),
    ("list", listing),
    ("doctor", doctor),
    ("check-data", check_data),
    ("features", features),
):
    app.command(_name, epilog=_module.EXAMPLES)(_module.command)


def run_app(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 2 for wrong input, 128 + n when stopped by signal n."""
    try:
        app(args=None if arguments is None else list(arguments), prog_name="cflat")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except CFlatError as error:
        print(f"cflat: {error}", file=sys.stderr)
        return 2
    return 0
