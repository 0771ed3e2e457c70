"""``cflat demo``: what C-Flat and C-Flat Turbo do, on the embedded digits."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from cflat.cli.compare import show_comparison
from cflat.cli.jobs import job_executor
from cflat.cli.options import Json, Quiet
from cflat.cli.output import console, emit_json, next_command

__all__ = ["EXAMPLES", "command"]

EXAMPLES = """\b
Examples:
  cflat demo
  cflat demo --out /tmp/demo --json
"""

OPTIMIZERS = ("none", "c_flat", "c_flat_turbo")
SEEDS = (0, 1, 2)
DEMO: dict[str, Any] = {
    "method": "icarl",
    "data": {"name": "digits", "train_per_class": 40},
    "preset": "cpu",
    "runtime": {"threads": 1},
}


def command(
    out: Annotated[Path, typer.Option(help="Folder of runs, figure and page")] = Path("runs/demo"),
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Train iCaRL on digits with a plain optimizer, C-Flat and C-Flat Turbo over three seeds, and show the result."""
    from cflat.studies.compare import compare, comparison_values, write_comparison

    with job_executor("local", out, quiet or json) as executor:
        result = compare(DEMO, OPTIMIZERS, SEEDS, out, executor)
        picture, page = write_comparison(out, result)
    if json:
        emit_json({"out": str(out), "figure": str(picture), "page": str(page), **comparison_values(result)})
        return
    show_comparison(result)
    console().print(f"\nFigure: {picture}\nPage:   {page}")
    next_command("cflat run --method icarl --data digits --optimizer c_flat_turbo")
