"""``cflat sweep``: all combinations of some settings, from a file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cflat.cli.executors import ExecutorName, Gpus, job_executor
from cflat.cli.options import Json, Quiet, safe_name
from cflat.cli.output import console, emit_json, next_command, spread_cells, spread_columns, table

if TYPE_CHECKING:
    from cflat.studies.sweep import Combination, SweepResult

EXAMPLES = """\
  cflat sweep examples/sweep_radius.yaml
  cflat sweep examples/sweep_radius.yaml --dry-run
  cflat sweep radius.yaml --executor ray --out runs/radius
  RAY_ADDRESS=auto cflat sweep radius.yaml --executor ray --gpus 0.5

\b
The file:
  base: {method: icarl, data: digits}
  axes:
    optimizer.name: [sam, c_flat]
    optimizer.rho: [0.02, 0.05, 0.1]
  seeds: [0, 1, 2]
"""

BEST = "*"


def command(
    file: Annotated[Path, typer.Argument(metavar="SWEEP.yaml", help="What to vary; see docs/sweeps.md")],
    out: Annotated[Path | None, typer.Option(help="Folder for the runs; default runs/sweep-NAME")] = None,
    executor: ExecutorName = "local",
    gpus: Gpus = 1.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the planned runs, then exit")] = False,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Run every combination of the listed settings with several seeds; rerun the command to continue."""
    from cflat.studies.space import read_sweep
    from cflat.studies.sweep import plan_sweep, run_sweep, write_sweep

    sweep = read_sweep(file)
    folder = out or Path("runs") / safe_name("sweep", sweep.name)
    if dry_run:
        _show_plan(plan_sweep(sweep, folder), folder, json)
        if not json:
            next_command(["cflat", "sweep", str(file), "--out", str(folder), "--executor", executor])
        return
    with job_executor(executor, folder, quiet or json, gpus) as (chosen, _):
        result = run_sweep(sweep, folder, chosen)
        picture, page = write_sweep(folder, result)
    if json:
        emit_json({"out": str(folder), "figure": str(picture), "page": str(page), **result.to_dict()})
        return
    _show(result)
    console().print(f"Results: {folder}/sweep.json, sweep.csv\nFigure:  {picture}\nPage:    {page}")
    next_command(["python", "-m", "webbrowser", "-t", str(page)])


def _show(result: SweepResult) -> None:
    rows = [
        [*(str(row.settings.get(key, "-")) for key in result.axes), *spread_cells(row.spreads, result.further)]
        for row in result.ranked
    ]
    columns = [*result.axes, *spread_columns(result.further)]
    # Choosing settings by test accuracy would make it an optimistic estimate.
    chosen = "no best one is chosen by test images, set data.validation=0.2 for that"
    if result.best is not None:
        for cells, row in zip(rows, result.ranked, strict=True):
            cells.append("-" if row.validation is None else row.validation.text(scale=100))
        columns.append("validation Avg")
        chosen = f"{BEST} best Avg on validation images"
        rows[0][0] = f"{BEST} {rows[0][0]}" if len(rows) > 1 else rows[0][0]
    n = len(result.seeds)
    what = f"mean ± deviation, n = {n} seed{'s' * (n > 1)}, accuracies on {result.split} images in percent"
    title = f"{result.name}, score {' or '.join(result.scores)}: {what}; {chosen}"
    console().print(table(title, columns, rows, num_text=len(result.axes)))


def _show_plan(combinations: list[Combination], folder: Path, as_json: bool) -> None:
    jobs = [(one.settings, job, job.is_finished) for one in combinations for job in one.jobs]
    finished = sum(is_finished for *_, is_finished in jobs)
    if as_json:
        runs = [
            {"run": str(job.out), "settings": settings, "seed": job.config.seed, "is_finished": is_finished}
            for settings, job, is_finished in jobs
        ]
        emit_json({"out": str(folder), "num_runs": len(jobs), "num_finished": finished, "runs": runs})
        return
    for _, job, is_finished in jobs:
        print(f"{job.out}{'  finished' * is_finished}")
    print(f"{len(jobs)} runs of {len(combinations)} combinations; {finished} finished")
