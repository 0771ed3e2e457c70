"""``cflat plan``: what a run will cost, before it begins."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from cflat.cli.options import Json, takes_settings
from cflat.cli.output import console, duration, emit_json, next_command, table

if TYPE_CHECKING:
    from cflat.config.run_config import RunConfig
    from cflat.runs.plan import Estimate

EXAMPLES = """\
  cflat plan --method icarl --data digits --optimizer c_flat_turbo
  cflat plan --method ease --data cifar100 --optimizer c_flat --preset cpu --weights vit_tiny.safetensors
  cflat plan --method memo --data npz:photos.npz --weights timm train.epochs=5 --json
"""

MANY_TASKS = 12


@takes_settings("method", "data", "optimizer", "preset", "weights", "data_root")
def command(
    layer: dict[str, Any],
    json: Json = False,
) -> None:
    """Measure a few steps on this machine and predict time, memory, FLOPs and disk space of the whole run."""
    from cflat.config.presets import resolve_config
    from cflat.runs.plan import estimate

    resolved = resolve_config(layer)
    found = estimate(resolved)
    if json:
        emit_json({"config": resolved.to_dict(), **asdict(found)})
    else:
        _show(resolved, found)


def _show(config: RunConfig, found: Estimate) -> None:
    from cflat.config.commands import reproduce_command

    out = console()
    # Every n-th task of a long stream, and the last.
    step = -(-len(found.tasks) // MANY_TASKS)
    shown = [task for task in found.tasks if task.task % step == 0 or task is found.tasks[-1]]
    rows = []
    for task in shown:
        counts = [str(task.task), str(task.steps), f"{task.evaluations:.0f}", f"{task.flops:.2e}"]
        rows.append([*counts, duration(sum(task.seconds.values())), _size(task.state_bytes)])
    title = f"{config.method.name} on {config.data.name} with {config.optimizer.name}: {len(found.tasks)} tasks"
    out.print(table(title, ["task", "steps", "evaluations", "FLOPs", "time", "state"], rows))
    lines = {
        "training": f"{found.steps} steps, {found.evaluations:.0f} evaluations "
        f"({found.evaluations_per_step:.2f} per step), {found.flops:.2e} FLOPs",
        "trained parameters": f"{found.trainable_parameters:,}",
        "time here": f"{duration(found.seconds)}, as busy as the machine is now",
        "of that": ", ".join(f"{name} {duration(seconds)}" for name, seconds in found.parts.items()),
        "memory": f"{_size(found.peak_memory_bytes)} at most, {_size(found.state_bytes)} of it the method's state",
        "disk": f"{_size(found.checkpoint_bytes)} a checkpoint, of which two are kept",
        "measured": f"a few steps and test images of tasks {', '.join(map(str, found.measured_tasks))}",
    }
    if found.ranks > 1:
        lines["ranks"] = f"{found.ranks}; their communication is not included in the time"
    width = max(map(len, lines))
    for name, text in lines.items():
        out.print(f"{name:<{width}}  {text}")
    if (again := reproduce_command(config)) is not None:
        next_command(again)


def _size(num_bytes: float) -> str:
    """Return a size in readable units.

    >>> [_size(size) for size in (0, 1500, 3 << 20, 5 << 30)]
    ['0 KiB', '1 KiB', '3.0 MiB', '5.0 GiB']
    """
    if num_bytes < 1 << 20:
        return f"{num_bytes / 2**10:.0f} KiB"
    return f"{num_bytes / 2**20:.1f} MiB" if num_bytes < 1 << 30 else f"{num_bytes / 2**30:.1f} GiB"
