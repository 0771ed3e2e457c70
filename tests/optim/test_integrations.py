"""The optimizers inside Lightning Fabric and torch.compile; other clients have an environment of their own."""

from __future__ import annotations

import sys
import types

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler

import cflat
from cases import TURBO, case
from faults import EVERY, Run, batch_of, differences


class TestFabric:
    """Fabric wraps an optimizer in an object that takes on its class and forwards what it does not find."""

    @staticmethod
    def _set_up(row):
        fabric = pytest.importorskip("lightning_fabric").Fabric(accelerator="cpu", devices=1)
        run = Run(row)
        model, optimizer = fabric.setup(run.model, run.optimizer)

        def closure(step):
            inputs, labels = batch_of(step)

            def evaluate():
                loss = F.cross_entropy(model(inputs), labels)
                fabric.backward(loss)
                return loss

            return evaluate

        return run, optimizer, closure

    @pytest.mark.parametrize("row", EVERY, ids=str)
    @pytest.mark.parametrize("door", ["step", "passes"])
    def test_training_equals_training_without_it(self, row, door):
        plain = Run(row)
        plain.optimizer.start_task(1, num_tasks=2)
        plain.train(*range(6))
        world, state = plain.world(), plain.state()

        run, optimizer, closure = self._set_up(row)
        torch.manual_seed(7)
        run.model.load_state_dict(Run(row).model.state_dict())
        optimizer.start_task(1, num_tasks=2)
        for step in range(6):
            if door == "step":
                assert optimizer.step(closure(step)).isfinite()
            else:
                for _ in optimizer.passes():
                    closure(step)()
        assert not differences(run.world(), world)
        assert not differences(run.state(), state)
        assert not differences(optimizer.state_dict(), state)

    def test_state_is_not_split_between_the_wrappers(self):
        run, optimizer, closure = self._set_up(TURBO)
        optimizer.start_task(3, num_tasks=4)
        optimizer.step(closure(0))
        for _ in optimizer.passes():
            closure(1)()
        assert optimizer.step() is None  # has stepped already
        assert optimizer.interval == run.optimizer.interval == 6
        assert optimizer.task_step == run.optimizer.task_step == 2
        assert optimizer.telemetry.steps == run.optimizer.telemetry.steps == 2

    @pytest.mark.parametrize("door", ["step", "passes"])
    def test_schedulers_reach_the_base(self, door):
        run, optimizer, closure = self._set_up(TURBO)
        scheduler = lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        for step in range(3):
            if door == "step":
                optimizer.step(closure(step))
            else:
                for _ in optimizer.passes():
                    closure(step)()
            scheduler.step()
        assert run.base.param_groups[0]["lr"] == 0.1 * 0.5**3


def test_a_compiled_model_sees_the_perturbed_weights():
    """The compiled graph reads parameters anew at each call, so it must give the same run as the eager model."""
    eager = Run(TURBO)
    eager.train(0, 1, 2)
    expected = eager.world()["model"]

    run = Run(TURBO)
    compiled = torch.compile(run.model, backend="eager")
    for step in range(3):
        inputs, labels = batch_of(step)
        run.optimizer.step(lambda inputs=inputs, labels=labels: F.cross_entropy(compiled(inputs), labels).backward())
    assert not differences(run.world()["model"], expected)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo's, about the loss
@pytest.mark.parametrize("door", ["step", "passes"])
@pytest.mark.parametrize("row", [case("none"), case("c_flat"), TURBO], ids=str)
@pytest.mark.parametrize("base", [torch.optim.SGD, torch.optim.AdamW])
def test_a_compiled_training_step_keeps_the_optimizer_out_of_its_graph(door, row, base):
    """Moves and decisions must not be traced; what the closure compiles is compiled."""

    def train(compiles):
        torch._dynamo.reset()
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
        optimizer = row.make(base(net.parameters(), lr=0.01), model=net)
        graphs = []

        def backend(graph, inputs):
            graphs.append(graph)
            return graph.forward

        forward = torch.compile(net, backend=backend) if compiles else net

        def train_step(inputs, labels):
            def closure():
                loss = F.cross_entropy(forward(inputs), labels)
                loss.backward()
                return loss

            if door == "step":
                return optimizer.step(closure)
            for _ in optimizer.passes():
                loss = closure()
            return loss

        take = torch.compile(train_step, backend="eager") if compiles else train_step
        for step in range(3):
            take(*batch_of(step))
        return dict(net.state_dict()), optimizer.telemetry.evaluations, len(graphs)

    weights, evaluations, graphs = train(True)
    expected, count, _ = train(False)
    assert evaluations == count
    assert graphs == (1 if door == "step" else 0)  # in a loop over passes the outer compiler takes the closure
    assert not differences(weights, expected)


def test_the_last_closure_of_an_accumulation_is_refused_wherever_accelerate_stands(monkeypatch):
    """Accelerate is recognized from the frames between its step and ours, of which schedulers add some."""
    accelerate = types.ModuleType("accelerate.optimizer")
    source = "class Accelerated:\n    def step(self, closure):\n        return self.optimizer.step(closure)\n"
    exec(source, accelerate.__dict__)
    monkeypatch.setitem(sys.modules, "accelerate.optimizer", accelerate)
    weight = nn.Parameter(torch.ones(2))
    wrapped = accelerate.Accelerated()
    wrapped.optimizer = cflat.SAM(torch.optim.SGD([weight], lr=0.1))
    lr_scheduler.StepLR(wrapped.optimizer, 1)  # patches step

    def closure():
        loss = weight.square().sum()
        loss.backward()
        return loss

    wrapped.gradient_state = types.SimpleNamespace(num_steps=1)
    wrapped.step(closure)
    wrapped.gradient_state.num_steps = 2
    with pytest.raises(cflat.ClosureError, match="accumulates over 2 micro-batches"):
        wrapped.step(closure)
    wrapped.optimizer.step(closure)  # somebody else's call is no business of Accelerate's
