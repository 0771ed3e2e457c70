"""What one of two ranks does for `tests/train/test_shards.py`; results go to a file per rank."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cflat.data import Transform
from cflat.methods import Method, StreamInfo, create_method, get_method_spec
from cflat.nn.backbone import create_backbone
from cflat.train import (
    BaseSettings,
    Inputs,
    Observer,
    OptimizerChoice,
    Runtime,
    RuntimeSettings,
    Trainer,
    TrainingInterrupted,
    TrainSettings,
)
from cflat.train.shards import gather_whole
from runs import IMAGE_SIZE, tiny_inputs, tiny_stream

CASES = {
    "finetune": ("finetune", "none", {}, {}),
    "finetune-turbo": ("finetune", "c_flat_turbo", {}, {}),
    "finetune-averaged": ("finetune", "c_flat", {}, {}),
    "replay": ("replay", "c_flat", {"memory_per_class": 2}, {"accumulate": 3}),
    "simplecil": ("simplecil", "none", {}, {}),
    "ease": ("ease", "c_flat_turbo", {"dropout": 0.0}, {}),
    "ranpac": ("ranpac", "sam", {"dropout": 0.0, "double": True}, {}),
    "aper": ("aper", "none", {"dropout": 0.0}, {}),
    "l2p": ("l2p", "c_flat_turbo", {}, {}),
    "dualprompt": ("dualprompt", "none", {}, {}),
}
"""Method, optimizer, settings of the method and of the training."""
STREAM = tiny_stream(per_class=3)


@dataclass(frozen=True)
class ToDouble:
    """Let inputs have the default precision."""

    num_draws: int = 0

    def __call__(self, images: Tensor, draws: Tensor) -> Tensor:
        return images.to(torch.get_default_dtype())


def inputs() -> Inputs:
    return Inputs(*(Transform((*one.stages, ToDouble())) for one in (tiny_inputs().train, tiny_inputs().eval)))


class Sizes(Observer):
    """Note how many numbers of the blocks a rank keeps, and of their momentum."""

    def __init__(self) -> None:
        self.kept: list[int] = []

    def on_phase_start(self, optimizer, network) -> None:
        self.optimizer, self.blocks = optimizer, network.backbone.model.blocks

    def on_task_end(self, record) -> None:
        if hasattr(self, "blocks"):
            parts = (p.to_local() if hasattr(p, "to_local") else p for p in self.blocks.parameters())
            self.kept.append(sum(part.numel() for part in parts))


def make(case: str) -> Method:
    name, _, settings, _ = CASES[case]
    torch.manual_seed(0)
    backbone = create_backbone("vit_smoke", image_size=IMAGE_SIZE, checkpointing=case == "replay")
    info = StreamInfo("class", STREAM.num_classes, STREAM.num_tasks)
    return create_method(name, backbone, info, get_method_spec(name).config(**settings))


def learn(case: str, runtime: Runtime, folder: Path | None = None, stop_after: int | None = None) -> dict[str, Any]:
    """Train two tasks of 9 images, the last step of which has three, and return all that was learned."""
    _, optimizer, _, train = CASES[case]
    method, sizes, asked = make(case), Sizes(), iter(range(10_000))
    result = Trainer(
        method,
        STREAM,
        base=BaseSettings(lr=0.02, weight_decay=1e-4, ema=0.8 if case.endswith("-averaged") else None),
        train=TrainSettings(epochs=1, batch_size=2 if train else 6, eval_batch_size=7, **train),
        runtime=runtime,
        optimizer=OptimizerChoice(optimizer, {"rho": 0.05} if optimizer != "none" else {}),
        inputs=inputs(),
        seed=3,
        observer=sizes,
        folder=folder,
        should_stop=lambda: stop_after is not None and next(asked) >= stop_after,
    ).run(resume=folder is not None)
    return {
        "state": gather_whole(method.state_dict(), keep=True),
        "extra": method.extra_state(),
        "correct": {name: matrix.to_dict() for name, matrix in result.accuracy.items()},
        "evaluations": result.cost.evaluations,
        "trainable": result.cost.trainable_parameters,
        "kept": sizes.kept,
    }


def stop_and_go_on(case: str, runtime: Runtime, folder: Path) -> dict[str, Any]:
    """Stop after the first and after the second step, and go on."""
    for stop_after in (1, 1):
        try:
            learn(case, runtime, folder, stop_after)
        except TrainingInterrupted:
            continue
        raise AssertionError("was not stopped")
    return learn(case, runtime, folder)


def stop(case: str, runtime: Runtime, folder: Path) -> None:
    """Leave a checkpoint of a run that was stopped after its first step."""
    folder.mkdir(exist_ok=True)
    with suppress(TrainingInterrupted):
        learn(case, runtime, folder, stop_after=1)


def main(out: str, *cases: str) -> None:
    """Carry out all cases as one of several ranks, as the environment says."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    runtime = Runtime(RuntimeSettings(accelerator="cpu", strategy="fsdp"))
    results = {case: learn(case, runtime) for case in cases}
    for case in [case for case in cases if case in ("finetune-turbo", "finetune-averaged")]:  # alike on all ranks
        folder = Path(out).parent / f"resumed-{case}"
        folder.mkdir(exist_ok=True)
        results[f"resumed-{case}"] = stop_and_go_on(case, runtime, folder)
        stop(case, runtime, Path(out).parent / f"stopped-{case}")
    torch.save(results, f"{out}.{runtime.rank}")
