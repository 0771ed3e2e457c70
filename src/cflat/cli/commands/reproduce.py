"""``cflat reproduce``: a table or figure of the paper, run and set beside what was published."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cflat._errors import ConfigError
from cflat.cli.commands import listing
from cflat.cli.executors import ExecutorName, Gpus, VariantProgress, job_executor
from cflat.cli.options import (
    DataRoot,
    Json,
    Overrides,
    Quiet,
    Score,
    Weights,
    chosen_layer,
    comma_names,
    comma_numbers,
    safe_name,
)
from cflat.cli.output import console, emit_json, next_command, table

if TYPE_CHECKING:
    from cflat.figures import FigureData
    from cflat.paper.reproduce import Plan, Reproduction

FORMATS = ("svg", "png")

EXAMPLES = """\
  cflat reproduce table1 --scale smoke                   seconds, no files: does everything run?
  cflat reproduce table1 --scale cpu --rows ease --columns cifar100 --weights vit_tiny.safetensors
  cflat reproduce table3 --weights timm --executor ray   the paper's settings, on a cluster
  cflat reproduce fig3 --scale smoke
  cflat list recipes                                     all tables and figures
"""


def command(
    name: Annotated[
        str | None, typer.Argument(help="table1, fig3, ..., or a YAML file; without it, list all tables and figures")
    ] = None,
    overrides: Overrides = None,
    scale: Annotated[str, typer.Option(help="paper (GPU), cpu (minutes per run) or smoke (seconds)")] = "paper",
    rows: Annotated[str, typer.Option(help="Only these methods or lines, comma-separated")] = "",
    columns: Annotated[str, typer.Option(help="Only these columns or datasets, comma-separated")] = "",
    seeds: Annotated[str, typer.Option(help="Seeds to use instead of the recipe's, comma-separated")] = "",
    out: Annotated[Path, typer.Option(help="Folder for results and runs; all tables share their runs")] = Path(
        "runs/reproduce"
    ),
    weights: Weights = None,
    data_root: DataRoot = None,
    score: Score = None,
    executor: ExecutorName = "local",
    gpus: Gpus = 1.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be run, then exit")] = False,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Reproduce a table or figure of the paper at a scale of your choice, next to the published numbers."""
    if name is None:
        listing.command("recipes", json=json)
        return
    from cflat.paper.comparison import write_reproduction
    from cflat.paper.exhibits import load_exhibit
    from cflat.paper.reproduce import Request, plan_exhibit, reproduce, watched_config
    from cflat.studies.analyze import analyze, check_request

    chosen = chosen_layer(None, overrides, data_root=data_root)
    if dry_run and weights is None:
        weights = "timm"  # nothing is loaded; a recipe can be checked without them
    request = Request(scale, weights, chosen, tuple(comma_numbers("--seeds", seeds)), score)
    exhibit = load_exhibit(name)
    if exhibit.rows:
        exhibit = exhibit.select(comma_names(rows), comma_names(columns))
    elif rows or columns:
        raise ConfigError(f"{exhibit.name} has no rows and columns to choose from.")
    plan = plan_exhibit(exhibit, request, out / "runs", needs_data=not dry_run)
    if exhibit.figures:  # before anything is trained
        watched = watched_config(exhibit, request)
        check_request(watched, FORMATS, exhibit.figures)
    if dry_run:
        _show_plan(plan, json)
        return
    folder = out / safe_name(exhibit.name, plan.scale)
    with job_executor(executor, folder, quiet or json, gpus) as (run_on, stop):
        found = reproduce(plan, run_on)
        figures: list[FigureData] = []
        if exhibit.figures:
            # Tasks of smoke runs are shorter than ten steps: no record would have another one five steps earlier.
            tell, every = VariantProgress(is_silent=quiet or json), 1 if scale == "smoke" else 5
            figures = analyze(
                watched, folder, every=every, formats=FORMATS, only=exhibit.figures, tell=tell, should_stop=stop
            )
        files = write_reproduction(folder, plan, found, figures)
    if json:
        emit_json({"out": str(folder), "files": {kind: str(file) for kind, file in files.items()}, **found.to_dict()})
        return
    _show(found, figures, folder)
    console().print(f"Results: {folder}\nPage:    {files['page']}")
    next_command("cflat list recipes")


def _show(found: Reproduction, figures: list[FigureData], folder: Path) -> None:
    from cflat.paper.comparison import remarks, tables, verdicts

    out = console()
    out.print(f"{found.exhibit.name}: {found.exhibit.title}\n" + "\n".join(remarks(found)))
    for made in tables(found):
        rows = [[cell.text for cell in row] for row in made.rows]
        out.print()
        out.print(table(made.name, list(made.columns), rows, num_text=made.num_text))
    out.print()
    for sentence in verdicts(found):
        out.print(sentence)
    for figure in figures:
        out.print(f"{figure.title}: {folder / figure.name}.svg")


def _show_plan(plan: Plan, as_json: bool) -> None:
    jobs = plan.all_jobs
    finished = [job for job in jobs if job.is_finished]
    if as_json:
        runs = [
            {
                "out": str(job.out),
                "is_finished": job in finished,
                "shown_in": plan.users_of(job),
                "score": plan.score_of(job.config.method.name),
                "config": job.config.to_dict(),
            }
            for job in jobs
        ]
        head = {"name": plan.exhibit.name, "scale": plan.scale, "meaning": plan.meaning}
        emit_json({**head, "missing": dict(plan.missing), "runs": runs})
        return
    rows = [[job.out.name, "finished" if job in finished else "to run"] for job in jobs]
    console().print(table(f"{plan.exhibit.name} at scale {plan.scale}", ["run", "state"], rows, num_text=2))
    if plan.meaning:
        console().print(plan.meaning)
    for name, reason in plan.missing.items():
        console().print(f"{name} would be left out: {reason}")
    if plan.exhibit.figures:
        console().print(f"Then gradients are watched for {', '.join(plan.exhibit.figures)}.")
    console().print(f"{len(jobs)} runs, {len(finished)} of them finished.")
