"""What each client costs, counted in forward passes of the model: the optimizer's evaluations, and not one more."""

from __future__ import annotations

from collections import Counter

import pytest
import test_accelerate
import test_avalanche
import test_huggingface
import test_lightning
import torch
from accelerate.state import AcceleratorState, GradientState
from torch import nn

from cases import TURBO, case

NUM_BATCHES = 10


@pytest.fixture
def forwards(monkeypatch):
    """Count forward passes of whole models, by class."""
    calls = Counter()
    original = nn.Module.__call__

    def call(self, *args, **kwargs):
        calls[type(self).__name__] += 1
        return original(self, *args, **kwargs)

    monkeypatch.setattr(nn.Module, "__call__", call)
    return calls


def lightning(row, accumulate):
    module = test_lightning.Module(row)
    batches = test_lightning.loader(test_lightning.by_hand.batches(NUM_BATCHES))
    test_lightning.fit(module, batches, accumulate_grad_batches=accumulate)
    return "Net", NUM_BATCHES, module.flat


def accelerate(row, accumulate):
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    return "Net", NUM_BATCHES, test_accelerate.accelerated(row, accumulate, "no")[1]


def trainer(row, accumulate, folder):
    own, _, flat = test_huggingface.trainer_for(folder, row, gradient_accumulation_steps=accumulate)
    own.train()
    return "GPT2LMHeadModel", 6, flat


@pytest.mark.parametrize("client", [lightning, accelerate, trainer], ids=lambda client: client.__name__)
@pytest.mark.parametrize("row", [case("c_flat"), TURBO], ids=str)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_micro_batches_are_evaluated_as_often_as_the_optimizer_asks(client, row, accumulate, forwards, tmp_path):
    folder = (tmp_path,) if client is trainer else ()
    model, num_batches, flat = client(row, accumulate, *folder)
    assert flat.telemetry.steps == num_batches // accumulate
    assert forwards[model] == flat.telemetry.evaluations * accumulate
    if row.name == "c_flat":
        assert forwards[model] == 4 * num_batches


@pytest.mark.parametrize("name", ["naive", "ewc", "lwf"])
def test_avalanche_evaluates_no_more_either(name, forwards):
    """EWC's importances add a pass over each task; LwF asks its teacher in every evaluation from the second task on."""
    torch.manual_seed(0)
    stream = test_avalanche.make_stream()
    state = test_avalanche.train(stream, case("c_flat"), name, True)
    telemetry = state["optimizer"]["wrapper"]["telemetry"]
    per_task = telemetry["steps"] // 3
    extra = {"naive": 0, "ewc": 3 * per_task, "lwf": 2 * per_task * 4}[name]
    assert forwards["Classifier"] == telemetry["evaluations"] + extra
    assert telemetry["evaluations"] == 4 * telemetry["steps"]
