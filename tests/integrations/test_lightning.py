"""PyTorch Lightning, its real Trainer: each run equals the loop by hand bit for bit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import by_hand
import lightning.pytorch as pl
import pytest
import torch
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_
from torch.optim import lr_scheduler

import cflat
from cases import case
from cflat.integrations.lightning import FlatCallback
from faults import differences

QUIET = {
    "accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False,
    "enable_progress_bar": False, "enable_model_summary": False, "max_epochs": 1,
}  # fmt: skip


class Module(pl.LightningModule):
    def __init__(self, row, scheduled=False, **settings):
        super().__init__()
        self.net = by_hand.network()
        self.row, self.scheduled, self.settings = row, scheduled, settings
        self.logged = []

    def configure_optimizers(self):
        self.flat = by_hand.optimizer_for(self.row, self.net, **self.settings)
        if not self.scheduled:
            return self.flat
        return [self.flat], [{"scheduler": lr_scheduler.StepLR(self.flat, 2, 0.5), "interval": "step"}]

    def training_step(self, batch, batch_idx):
        inputs, labels = batch
        loss = F.cross_entropy(self.net(inputs), labels)
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.logged.append(outputs["loss"].item())


def fit(module, batches, validation=None, *, callback=True, **trainer):
    torch.manual_seed(by_hand.SEED)
    callbacks = [FlatCallback(0, 3)] if callback else []
    trainer = pl.Trainer(**{**QUIET, **trainer}, callbacks=callbacks)
    trainer.fit(module, batches, validation, ckpt_path=None)
    return trainer


def hand_written(row, batches, *, accumulate=1, scheduled=False, max_norm=None, dtype=None, settings=None):
    net = by_hand.network()
    flat = by_hand.optimizer_for(row, net, **(settings or {}))
    scheduler = lr_scheduler.StepLR(flat, 2, 0.5) if scheduled else None
    torch.manual_seed(by_hand.SEED)
    torch.empty((), dtype=torch.int64).random_()  # the seed that a data loader draws for its workers
    flat.start_task(0, 3)

    def loss_of(batch):
        inputs, labels = batch
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype is not None):
            return F.cross_entropy(net(inputs), labels)

    clip = None if max_norm is None else lambda: clip_grad_norm_(net.parameters(), max_norm)
    losses = by_hand.train(
        flat,
        by_hand.windows(batches, accumulate),
        loss_of,
        divisor=accumulate,
        after_backward=clip,
        scheduler=scheduler,
    )
    return net, flat, losses


def assert_equal(module, net, flat):
    ours = {"model": dict(module.net.state_dict()), "optimizer": module.flat.state_dict()}
    assert not differences(ours, {"model": dict(net.state_dict()), "optimizer": flat.state_dict()})


LOADER = {"batch_size": None, "shuffle": False}


def loader(batches):
    return torch.utils.data.DataLoader(batches, **LOADER)


@pytest.mark.parametrize("row", by_hand.ROWS, ids=str)
@pytest.mark.parametrize("accumulate", [1, 3])
def test_accumulation_equals_the_loop_by_hand(row, accumulate):
    batches = by_hand.batches(10)  # the last step has one micro-batch only
    module = Module(row)
    trainer = fit(module, loader(batches), accumulate_grad_batches=accumulate)
    net, flat, losses = hand_written(row, batches, accumulate=accumulate)
    assert_equal(module, net, flat)
    assert trainer.global_step == flat.telemetry.steps == len(losses)
    if accumulate == 1:
        assert module.logged == losses  # what the step returns is its first evaluation's
        assert trainer.logged_metrics["loss"] == pytest.approx(sum(losses) / len(losses))  # and so is what it logs
    assert trainer.logged_metrics["cflat/evaluations_per_step"] == pytest.approx(flat.telemetry.evaluations_per_step)


@pytest.mark.parametrize("form", ["idx", "none", "defaulted"])
def test_training_steps_of_all_forms_accumulate(form):
    """Lightning passes the index by position, whatever it is called."""
    row, batches = by_hand.ROWS[2], by_hand.batches(4)
    whole = Module(row)
    fit(whole, loader(batches), accumulate_grad_batches=2)

    class Named(Module):
        def training_step(self, batch, idx):
            assert idx in range(4)
            return super().training_step(batch, idx)

    class Without(Module):
        def training_step(self, batch):
            return super().training_step(batch, 0)

    class Defaulted(Module):
        def training_step(self, batch, batch_idx=None):
            return super().training_step(batch, batch_idx)

    module = {"idx": Named, "none": Without, "defaulted": Defaulted}[form](row)
    fit(module, loader(batches), accumulate_grad_batches=2)
    assert_equal(module, whole.net, whole.flat)


def test_an_epoch_that_is_cut_short_steps_with_what_it_has():
    """5 of 8 batches in steps of 2: the last step has one micro-batch."""
    row, batches = by_hand.ROWS[2], by_hand.batches(8)
    module = Module(row)
    fit(module, loader(batches), accumulate_grad_batches=2, limit_train_batches=5)
    net, flat, _ = hand_written(row, batches[:5], accumulate=2)
    assert_equal(module, net, flat)


class Validated(Module):
    def validation_step(self, batch, batch_idx):
        self.seen = [param.detach().clone() for param in self.net.parameters()]


@pytest.mark.parametrize("name", ["msam", "c_flat"])
def test_validation_between_micro_batches_sees_the_weights_of_the_last_step(name):
    """After three batches, two to a step."""
    batches = by_hand.batches(4)
    module = Validated(case(name))
    settings = {"accumulate_grad_batches": 2, "num_sanity_val_steps": 0}
    fit(module, loader(batches), loader(batches[:1]), val_check_interval=3, **settings)
    after_one_step, _, _ = hand_written(case(name), batches[:2], accumulate=2)
    assert not differences(module.seen, list(after_one_step.parameters()))


def test_a_loss_scaler_is_refused():
    scaled = pl.plugins.MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    with pytest.raises(cflat.ClosureError, match="Use 'bf16-mixed'"):
        fit(Module(by_hand.ROWS[1]), loader(by_hand.batches(2)), plugins=[scaled])


@pytest.mark.parametrize("row", by_hand.ROWS[1:], ids=str)
@pytest.mark.parametrize(
    ("trainer", "settings", "hand"),
    [
        ({"precision": "bf16-mixed"}, {}, {"dtype": torch.bfloat16}),
        ({"gradient_clip_val": 0.3}, {}, {"max_norm": 0.3}),
        ({}, {"options": cflat.StepOptions(max_norm=0.3)}, {}),
        ({}, {"scheduled": True}, {"scheduled": True}),
        ({"precision": "bf16-mixed", "gradient_clip_val": 0.3, "accumulate_grad_batches": 2}, {"scheduled": True},
         {"dtype": torch.bfloat16, "max_norm": 0.3, "accumulate": 2, "scheduled": True}),
    ],
    ids=["bf16", "clip each", "clip final", "scheduler", "all"],
)  # fmt: skip
def test_features_equal_the_loop_by_hand(row, trainer, settings, hand):
    batches = by_hand.batches(6)
    module = Module(row, **settings)
    fit(module, loader(batches), **trainer)
    options = {key: value for key, value in settings.items() if key == "options"}
    net, flat, _ = hand_written(row, batches, settings=options, **hand)
    assert_equal(module, net, flat)


def test_without_the_callback_a_module_works_and_accumulation_is_refused():
    row, batches = by_hand.ROWS[2], by_hand.batches(4)
    module = Module(row)
    fit(module, loader(batches), callback=False)
    net, _, _ = hand_written(row, batches)
    assert not differences(dict(module.net.state_dict()), dict(net.state_dict()))
    with pytest.raises(cflat.ClosureError, match=r"accumulated before this step.*cflat\.integrations"):
        fit(Module(row), loader(batches), callback=False, accumulate_grad_batches=2)


@pytest.mark.parametrize("row", by_hand.ROWS[1:], ids=str)
def test_a_resumed_run_equals_one_that_was_not_interrupted(row, tmp_path):
    """In the middle of a task and of an interval; without dropout, whose generator Lightning does not save."""

    def run(epochs, checkpoint=None):
        module = Module(row, scheduled=True)
        net = module.net
        net.forward = lambda inputs: net.head(torch.tanh(net.norm(net.hidden(inputs))))
        trainer = pl.Trainer(
            **{**QUIET, "max_epochs": epochs}, callbacks=[FlatCallback(1, 3)], accumulate_grad_batches=2
        )
        trainer.fit(module, loader(by_hand.batches(7)), ckpt_path=checkpoint)
        return trainer, module

    whole = run(4)[1]
    run(2)[0].save_checkpoint(tmp_path / "last.ckpt")
    resumed = run(4, tmp_path / "last.ckpt")[1]
    assert resumed.flat.task_step == 16
    assert_equal(resumed, whole.net, whole.flat)


def test_manual_optimization_takes_passes_and_the_usual_step():
    row, batches = by_hand.ROWS[3], by_hand.batches(5)

    class Manual(Module):
        def __init__(self):
            super().__init__(row)
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            for _ in optimizer.passes():
                self.manual_backward(F.cross_entropy(self.net(batch[0]), batch[1]))
            optimizer.step()

        def on_train_batch_end(self, *_):
            pass

    module = Manual()
    trainer = fit(module, loader(batches))
    net, flat, _ = hand_written(row, batches)
    assert_equal(module, net, flat)
    assert trainer.global_step == 5


@pytest.mark.parametrize(
    ("message", "module", "trainer"),
    [
        ("needs one optimizer of cflat, found 0", "plain", {}),
        ("left no gradient", "none", {}),
    ],
)
def test_what_cannot_work_is_refused(message, module, trainer):
    class Wrong(Module):
        def configure_optimizers(self):
            return super().configure_optimizers() if module != "plain" else torch.optim.SGD(self.parameters(), 0.1)

        def training_step(self, batch, batch_idx):
            return None if module == "none" else super().training_step(batch, batch_idx)

    with pytest.raises(cflat.ClosureError, match=message):
        fit(Wrong(by_hand.ROWS[1]), loader(by_hand.batches(2)), **trainer)


def test_two_ranks_equal_one_with_both_shares(tmp_path):
    """DDP over gloo, with accumulation: ranks stay equal, and equal one process that sees both halves."""
    script = Path(__file__).with_name("lightning_ranks.py")
    ended = subprocess.run([sys.executable, script, tmp_path], capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr[-3000:]
    ranks = [torch.load(tmp_path / f"rank{rank}.pt") for rank in (0, 1)]
    alone = torch.load(tmp_path / "alone.pt")
    assert not differences(ranks[0]["weights"], ranks[1]["weights"])
    assert ranks[0]["evaluations"] == ranks[1]["evaluations"] == alone["evaluations"]
    for name, weight in alone["weights"].items():
        torch.testing.assert_close(ranks[0]["weights"][name], weight, rtol=1e-9, atol=1e-10)
