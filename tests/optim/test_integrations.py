"""The optimizers inside real clients: Lightning Fabric, and others where they are installed."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F
from torch.optim import lr_scheduler

from cases import TURBO
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


class TestLightning:
    def test_manual_optimization(self):
        lightning = pytest.importorskip("lightning")

        class Module(lightning.LightningModule):
            def __init__(self):
                super().__init__()
                self.automatic_optimization = False
                self.run = Run(TURBO)
                self.net = self.run.model

            def configure_optimizers(self):
                return self.run.optimizer

            def training_step(self, batch, _):
                inputs, labels = batch
                for _ in self.optimizers(use_pl_optimizer=False).passes():
                    self.manual_backward(F.cross_entropy(self.net(inputs), labels))

        module = Module()
        trainer = lightning.Trainer(
            max_steps=-1, max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(module, [batch_of(step) for step in range(4)])
        assert module.run.optimizer.telemetry.steps == 4


class TestAccelerate:
    def test_prepare_and_backward(self):
        accelerator = pytest.importorskip("accelerate").Accelerator(cpu=True)
        run = Run(TURBO)
        model, optimizer = accelerator.prepare(run.model, run.optimizer)
        for step in range(4):
            inputs, labels = batch_of(step)
            for _ in optimizer.optimizer.passes():
                accelerator.backward(F.cross_entropy(model(inputs), labels))
        assert run.optimizer.telemetry.steps == 4


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
