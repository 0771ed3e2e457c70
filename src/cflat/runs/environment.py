"""Where a run took place: versions, machine, source; no names of hosts, users or folders."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import cflat
from cflat._machine import all_memory

PACKAGES = ("torch", "torchvision", "timm", "lightning-fabric", "numpy", "scipy", "scikit-learn", "pydantic")
"""Those that can change a result."""


def describe_environment() -> dict[str, Any]:
    """Return what somebody needs to know who wants the same numbers."""
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


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _source() -> dict[str, Any] | None:
    """Return the commit of the checkout that cflat is imported from, if it is one."""
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
