"""What one of several ranks does for `tests/train/test_ranks.py`; run by torchrun, results go to a file per rank."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from cflat.config.presets import resolve_config
from cflat.runs.run import assemble
from cflat.train import OptimizerChoice, Runtime, run_stream


def main(out: str, optimizer: str, batch_size: str) -> None:
    world = int(os.environ.get("WORLD_SIZE", "1"))
    config = resolve_config(
        {
            "method": {"name": "replay", "memory_per_class": 2},
            "data": {"name": "digits", "train_per_class": 12, "test_per_class": 5},
            "preset": "smoke",
            "backbone": {"name": "vit_smoke"},  # no BatchNorm: its statistics depend on the share of a rank
            "optimizer": optimizer,
            "stream": {"initial": 4, "increment": 4, "max_tasks": 2},
            "train": {"epochs": 3, "batch_size": int(batch_size)},
            "runtime": {"devices": world, "accelerator": "cpu", "strategy": "ddp" if world > 1 else "auto"},
        }
    )
    runtime = Runtime(config.runtime)
    parts = assemble(config)
    result = run_stream(
        parts.method,
        parts.stream,
        base=config.base,
        train=config.train,
        runtime=runtime,
        optimizer=OptimizerChoice(config.optimizer.name, config.optimizer.keywords()),
        inputs=parts.inputs,
    )
    weights = torch.cat([parameter.detach().reshape(-1) for parameter in parts.method.network.parameters()])
    accuracy = {name: matrix.to_dict() for name, matrix in result.accuracy.items()}
    evaluations = result.cost.evaluations_per_step
    torch.save({"weights": weights, "accuracy": str(accuracy), "evaluations": evaluations}, f"{out}.{runtime.rank}")


if __name__ == "__main__":
    Path(sys.argv[1]).parent.mkdir(parents=True, exist_ok=True)
    main(*sys.argv[1:])
