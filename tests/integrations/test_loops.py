"""Loops that the paper names as future work, and what torch does to a model: each against a loop by hand."""

from __future__ import annotations

import runpy
import shutil
from pathlib import Path

import by_hand
import gymnasium
import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import cflat
from faults import differences

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "integrations"


def example(name):
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))


def train(row, forward_of, num=5):
    net = by_hand.network()
    flat = by_hand.optimizer_for(row, net)
    forward = forward_of(net)
    torch.manual_seed(by_hand.SEED)
    steps = [[batch] for batch in by_hand.batches(num)]
    losses = by_hand.train(flat, steps, lambda batch: F.cross_entropy(forward(batch[0]), batch[1]))
    return by_hand.snapshot(net, flat), losses


@pytest.mark.parametrize("row", by_hand.ROWS, ids=str)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_model_gives_the_same_run(row, backend):
    compiled, losses = train(row, lambda net: torch.compile(net, backend=backend))
    eager, expected = train(row, lambda net: net)
    assert losses == pytest.approx(expected, rel=1e-5)
    for name, weight in eager["model"].items():
        torch.testing.assert_close(compiled["model"][name], weight, rtol=1e-4, atol=1e-6)
    if backend == "eager":
        assert not differences(compiled, eager)


@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler")
def test_a_model_compiled_to_machine_code_sees_the_perturbed_weights():
    """Without dropout: Inductor draws its own random numbers."""

    def losses(make):
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
        flat = by_hand.optimizer_for(by_hand.ROWS[2], net)
        forward = make(net)
        steps = [[batch] for batch in by_hand.batches(4)]
        return by_hand.train(flat, steps, lambda batch: F.cross_entropy(forward(batch[0]), batch[1])), flat

    compiled, flat = losses(torch.compile)
    expected, twin = losses(lambda net: net)
    assert compiled == pytest.approx(expected, rel=1e-5)
    assert flat.telemetry.last["increment"] == pytest.approx(twin.telemetry.last["increment"], rel=1e-3)


@pytest.mark.parametrize("row", by_hand.ROWS, ids=str)
@pytest.mark.parametrize("is_reentrant", [False, True])
def test_gradient_checkpointing_gives_the_same_run(row, is_reentrant):
    """The block without BatchNorm is computed again in every backward pass, with the dropout of its forward pass."""

    def forward_of(net, saves):
        def tail(hidden):
            return net.head(F.dropout(torch.tanh(hidden), 0.2, net.training))

        def forward(inputs):
            hidden = net.norm(net.hidden(inputs))
            return checkpoint(tail, hidden, use_reentrant=is_reentrant) if saves else tail(hidden)

        return forward

    ours, losses = train(row, lambda net: forward_of(net, True))
    expected, others = train(row, lambda net: forward_of(net, False))
    assert losses == others
    assert not differences(ours, expected)


def test_reinforce_equals_four_evaluations_by_hand():
    """C-Flat by its formula on CartPole: episodes are played once per step, evaluated at four points."""
    ours = example("reinforce")
    policy, optimizer = ours["make"]()
    lengths = ours["train"](optimizer, policy, num_steps=3)
    assert optimizer.telemetry.evaluations == 12

    twin, _ = ours["make"]()
    params, adam = list(twin.parameters()), torch.optim.Adam(twin.parameters(), lr=2e-2)
    environment = gymnasium.make("CartPole-v1")

    def gradient(episodes, offset=None):
        with torch.no_grad():
            kept = [param.clone() for param in params]
            for param, part in zip(params, offset or [], strict=bool(offset)):
                param.add_(part)
        found = torch.autograd.grad(ours["loss_of"](twin, episodes), params)
        with torch.no_grad():
            for param, value in zip(params, kept, strict=True):
                param.copy_(value)
        return found

    def towards(direction):
        norm = torch.sqrt(sum(part.square().sum() for part in direction))
        return [0.05 * part / norm for part in direction]

    expected = []
    for step in range(3):
        episodes = [ours["play"](environment, twin, seed) for seed in range(4 * step, 4 * step + 4)]
        expected.append(sum(len(returns) for _, _, returns in episodes) / 4)
        g = gradient(episodes)
        g_s = gradient(episodes, towards(g))
        eps_1 = towards([a - b for a, b in zip(g_s, g, strict=True)])
        g_0 = gradient(episodes, eps_1)
        g_1 = gradient(episodes, [a + b for a, b in zip(eps_1, towards(g_0), strict=True)])
        for param, s, one, zero in zip(params, g_s, g_1, g_0, strict=True):
            param.grad = s + 0.2 * (one - zero)
        adam.step()
    assert lengths == expected  # the same policy plays the same episodes
    for mine, other in zip(policy.parameters(), params, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


def test_two_towers_learn_and_keep_their_statistics():
    """Equal to passes by hand, and BatchNorm sees each batch once."""
    ours = example("two_towers")
    model, optimizer = ours["make"]()
    losses = ours["train"](optimizer, model, 20)
    assert losses[-1] < 0.7 * losses[0]
    assert model.image[1].num_batches_tracked == 20

    twin, other = ours["make"]()
    for step in range(20):
        images, texts = ours["batch"](step)
        with other.passes() as passes:
            for _ in passes:
                twin(images, texts).backward()
    assert not differences(by_hand.snapshot(model, optimizer), by_hand.snapshot(twin, other))


def test_two_towers_with_an_optimizer_each_must_not_share_a_closure():
    """The other tower's optimizer finds the gradients of all passes; it says so instead of dropping them."""
    model = example("two_towers")["make"]()[0]
    images, texts = example("two_towers")["batch"](0)
    towers = [cflat.SAM(torch.optim.SGD(tower.parameters(), lr=0.1)) for tower in (model.image, model.text)]

    def closure():
        loss = model(images, texts)
        loss.backward()
        return loss

    towers[0].step(closure)
    with pytest.raises(cflat.ClosureError, match="accumulated before this step"):
        towers[1].step(closure)
    towers[1].zero_grad()
    towers[1].step(closure)
