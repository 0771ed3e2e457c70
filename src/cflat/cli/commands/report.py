"""``cflat report``: one page that compares runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cflat.cli.options import Json, Score
from cflat.cli.output import console, emit_json, next_command, note

EXAMPLES = """\
  cflat report runs/compare-icarl-digits
  cflat report runs/ease-cifar100-none-seed0 runs/ease-cifar100-c_flat_turbo-seed0 -o ease.html --title "EASE"
  cflat report runs/compare-icarl-digits --tables tables      accuracy.tex, accuracy.csv, cost.tex, ...
"""


def command(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR", help="Run directories, or folders that contain them")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Output file")] = Path("report.html"),
    tables: Annotated[Path | None, typer.Option(help="Also write the tables as LaTeX and CSV into this folder")] = None,
    title: Annotated[str | None, typer.Option(help="Title of the page")] = None,
    score: Score = None,
    json: Json = False,
) -> None:
    """Compare runs on one self-contained HTML page: accuracy, speed, cost, timelines, differences, commands."""
    from cflat.report.export import tables_of
    from cflat.report.write import write_report

    report = write_report(folders, out, title, score=score)
    files = [] if tables is None else tables_of(report.records, tables)
    if json:
        emit_json(
            {
                "out": str(out),
                "tables": [str(file) for file in files],
                "title": report.data.title,
                "headlines": list(report.data.headlines),
                "runs": report.num_runs,
                "unfinished": report.num_unfinished,
                "groups": [group.name for group in report.groups],
                "scores": list(dict.fromkeys(group.records[0].score for group in report.groups)),
                "problems": [{"where": problem.where, "message": problem.message} for problem in report.problems],
            }
        )
        return
    # A broken run must not hide the others.
    for problem in report.problems:
        note(f"Left out: {problem.where}: {problem.message}")
    for sentence in report.data.headlines:
        console().print(sentence)
    unfinished = f", {report.num_unfinished} unfinished" if report.num_unfinished else ""
    counts = f"{_count(report.num_runs, 'run')}{unfinished}, {_count(len(report.groups), 'configuration')}"
    console().print(f"Page: {out} ({counts})")
    if files:
        console().print(f"Tables: {', '.join(map(str, files))}")
    next_command(["python", "-m", "webbrowser", "-t", str(out)])


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
