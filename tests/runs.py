"""Tiny real runs: digits, a few images, one small network. What the tests of methods and trainer share."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch

from cflat.data import Stream, build_stream, eval_transform, load_dataset, train_transform
from cflat.methods import Method, StreamInfo, create_method, get_method_spec
from cflat.nn.backbone import create_backbone
from cflat.optim import Telemetry
from cflat.runs.folder import RunFolder, RunSummary
from cflat.runs.run import run
from cflat.train import (
    BaseSettings,
    Cost,
    EpochRecord,
    Inputs,
    Observer,
    OptimizerChoice,
    RunResult,
    Runtime,
    RuntimeSettings,
    Trainer,
    TrainSettings,
)

IMAGE_SIZE = 8


@cache
def tiny_stream(scenario: str = "class", per_class: int = 12, num_tasks: int = 2) -> Stream:
    dataset = load_dataset("digits", train_per_class=per_class, test_per_class=8)
    return build_stream(dataset, scenario, initial=3, increment=3) if num_tasks > 2 else _first_tasks(dataset, scenario)


def _first_tasks(dataset, scenario) -> Stream:
    whole = build_stream(dataset, scenario, initial=3, increment=3)
    return Stream(scenario, whole.tasks[:2], 6, whole.class_names[:6])


@cache
def cpu() -> Runtime:
    return Runtime(RuntimeSettings(accelerator="cpu"))


def tiny_method(name: str, stream: Stream, seed: int = 0, config=None) -> Method:
    spec = get_method_spec(name)
    torch.manual_seed(seed)
    backbone = create_backbone("small_cnn" if "other" in spec.families else "vit_smoke", image_size=IMAGE_SIZE)
    info = StreamInfo(stream.scenario, stream.num_classes, stream.num_tasks, stream.label_modulus)
    return create_method(name, backbone, info, config)


def tiny_inputs() -> Inputs:
    return Inputs(train_transform("none", IMAGE_SIZE), eval_transform("none", IMAGE_SIZE))


def resume(out: Path) -> RunSummary:
    """Go on with the run in a folder, from its own configuration."""
    return run(RunFolder(out).load_config(), out, resume=True)


def tiny_trainer(
    method: Method,
    stream: Stream,
    *,
    optimizer: str = "none",
    settings: dict | None = None,
    epochs: int = 2,
    folder: Path | None = None,
    observer: Observer | None = None,
    checkpoint_minutes: float = 10.0,
    should_stop=lambda: False,
    check_purity: bool = False,
    base: BaseSettings | None = None,
    choice: OptimizerChoice | None = None,
) -> Trainer:
    return Trainer(
        method,
        stream,
        base=base or BaseSettings(lr=0.05, weight_decay=1e-4, schedule="cosine"),
        train=TrainSettings(
            epochs=epochs, batch_size=16, checkpoint_minutes=checkpoint_minutes, check_purity=check_purity
        ),
        runtime=cpu(),
        optimizer=choice or OptimizerChoice(optimizer, settings or {}),
        inputs=tiny_inputs(),
        seed=3,
        folder=folder,
        observer=observer or Observer(),
        should_stop=should_stop,
    )


def tiny_run(method: Method, stream: Stream, *, resume: bool = False, **options) -> RunResult:
    return tiny_trainer(method, stream, **options).run(resume=resume)


def an_epoch(**values) -> EpochRecord:
    """Return the record of an epoch in which nothing much happened."""
    telemetry = Telemetry(steps=4, evaluations=8)
    return EpochRecord(**{"task": 0, "phase": "train", "epoch": 0, "loss": 1.0, "telemetry": telemetry, **values})


A_COST = Cost(
    steps=6,
    images=96,
    images_per_second=30.0,
    evaluations=24,
    evaluations_per_step=4.0,
    evaluations_by_kind={"sharpness.refreshed": 6},
    nonfinite_steps=0,
    step_seconds=0.1,
    data_seconds=0.01,
    peak_memory_bytes=1,
    trainable_parameters=2,
    flops=3.0,
)
"""What a short run may cost."""
