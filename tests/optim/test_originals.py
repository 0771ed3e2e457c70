"""Where our readings differed from the authors' code: their arithmetic as plain loops, against ours, in float64.

Run beside the originals themselves (nblt/F-SAM, MarlonBecker/MSAM, xxgege/GAM, INFTY's "plus"), ours are within 1e-12
after 60 steps; these loops are written from their formulas, and keep that.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import cflat
from cases import MLP, flat_weights, loss_of, train

STEPS, LR, MU, DECAY = 60, 0.1, 0.9, 5e-4


def sgd(model: nn.Module, decay: float = DECAY) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=LR, momentum=MU, weight_decay=decay)


def gradients() -> tuple[Tensor, Callable[[Tensor, int], Tensor]]:
    """Return where training starts, and the gradient of the batch of any step at any point."""
    model = MLP.model()
    params = list(model.parameters())

    def gradient(theta: Tensor, step: int) -> Tensor:
        nn.utils.vector_to_parameters(theta, params)
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss_of(model, MLP.batch(step)), params)])

    return flat_weights(model), gradient


def ours(make: Callable[[nn.Module], cflat.SharpnessAware]) -> Tensor:
    model = MLP.model()
    train(make(model), model, MLP, STEPS)
    return flat_weights(model)


def descend(direction: Callable[[Tensor, int], Tensor]) -> Tensor:
    """Train with torch's SGD by hand along a direction."""
    theta, _ = gradients()
    buffer = None
    for step in range(STEPS):
        d = direction(theta, step) + DECAY * theta
        buffer = d if buffer is None else MU * buffer + d
        theta = theta - LR * buffer
    return theta


def check(theirs: Tensor, mine: Tensor) -> None:
    assert (theirs - mine).norm() < 1e-10 * theirs.norm()


def test_friendly_sam_starts_its_average_at_the_first_gradient() -> None:
    _, gradient = gradients()
    state: dict[str, Tensor] = {}

    def direction(theta: Tensor, step: int) -> Tensor:
        g = gradient(theta, step)
        along = g - state["momentum"] if state else g
        state["momentum"] = 0.6 * state["momentum"] + 0.4 * g if state else g
        return gradient(theta + 0.1 * along / along.norm(), step)

    check(descend(direction), ours(lambda m: cflat.FriendlySAM(sgd(m), model=m, rho=0.1, sigma=1.0, decay=0.6)))


def test_vasso_averages_with_the_present_gradient_and_starts_at_the_first() -> None:
    _, gradient = gradients()
    state: dict[str, Tensor] = {}

    def direction(theta: Tensor, step: int) -> Tensor:
        g = gradient(theta, step)
        state["ema"] = 0.6 * state["ema"] + 0.4 * g if state else g
        return gradient(theta + 0.1 * state["ema"] / state["ema"].norm(), step)

    check(descend(direction), ours(lambda m: cflat.VaSSO(sgd(m), model=m, rho=0.1, theta=0.4)))


def test_friendly_sam_starts_with_each_parameter() -> None:
    """A head that grows later begins with its own first gradient; SGD without momentum shows it in one step."""
    first, head = (nn.Parameter(torch.ones(3, dtype=torch.float64)) for _ in range(2))
    optimizer = cflat.FriendlySAM(torch.optim.SGD([first, head], lr=0.0), rho=0.1, decay=0.5)
    for use_head in (False, True, True):

        def closure(use_head: bool = use_head) -> Tensor:
            loss = (first**3).sum() + ((2 * head**3).sum() if use_head else 0.0)
            loss.backward()
            return loss

        optimizer.step(closure)
    memory = optimizer.memory("m")
    torch.testing.assert_close(memory._tensors[first], torch.full((3,), 3.0, dtype=torch.float64))
    torch.testing.assert_close(memory._tensors[head], torch.full((3,), 6.0, dtype=torch.float64))


@pytest.mark.parametrize("decay", [0.0, DECAY, 1e-2])
def test_msam_has_the_weight_decay_in_its_momentum(decay: float) -> None:
    """The authors' weights stay perturbed from step to step: theirs is one buffer for both, with decay at the weights
    as they are."""
    theta_p, gradient = gradients()
    buffer, rho, inverse = torch.zeros_like(theta_p), 0.3, 0.0
    for step in range(STEPS):
        d = gradient(theta_p, step) + decay * theta_p
        theta = theta_p + rho * inverse * buffer
        buffer = MU * buffer + d
        theta = theta - LR * buffer
        inverse = 1 / buffer.norm()
        theta_p = theta - rho * inverse * buffer
    check(theta, ours(lambda m: cflat.MSAM(sgd(m, decay), model=m, rho=rho, momentum=MU)))


def test_msam_leaves_a_decay_apart_from_the_gradient_alone() -> None:
    """AdamW: v is the plain moving average, whatever the decay; seen in where the second gradient is taken."""
    places = []
    for decay in (0.0, 0.5):
        model = MLP.model()
        base = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=decay)
        optimizer = cflat.MSAM(base, model=model, rho=0.3)
        train(optimizer, model, MLP, 1)
        for _ in optimizer.passes():
            places.append(flat_weights(model))
            loss_of(model, MLP.batch(1)).backward()
    assert torch.equal(*places)


def test_gam_has_the_weights_of_the_authors_script() -> None:
    """beta_0 = 0.5 and beta_1 = 0.6 for ResNets on CIFAR-100; beta_2 = 1 - beta_0 and beta_3 = 1 - beta_1."""
    _, gradient = gradients()

    def direction(theta: Tensor, step: int) -> Tensor:
        g_0 = gradient(theta, step)
        g_1 = gradient(theta + 0.02 * g_0 / g_0.norm(), step)
        ascent = 0.2 * (g_1 - g_0) / (g_1 - g_0).norm()
        g_2 = gradient(theta + ascent, step)
        g_3 = gradient(theta + ascent + 0.02 * g_2 / g_2.norm(), step)
        old, new = g_0 + 0.5 * g_2, 0.6 * g_1 + 0.4 * g_3
        cosine = old @ new / (old.norm() * new.norm())
        return new - 0.03 * (old - cosine * old.norm() * new / new.norm())

    check(descend(direction), ours(lambda m: cflat.GAM(sgd(m), model=m)))


def test_c_flat_plus_has_the_settings_of_the_authors_configuration() -> None:
    _, gradient = gradients()
    state = {"A": 5.0, "exact": 0}

    def direction(theta: Tensor, step: int) -> Tensor:
        g = gradient(theta, step)
        excess = state["A"] / (1 + math.exp(-0.1 * (step + 1 - 80))) - g.norm().item()
        state["A"] -= 0.8 * excess
        if excess > 0:
            return g
        state["exact"] += 1
        g_s = gradient(theta + 0.2 * g / g.norm(), step)
        proxy = theta + 0.2 * (g_s - g) / (g_s - g).norm()
        g_0 = gradient(proxy, step)
        return g_s + 0.2 * (gradient(proxy + 0.2 * g_0 / g_0.norm(), step) - g_0)

    check(descend(direction), ours(lambda m: cflat.CFlatPlus(sgd(m), model=m)))
    assert 0 < state["exact"] < STEPS
