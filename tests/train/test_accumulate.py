"""Steps of several micro-batches: those of one large batch, in the memory of a small one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import cflat
from cflat.data import Batch
from cflat.methods import StreamInfo, create_method, get_method_spec, list_methods
from cflat.nn.backbone import create_backbone
from cflat.runs.flatness_observer import FlatnessObserver
from cflat.train import BaseSettings, Observer, OptimizerChoice, Trainer, TrainSettings
from cflat.train.objective import Objective
from runs import IMAGE_SIZE, cpu, tiny_inputs, tiny_method, tiny_stream
from shard_run import inputs

TRAINED = [name for name in list_methods() if name != "simplecil"]
SMALL, PARTS = 2, 4  # 15 images: steps of 8 and 7, the last one in parts of 2, 2, 2 and 1
FEW = tiny_stream(per_class=5)


@pytest.fixture
def double():
    torch.set_default_dtype(torch.float64)
    yield inputs()
    torch.set_default_dtype(torch.float32)


def plain_method(name, backbone="vit_smoke"):
    """Return a method on a network without BatchNorm and dropout."""
    spec = get_method_spec(name)
    wanted = {"dropout": 0.0, "retrain_epochs": 1}
    config = spec.config(**{key: wanted[key] for key in wanted if key in spec.config.__dataclass_fields__})
    torch.manual_seed(0)
    built = create_backbone(backbone, image_size=IMAGE_SIZE)
    return create_method(name, built, StreamInfo("class", FEW.num_classes, FEW.num_tasks), config)


def run(method, inputs, optimizer="c_flat_turbo", observer=None, folder=None, **train):
    return Trainer(
        method,
        FEW,
        base=BaseSettings(lr=0.01),
        train=TrainSettings(epochs=1, checkpoint_minutes=0, **train),
        runtime=cpu(),
        optimizer=OptimizerChoice(optimizer, {"rho": 0.05} if optimizer != "none" else {}),
        inputs=inputs,
        observer=observer or Observer(),
        folder=folder,
    ).run(resume=folder is not None)


def assert_equal_runs(make, optimizer, inputs):
    parts, whole = make(), make()
    in_parts = run(parts, inputs, optimizer, batch_size=SMALL, accumulate=PARTS, eval_batch_size=16)
    at_once = run(whole, inputs, optimizer, batch_size=SMALL * PARTS, eval_batch_size=16)
    torch.testing.assert_close(parts.state_dict(), whole.state_dict(), rtol=1e-9, atol=1e-9)
    assert in_parts.accuracy == at_once.accuracy
    for count in ("steps", "images", "evaluations", "evaluations_by_kind"):
        assert getattr(in_parts.cost, count) == getattr(at_once.cost, count), count


@pytest.mark.parametrize("method", TRAINED)
def test_micro_batches_are_one_batch_for_every_method(method, double):
    assert_equal_runs(lambda: plain_method(method), "c_flat_turbo", double)


@pytest.mark.parametrize("optimizer", [name for name in cflat.list_optimizers() if name != "c_flat_turbo"])
def test_micro_batches_are_one_batch_for_every_optimizer(optimizer, double):
    assert_equal_runs(lambda: plain_method("replay", "mlp"), optimizer, double)


class CrashAt(Observer):
    """Die after so many steps."""

    def __init__(self, steps):
        self.left = steps

    def on_step(self, event):
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt


def test_a_run_goes_on_between_its_steps(tmp_path: Path):
    settings = {"batch_size": SMALL, "accumulate": PARTS}
    whole, broken = (tiny_method("icarl", FEW) for _ in range(2))
    run(whole, tiny_inputs(), **settings)
    for steps in (0, 2):
        with pytest.raises(KeyboardInterrupt):
            run(tiny_method("icarl", FEW), tiny_inputs(), observer=CrashAt(steps), folder=tmp_path, **settings)
    run(broken, tiny_inputs(), folder=tmp_path, **settings)
    expected = whole.state_dict()
    assert all(torch.equal(value, expected[key]) for key, value in broken.state_dict().items())


def peak_of_graphs(objective, batch) -> int:
    """Return the most bytes that one backward pass has waiting for it."""
    peak = held = 0

    def pack(tensor):
        nonlocal peak, held
        held += tensor.numel() * tensor.element_size()
        peak = max(peak, held)
        return tensor

    def unpack(tensor):
        nonlocal held
        held = 0  # this graph is being read: what is saved from here on belongs to the next
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        objective.closure(batch)()
    return peak


def test_only_one_micro_batch_has_a_graph_at_a_time():
    method = plain_method("finetune")
    method.grow(FEW.tasks[0])
    batch = Batch(torch.rand(16, 3, 8, 8), torch.arange(16) % 3, torch.arange(16))
    whole, parts = (Objective(method, method.network, cpu(), accumulate=count) for count in (1, 8))
    assert peak_of_graphs(parts, batch) < peak_of_graphs(whole, batch) / 4


def test_flatness_is_measured_in_the_memory_of_a_micro_batch():
    method, sizes, flatness = plain_method("finetune"), [], FlatnessObserver()
    method.network.register_forward_pre_hook(lambda _, arguments: sizes.append(len(arguments[0])))
    run(method, tiny_inputs(), observer=flatness, batch_size=SMALL, accumulate=PARTS)
    assert max(sizes) == SMALL
    assert set(flatness.values()) == {"sharpness", "eigenvalue"}


def test_batchnorm_never_sees_a_single_image():
    method, sizes = tiny_method("finetune", FEW), []
    method.grow(FEW.tasks[0])
    method.network.register_forward_pre_hook(lambda _, arguments: sizes.append(len(arguments[0])))
    objective = Objective(method, method.network, cpu(), accumulate=4)
    batch = Batch(torch.rand(5, 3, 8, 8), torch.arange(5) % 3, torch.arange(5))
    objective.closure(batch)()
    assert sizes == [3, 2]


def test_what_has_no_row_for_each_image_is_not_split():
    batch = Batch(torch.rand(4, 3, 8, 8), torch.arange(4), torch.arange(4), {"weights": torch.ones(7)})
    with pytest.raises(ValueError, match=r"'weights' has the shape \(7,\).*one row for each image"):
        batch.split(2)
    assert [len(part) for part in replace(batch, extras={}).split(3)] == [2, 1, 1]
