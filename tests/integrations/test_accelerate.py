"""Hugging Face Accelerate, the real library: each run equals the loop by hand bit for bit."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from pathlib import Path

import by_hand
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch.nn import functional as F
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader

import cflat
from cflat.integrations.accelerate import FlatSteps
from faults import differences


def _fresh():
    """Forget precision and accumulation, which Accelerate keeps in process-wide singletons."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.fixture(autouse=True)
def _fresh_state():
    _fresh()


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def accelerated(row, accumulate, precision, *, calls_step=False, **settings):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate, mixed_precision=precision)
    net = by_hand.network()
    flat = by_hand.optimizer_for(row, net, **settings)
    scheduler = lr_scheduler.StepLR(flat, 2, 0.5)
    loader = DataLoader(by_hand.batches(10), batch_size=None)
    model, optimizer, loader, scheduler = accelerator.prepare(net, flat, loader, scheduler)
    take = FlatSteps(accelerator, model, optimizer)
    torch.manual_seed(by_hand.SEED)
    losses = []
    for inputs, labels in loader:
        with accelerator.accumulate(model):
            losses.append(take(lambda x, y: F.cross_entropy(model(x), y), inputs, labels).item())
            if calls_step:
                optimizer.step()
            scheduler.step()
            if calls_step:
                optimizer.zero_grad()
    return net, flat, losses


def hand_written(row, accumulate, precision, **settings):
    net = by_hand.network()
    flat = by_hand.optimizer_for(row, net, **settings)
    scheduler = lr_scheduler.StepLR(flat, 2, 0.5)
    loader = DataLoader(by_hand.batches(10), batch_size=None)
    torch.manual_seed(by_hand.SEED)
    batches = list(loader)

    def loss_of(batch):
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            logits = net(batch[0])
        return F.cross_entropy(logits.float(), batch[1])

    losses = by_hand.train(flat, by_hand.windows(batches, accumulate), loss_of, divisor=accumulate, scheduler=scheduler)
    return net, flat, losses


@pytest.mark.parametrize("row", by_hand.ROWS, ids=str)
@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("accumulate", [1, 2, 3])
def test_steps_equal_the_loop_by_hand(row, accumulate, precision):
    net, flat, losses = accelerated(row, accumulate, precision, calls_step=accumulate == 2)
    expected = hand_written(row, accumulate, precision)
    assert not differences(by_hand.snapshot(net, flat), by_hand.snapshot(*expected[:2]))
    if row.name == "msam" and accumulate > 1:
        return  # its micro-batches before the last report their loss at the unperturbed weights
    sums = [sum(window) / accumulate for window in by_hand.windows(losses, accumulate)]
    assert sums == pytest.approx(expected[2], rel=1e-6)


def test_clipping_belongs_to_the_step():
    options = cflat.StepOptions(max_norm=0.2)
    net, flat, _ = accelerated(by_hand.ROWS[2], 2, "no", options=options)
    expected = hand_written(by_hand.ROWS[2], 2, "no", options=options)
    assert not differences(by_hand.snapshot(net, flat), by_hand.snapshot(*expected[:2]))


def test_a_loss_scaler_is_refused():
    accelerator, model, optimizer = prepared(1)
    accelerator.scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(ValueError, match="Use 'bf16', or loop over"):
        FlatSteps(accelerator, model, optimizer)


def test_two_ranks_equal_one_with_both_shares(tmp_path):
    """DDP over gloo, with accumulation: ranks stay equal, and equal one process that sees both halves."""
    script = Path(__file__).with_name("accelerate_ranks.py")
    world = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, script, tmp_path], env={**world, "RANK": rank, "LOCAL_RANK": rank}, stderr=subprocess.PIPE
        )
        for rank in "01"
    ]
    errors = [process.communicate(timeout=300)[1].decode() for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], errors[0][-2000:] + errors[1][-2000:]
    subprocess.run([sys.executable, script, tmp_path], check=True, timeout=300)
    first, second, alone = (torch.load(tmp_path / f"{name}.pt") for name in ("rank0", "rank1", "alone"))
    assert not differences(first, second)
    assert first["evaluations"] == alone["evaluations"]
    for name, weight in alone["weights"].items():
        torch.testing.assert_close(first["weights"][name], weight, rtol=1e-9, atol=1e-10)


def prepared(accumulate):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    net = by_hand.network()
    return accelerator, *accelerator.prepare(net, by_hand.optimizer_for(by_hand.ROWS[1], net))


