"""Training in mixed precision: finite, counted as in full precision, and resumed bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cflat.train import (
    BaseSettings,
    Observer,
    OptimizerChoice,
    Runtime,
    RuntimeSettings,
    Trainer,
    TrainSettings,
)
from runs import cpu, tiny_inputs, tiny_method, tiny_stream

STREAM = tiny_stream(per_class=6)
TURBO = OptimizerChoice("c_flat_turbo", {"rho": 0.05, "k": 3, "threshold": 0.2})


class Watch(Observer):
    """Note the precision of features, and die after so many steps."""

    def __init__(self, steps: int = 1000) -> None:
        self.left = steps
        self.seen: set[torch.dtype] = set()

    def on_phase_start(self, optimizer, network) -> None:
        network.backbone.register_forward_hook(lambda *call: self.seen.add(call[2].dtype))

    def on_step(self, event) -> None:
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt


def run(name: str, runtime: Runtime, observer: Observer | None = None, folder: Path | None = None):
    method = tiny_method(name, STREAM)
    result = Trainer(
        method,
        STREAM,
        base=BaseSettings(lr=0.02),
        train=TrainSettings(epochs=2, batch_size=6, checkpoint_minutes=0),
        runtime=runtime,
        optimizer=TURBO,
        inputs=tiny_inputs(),
        observer=observer or Observer(),
        folder=folder,
    ).run(resume=folder is not None)
    return method, result


@pytest.mark.parametrize("name", ["icarl", "ease"])
def test_bf16_trains_is_counted_and_resumes(name: str, tmp_path: Path):
    bf16 = Runtime(RuntimeSettings(accelerator="cpu", precision="bf16"))
    watch = Watch()
    whole, result = run(name, bf16, watch)
    weights = dict(whole.network.named_parameters())
    assert all(value.dtype == torch.float32 and value.isfinite().all() for value in weights.values())
    assert result.cost.nonfinite_steps == 0
    full, in_full = run(name, cpu())
    assert result.cost.steps == in_full.cost.steps
    assert result.cost.steps < result.cost.evaluations <= 4 * result.cost.steps
    assert any(not torch.equal(value, weights[key]) for key, value in full.network.named_parameters())
    if name == "icarl":
        assert watch.seen == {torch.bfloat16}
    for steps in (2, 7):
        with pytest.raises(KeyboardInterrupt):
            run(name, bf16, Watch(steps), tmp_path)
    resumed, again = run(name, bf16, folder=tmp_path)
    expected = whole.state_dict()
    assert [key for key, value in resumed.state_dict().items() if not torch.equal(value, expected[key])] == []
    assert again.accuracy == result.accuracy
    assert again.cost.evaluations == result.cost.evaluations
    assert again.cost.evaluations_by_kind == result.cost.evaluations_by_kind
