"""``cflat predict``: the classes of new images, by a trained method."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cflat._errors import ConfigError
from cflat._files import csv_text
from cflat.cli.options import Json
from cflat.cli.output import console, emit_json, table

EXAMPLES = """\
  cflat predict runs/icarl-digits-none-seed0 photos/
  cflat predict runs/ease-cub200-c_flat_turbo-seed0 bird.jpg other.jpg --top 3
  cflat predict runs/ease-cub200-c_flat_turbo-seed0 photos/ --csv > answers.csv
"""


def command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory, or a file that Predictor.save wrote")],
    images: Annotated[list[Path], typer.Argument(metavar="IMAGE", help="Image files, or folders of images")],
    top: Annotated[int, typer.Option(help="Number of classes to report per image")] = 1,
    task: Annotated[int | None, typer.Option(help="Task of the images, from 0; task-incremental runs only")] = None,
    score: Annotated[str | None, typer.Option(help="Score to rank classes by; default: the method's first")] = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV with one line per image")] = False,
    json: Json = False,
) -> None:
    """Classify new images with a trained method; the training data is not needed."""
    from cflat.runs.inference import load_predictor

    if as_csv and json:
        raise ConfigError("--csv and --json exclude each other.")
    found = load_predictor(run).predict(images, top=top, task=task, score=score)
    if json:
        emit_json([prediction.to_dict() for prediction in found])
        return
    places = ["", *(f" {place}" for place in range(2, 1 + len(found[0].top)))]
    columns = ["image", *(f"{what}{place}" for place in places for what in ("class", "score"))]
    rows = [[one.image, *(cell for name, value in one.top for cell in (name, f"{value:.4g}"))] for one in found]
    # Plain CSV, without a title or the next command, for pipes.
    if as_csv:
        print(csv_text([columns, *rows]), end="")
        return
    console().print(table("", columns, rows, num_text=2))
