"""Convolutions in channels-last order: the same training to rounding in double precision, resumed bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cflat.train import BaseSettings, Observer, OptimizerChoice, Runtime, RuntimeSettings, Trainer, TrainSettings
from runs import cpu, tiny_method, tiny_stream
from shard_run import inputs

STREAM = tiny_stream(per_class=4)


class CrashAt(Observer):
    """Die after so many steps."""

    def __init__(self, steps: int) -> None:
        self.left = steps

    def on_step(self, event) -> None:
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt


def run(runtime: Runtime, observer: Observer | None = None, folder: Path | None = None):
    method = tiny_method("memo", STREAM)
    Trainer(
        method,
        STREAM,
        base=BaseSettings(lr=0.01),
        train=TrainSettings(epochs=1, batch_size=6, checkpoint_minutes=0),
        runtime=runtime,
        optimizer=OptimizerChoice("c_flat_turbo", {"rho": 0.05}),
        inputs=inputs(),
        observer=observer or Observer(),
        folder=folder,
    ).run(resume=folder is not None)
    return method


@pytest.fixture(autouse=True)
def _double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def test_layouts_train_alike_and_resume(tmp_path: Path):
    runtime = Runtime(RuntimeSettings(accelerator="cpu", channels_last=True))
    whole, plain = run(runtime), run(cpu())
    kernels = [p for p in whole.network.parameters() if p.ndim == 4]
    assert all(kernel.is_contiguous(memory_format=torch.channels_last) for kernel in kernels)
    expected = dict(plain.network.named_parameters())
    for name, weight in whole.network.named_parameters():
        torch.testing.assert_close(weight, expected[name], rtol=1e-6, atol=1e-9)
    with pytest.raises(KeyboardInterrupt):
        run(runtime, CrashAt(2), tmp_path)
    state = run(runtime, folder=tmp_path).state_dict()
    assert [key for key, value in whole.state_dict().items() if not torch.equal(value, state[key])] == []
