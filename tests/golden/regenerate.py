"""Write the golden trajectories anew: ``PYTHONPATH=tests python tests/golden/regenerate.py [case ...]``.

Do this only when a formula is meant to change, and say in the commit which and why. Two tasks of ten steps in
float64; the files hold the final weights and the evaluations of every step.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cases import OPTIMIZERS, TURBO_VARIANTS, Case, Problem, flat_weights, train

GOLDEN = (*OPTIMIZERS, *TURBO_VARIANTS[:3])
FOLDER = Path(__file__).parent
NUM_STEPS = 20
TINY = Problem("tiny", lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), (3,), num_classes=2)


def make_base(model: nn.Module) -> torch.optim.Optimizer:
    """Return the base optimizer of all trajectories."""
    return torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, weight_decay=1e-3)


def trajectory(row: Case) -> dict[str, Any]:
    """Return where 20 steps lead and how many evaluations each of them took."""
    model = TINY.model()
    optimizer = row.make(make_base(model), model=model)
    evaluations = []
    for step in range(NUM_STEPS):
        if step % 10 == 0:
            optimizer.start_task(step // 10, num_tasks=2)
        evaluations += train(optimizer, model, TINY, 1, start=step)
    return {"evaluations": evaluations, "weights": flat_weights(model).tolist()}


def path_of(row: Case) -> Path:
    """Return the file that holds a case's trajectory."""
    return FOLDER / f"{row.id}.json"


def main(names: list[str]) -> None:
    """Write the files of the named cases, or of all."""
    for row in GOLDEN:
        if not names or row.id in names:
            path_of(row).write_text(json.dumps(trajectory(row)) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
