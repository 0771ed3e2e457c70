"""``cflat tune``: learning rate and radius for every optimizer, with the same budget, on validation images."""

from __future__ import annotations

import math
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cflat._errors import ConfigError
from cflat.cli.executors import ExecutorName, Gpus, job_executor
from cflat.cli.options import Json, Quiet, Score, comma_numbers, takes_settings, usual_folder
from cflat.cli.output import console, emit_json, next_command, note, percent, table

if TYPE_CHECKING:
    from cflat.studies.curve import RateCurves
    from cflat.studies.tuned import Tuning

EXAMPLES = """\
  cflat tune --method icarl --data digits --optimizers none,sam,c_flat,c_flat_turbo --trials 8
  cflat tune --method replay --data digits --protocol first-task --range base.lr=0.001:0.1
  cflat tune --method ease --data cifar100 --preset cpu --weights vit_tiny.safetensors --executor ray
  cflat tune --method replay --data digits --optimizers none,c_flat_turbo:k=10 --curve --seeds 1000,1001,1002
  cflat compare --tuned runs/tune-icarl-digits/tuned.json --seeds 0,1,2,3,4
"""
# Not those of the search: final runs must not share its luck.
FINAL_SEEDS = "0,1,2,3,4"


@takes_settings("method", "data", "preset", "weights", "data_root")
def command(
    layer: dict[str, Any],
    optimizers: Annotated[
        str,
        typer.Option(
            "--optimizers",
            "-o",
            help="Comma-separated; append settings with colons, as in c_flat_turbo:k=10",
        ),
    ] = "none,sam,c_flat,c_flat_turbo",
    trials: Annotated[int | None, typer.Option(help="Trials per optimizer; default 8")] = None,
    protocol: Annotated[
        str, typer.Option(help="stream: judged by the whole stream; first-task: by its first task alone")
    ] = "stream",
    seeds: Annotated[str, typer.Option(help="Seeds of each trial, comma-separated; not those of the final runs")] = (
        "1000"
    ),
    range_: Annotated[
        list[str] | None,
        typer.Option("--range", help="What to search: base.lr=0.001:0.1, optimizer.k=[2, 5, 10]; may be repeated"),
    ] = None,
    metric: Annotated[str, typer.Option(help="Validation accuracy to maximise: avg or last")] = "avg",
    score: Score = None,
    sampler: Annotated[str | None, typer.Option(help="tpe (guided by earlier trials) or random; default tpe")] = None,
    search_seed: Annotated[int | None, typer.Option(help="Random seed of the search; default 0")] = None,
    prune: Annotated[
        bool | None, typer.Option("--prune/--no-prune", help="Stop unpromising trials early; default --prune")
    ] = None,
    curve: Annotated[
        bool, typer.Option("--curve", help="Instead of searching, measure accuracy over a grid of learning rates")
    ] = False,
    rates: Annotated[str | None, typer.Option(help="Learning rates of the curve, comma-separated")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the search; default runs/tune-METHOD-DATA")] = None,
    executor: ExecutorName = "local",
    gpus: Gpus = 1.0,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Tune every optimizer with the same number of trials on validation images; rerun to continue."""
    from cflat.config.variants import list_variants
    from cflat.studies.curve import rate_curves, write_curves
    from cflat.studies.tune import parse_range, tune, write_search
    from cflat.studies.tuned import read_tuning

    given = {"trials": trials, "sampler": sampler, "search_seed": search_seed, "prune": prune, "range": range_}
    # What is not given is left to the defaults of `tune`.
    search: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    if curve and search:
        options = ", ".join(f"--{'no-' * (value is False)}{key.replace('_', '-')}" for key, value in search.items())
        raise ConfigError(f"--curve trains every rate of a grid and searches nothing; leave out {options}.")
    if rates is not None and not curve:
        raise ConfigError("--rates is for --curve; a search has --range base.lr=LOW:HIGH.")
    ranges = dict(parse_range(text) for text in search.pop("range", ()))
    names, numbers = list_variants(optimizers), comma_numbers("--seeds", seeds)
    folder = out or usual_folder("tune", layer)
    shared: dict[str, Any] = {"protocol": protocol, "seeds": numbers, "metric": metric, "score": score}
    # Trials come in many small batches: Ray is started once.
    with job_executor(executor, folder, quiet or json, gpus, stays=True) as (chosen, _):
        if curve:
            file = folder / "tuned.json"
            tuned = read_tuning(file).settings if file.is_file() else {}
            if tuned and not json:
                note(f"Radii and other settings are those of {file}.")
            grid = None if rates is None else comma_numbers("--rates", rates, float)
            found = rate_curves(layer, names, folder, rates=grid, tuned=tuned, executor=chosen, **shared)
            picture = write_curves(folder, found)
            if json:
                emit_json({"out": str(folder), "figure": str(picture), **found.to_dict()})
                return
            _show_curves(found)
            console().print(f"Numbers: {folder / 'rates.json'}\nFigure:  {picture}")
            next_command(["python", "-m", "webbrowser", "-t", str(picture)])
            return
        tuning = tune(layer, names, folder, ranges=ranges, executor=chosen, **search, **shared)
        picture = write_search(folder, tuning)
        final = shlex.join(["cflat", "compare", "--tuned", str(folder / "tuned.json"), "--seeds", FINAL_SEEDS])
        if json:
            emit_json({"out": str(folder), "figure": str(picture), "next": final, **tuning.to_dict()})
            return
        _show(tuning)
        console().print(f"Settings: {folder / 'tuned.json'}\nFigure:   {picture}")
        next_command(final)


def _show(tuning: Tuning) -> None:
    from cflat.report.groups import title_of
    from cflat.studies.tuned import METRICS, PROTOCOLS

    keys = list(dict.fromkeys(key for settings in tuning.settings.values() for key in settings))
    base = tuning.base
    rows = []
    for name, tuned in tuning.optimizers.items():
        best, budget = tuned.best, tuned.budget
        settings, score = ({}, math.nan) if best is None else (best.settings, best.score)
        cells = [title_of(name, base), *(_value(settings.get(key)) for key in keys), percent(score)]
        cells.append(f"{budget['trials']} ({budget['pruned'] + budget['diverged']})")
        rows.append([*cells, f"{budget['images']:,}", f"{budget['evaluations']:,}", f"{budget['seconds']:.0f}"])
    n = len(tuning.seeds)
    title = (
        f"{tuning.method} on {tuning.data}: chosen by {tuning.metric} (score {tuning.score}) on validation images, "
        f"protocol {tuning.protocol}, {n} seed{'s' * (n > 1)} a trial"
    )
    columns = ["optimizer", *keys, "validation %", "trials (ended early)", "images", "evaluations", "seconds"]
    out = console()
    out.print(table(title, columns, rows))
    out.print(f"  {tuning.protocol}: {PROTOCOLS[tuning.protocol]}")
    out.print(f"  {tuning.metric}: {METRICS[tuning.metric]}; no test image was looked at")
    if tuning.diverged:
        out.print(f"  {tuning.diverged}")


def _show_curves(found: RateCurves) -> None:
    from cflat.metrics import spread
    from cflat.report.groups import title_of

    rows = []
    for curve in found.curves:
        plateau = curve.plateau
        cells = [title_of(curve.optimizer, found.base), f"{plateau.best_rate:g}", percent(plateau.best_accuracy)]
        cells += [f"{plateau.low:.2g} to {plateau.high:.2g}", f"{plateau.decades:.2f}{' or more' * plateau.is_cut_off}"]
        rows.append([*cells, spread([one.decades for one in curve.by_seed]).text()])
    n = len(found.seeds)
    title = (
        f"{found.method} on {found.data}: {len(found.rates)} rates, {n} seed{'s' * (n > 1)}, "
        f"{found.metric} (score {found.score}) on validation images, protocol {found.protocol}; plateau: rates within "
        f"{100 * found.within:g} points of the best"
    )
    columns = ["optimizer", "best rate", "validation %", "plateau", "decades", "decades, each seed"]
    console().print(table(title, columns, rows))


def _value(value: object) -> str:
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
