"""``cflat probe``: does flatness change the update here, at which radius, at what cost."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cflat._errors import ConfigError
from cflat._files import write_json
from cflat.cli.options import Json, Quiet, takes_settings, usual_folder
from cflat.cli.output import acknowledge_stop, console, emit_json, next_command, note, table

if TYPE_CHECKING:
    from collections.abc import Callable

    from cflat.analysis.probe import ProbeResult, ProbeRow

EXAMPLES = """\
  cflat probe --method icarl --data digits
  cflat probe --method ease --data cifar100 --preset cpu --weights vit_tiny.safetensors --radii 0.05,0.2,1
"""


@takes_settings("method", "data", "preset", "seed", "weights", "data_root")
def command(
    layer: dict[str, Any],
    radii: Annotated[
        str | None, typer.Option(help="Comma-separated; the verdict is about the first; by default the preset's")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps to probe")] = 24,
    warmup: Annotated[int, typer.Option(min=0, help="Training steps before the first probe")] = 10,
    task: Annotated[
        int, typer.Option(min=0, help="Task to probe, from 0; earlier tasks are trained with the base optimizer")
    ] = 0,
    details: Annotated[bool, typer.Option("--details", help="Print all radii and columns")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder for the results; default runs/probe-METHOD-DATA")] = None,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Compare each optimizer's update with the plain gradient and with exact C-Flat over a grid of radii."""
    from cflat.config.commands import compare_command
    from cflat.config.documents import merge
    from cflat.config.presets import radius_of, resolve_config
    from cflat.figures.probes import probe_figure
    from cflat.figures.static import save
    from cflat.runs.interrupts import StopRequest
    from cflat.runs.lock import owned
    from cflat.studies.probe_run import probe_run
    from cflat.train import TrainingInterrupted

    # For the lam, beta and k of the probe; `probe_run` trains with the base optimizer alone.
    resolved = resolve_config(merge(layer, {"optimizer": "c_flat_turbo"}))
    grid = _radii(radii, radius_of(resolved))
    folder = out or usual_folder("probe", layer)

    def tell(done: int) -> None:
        if not (quiet or json) and (done == steps or done % max(1, steps // 4) == 0):
            note(f"probed {done} of {steps} steps")

    subject = f"{resolved.method.name} on {resolved.data.name}"
    with owned(folder):  # fails before anything is trained if the folder cannot be written
        # Not `stoppable`: a probe that is stopped early reports the steps it has seen.
        try:
            with StopRequest(acknowledge_stop) as stop:
                found = probe_run(resolved, grid, steps=steps, warmup=warmup, task=task, tell=tell, should_stop=stop)
        except TrainingInterrupted:
            note("Stopped before the first probed step; there is nothing to report.")
            raise SystemExit(stop.exit_code) from None
        write_json(folder / "probe.json", found.to_dict())
        figure = probe_figure(found.to_dict(), f"{subject}, task {task + 1}")
        save(figure, folder / "probe.svg")
        picture = save(figure, folder / "probe.png")
    if json:
        emit_json({"out": str(folder), "figure": str(picture), **found.to_dict()})
        return
    _show(found, subject, grid[0], details=details)
    console().print(f"Figure: {picture}")
    radius = found.suggested_rho if found.suggested_rho is not None else grid[0]
    next_command(compare_command(resolved, ("none", "c_flat", "c_flat_turbo"), rho=radius))


def _radii(text: str | None, configured: float) -> tuple[float, ...]:
    from cflat.analysis.probe import RADII

    if text is None:
        return (configured, *(rho for rho in RADII if rho != configured))  # the verdict is about the first
    try:
        radii = tuple(float(part) for part in text.split(",") if part.strip())
    except ValueError:
        radii = ()
    if not radii or not all(math.isfinite(rho) and rho > 0 for rho in radii):
        raise ConfigError(f"--radii must be numbers above 0 separated by commas, got {text!r}.")
    return radii


def _show(found: ProbeResult, subject: str, judged: float, *, details: bool) -> None:
    """Print the verdict, then the rows that it is about; with details, all rows and how far directions turn."""
    out = console()
    for sentence in (found.verdict, *found.remarks):
        out.print(sentence, soft_wrap=True)
    out.print()
    shown = (judged, judged if found.suggested_rho is None else found.suggested_rho)
    rows = [row for row in found.rows if details or (row.rho in shown and not row.optimizer.startswith("reuse only"))]
    columns: dict[str, Callable[[ProbeRow], str]] = {
        "radius": lambda row: f"{row.rho:g}",
        "optimizer": lambda row: row.optimizer,
        "evaluations/step": lambda row: f"{row.evaluations_per_step:.2f}",
        "cos plain": lambda row: _number(row.cosine_plain, 4),
        "e": lambda row: _number(row.surrogate_error, 2),
    }
    if details:
        columns |= {
            "norm": lambda row: _number(row.norm_ratio, 4),
            "cos C-Flat": lambda row: _number(row.cosine_exact, 4),
            "e across g": lambda row: _number(row.surrogate_error_orthogonal, 2),
            "sharpness on %": lambda row: _number(100 * row.sharpness_rate, 0),
            "flatness on %": lambda row: _number(100 * row.flatness_rate, 0),
        }
    cells = [[cell(row) for cell in columns.values()] for row in sorted(rows, key=lambda row: row.rho)]
    out.print(table(f"{subject}: means over {found.steps} steps", list(columns), cells, num_text=2))
    out.print("  cos plain: cosine of the update with the plain gradient; e: distance of what is added to the gradient")
    out.print("  from what C-Flat adds, relative to that (plain training has 1)")
    if not details:
        out.print("  --details shows all radii, norms, triggers and how far directions turn")
        return
    for entry in sorted(found.stability, key=lambda entry: entry.rho):
        turns = ", ".join(f"{name} {_number(value, 3)}" for name, value in entry.cosines.items())
        out.print(f"  radius {entry.rho:g}, cosine with {entry.interval} steps earlier: {turns}")


def _number(value: float, digits: int) -> str:
    return "-" if math.isnan(value) else f"{value:.{digits}f}"
