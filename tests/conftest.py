"""Fixtures that every area shares."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

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


@pytest.hookimpl(optionalhook=True)  # pytest-xdist need not be there
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep tests that share a fixture on one worker: a second one would make it again."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFixture(LoadScopeScheduling):
        # Not its marks for groups (--dist loadgroup), which have no effect with pytest 9.
        def _split_scope(self, nodeid: str) -> str:
            file, *_ = nodeid.split("::")
            return file if _has_module_fixtures(config.rootpath / file) else nodeid

    return ByFixture(config, log)


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
