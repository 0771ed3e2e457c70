"""``cflat doctor``: what this machine can do, and what is missing."""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec
from typing import Any

from cflat.cli.options import Json
from cflat.cli.output import console, emit_json, next_command, table

EXAMPLES = """\b
Examples:
  cflat doctor
  cflat doctor --json
"""

OPTIONAL = {"ray": "cflat[sweep]", "tensorboard": "cflat[track]", "wandb": "cflat[track]", "mlflow": "cflat[track]"}


def command(json: Json = False) -> None:
    """Report versions, devices, memory, disk and the data root."""
    from cflat.runs.environment import describe_environment

    facts = {**describe_environment(), "data_root": _data_root(), "free_disk_bytes": shutil.disk_usage(".").free}
    facts["optional"] = {name: find_spec(name) is not None for name in OPTIONAL}
    if json:
        emit_json(facts)
        return
    console().print(table("", ["what", "found"], _rows(facts), num_text=2))
    next_command("cflat demo")


def _rows(facts: dict[str, Any]) -> list[list[str]]:
    memory = facts["memory_bytes"]
    packages = ", ".join(f"{name} {found or 'missing'}" for name, found in facts["packages"].items())
    optional = ", ".join(
        name if is_there else f"{name} missing (pip install '{OPTIONAL[name]}')"
        for name, is_there in facts["optional"].items()
    )
    return [
        ["cflat", facts["cflat"]],
        ["python", f"{facts['python']} on {facts['system']} {facts['machine']}"],
        ["packages", packages],
        ["optional", optional],
        ["processor", f"{facts['cpus']} cores, torch threads: {facts['torch_threads']}"],
        ["memory", "unknown" if memory is None else f"{memory / 2**30:.1f} GiB"],
        ["GPUs", ", ".join(facts["gpus"]) or "none: use preset cpu or smoke"],
        ["free disk here", f"{facts['free_disk_bytes'] / 2**30:.1f} GiB"],
        ["data root", facts["data_root"] or "not set: give --data-root or set $CFLAT_DATA"],
    ]


def _data_root() -> str | None:
    root = os.environ.get("CFLAT_DATA")
    if root and not os.path.isdir(root):
        return f"{root} (not a folder)"
    return root or None
