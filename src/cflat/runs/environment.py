"""Where a run took place: versions, machine, source; no names of hosts, users or folders."""

from __future__ import annotations

import os
import platform
import subprocess
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import cflat
from cflat._errors import CFlatError
from cflat._machine import all_memory
from cflat.data.catalog import list_datasets, locate_dataset

PACKAGES = ("torch", "torchvision", "timm", "lightning-fabric", "numpy", "scipy", "scikit-learn", "pydantic")
"""Those that can change a result."""
SUFFIXES = (".safetensors", ".pth", ".pt", ".bin")
"""Of weights files."""


def describe_environment() -> dict[str, Any]:
    """Return what is needed to reproduce the numbers of a run."""
    return {
        "cflat": cflat.__version__,
        "source": _source(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "system": platform.system(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "memory_bytes": all_memory(),
        "torch_threads": torch.get_num_threads(),
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "cuda": torch.version.cuda if torch.cuda.is_available() else None,
    }


def find_datasets() -> list[str]:
    """Return the datasets of the catalogue whose files are below the data root, or that need none."""
    found = []
    for spec in list_datasets():
        with suppress(CFlatError):  # it is not there, or needs a path
            locate_dataset(spec.name)
            found.append(spec.name)
    return found


def find_weights(root: str | None) -> list[str]:
    """Return the weights that runs could start from: files here and below the data root, and what timm has fetched."""
    folders = [Path(), Path("weights"), *([Path(root), Path(root) / "weights"] if root else [])]
    files = {str(path) for folder in folders if folder.is_dir() for path in folder.iterdir() if path.suffix in SUFFIXES}
    home = Path(os.environ.get("HF_HOME") or Path("~/.cache/huggingface").expanduser())
    cached = {f"timm ({path.name.split('--')[-1]})" for path in (home / "hub").glob("models--timm--*")}
    return sorted(files | cached)


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _source() -> dict[str, Any] | None:
    """Return the commit of the checkout that cflat is imported from, if it is one."""
    # The root of a checkout; of an installed package, a folder without .git.
    root = Path(cflat.__file__).resolve().parents[2]
    commit = _git(root, "rev-parse", "HEAD") if (root / ".git").exists() else None
    if commit is None:
        return None
    return {"commit": commit, "is_modified": bool(_git(root, "status", "--porcelain", "-uno"))}


def _git(root: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(root), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
