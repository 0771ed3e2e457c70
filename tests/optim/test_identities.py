"""What must hold exactly between optimizers: limits, special cases, evaluation counts and invariances."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import cflat
from cases import (
    BASES,
    CONV,
    FORECAST,
    FORECAST_VARIANTS,
    MLP,
    OPTIMIZERS,
    RESNET,
    TURBO,
    TURBO_VARIANTS,
    Case,
    Problem,
    case,
    closure_of,
    flat_weights,
    train,
)

ALWAYS = {"trigger": False, "schedule": False}


def final_weights(
    row: Case, problem: Problem = MLP, dtype: torch.dtype = torch.float64, base: str = "sgd", num_steps: int = 10
) -> Tensor:
    """Train and return weights and buffers as one vector."""
    model = problem.model(dtype)
    train(row.make(BASES[base](model), model=model), model, problem, num_steps)
    return torch.cat([flat_weights(model), *[buffer.reshape(-1).to(dtype) for buffer in model.buffers()]])


# -- limits --------------------------------------------------------------------------------------------------

TINY = 1e-9
NEARLY_BASE = [
    case("sam").but(rho=TINY),
    case("asam").but(rho=TINY),
    case("gsam").but(rho=TINY),
    case("looksam").but("-k1", rho=TINY, k=1),
    case("looksam").but("-alpha0", rho=TINY, alpha=0.0),
    case("gam").but("-sum1", rho=TINY, rho_fd=TINY, betas=(0.5, -0.5, 0.5)),  # d = (b_1 + b_3) g in the limit
    case("ss_sam").but(rho=TINY),
    case("ae_sam").but(rho=TINY),
    case("friendly_sam").but(rho=TINY),
    case("msam").but(rho=TINY),
    case("vasso").but(rho=TINY),
    case("async_sam").but(rho=TINY),
    case("random_sam").but(rho=TINY),
    case("c_flat").but(rho=TINY),
    case("c_flat_plus").but(rho=TINY),
    TURBO.but("-k1", rho=TINY, k=1, schedule=False),
    TURBO.but("-calibrated", rho=TINY, reading="calibrated"),
    FORECAST.but(rho=TINY),
]


@pytest.mark.parametrize("row", NEARLY_BASE, ids=str)
@pytest.mark.parametrize("base", ["sgd", "adam"])
def test_vanishing_radius_gives_the_base_optimizer(row: Case, base: str) -> None:
    plain = final_weights(case("none"), base=base)
    torch.testing.assert_close(final_weights(row, base=base), plain, rtol=0, atol=1e-6)
    assert not torch.equal(final_weights(row.but(rho=0.1), base=base), plain)


def test_vasso_with_this_steps_gradient_alone_is_sam() -> None:
    assert torch.equal(final_weights(case("vasso").but(theta=1.0)), final_weights(case("sam")))


@pytest.mark.parametrize("row", [case("looksam"), TURBO.but(**ALWAYS)], ids=str)
def test_printed_surrogates_do_not_vanish_with_the_radius(row: Case) -> None:
    """They have length alpha |g| or beta |g| whatever rho is: an amplification, not an approximation."""
    difference = final_weights(row.but(rho=1e-6)) - final_weights(case("none"))
    assert difference.norm() > 0.1


def test_plain_is_the_base_optimizer_bit_for_bit() -> None:
    model = CONV.model(torch.float32)
    base = BASES["groups"](model)
    for step in range(10):
        base.zero_grad()
        closure_of(model, CONV.batch(step, torch.float32))()
        base.step()
    expected = torch.cat([flat_weights(model), *[buffer.reshape(-1).float() for buffer in model.buffers()]])
    assert torch.equal(final_weights(case("none"), CONV, torch.float32, "groups"), expected)


# -- special cases, bit for bit ------------------------------------------------------------------------------

SAM = Case("sam", "sam", {"rho": 0.07})
CFLAT = Case("c_flat", "c_flat", {"rho": 0.07, "lam": 0.3})
SAME = [
    pytest.param(case("c_flat").but(rho=0.07, lam=0.0), SAM, id="c_flat-lam0-sam"),
    pytest.param(case("looksam").but(rho=0.07, k=1), SAM, id="looksam-k1-sam"),
    pytest.param(case("ss_sam").but(rho=0.07, p=1.0), SAM, id="ss_sam-p1-sam"),
    pytest.param(case("ss_sam").but(p=0.0), case("none"), id="ss_sam-p0-none"),
    pytest.param(case("friendly_sam").but(rho=0.07, sigma=0.0), SAM, id="friendly_sam-sigma0-sam"),
    pytest.param(case("gsam").but(rho=0.07, alpha=0.0), SAM, id="gsam-alpha0-sam"),
    pytest.param(case("ae_sam").but(rho=0.07, start=-1e9, end=-1e9), SAM, id="ae_sam-always-sam"),
    pytest.param(case("ae_sam").but(start=1e9, end=1e9), case("none"), id="ae_sam-never-none"),
    pytest.param(
        case("c_flat_plus").but(rho=0.07, lam=0.3, amplitude=1e-30, gain=1e-30), CFLAT, id="c_flat_plus-always-c_flat"
    ),
    pytest.param(TURBO.but(threshold=1e12), case("none"), id="turbo-never-none"),
    pytest.param(TURBO.but(rho=0.07, lam=0.0, k=1, **ALWAYS), SAM, id="turbo-k1-lam0-sam"),
    pytest.param(Case("", "c_flat_turbo", {"rho": 0.07, "lam": 0.3, "k": 1, **ALWAYS}), CFLAT, id="turbo-k1-c_flat"),
    pytest.param(
        Case("", "c_flat_forecast", {"rho": 0.07, "lam": 0.3, "evaluations": 4}), CFLAT, id="forecast-4-c_flat"
    ),
]


@pytest.mark.parametrize(("row", "same"), SAME)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["f32", "f64"])
def test_special_case_has_the_same_bits(row: Case, same: Case, dtype: torch.dtype) -> None:
    assert torch.equal(final_weights(row, CONV, dtype), final_weights(same, CONV, dtype))


@pytest.mark.parametrize("reading", ["printed", "consistent", "calibrated"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["f32", "f64"])
@pytest.mark.parametrize(
    ("problem", "base"), [(MLP, "adam"), (CONV, "groups"), (RESNET, "sgd")], ids=["mlp", "conv", "resnet"]
)
def test_turbo_that_always_refreshes_is_c_flat(problem: Problem, base: str, dtype: torch.dtype, reading: str) -> None:
    turbo = TURBO.but(rho=0.07, lam=0.3, k=1, reading=reading, **ALWAYS)
    assert torch.equal(final_weights(turbo, problem, dtype, base), final_weights(CFLAT, problem, dtype, base))


@pytest.mark.parametrize(
    "settings",
    [
        {"rho": 0.01, "lam": 0.45},  # 0.45 * 0.01 / 0.01 is not 0.45
        {"rho": 0.3, "lam": 0.2, "rho_fd": 0.007},
        {"rho": cflat.InverseSqrt(0.3), "lam": 0.7},
        {"rho": cflat.TiedToLR(rho_max=0.2, lr_max=0.3), "lam": 0.85, "rho_fd": 0.01},
    ],
    ids=["uneven", "rho_fd", "inverse-sqrt", "tied"],
)
def test_turbo_is_c_flat_for_every_radius(settings) -> None:
    turbo = TURBO.but(k=1, **ALWAYS, **settings)
    assert torch.equal(final_weights(turbo), final_weights(Case("c_flat", "c_flat", settings)))


@pytest.mark.parametrize("row", [case("c_flat"), case("c_flat_plus").but(amplitude=1e-30), TURBO], ids=str)
def test_radius_may_reach_zero(row: Case) -> None:
    """A radius tied to a learning rate that ends at 0 is 0 in the last step."""
    model = MLP.model()
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = row.make(base, model=model, rho=cflat.TiedToLR(rho_max=0.1, lr_max=0.1))
    train(optimizer, model, MLP, 3)
    base.param_groups[0]["lr"] = 0.0
    before = flat_weights(model)
    train(optimizer, model, MLP, 3, start=3)
    assert torch.equal(flat_weights(model), before)
    assert optimizer.telemetry.nonfinite == 0


# -- cost ----------------------------------------------------------------------------------------------------


def counts_of(row: Case, num_steps: int) -> list[int]:
    model = MLP.model()
    return train(row.make(BASES["sgd"](model), model=model), model, MLP, num_steps)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (case("none"), [1] * 10),
        (case("sam"), [2] * 10),
        (case("asam"), [2] * 10),
        (case("gsam"), [2] * 10),
        (case("friendly_sam"), [2] * 10),
        (case("msam"), [1] * 10),
        (case("vasso"), [2] * 10),
        (case("async_sam"), [1] * 10),
        (case("random_sam"), [1] * 10),
        (case("gam"), [4] * 10),
        (case("c_flat"), [4] * 10),
        (case("looksam").but(k=5), [2, 1, 1, 1, 1] * 2),
        (TURBO.but("-reuse", k=5, **ALWAYS), [4, 2, 2, 2, 4, 2, 2, 2, 2, 4, 2, 2, 2, 2, 4]),
        (TURBO.but("-reuse-calibrated", k=5, reading="calibrated", **ALWAYS), [4, 2, 2, 2, 2] * 3),
        (FORECAST.but(evaluations=1.5), [4, *[1, 2] * 9]),
        (FORECAST.but("-rich", evaluations=2.5), [4, *[2, 2, 2, 4] * 3]),
    ],
    ids=lambda value: str(value) if isinstance(value, Case) else "",
)
def test_evaluations_per_step(row: Case, expected: list[int]) -> None:
    assert counts_of(row, len(expected)) == expected


def test_mean_evaluations_are_those_of_the_paper() -> None:
    assert sum(counts_of(case("looksam").but(k=5), 50)) / 50 == 1.2
    assert sum(counts_of(TURBO.but(k=5, **ALWAYS), 55)[5:]) / 50 == 2.4
    assert sum(counts_of(TURBO.but(k=5, reading="calibrated", **ALWAYS), 50)) / 50 == 2.4


@pytest.mark.parametrize("reading", ["printed", "consistent", "calibrated"])
def test_triggered_turbo_has_steps_of_one_evaluation(reading: str) -> None:
    counts = counts_of(TURBO.but(threshold=1.0, reading=reading), 60)
    assert counts[0] == 4  # nothing is cached yet
    assert counts.count(1) >= 10
    assert sum(counts) < 2.4 * 60


@pytest.mark.parametrize("row", [*OPTIMIZERS, *TURBO_VARIANTS, *FORECAST_VARIANTS], ids=str)
def test_telemetry_agrees_with_a_counting_closure(row: Case) -> None:
    model = MLP.model()
    optimizer = row.make(BASES["sgd"](model), model=model)
    total = 0
    for task in range(2):
        optimizer.start_task(task, num_tasks=2)
        for step in range(12):
            (count,) = train(optimizer, model, MLP, 1, start=12 * task + step)
            total += count
            assert optimizer.telemetry.last["evaluations"] == count
    telemetry = optimizer.telemetry
    assert (telemetry.steps, telemetry.evaluations) == (24, total)
    assert telemetry.evaluations_per_step == total / 24
    for branch in (telemetry.sharpness, telemetry.flatness):
        assert branch.refreshed + branch.reused + branch.skipped in (0, 24)
    if row.name == "c_flat_forecast":
        assert total == 24 + telemetry.sharpness.refreshed + 2 * telemetry.flatness.refreshed
    elif row.name == "c_flat_turbo":
        used_flat = 24 - telemetry.sharpness.skipped  # one evaluation for g, and one for g_0 on these steps
        assert total == 24 + telemetry.sharpness.refreshed + used_flat + telemetry.flatness.refreshed


@pytest.mark.parametrize(("k", "growth", "num_tasks"), [(5, 10.0, 10), (3, 4.0, 3), (1, 7.0, 7), (2, 0.0, 4)])
def test_interval_grows_with_the_tasks(k: int, growth: float, num_tasks: int) -> None:
    model = MLP.model()
    optimizer = TURBO.but(k=k, k_growth=growth).make(BASES["sgd"](model))
    intervals = []
    for task in range(num_tasks):
        optimizer.start_task(task, num_tasks=num_tasks)
        intervals.append(optimizer.interval)
    assert intervals == [k + int(growth) * task // num_tasks for task in range(num_tasks)]
    optimizer.start_task(num_tasks)
    assert optimizer.interval == k  # the length of the stream is unknown


def test_coin_of_ss_sam_is_fair_and_does_not_depend_on_the_data() -> None:
    first = counts_of(case("ss_sam").but(p=0.3), 200)
    assert abs(first.count(2) - 60) < 4 * (200 * 0.3 * 0.7) ** 0.5
    model = MLP.model(seed=5)
    optimizer = case("ss_sam").but(p=0.3).make(BASES["adam"](model))
    assert train(optimizer, model, MLP, 50, start=700) == first[:50]
    assert counts_of(case("ss_sam").but(p=0.3, seed=1), 50) != first[:50]


# -- a step that is discarded ---------------------------------------------------------------------------------


class GivenUp(Exception):
    pass


@pytest.mark.parametrize("row", [*OPTIMIZERS, *TURBO_VARIANTS, *FORECAST_VARIANTS], ids=str)
def test_repeating_a_step_that_was_given_up_changes_nothing(row: Case) -> None:
    """Caches, averages and thresholds must not remember the gradients of a step that was not taken."""
    undisturbed = final_weights(row, num_steps=8)
    model = MLP.model()
    optimizer = row.make(BASES["sgd"](model), model=model)
    for step in range(8):
        for last in (2, 3, 4):
            calls = 0
            closure = closure_of(model, MLP.batch(step))

            def failing() -> Tensor:
                nonlocal calls
                calls += 1
                if calls == last:  # noqa: B023 - called before the next iteration
                    raise GivenUp
                return closure()  # noqa: B023

            try:
                optimizer.step(failing)
            except GivenUp:
                continue
            break  # it took fewer evaluations and is done
        else:
            optimizer.step(closure_of(model, MLP.batch(step)))
    assert optimizer.telemetry.steps == 8
    assert torch.equal(flat_weights(model), undisturbed)


# -- invariances ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", [*OPTIMIZERS, *TURBO_VARIANTS[:2]], ids=str)
def test_order_and_grouping_of_parameters_do_not_matter(row: Case) -> None:
    """Norms and inner products are global, so only rounding may differ."""
    weights = []
    for arrange in (lambda p: p, lambda p: p[::-1], lambda p: [{"params": p[1::2]}, {"params": p[::2][::-1]}]):
        model = CONV.model()
        base = torch.optim.SGD(arrange(list(model.parameters())), lr=0.1, momentum=0.9)
        train(row.make(base, model=model), model, CONV, 8)
        weights.append(flat_weights(model))
    torch.testing.assert_close(weights[1], weights[0], rtol=0, atol=1e-11)
    torch.testing.assert_close(weights[2], weights[0], rtol=0, atol=1e-11)


class TwoLayers(nn.Module):
    """A ReLU network that computes the same function for every ``scale``."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        fixed = torch.Generator().manual_seed(3)
        first, bias, second = (
            torch.randn(*shape, generator=fixed, dtype=torch.float64) for shape in ((8, 6), (8,), (3, 8))
        )
        self.first = nn.Parameter(first * scale)
        self.bias = nn.Parameter(bias * scale)
        self.second = nn.Parameter(second / scale)

    def forward(self, inputs: Tensor) -> Tensor:
        return F.linear(torch.relu(F.linear(inputs, self.first, self.bias)), self.second)


def worst_loss(name: str, scale: float, **settings) -> float:
    """Return the loss at the perturbed weights of one step."""
    model, log = TwoLayers(scale), []
    optimizer = cflat.create_optimizer(name, torch.optim.SGD(model.parameters(), lr=0.0), rho=0.2, **settings)
    optimizer.step(closure_of(model, MLP.batch(0), log))
    assert len(log) == 2
    return log[1]


@pytest.mark.parametrize("scale", [0.1, 3.0, 50.0])
def test_asam_does_not_depend_on_the_scale_of_the_layers(scale: float) -> None:
    assert worst_loss("asam", scale, eta=0.0) == pytest.approx(worst_loss("asam", 1.0, eta=0.0), rel=1e-10)
    assert worst_loss("sam", scale) != pytest.approx(worst_loss("sam", 1.0), rel=1e-3)
