"""Fixtures that every area shares."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

# Some virtual machines announce AMX and fault when oneDNN uses it for bfloat16; all others lose nothing here.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import pytest
import torch
from hypothesis import HealthCheck, settings

# No test depends on how fast the machine is.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


@cache
def _has_module_fixtures(path: Path) -> bool:
    return 'scope="module"' in path.read_text()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "xdist_group(name): run on one worker, by pytest-xdist if it is installed")


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep tests that share a fixture on one worker (``--dist loadgroup``): a second one would make it again."""
    for item in items:
        if _has_module_fixtures(item.path):
            item.add_marker(pytest.mark.xdist_group(f"{item.path.parent.name}-{item.path.stem}"))


SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder with real data and weights beside the checkout."""
    if not (SHARED / "README.md").is_file():
        pytest.skip(f"needs the shared data folder, absent at {SHARED}")
    return SHARED


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    torch.manual_seed(0)
