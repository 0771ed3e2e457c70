"""``cflat doctor``: what this machine can do, and what is missing."""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec

from cflat._machine import gib
from cflat.cli.options import Json
from cflat.cli.output import console, emit_json, next_command, table

EXAMPLES = """\
  cflat doctor
  cflat doctor --json
"""

OPTIONAL = {
    "optuna": "cflat[sweep]",
    "ray": "cflat[sweep]",
    "tensorboard": "cflat[track]",
    "wandb": "cflat[track]",
    "mlflow": "cflat[track]",
}


def command(json: Json = False) -> None:
    """Report versions, devices, memory, disk, and the datasets and weights that are here."""
    from cflat.runs.environment import describe_environment, find_datasets, find_weights

    root = os.environ.get("CFLAT_DATA") or None
    facts = {
        **describe_environment(),
        # A typo in the variable is the usual reason for missing data.
        "data_root": f"{root} (not a folder)" if root and not os.path.isdir(root) else root,
        "free_disk_bytes": shutil.disk_usage(".").free,
        "optional": {name: find_spec(name) is not None for name in OPTIONAL},
        "datasets": find_datasets(),
        "weights": find_weights(root),
    }
    if json:
        emit_json(facts)
        return
    memory = facts["memory_bytes"]
    missing = {name: f"{name} missing (pip install '{extra}')" for name, extra in OPTIONAL.items()}
    rows = {
        "cflat": facts["cflat"],
        "python": f"{facts['python']} on {facts['system']} {facts['machine']}",
        "packages": ", ".join(f"{name} {found or 'missing'}" for name, found in facts["packages"].items()),
        "optional": ", ".join(name if is_there else missing[name] for name, is_there in facts["optional"].items()),
        "processor": f"{facts['cpus']} cores, torch threads: {facts['torch_threads']}",
        "memory": "unknown" if memory is None else gib(memory),
        "GPUs": ", ".join(facts["gpus"]) or "none: use preset cpu or smoke",
        "free disk here": gib(facts["free_disk_bytes"]),
        "datasets": ", ".join(facts["datasets"]),
        "weights": ", ".join(facts["weights"]) or "none: give --weights FILE, or timm to download them",
        "data root": facts["data_root"] or "not set: give --data-root or set $CFLAT_DATA",
    }
    console().print(table("", ["what", "found"], list(rows.items()), num_text=2))
    next_command("cflat demo")
