"""The probe against a naive float64 computation, its words, and its promise to leave training alone."""

from __future__ import annotations

import copy
import math
import statistics

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cflat.analysis.probe import Probe, _judge, _judge_surrogates, probe

LAM = 0.3


def make_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def make_batches(number: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [
        (torch.randn(12, 4, generator=generator).double(), torch.randint(0, 3, (12,), generator=generator))
        for _ in range(number)
    ]


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def gradient(model: nn.Module, batch: tuple[Tensor, Tensor], offset: Tensor | float = 0.0) -> Tensor:
    twin = copy.deepcopy(model)
    theta = nn.utils.parameters_to_vector(twin.parameters()).detach()
    nn.utils.vector_to_parameters(theta + offset, twin.parameters())
    return torch.cat([part.reshape(-1) for part in torch.autograd.grad(loss_of(twin, batch), list(twin.parameters()))])


def naive_directions(model: nn.Module, batch: tuple[Tensor, Tensor], rho: float) -> tuple[Tensor, Tensor, Tensor]:
    """The plain gradient, SAM's and C-Flat's, from the definitions."""
    g = gradient(model, batch)
    g_s = gradient(model, batch, rho * g / g.norm())
    eps_1 = rho * (g_s - g) / (g_s - g).norm()
    g_0 = gradient(model, batch, eps_1)
    g_1 = gradient(model, batch, eps_1 + rho * g_0 / g_0.norm())
    return g, g_s, g_s + LAM * (g_1 - g_0)


def cosine(a: Tensor, b: Tensor) -> float:
    return float(torch.dot(a, b) / (a.norm() * b.norm()))


@pytest.mark.parametrize("rho", [0.02, 0.3, 1.5])
def test_cosines_norms_and_errors_are_the_naive_ones(rho: float):
    batches, lr = make_batches(7), 0.2
    model = make_model()
    found = probe(model, loss_of, batches, torch.optim.SGD(model.parameters(), lr=lr), steps=7, radii=[rho], lam=LAM)
    twin, expected = make_model(), []
    for batch in batches:
        g, g_s, exact = naive_directions(twin, batch, rho)
        expected.append(
            (
                cosine(exact, g),
                float(exact.norm() / g.norm()),
                cosine(g_s, exact),
                float((g_s - exact).norm() / exact.norm()),
            )
        )
        theta = nn.utils.parameters_to_vector(twin.parameters()).detach()
        nn.utils.vector_to_parameters(theta - lr * g, twin.parameters())
    means = [statistics.fmean(column) for column in zip(*expected, strict=True)]
    exact_row, sam = found.row(rho, "C-Flat"), found.row(rho, "SAM")
    assert exact_row.cosine_plain == pytest.approx(means[0], rel=1e-9)
    assert exact_row.norm_ratio == pytest.approx(means[1], rel=1e-9)
    assert sam.cosine_exact == pytest.approx(means[2], rel=1e-9)
    assert sam.error_exact == pytest.approx(means[3], rel=1e-8)
    assert exact_row.cosine_exact == pytest.approx(1.0, abs=1e-12)
    assert exact_row.error_exact == 0.0


def test_evaluations_and_trigger_rates_are_counted():
    model = make_model()
    found = probe(
        model, loss_of, make_batches(4), torch.optim.SGD(model.parameters(), lr=0.1), steps=20, radii=[0.1], k=5
    )
    assert found.steps == 20
    assert found.row(0.1, "C-Flat").evaluations_per_step == 4
    assert found.row(0.1, "SAM").evaluations_per_step == 2
    assert math.isnan(found.row(0.1, "SAM").flatness_rate)
    # exact in the first step (empty cache), then whenever j mod 5 = 0: 5 of 20 steps with four evaluations
    assert found.row(0.1, "reuse only").evaluations_per_step == pytest.approx((5 * 4 + 15 * 2) / 20)
    assert found.row(0.1, "reuse only").sharpness_rate == 1.0
    turbo = found.row(0.1, "Turbo")
    assert 0 <= turbo.sharpness_rate <= 1
    assert turbo.evaluations_per_step < 4


def test_the_weights_follow_plain_training():
    trained = []
    for is_probed in (False, True):
        model = make_model()
        base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if is_probed:
            probe(model, loss_of, make_batches(3), base, steps=5, warmup=2, radii=[0.05, 0.5])
        else:
            for batch in (make_batches(3) * 3)[:7]:
                base.zero_grad()
                loss_of(model, batch).backward()
                base.step()
        trained.append(nn.utils.parameters_to_vector(model.parameters()))
    assert torch.equal(*trained)


def test_vectors_of_a_frozen_batch_do_not_turn():
    model = make_model()
    watched = Probe(model.parameters(), model, radii=[0.1], k=2)
    batch = make_batches(1)[0]

    def closure() -> Tensor:
        loss = loss_of(model, batch)
        loss.backward()
        return loss

    for _ in range(6):
        assert watched.look(closure)
    assert watched.result().stability[0].cosines == pytest.approx(dict.fromkeys(("g", "g_0", "g_vs", "g_vf"), 1.0))
    assert "Cached directions last" in " ".join(watched.result().remarks)
    assert watched.result().row(0.1, "reuse only, calibrated").error_exact < 1e-9  # nothing has changed


def test_infinite_and_zero_gradients_are_passed_over():
    model = make_model()
    watched = Probe(model.parameters(), model, radii=[0.1])

    def zero() -> Tensor:
        loss = 0.0 * sum(parameter.sum() for parameter in model.parameters())
        loss.backward()
        return loss

    def infinite() -> Tensor:
        loss = float("inf") * sum(parameter.sum() for parameter in model.parameters())
        loss.backward()
        return loss

    assert not watched.look(zero)
    assert not watched.look(infinite)
    with pytest.raises(ValueError, match="no step with a finite gradient"):
        watched.result()


@pytest.mark.parametrize(("radii", "suggested"), [([1.0, 0.4], 0.4), ([1.0], None)])
def test_a_radius_at_which_c_flat_is_never_finite_is_too_large(radii, suggested):
    place = torch.tensor([1.0, 0.5], dtype=torch.float64, requires_grad=True)
    watched = Probe([place], radii=radii)

    def closure() -> Tensor:
        wall = math.inf if (place.detach() - torch.tensor([1.0, 0.5])).norm() > 0.9 else 1.0
        loss = wall * (place * torch.tensor([1.0, 9.0]) * place).sum() + 9 * place[0]
        loss.backward()
        return loss

    assert watched.look(closure)
    found = watched.result()
    assert found.verdict.startswith("At rho = 1 exact C-Flat met Inf or NaN in every step: this radius is too large.")
    assert found.suggested_rho == suggested
    assert {row.rho for row in found.rows} == set(radii) - {1.0}
    assert found.remarks == []


def test_without_a_forecast_to_compare_there_is_no_remark():
    model = make_model()
    rows = probe(
        model, loss_of, make_batches(2), torch.optim.SGD(model.parameters(), lr=0.1), steps=2, radii=[0.1]
    ).rows
    assert "What Forecast adds" in _judge_surrogates(rows)
    assert _judge_surrogates([row for row in rows if row.optimizer != "Forecast"]) == ""


@pytest.mark.parametrize(
    ("cosines", "words", "suggested"),
    [
        ({0.05: 0.998, 0.2: 0.97, 0.5: 0.9}, "next to nothing", 0.2),
        ({0.05: 0.998}, "extrapolated", 0.2),
        ({0.05: 0.9}, "changes the update", 0.05),
        ({0.5: 0.1, 0.05: 0.9}, "too large. Try rho = 0.05", 0.05),
        ({0.5: 0.1}, "No tried radius", None),
        ({0.05: 1.0}, "No tried radius is in the useful range.", None),
    ],
)
def test_words_and_suggestion(cosines, words, suggested):
    verdict, rho = _judge(cosines, first=next(iter(cosines)))
    assert words in verdict
    assert rho == suggested


@pytest.mark.parametrize(
    ("arguments", "words"), [({"radii": []}, "at least one"), ({"radii": [0.1, -1]}, "radii"), ({"steps": 0}, "steps")]
)
def test_wrong_arguments_are_named(arguments, words):
    model = make_model()
    with pytest.raises(ValueError, match=words):
        probe(model, loss_of, make_batches(1), torch.optim.SGD(model.parameters(), lr=0.1), **arguments)


def test_an_empty_loader_ends():
    model = make_model()
    with pytest.raises(ValueError, match="no step"):
        probe(model, loss_of, [], torch.optim.SGD(model.parameters(), lr=0.1))
