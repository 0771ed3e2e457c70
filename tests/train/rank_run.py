"""What one of several ranks does for `tests/train/test_ranks.py`; results go to a file per rank.

One process carries out many cases: starting it takes longer than most of them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cflat.data import BatchLoader, ImageSet, Transform, eval_transform
from cflat.methods import Method, get_method_spec
from cflat.train import (
    BaseSettings,
    Inputs,
    OptimizerChoice,
    RunResult,
    Runtime,
    RuntimeSettings,
    Trainer,
    TrainingInterrupted,
    TrainSettings,
)
from runs import IMAGE_SIZE, tiny_method, tiny_stream

OPTIMIZERS: dict[str, dict[str, Any]] = {"none": {}, "c_flat": {"rho": 0.05}, "c_flat_turbo": {"rho": 0.05}}
METHODS: dict[str, dict[str, Any]] = {
    "finetune": {},
    "joint": {},
    "lwf": {},
    "ewc": {"weight": 10.0},
    "replay": {"memory_per_class": 3},
    "icarl": {"memory_per_class": 3},
    "memo": {"memory_per_class": 3},
    "derpp": {"memory_per_class": 3},
    "er_ace": {"memory_total": 20},
    "l2p": {},
    "dualprompt": {},
    "coda_prompt": {"layers": (0, 1), "components": 3, "orthogonality": 0.0},
    "slca": {"align_epochs": 1, "align_samples": 8},
    "simplecil": {},
    "aper": {"dropout": 0.0},
    "ranpac": {"dropout": 0.0, "double": True},
    "ease": {"dropout": 0.0},
    "duct": {"retrain_epochs": 1},
}
"""Without dropout: ranks draw masks of their own. CODA-Prompt's penalty is computed, and counted, on each."""


@dataclass(frozen=True)
class Case:
    """What is trained."""

    method: str = "icarl"
    optimizer: str = "none"
    batch_size: int = 14
    """Of the 33 images of the first task, 5 are left for its last step, more or fewer than there are ranks."""
    accumulate: int = 1
    syncs: bool = True
    poison: str = ""
    """Which image of the first task is Inf on rank 1 alone."""
    epochs: int = 1
    ema: float | None = None


@dataclass(frozen=True)
class ToDefault:
    """Give inputs the default precision."""

    num_draws: int = 0

    def __call__(self, images: Tensor, draws: Tensor) -> Tensor:
        return images.to(torch.get_default_dtype())


@dataclass(frozen=True)
class Poison:
    """Let this rank's first image of the first step be Inf."""

    spent: list[bool]
    num_draws: int = 0

    def __call__(self, images: Tensor, draws: Tensor) -> Tensor:
        if self.spent:
            return images
        self.spent.append(True)
        poisoned = images.clone()
        poisoned[0] = torch.inf
        return poisoned


def inputs(poisoned: bool = False) -> Inputs:
    same = Transform((*eval_transform("none", IMAGE_SIZE).stages, ToDefault()))
    return Inputs(Transform((*same.stages, Poison([]))) if poisoned else same, same)


def learn(
    case: Case,
    runtime: Runtime,
    folder: Path | None = None,
    resume: bool = False,
    should_stop: Callable[[], bool] = lambda: False,
) -> tuple[Method, RunResult]:
    stream = tiny_stream("class", 11)
    method = tiny_method(case.method, stream, config=get_method_spec(case.method).config(**METHODS[case.method]))
    result = Trainer(
        method,
        stream,
        base=BaseSettings(lr=0.02, weight_decay=1e-4, ema=case.ema),
        train=TrainSettings(
            epochs=case.epochs, batch_size=case.batch_size, eval_batch_size=7, accumulate=case.accumulate
        ),
        runtime=runtime,
        optimizer=OptimizerChoice(case.optimizer, OPTIMIZERS[case.optimizer]),
        inputs=inputs(bool(case.poison) and runtime.rank == 1),
        seed=3,
        folder=folder,
        should_stop=should_stop,
    ).run(resume=resume)
    return method, result


def learned(case: Case, runtime: Runtime) -> dict[str, Any]:
    """Return all that a case teaches, and what it costs."""
    method, result = learn(case, runtime)
    return {
        "state": {name: value.detach().clone() for name, value in method.state_dict().items()},
        "extra": method.extra_state(),
        "correct": {name: matrix.to_dict() for name, matrix in result.accuracy.items()},
        "answers": answers(method, tiny_stream("class", 11).tasks[0].test),
        "evaluations": result.cost.evaluations,
        "nonfinite": result.cost.nonfinite_steps,
        "images": result.cost.images,
        "flops": result.cost.flops,
    }


@torch.no_grad()
def answers(method: Method, images: ImageSet) -> dict[str, list[int]]:
    """Return the classes that each score gives the images."""
    method.eval()
    (batch,) = BatchLoader(images, inputs().eval, len(images), shuffle=False)
    return {name: scores.argmax(dim=1).tolist() for name, scores in method.predict(batch.without_labels()).items()}


def stop_and_resume(folder: Path, runtime: Runtime) -> dict[str, Any]:
    """Let rank 1 alone be asked to stop, in the third step and in the test behind; go on both times."""
    case = Case("icarl", "c_flat", epochs=2)
    stopped = []
    for number in (3, 12):
        asked = iter(range(1000))
        try:
            learn(case, runtime, folder, bool(stopped), lambda n=number, a=asked: runtime.rank == 1 and next(a) >= n)
        except TrainingInterrupted as error:
            stopped.append(str(error))
    method, _ = learn(case, runtime, folder, resume=True)
    return {"stopped": stopped, "state": dict(method.state_dict())}


def carry_out(cases: Sequence[Case], out: Path, num_ranks: int, stops_in: Path | None = None) -> None:
    """Run all cases as one of several ranks, as the environment says, and write what they teach."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    results: dict[Any, Any] = {}
    for syncs in (True, False):
        runtime = Runtime(RuntimeSettings(accelerator="cpu", sync_batchnorm=syncs, timeout_seconds=300))
        assert runtime.world_size == num_ranks
        results |= {case: learned(case, runtime) for case in cases if case.syncs == syncs}
        if syncs and stops_in is not None:
            results["stopped"] = stop_and_resume(stops_in, runtime)
            results["whole"] = learned(Case("icarl", "c_flat", epochs=2), runtime)
    torch.save(results, f"{out}.{runtime.rank}")


def alone(case: Case) -> dict[str, Any]:
    """Return what one process learns from the whole batches."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return learned(replace(case, poison=""), Runtime(RuntimeSettings(accelerator="cpu")))
    finally:
        torch.set_default_dtype(before)


if __name__ == "__main__":
    sys.exit("Started by tests/train/test_ranks.py.")
