"""``cflat run``: train one configuration."""

from __future__ import annotations

import shlex
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cflat._errors import ConfigError
from cflat.cli.options import Json, Quiet, Score, safe_name, takes_settings
from cflat.cli.output import console, emit_json, is_main_process, next_command, percent, stoppable, table

if TYPE_CHECKING:
    from cflat.config.run_config import RunConfig
    from cflat.runs.folder import RunSummary
    from cflat.train import Observer

EXAMPLES = """\
  cflat run --method icarl --data digits
  cflat run --method ease --data cifar100 --optimizer c_flat_turbo --weights timm --data-root ~/data
  cflat run --method memo --data npz:photos.npz --preset cpu --weights vit_tiny.safetensors train.epochs=5
  cflat run --method icarl --data digits --dry-run
  cflat run --resume runs/icarl-digits-none-seed0
  cflat run --resume runs/ease-cifar100-none-seed0 --data-root /scratch/data runtime.threads=4
"""


@takes_settings("method", "data", "optimizer", "preset", "seed", "weights", "data_root")
def command(
    layer: dict[str, Any],
    out: Annotated[Path | None, typer.Option(help="Run directory; default runs/METHOD-DATA-OPTIMIZER-seedN")] = None,
    resume: Annotated[Path | None, typer.Option(help="Resume the run in this directory")] = None,
    score: Score = None,
    track: Annotated[str | None, typer.Option(help="Also log metrics to tensorboard, wandb or mlflow")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the configuration and the plan, then exit")] = False,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Train a method on a stream of tasks and evaluate it after each."""
    from cflat.cli.progress import RunProgress, close_all
    from cflat.config.commands import override
    from cflat.config.presets import resolve_config
    from cflat.methods import get_method_spec
    from cflat.runs.folder import RunFolder
    from cflat.runs.run import run
    from cflat.runs.trackers import track_run

    if resume is not None:
        if out is not None:
            raise ConfigError("--resume continues in the run directory it names; leave out --out.")
        before, folder = RunFolder(resume).load_config(), resume
        resolved = before.changed(layer)
        # config.yaml keeps the original values, so the command that resumes the run has to repeat them.
        changes = [override(key, value) for key, value in before.differences(resolved).items()]
    else:
        resolved, changes = resolve_config(layer), []
        # Ranks may find different folders; `run` takes that of rank 0.
        folder = out or _free_folder(resolved)
    score = get_method_spec(resolved.method.name).score(score)  # before anything is trained
    if dry_run:
        _show_plan(resolved, folder, json)
        return
    observers: list[Observer] = [] if quiet or json else [RunProgress(folder=folder)]
    if track is not None:
        observers.append(track_run(track, resolved, folder))
    how_to_go_on = shlex.join(["cflat", "run", "--resume", str(folder), *changes])
    try:
        with stoppable(f"Resume it: {how_to_go_on}") as stop:
            summary = run(resolved, folder, resume=resume is not None, observers=observers, should_stop=stop)
    finally:
        # After an error, too: trackers still send what they hold.
        close_all(observers)
    # All ranks have the summary; one prints it.
    if not is_main_process():
        return
    summary = summary.judged_by(score)
    if json:
        emit_json({"out": str(folder), **summary.to_dict()})
    else:
        _show(summary, folder)


def _free_folder(config: RunConfig) -> Path:
    """Return a folder under ``runs`` that is free; one that a failed start has left empty counts as free."""
    from cflat.runs.folder import has_content

    name = safe_name(config.method.name, config.data.name, config.optimizer.name, f"seed{config.seed}")
    path, number = Path("runs") / name, 2
    while path.exists() and has_content(path):
        path, number = Path("runs") / f"{name}-{number}", number + 1
    return path


def _show(summary: RunSummary, folder: Path) -> None:
    from cflat.config.commands import compare_command
    from cflat.metrics import METRICS

    found = [
        (split, name, matrix)
        for split, matrices in (("test", summary.accuracy), ("validation", summary.validation))
        for name, matrix in sorted(matrices.items(), key=lambda item: item[0] != summary.score)
        if matrix.num_stages
    ]
    shown = [metric for metric in METRICS.values() if any(not isnan(getattr(m, metric.name)) for _, _, m in found)]
    rows = [[split, name, *(percent(getattr(matrix, m.name)) for m in shown)] for split, name, matrix in found]
    out = console()
    config = summary.config
    title = f"{config.method.name} on {config.data.name} with {config.optimizer.name}, seed {config.seed} (percent)"
    columns = ["images", "score", *(metric.title for metric in shown)]
    out.print(table(title, columns, rows, num_text=2))
    for metric in shown:
        out.print(f"  {metric.title}: {metric.definition}")
    out.print(
        f"{summary.value('images_per_second'):.0f} images/s, "
        f"{summary.value('evaluations_per_step'):.2f} evaluations/step, "
        f"{summary.cost.peak_memory_bytes / 2**20:.0f} MiB, {summary.seconds:.1f} s"
    )
    out.print(f"Results: {folder}")
    next_command(compare_command(config, ("none", "c_flat", "c_flat_turbo")))


def _show_plan(config: RunConfig, folder: Path, as_json: bool) -> None:
    from cflat.config.commands import reproduce_command
    from cflat.data.outline import shortlist
    from cflat.runs.plan import plan_run

    plan = plan_run(config)
    if as_json:
        emit_json({"out": str(folder), "config": config.to_dict(), "plan": plan.to_dict()})
        return
    print(config.to_yaml())
    rows = []
    for task in plan.tasks:
        # Tasks of these streams share classes: a list of them would not tell the tasks apart.
        name = task.name if config.stream.scenario in ("domain", "blurry") else shortlist(task.class_names)
        counts = (task.train_images, task.validation_images, task.test_images, task.steps)
        rows.append([str(task.index), name, *map(str, counts)])
    columns = ["task", "classes", "train images", "validation images", "test images", "steps"]
    console().print(table("", columns, rows, num_text=2))
    print(f"{plan.steps} steps without exemplars, {plan.evaluations} evaluations per step; run directory {folder}")
    if (command := reproduce_command(config)) is not None:
        next_command(f"{command} {shlex.join(['--out', str(folder)])}")
