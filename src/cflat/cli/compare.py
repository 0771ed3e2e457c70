"""``cflat compare``: optimizers side by side, over several seeds."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cflat.cli.jobs import ExecutorName, Gpus, job_executor
from cflat.cli.options import (
    Config,
    Data,
    DataRoot,
    Json,
    Method,
    Overrides,
    Preset,
    Quiet,
    Weights,
    chosen_layer,
    comma_names,
    comma_numbers,
    safe_name,
)
from cflat.cli.output import console, emit_json, next_command, plus_minus, table

if TYPE_CHECKING:
    from cflat.metrics import PairedDifference
    from cflat.studies.compare import Comparison

__all__ = ["EXAMPLES", "command", "show_comparison"]

EXAMPLES = """\b
Examples:
  cflat compare --method icarl --data digits --optimizers none,c_flat,c_flat_turbo --seeds 0,1,2
  cflat compare --method ease --data cifar100 --preset cpu --weights vit_tiny.safetensors optimizer.rho=0.1
"""


def command(
    overrides: Overrides = None,
    method: Method = None,
    data: Data = None,
    optimizers: Annotated[
        str, typer.Option("--optimizers", "-o", help="Separated by commas; the first is the reference")
    ] = "none,c_flat,c_flat_turbo",
    seeds: Annotated[str, typer.Option(help="Separated by commas")] = "0,1,2",
    preset: Preset = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the runs; default runs/compare-METHOD-DATA")] = None,
    weights: Weights = None,
    data_root: DataRoot = None,
    config: Config = None,
    executor: ExecutorName = "local",
    gpus: Gpus = 1.0,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Compare optimizers on one method and dataset: mean and spread over seeds, paired differences."""
    from cflat.studies.compare import compare, write_comparison

    layer = chosen_layer(
        config,
        overrides,
        method=method,
        data__name=data,
        data__root=data_root,
        backbone__weights=weights,
        preset=preset,
    )
    folder = out or Path("runs") / safe_name("compare", *(_name(layer.get(key)) for key in ("method", "data")))
    with job_executor(executor, quiet or json, gpus) as chosen:
        comparison = compare(layer, comma_names(optimizers), comma_numbers("--seeds", seeds), folder, chosen)
    picture, page = write_comparison(folder, comparison)
    if json:
        emit_json({"out": str(folder), "figure": str(picture), "page": str(page), **comparison.to_dict()})
        return
    show_comparison(comparison)
    console().print(f"Results: {folder}\nPage:    {page}")
    next_command(
        f"cflat run --method {comparison.method} --data {comparison.data} --optimizer c_flat_turbo optimizer.rho=0.1"
    )


def show_comparison(comparison: Comparison) -> None:
    """Print the two tables: numbers with their spread, and differences to the first optimizer."""
    rows = [
        [
            row.optimizer,
            *(
                plus_minus(row.spreads[name].mean, row.spreads[name].std, scale=100)
                for name in ("avg", "last", "forgetting")
            ),
            plus_minus(row.spreads["images_per_second"].mean, row.spreads["images_per_second"].std, digits=0),
            plus_minus(row.spreads["evaluations_per_step"].mean, row.spreads["evaluations_per_step"].std),
        ]
        for row in comparison.rows
    ]
    n = len(comparison.seeds)
    out = console()
    title = f"{comparison.method} on {comparison.data}: mean ± deviation over {n} seeds, accuracies in percent"
    out.print(table(title, ["optimizer", "Avg", "Last", "Forgetting", "img/s", "evaluations/step"], rows))
    if len(comparison.rows) > 1:
        differences = [
            [row.optimizer, *(_difference(row.differences[name]) for name in ("avg", "last", "forgetting"))]
            for row in comparison.rows[1:]
        ]
        out.print()
        title = f"difference to {comparison.rows[0].optimizer}, seed by seed, in points (p: paired t-test, n = {n})"
        out.print(table(title, ["optimizer", "Avg", "Last", "Forgetting"], differences))


def _difference(found: PairedDifference) -> str:
    p = "" if math.isnan(found.p) else f" (p {found.p:.2g})"
    return f"{100 * found.mean:+.2f}" + ("" if math.isnan(found.std) else f" ± {100 * found.std:.2f}") + p


def _name(section: object) -> object:
    return section.get("name") if isinstance(section, dict) else section
