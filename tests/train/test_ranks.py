"""The trainer on two ranks: the same weights and decisions on both, and those of one rank with the whole batch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).with_name("rank_run.py")


def results_of(folder: Path, optimizer: str, num_ranks: int, batch_size: int) -> list[dict]:
    out = folder / f"{optimizer}-{num_ranks}"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    command = [*(launcher if num_ranks > 1 else [sys.executable]), str(SCRIPT), str(out), optimizer, str(batch_size)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return [torch.load(f"{out}.{rank}", weights_only=True) for rank in range(num_ranks)]


@pytest.mark.parametrize("optimizer", ["none", "c_flat_turbo"])
def test_two_ranks_agree_and_equal_one_with_the_whole_batch(optimizer: str, tmp_path: Path):
    first, second = results_of(tmp_path, optimizer, num_ranks=2, batch_size=4)
    assert torch.equal(first["weights"], second["weights"])
    assert first["accuracy"] == second["accuracy"]
    assert first["evaluations"] == second["evaluations"]
    (alone,) = results_of(tmp_path, optimizer, num_ranks=1, batch_size=8)
    assert alone["evaluations"] == first["evaluations"]
    torch.testing.assert_close(first["weights"], alone["weights"], rtol=1e-3, atol=1e-4)
