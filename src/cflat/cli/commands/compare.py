"""``cflat compare``: optimizers side by side, over several seeds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cflat._files import write_json
from cflat.cli.executors import ExecutorName, Gpus, job_executor
from cflat.cli.options import Json, Quiet, Score, comma_numbers, takes_settings, usual_folder
from cflat.cli.output import console, emit_json, next_command, spread_cells, spread_columns, table

if TYPE_CHECKING:
    from cflat.studies.sweep import SweepResult

DEFAULT = "none,c_flat,c_flat_turbo"
OPTIMIZERS = "Comma-separated, reference first; append settings as in c_flat_turbo:reading=calibrated; default "
EXAMPLES = """\
  cflat compare --method icarl --data digits --optimizers none,c_flat,c_flat_turbo --seeds 0,1,2
  cflat compare --method ease --data cifar100 --preset cpu --weights vit_tiny.safetensors optimizer.rho=0.1
  cflat compare --method icarl --data digits --optimizers c_flat,c_flat_turbo,c_flat_turbo:reading=calibrated
  cflat compare --tuned runs/tune-icarl-digits/tuned.json --seeds 0,1,2,3,4
"""


@takes_settings("method", "data", "preset", "weights", "data_root")
def command(
    layer: dict[str, Any],
    optimizers: Annotated[str | None, typer.Option("--optimizers", "-o", help=OPTIMIZERS + DEFAULT)] = None,
    seeds: Annotated[str, typer.Option(help="Seeds, comma-separated")] = "0,1,2",
    tuned: Annotated[Path | None, typer.Option(help="Use the settings in a tuned.json from cflat tune")] = None,
    score: Score = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the runs; default runs/compare-METHOD-DATA")] = None,
    executor: ExecutorName = "local",
    gpus: Gpus = 1.0,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Compare optimizers on one method and dataset: mean and spread over seeds, paired differences."""
    from cflat.config.commands import reproduce_command
    from cflat.config.variants import list_variants, parse_variant
    from cflat.studies.compare import compare, comparison_values, write_comparison
    from cflat.studies.tuned import read_tuning, require_tuned

    names = list_variants(optimizers or DEFAULT)
    numbers = comma_numbers("--seeds", seeds)
    settings: dict[str, dict[str, Any]] = {}
    if tuned is not None:
        found = read_tuning(tuned)
        found.check_seeds(numbers)
        settings = found.settings
        # In the canonical spelling, under which the search has stored them.
        names = [parse_variant(name).text for name in list_variants(optimizers)] if optimizers else list(settings)
        require_tuned(names, found)
        layer = found.final_layer(layer)
        score = score or found.score
    # Not the folder of a plain comparison, where the same optimizers have other settings: runs are never mixed.
    folder = out or usual_folder("compare-tuned" if tuned else "compare", layer)
    with job_executor(executor, folder, quiet or json, gpus) as (chosen, _):
        if tuned is not None:  # the page must know that each optimizer has the settings of one search
            write_json(folder / "tuned.json", found.to_dict())
        result = compare(layer, names, numbers, folder, chosen, settings, score)
        picture, page = write_comparison(folder, result)
    values = comparison_values(result)
    if json:
        emit_json({"out": str(folder), "figure": str(picture), "page": str(page), **values})
        return
    show_comparison(result)
    console().print(f"Results: {folder}\nPage:    {page}")
    # A suggestion to look at one run; rows are not ranked by it.
    best = max(result.rows, key=lambda row: row.spread("avg").mean).summaries[0].config
    # Some configurations cannot be written as a command line.
    next_command(reproduce_command(best) or ["cflat", "report", str(folder)])


def show_comparison(result: SweepResult) -> None:
    """Print the two tables: numbers with their spread, and differences to the first optimizer."""
    from cflat.metrics import HEADLINES, METRICS
    from cflat.studies.compare import row_title

    first, *others = result.rows
    config, n, out = first.summaries[0].config, len(result.seeds), console()
    what = f"mean ± deviation over {n} seeds, accuracies on {result.split} images in percent"
    rows = [[row_title(row), *spread_cells(row.spreads, result.further)] for row in result.rows]
    title = f"{config.method.name} on {config.data.name}, score {first.score}: {what}"
    out.print(table(title, ["optimizer", *spread_columns(result.further)], rows))
    if others:
        title = (
            f"difference to {row_title(first)}, score {first.score}, seed by seed, in points "
            f"(p: paired t-test, n = {n})"
        )
        rows = [[row_title(one), *(one.difference(first, m).text(scale=100) for m in HEADLINES)] for one in others]
        out.print()
        out.print(table(title, ["optimizer", *(METRICS[name].title for name in HEADLINES)], rows))
        if all(one.values(name) == first.values(name) for one in others for name in HEADLINES):
            out.print(
                "All rows are equal to the last digit: this stream is too small or too easy to distinguish optimizers. "
                "Use more test images, a harder stream, or more training steps.",
                soft_wrap=True,
            )
