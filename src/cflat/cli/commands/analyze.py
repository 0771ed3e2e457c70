"""``cflat analyze``: the paper's figures for a run of one's own."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cflat._errors import ConfigError
from cflat.cli.jobs import stoppable, tell_variant
from cflat.cli.options import Json, Quiet, comma_names, comma_numbers, takes_settings, usual_folder
from cflat.cli.output import console, emit_json, next_command, table

if TYPE_CHECKING:
    from cflat.config.run_config import RunConfig
    from cflat.figures import FigureData

EXAMPLES = """\b
Examples:
  cflat analyze runs/icarl-digits-c_flat_turbo-seed0
  cflat analyze --method icarl --data digits --optimizer c_flat_turbo
  cflat analyze runs/ease-cifar100-c_flat_turbo-seed0 --every 10 --formats svg,pdf
"""


@takes_settings("method", "data", "optimizer", "preset", "weights", "data_root")
def command(
    layer: dict[str, Any],
    folders: list[str],
    every: Annotated[int, typer.Option(min=1, help="Steps from one gradient record to the next")] = 5,
    seeds: Annotated[str, typer.Option(help="More seeds for sensitivity and schedules, comma-separated")] = "",
    formats: Annotated[str, typer.Option(help="Any of svg, pdf and png, comma-separated")] = "svg",
    out: Annotated[
        Path | None, typer.Option(help="Run directory of a new run; default runs/analyze-METHOD-DATA")
    ] = None,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Record gradients and loss landscapes of a run, vary its optimizer, and draw all figures into DIR/analysis."""
    resolved, folder = _subject(folders, layer, out)
    figures = _analyze(resolved, folder, every, comma_numbers("--seeds", seeds), comma_names(formats), quiet or json)
    if json:
        emit_json({"out": str(folder / "analysis"), "figures": [figure.name for figure in figures]})
        return
    rows = [[figure.name, figure.title] for figure in figures]
    console().print(table(f"Figures in {folder / 'analysis'}", ["name", "what it shows"], rows, num_text=2))
    next_command(["cflat", "report", str(folder), "-o", "report.html"])


def _subject(folders: list[str], layer: dict[str, Any], out: Path | None) -> tuple[RunConfig, Path]:
    """Return the run to analyse and its folder."""
    from cflat.config.presets import resolve_config
    from cflat.runs.folder import RunFolder

    if folders:
        if len(folders) > 1 or layer or out is not None:
            raise ConfigError("Give one run directory and nothing else, or the settings of a new run.")
        return RunFolder(Path(folders[0])).load_config(), Path(folders[0])
    resolved = resolve_config(layer)
    folder = out or usual_folder("analyze", layer)
    existing = RunFolder(folder)
    if existing.config_file.is_file() and existing.load_config() != resolved:
        raise ConfigError(f"{str(folder)!r} holds a run with another configuration; choose another --out.")
    return resolved, folder


def _analyze(
    config: RunConfig, folder: Path, every: int, seeds: list[int], formats: list[str], is_silent: bool
) -> list[FigureData]:
    from cflat.runs.lock import owned
    from cflat.studies.analyze import analyze, check_request, record_run

    check_request(config, formats)
    with stoppable() as stop:
        record_run(config, folder, every=every, should_stop=stop)
        with owned(folder / "analysis"):
            return analyze(
                config,
                folder / "analysis",
                subject=folder,
                every=every,
                seeds=seeds,
                formats=formats,
                tell=partial(tell_variant, is_silent=is_silent),
                should_stop=stop,
            )