def test_an_unchanged_loop_is_refused_not_wrong():
    """Accelerate would call the last closure only, and the gradients of the others are nowhere to be seen."""
    accelerator, model, optimizer = prepared(2)

    def closure():
        loss = F.cross_entropy(model(by_hand.batches(1)[0][0]), by_hand.batches(1)[0][1])
        accelerator.backward(loss)
        return loss

    with accelerator.accumulate(model):
        optimizer.step(closure)
    with (
        pytest.raises(cflat.ClosureError, match=r"accumulates over 2 micro-batches.*FlatSteps"),
        accelerator.accumulate(model),
    ):
        optimizer.step(closure)
    optimizer.optimizer.step(closure)  # a step of one's own, outside of Accelerate's count, is nobody's business
    assert optimizer.optimizer.telemetry.steps == 1


def test_without_accumulation_a_plain_closure_works():
    accelerator, model, optimizer = prepared(1)
    inputs, labels = by_hand.batches(1)[0]

    def closure():
        loss = F.cross_entropy(model(inputs), labels)
        accelerator.backward(loss)
        return loss

    with accelerator.accumulate(model):
        optimizer.step(closure)
    assert optimizer.optimizer.telemetry.evaluations == 2


def test_a_clip_that_comes_too_late_is_refused():
    accelerator, model, optimizer = prepared(1)
    inputs, labels = by_hand.batches(1)[0]
    with accelerator.accumulate(model):
        FlatSteps(accelerator, model, optimizer)(lambda x, y: F.cross_entropy(model(x), y), inputs, labels)
        accelerator.clip_grad_norm_(model.parameters(), 0.1)
        with pytest.raises(cflat.ClosureError, match=r"StepOptions\(max_norm"):
            optimizer.step()


def test_a_plain_optimizer_is_refused():
    accelerator = Accelerator(cpu=True)
    net = by_hand.network()
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    with pytest.raises(cflat.ClosureError, match="Expected an optimizer of cflat"):
        FlatSteps(accelerator, model, optimizer)


def test_checkpoints_of_accelerate_hold_everything(tmp_path):
    row = by_hand.ROWS[3]
    accelerator = Accelerator(cpu=True)
    net = by_hand.network()
    model, optimizer = accelerator.prepare(net, by_hand.optimizer_for(row, net))
    take = FlatSteps(accelerator, model, optimizer)

    def train(batches):
        for inputs, labels in batches:
            take(lambda x, y: F.cross_entropy(model(x), y), inputs, labels)
        return by_hand.snapshot(net, optimizer.optimizer)

    train(by_hand.batches(8)[:4])
    accelerator.save_state(tmp_path, safe_serialization=False)
    expected = train(by_hand.batches(8)[4:])
    accelerator.load_state(tmp_path)
    assert optimizer.optimizer.telemetry.steps == 4
    assert not differences(train(by_hand.batches(8)[4:]), expected)


@pytest.mark.parametrize("row", by_hand.ROWS, ids=str)
def test_what_is_saved_between_micro_batches_are_the_weights_of_the_last_step(row, tmp_path):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    net = by_hand.network()
    model, optimizer = accelerator.prepare(net, by_hand.optimizer_for(row, net))
    take = FlatSteps(accelerator, model, optimizer)
    after_step = None
    for inputs, labels in by_hand.batches(5):
        with accelerator.accumulate(model):
            take(lambda x, y: F.cross_entropy(model(x), y), inputs, labels)
        if accelerator.sync_gradients:
            after_step = {name: param.detach().clone() for name, param in net.named_parameters()}
    assert not accelerator.sync_gradients
    accelerator.save_state(tmp_path, safe_serialization=False)
    saved = torch.load(tmp_path / "pytorch_model.bin")
    assert not differences({name: saved[name] for name in after_step}, after_step)


@pytest.mark.parametrize("row", by_hand.ROWS, ids=str)
def test_autocast_around_the_step_equals_autocast_inside(row):
    def train(is_around):
        _fresh()
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, mixed_precision="bf16")
        net = by_hand.network()
        _, optimizer = accelerator.prepare(net, by_hand.optimizer_for(row, net))
        take = FlatSteps(accelerator, net, optimizer)

        def loss_of(inputs, labels):
            with contextlib.nullcontext() if is_around else accelerator.autocast():
                return F.cross_entropy(net(inputs), labels)

        torch.manual_seed(by_hand.SEED)
        with accelerator.autocast() if is_around else contextlib.nullcontext():
            for inputs, labels in by_hand.batches(6):
                with accelerator.accumulate(net):
                    take(loss_of, inputs, labels)
        return by_hand.snapshot(net, optimizer.optimizer)

    assert not differences(train(True), train(False))
