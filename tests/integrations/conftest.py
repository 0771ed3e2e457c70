"""What all clients' tests share."""

from __future__ import annotations

import os

import pytest

# Some virtual machines announce AMX and fault when oneDNN uses it for bfloat16; all others lose nothing here.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    import torch

    torch.manual_seed(0)
