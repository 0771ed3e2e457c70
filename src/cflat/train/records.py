"""What observers are told at the end of an epoch and of a task: flat records of plain numbers, ready for JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from cflat.data import Split, Task
from cflat.metrics.accuracy import AccuracyMatrix
from cflat.optim import SharpnessAware

__all__ = ["epoch_record", "task_record"]


def epoch_record(task: int, phase: str, epoch: int, loss: float, optimizer: SharpnessAware) -> dict[str, Any]:
    """Return the mean loss of an epoch and the optimizer's counters since its phase began."""
    counters = optimizer.telemetry
    return {
        "event": "epoch",
        "task": task,
        "phase": phase,
        "epoch": epoch,
        "loss": loss,
        "lr": optimizer.param_groups[0]["lr"],
        "steps": counters.steps,
        "evaluations": counters.evaluations,
        "sharpness": asdict(counters.sharpness),
        "flatness": asdict(counters.flatness),
        "cache_age": dict(counters.cache_age),
        "surrogate": asdict(counters.surrogate),
        "nonfinite": counters.nonfinite,
        "last": dict(counters.last),
    }


def task_record(
    task: Task,
    accuracy: Mapping[Split, Mapping[str, AccuracyMatrix]],
    cost: Mapping[str, Any],
    evaluation_seconds: float,
) -> dict[str, Any]:
    """Return the accuracies after a task, by score, those on validation images apart, and the cost so far."""
    record: dict[str, Any] = {"event": "task", "task": task.index, "name": task.name}
    for split, matrices in accuracy.items():
        found = {
            name: {
                "stage_accuracy": float(matrix.stage_accuracy[-1]),
                "per_task": [float(value) for value in matrix.per_task],
            }
            for name, matrix in matrices.items()
        }
        record |= found if split == "test" else {split: found}
    record |= {name: cost[name] for name in ("steps", "images", "evaluations")}
    record["images_per_second"] = cost["images_per_second"]
    record["evaluations_per_step"] = cost["evaluations_per_step"]
    record["evaluation_seconds"] = evaluation_seconds
    return record
