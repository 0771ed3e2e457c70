"""Averaged weights: what replaces the trained ones, with which statistics, and that nothing is lost on the way."""

import random

import pytest
import torch
from torch import nn

from cflat.data import BatchLoader
from cflat.train import BaseSettings, Observer
from cflat.train.averaging import fresh_batchnorm
from runs import tiny_inputs, tiny_method, tiny_run, tiny_stream
from train.test_resume import assert_same, run_to_end

DECAY = 0.8


def averaging(**settings):
    return BaseSettings(lr=0.05, weight_decay=1e-4, ema=DECAY, **settings)


class ByHand(Observer):
    """Averages the trained weights as the formula says."""

    def on_phase_start(self, optimizer, network):
        self.params = optimizer.all_params()
        self.average = [param.detach().clone() for param in self.params]

    def on_step(self, event):
        self.last = [param.detach().clone() for param in self.params]
        pairs = zip(self.average, self.last, strict=True)
        self.average = [DECAY * average + (1 - DECAY) * weight for average, weight in pairs]


@pytest.mark.parametrize("optimizer", ["none", "c_flat"])
def test_the_average_of_all_steps_replaces_the_weights_of_the_last(optimizer):
    stream, watch = tiny_stream(), ByHand()
    tiny_run(tiny_method("finetune", stream), stream, base=averaging(), observer=watch, optimizer=optimizer)
    for param, average, last in zip(watch.params, watch.average, watch.last, strict=True):
        torch.testing.assert_close(param.detach(), average, rtol=1e-5, atol=1e-6)
        assert not torch.equal(param, last)


def test_batchnorm_has_the_statistics_of_the_average():
    stream = tiny_stream()
    method = tiny_method("finetune", stream)
    tiny_run(method, stream, base=averaging(), epochs=2)
    layers = {name: m for name, m in method.network.named_modules() if isinstance(m, nn.BatchNorm2d)}
    found = {name: (layer.running_mean.clone(), layer.running_var.clone()) for name, layer in layers.items()}
    loader = BatchLoader(stream.tasks[-1].train, tiny_inputs().train, 16, shuffle=True, seed=3, task=1)
    method.set_train_mode()
    with torch.no_grad(), fresh_batchnorm(method.network) as has_statistics:
        for batch in loader.epoch(2):
            method.loss(method.network, method.prepare(batch))
    assert has_statistics
    for name, layer in layers.items():
        torch.testing.assert_close((layer.running_mean, layer.running_var), found[name])
        assert layer.momentum == 0.1


def test_stored_images_have_their_part_in_the_statistics():
    stream = tiny_stream()
    method = tiny_method("derpp", stream)
    tiny_run(method, stream, base=averaging(), epochs=1)
    num_steps = -(-len(stream.tasks[-1].train) // 16)
    (layer, *_) = (module for module in method.network.modules() if isinstance(module, nn.BatchNorm2d))
    assert int(layer.num_batches_tracked) == 3 * num_steps  # new images, and two draws from the memory


def test_frozen_statistics_are_left_alone():
    frozen, trained = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    frozen(torch.randn(8, 3) + 5)
    frozen.eval()
    before = frozen.running_mean.clone()
    with fresh_batchnorm(nn.Sequential(frozen, trained)) as has_statistics:
        trained(torch.full((4, 3), 2.0) + torch.arange(4.0)[:, None])
    assert has_statistics
    assert torch.equal(frozen.running_mean, before)
    torch.testing.assert_close(trained.running_mean, torch.full((3,), 3.5))
    with fresh_batchnorm(nn.Linear(2, 2)) as has_statistics:
        assert not has_statistics


@pytest.mark.parametrize("name", ["icarl", "memo", "derpp", "duct", "ease", "l2p"])
def test_crashes_anywhere_leave_no_trace(name, tmp_path):
    base = averaging(name="qhm")
    whole = run_to_end(name, None, [], base=base)
    chooser = random.Random(f"{name}/ema")
    broken = run_to_end(name, tmp_path, [chooser.randrange(12) for _ in range(4)], base=base)
    assert_same(whole, broken)
    assert all(value.isfinite().all() for value in whole[0].state_dict().values() if value.is_floating_point())


def test_a_phase_without_epochs_changes_nothing():
    stream = tiny_stream()
    method = tiny_method("finetune", stream)
    tiny_run(method, stream, base=averaging(), epochs=0)
    fresh = tiny_method("finetune", stream)
    tiny_run(fresh, stream, epochs=0)
    assert all(torch.equal(a, b) for a, b in zip(method.buffers(), fresh.buffers(), strict=True))


def test_a_decay_of_zero_is_no_average():
    stream = tiny_stream()
    plain, averaged = tiny_method("finetune", stream), tiny_method("finetune", stream)
    settings = {"lr": 0.05, "weight_decay": 1e-4}
    tiny_run(plain, stream, base=BaseSettings(**settings))
    tiny_run(averaged, stream, base=BaseSettings(**settings, ema=0.0))
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), averaged.parameters(), strict=True))
