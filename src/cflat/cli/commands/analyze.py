"""``cflat analyze``: the paper's figures for a run of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from cflat._errors import ConfigError
from cflat.cli.executors import VariantProgress
from cflat.cli.options import RUN, Json, Quiet, comma_names, comma_numbers, takes_settings, usual_folder
from cflat.cli.output import console, emit_json, next_command, note, stoppable, table

EXAMPLES = """\
  cflat analyze runs/icarl-digits-c_flat_turbo-seed0
  cflat analyze --method icarl --data digits --optimizer c_flat_turbo
  cflat analyze runs/ease-cifar100-c_flat_turbo-seed0 --every 10 --formats svg,pdf
"""


@takes_settings("method", "data", "optimizer", "preset", "weights", "data_root", words=RUN)
def command(
    layer: dict[str, Any],
    folders: list[str],
    every: Annotated[int, typer.Option(min=1, help="Steps between two gradient records")] = 5,
    seeds: Annotated[str, typer.Option(help="Further seeds for the sensitivity figures, comma-separated")] = "",
    only: Annotated[
        str, typer.Option(help="Draw some figures alone, comma-separated: gradient_drift, evolution, ...")
    ] = "",
    formats: Annotated[str, typer.Option(help="Any of svg, pdf and png, comma-separated")] = "svg",
    out: Annotated[
        Path | None, typer.Option(help="Run directory of a new run; default runs/analyze-METHOD-DATA")
    ] = None,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Record gradients and loss landscapes of a run, vary its optimizer, and draw figures into DIR/analysis."""
    from cflat.config.presets import resolve_config
    from cflat.runs.folder import RunFolder
    from cflat.runs.lock import owned
    from cflat.studies.analyze import analyze, check_request, plan_variants, record_run

    if folders:
        if len(folders) > 1 or layer or out is not None:
            raise ConfigError("Give one run directory and nothing else, or the settings of a new run.")
        resolved, folder = RunFolder(Path(folders[0])).load_config(), Path(folders[0])
    else:
        resolved, folder = resolve_config(layer), out or usual_folder("analyze", layer)
    place, endings, more = folder / "analysis", comma_names(formats), comma_numbers("--seeds", seeds)
    chosen = comma_names(only) if only else ()
    # Before anything is trained.
    check_request(resolved, endings, chosen, more)
    planned = plan_variants(resolved, more, chosen)
    if not (quiet or json):
        watched = sum(variant.is_recorded for variant in planned)
        # Up to: those that are finished already are only read.
        note(f"Trains up to {len(planned)} runs: {watched} recorded, the others for accuracy and speed alone.")
    tell = VariantProgress(is_silent=quiet or json)
    # The run itself is locked by `record_run`, its folder of figures here.
    with stoppable() as stop:
        record_run(resolved, folder, every=every, has_landscapes=not chosen, should_stop=stop)
        with owned(place):
            figures = analyze(
                resolved,
                place,
                subject=folder,
                every=every,
                seeds=more,
                formats=endings,
                only=chosen,
                tell=tell,
                should_stop=stop,
            )
    if json:
        emit_json({"out": str(place), "figures": [figure.name for figure in figures]})
        return
    rows = [[figure.name, figure.title] for figure in figures]
    console().print(table(f"Figures in {place}", ["name", "what it shows"], rows, num_text=2))
    next_command(["cflat", "report", str(folder), "-o", "report.html"])
