"""What one of several ranks does for `tests/train/test_ranks.py`; run by torchrun, results go to a file per rank.

One process carries out many cases: starting it takes longer than all of them.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cflat.data import BatchLoader, Transform, eval_transform
from cflat.methods import Method
from cflat.train import BaseSettings, Inputs, OptimizerChoice, Runtime, RuntimeSettings, TrainSettings, run_stream
from runs import IMAGE_SIZE, tiny_method, tiny_stream

OPTIMIZERS: dict[str, dict[str, Any]] = {"none": {}, "c_flat": {"rho": 0.05}, "c_flat_turbo": {"rho": 0.05}}
METHODS: dict[str, dict[str, Any]] = {
    "finetune": {},
    "replay": {"memory_per_class": 3},
    "icarl": {"memory_per_class": 3},
    "memo": {"memory_per_class": 3},
    "l2p": {},
    "dualprompt": {},
    "simplecil": {},
    "aper": {"dropout": 0.0},
    "ranpac": {"dropout": 0.0, "double": True},
    "ease": {"dropout": 0.0},
    "duct": {"retrain_epochs": 1},
}
"""Without dropout: ranks draw masks of their own."""


@dataclass(frozen=True)
class ToDouble:
    """Let inputs have the default precision."""

    num_draws: int = 0

    def __call__(self, images: Tensor, draws: Tensor) -> Tensor:
        return images.to(torch.get_default_dtype())


def runtime_of(**settings: Any) -> Runtime:
    return Runtime(RuntimeSettings(accelerator="cpu", **settings))


def inputs() -> Inputs:
    same = Transform((*eval_transform("none", IMAGE_SIZE).stages, ToDouble()))
    return Inputs(same, same)


def learn(method: str, optimizer: str, runtime: Runtime, batch_size: int = 14, per_class: int = 11) -> dict[str, Any]:
    """Train two tasks of 33 images, the last step of which has 5 images, and return all that was learned."""
    stream = tiny_stream("class", per_class)
    made = tiny_method(method, stream, config=config_of(method))
    result = run_stream(
        made,
        stream,
        base=BaseSettings(lr=0.02, weight_decay=1e-4),
        train=TrainSettings(epochs=1, batch_size=batch_size, eval_batch_size=7),
        runtime=runtime,
        optimizer=OptimizerChoice(optimizer, OPTIMIZERS[optimizer]),
        inputs=inputs(),
        seed=3,
    )
    return {
        "state": {name: value.detach().clone() for name, value in made.state_dict().items()},
        "extra": made.extra_state(),
        "correct": {name: matrix.to_dict() for name, matrix in result.accuracy.items()},
        "answers": answers(made, stream.tasks[0].test),
        "evaluations": result.cost.evaluations,
        "images": result.cost.images,
        "flops": result.cost.flops,
    }


def config_of(method: str) -> Any:
    from cflat.methods import get_method_spec

    return get_method_spec(method).config(**METHODS[method])


@torch.no_grad()
def answers(method: Method, images: Any) -> dict[str, list[int]]:
    """Return the classes that each score gives the images."""
    method.eval()
    (batch,) = BatchLoader(images, inputs().eval, len(images), shuffle=False)
    return {name: scores.argmax(dim=1).tolist() for name, scores in method.predict(batch.without_labels()).items()}


def main(out: str, *cases: str) -> None:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    runtime = runtime_of()
    results = {case: learn(*case.split(":"), runtime) for case in cases}
    torch.save(results, f"{out}.{runtime.rank}")


if __name__ == "__main__":
    assert "RANK" in os.environ
    main(*sys.argv[1:])
