"""What only Turbo has: surrogates whose error is measured, budgets, and settings that exclude each other."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cflat
from cases import ADAPTIVE, BASES, MEASURED_VARIANTS, MLP, PRINTED_VARIANTS, Case, closure_of, loss_of, train
from cflat.optim._ahead import bearable_curvature
from cflat.optim._surrogate import Products, surrogate_errors
from reference import REFERENCES, ReferenceTrainer

MEASURED = (ADAPTIVE, *MEASURED_VARIANTS)


def turbo(**keywords) -> tuple[torch.nn.Module, cflat.CFlatTurbo]:
    model = MLP.model()
    return model, cflat.CFlatTurbo(BASES["sgd"](model), model=model, **keywords)


# -- the surrogate error -------------------------------------------------------------------------------------


@given(st.integers(0, 10_000), st.floats(-1, 2), st.floats(0, 1))
@settings(max_examples=50, deadline=None)
def test_errors_follow_from_inner_products(seed: int, a: float, c: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    g, d, u = torch.randn(3, 7, generator=generator, dtype=torch.float64)
    u /= u.norm()
    products = Products(*(value.item() for value in (g.norm(), d.norm(), d @ g, d @ u, g @ u)))
    error, orthogonal = surrogate_errors(products, a, c)
    difference = a * g + c * g.norm() * u - d
    across = difference - (difference @ g) / (g @ g) * g
    v = d - (d @ g) / (g @ g) * g
    assert error == pytest.approx((difference.norm() / d.norm()).item(), rel=1e-9)
    assert orthogonal == pytest.approx((across.norm() / v.norm()).item(), rel=1e-6)


def test_plain_training_has_error_one() -> None:
    assert surrogate_errors(Products(g=2.0, d=0.3, dg=0.1, du=0.05, gu=0.4), 0.0, 0.0) == pytest.approx((1.0, 1.0))


@pytest.mark.parametrize("row", MEASURED, ids=str)
def test_telemetry_has_the_errors_of_the_reference(row: Case) -> None:
    model, copy = MLP.model(), MLP.model()
    optimizer = row.make(BASES["sgd"](model), model=model)
    trainer = ReferenceTrainer(copy, BASES["sgd"](copy), REFERENCES[row.name](**row.settings), loss_of)
    measured = []
    for step in range(60):
        optimizer.step(closure_of(model, MLP.batch(step)))
        trainer.step(MLP.batch(step))
        if "error" in optimizer.telemetry.last:
            measured.append(optimizer.telemetry.last["error"])
    assert len(measured) == optimizer.telemetry.surrogate.count > 5
    assert measured == pytest.approx(trainer.algorithm.e, rel=1e-7)
    assert optimizer.telemetry.surrogate.mean == pytest.approx(sum(measured) / len(measured))


@pytest.mark.parametrize("row", PRINTED_VARIANTS[:4], ids=str)
def test_printed_rules_measure_their_sharpness_branch(row: Case) -> None:
    """Set against vectors: on each refresh the old cache, as a reused step would have used it, against g_s - g."""
    model = MLP.model()
    optimizer = row.make(BASES["sgd"](model), model=model)
    seen: dict[str, torch.Tensor] = {}
    optimizer.register_gradient_hook(
        lambda evaluation: seen.update({evaluation.name: torch.cat([t.flatten() for t in evaluation.gradient.tensors])})
    )
    branch, errors = optimizer._rule.sharp, 0
    for step in range(40):
        cached, (a, c) = list(branch.memory._tensors.values()), branch.coefficients
        old = torch.cat([t.flatten().clone() for t in cached]) if cached else None
        optimizer.step(closure_of(model, MLP.batch(step)))
        if "error" not in optimizer.telemetry.last:
            continue
        g, d = seen["g"], seen["g_s"] - seen["g"]
        surrogate = a * g + c * g.norm() * old / old.norm()
        assert optimizer.telemetry.last["error"] == pytest.approx(((surrogate - d).norm() / d.norm()).item(), rel=1e-7)
        errors += 1
    assert errors > 3
    assert optimizer.telemetry.surrogate.count == errors


def test_prediction_of_a_linear_gradient_field_is_good() -> None:
    """On a quadratic bowl d is parallel to g, of constant ratio once |g| is: error and cost are small."""
    weights = torch.nn.Parameter(torch.full((8,), 3.0, dtype=torch.float64))
    optimizer = cflat.CFlatTurbo(torch.optim.SGD([weights], lr=1e-4), rho=0.01)

    def closure() -> torch.Tensor:
        loss = 0.5 * weights.square().sum()
        loss.backward()
        return loss

    for _ in range(200):
        optimizer.step(closure)
    assert optimizer.telemetry.surrogate.mean < 0.05
    assert optimizer.telemetry.evaluations_per_step < 1.12  # a quarter of the budget's 0.3, and the first refresh


# -- budgets -------------------------------------------------------------------------------------------------


@given(st.floats(1.01, 4.0), st.integers(1, 120), st.sampled_from(["adaptive", "measured"]))
@settings(max_examples=25, deadline=None)
def test_budget_is_never_exceeded_but_by_the_first_refresh(budget: float, num_steps: int, rules: str) -> None:
    model, optimizer = turbo(evaluations=budget, rules=rules, rho=0.1)
    counts = train(optimizer, model, MLP, num_steps)
    spent = 0
    for step, count in enumerate(counts, start=1):
        spent += count
        assert spent <= budget * step + 3 + 1e-6


@pytest.mark.parametrize("budget", [1.15, 1.3, 2.0, 3.0])
def test_budget_is_used_where_predictions_are_poor(budget: float) -> None:
    model, optimizer = turbo(evaluations=budget, rho=0.1)
    train(optimizer, model, MLP, 200)
    assert optimizer.telemetry.surrogate.mean > 0.5
    assert budget - 0.03 < optimizer.telemetry.evaluations_per_step < budget + 0.02


def test_default_is_adaptive_and_within_its_budget() -> None:
    model, optimizer = turbo()
    counts = train(optimizer, model, MLP, 100)
    assert set(counts) == {1, 2, 4}
    assert sum(counts) <= 1.38 * 100 + 3
    assert optimizer.rules == cflat.TurboRules.named("adaptive")


def test_full_refreshes_are_every_tenth() -> None:
    model, optimizer = turbo(evaluations=1.5)
    train(optimizer, model, MLP, 200)
    telemetry = optimizer.telemetry
    assert telemetry.flatness.refreshed == math.ceil(telemetry.sharpness.refreshed / 10)


def test_useless_predictions_are_left_out() -> None:
    """Gradients that have nothing to do with each other cannot be predicted; then a step in between is plain."""
    model, optimizer = turbo(rho=0.5, evaluations=1.6)
    taken = []
    for step in range(150):
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.step(closure_of(model, MLP.batch(step)))
        taken.append(optimizer.telemetry.last["sharpness"])
        assert any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    outcomes = set(taken)
    assert outcomes <= {"refreshed", "reused", "skipped"}
    assert "skipped" in outcomes, "choose a harder problem: the guard was never needed"


def test_error_never_leaves_a_task() -> None:
    model, optimizer = turbo(rules="measured", k=3)
    train(optimizer, model, MLP, 20)
    optimizer.start_task(1, num_tasks=2)
    counts = train(optimizer, model, MLP, 2, start=20)
    assert counts[0] == 4
    assert "error" not in optimizer.telemetry.last  # the first refresh of a task has nothing to be compared with
    assert optimizer._rule.along.count == 1


# -- looking ahead -------------------------------------------------------------------------------------------

AHEAD = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01, amsgrad=True, weight_decay=0.1),
    "adamw": lambda params: torch.optim.AdamW(params, lr=torch.tensor(0.01), weight_decay=0.0),
    "dampened": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.5, dampening=0.3, maximize=True),
}


@pytest.mark.parametrize("base", AHEAD)
@pytest.mark.parametrize("speed", [1.0, 0.01])
def test_gradients_are_taken_where_the_base_would_be_without_them(base: str, speed: float) -> None:
    """What the base does with a gradient that leaves its momentum as it is, five times or within reach."""
    model = MLP.model()
    optimizer = cflat.CFlatTurbo(AHEAD[base](model.parameters()), model=model)
    optimizer.param_groups[0]["lr"] *= speed
    train(optimizer, model, MLP, 12)
    theta = [param.detach().clone() for param in model.parameters()]
    moves = []
    for param in model.parameters():
        state, group = optimizer.base.state[param], optimizer.param_groups[0]
        if base.startswith("adam"):
            square = state["max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"]
            mean, square = (
                value / (1 - beta ** float(state["step"]))
                for value, beta in zip((state["exp_avg"], square), group["betas"], strict=True)
            )
            moves.append(-float(group["lr"]) * mean / (square.sqrt() + group["eps"]))
        else:
            moves.append(-group["lr"] * state["momentum_buffer"])
    for _ in optimizer.passes():
        here = [param.detach().clone() for param in model.parameters()]
        closure_of(model, MLP.batch(12))()
        break
    length, size = (torch.cat([part.flatten() for part in parts]).norm() for parts in (moves, theta))
    steps = min(5.0, 0.1 * float(size / length))
    assert (steps < 5) == (speed == 1)
    for found, start, move in zip(here, theta, moves, strict=True):
        torch.testing.assert_close(found, start + steps * move, rtol=1e-9, atol=1e-12)


def test_only_what_is_trained_and_has_momentum_moves_ahead() -> None:
    model = MLP.model()
    first, *others = model.parameters()
    optimizer = cflat.CFlatTurbo(BASES["sgd"](model), model=model)
    new = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
    train(optimizer, model, MLP, 5)
    optimizer.add_param_group({"params": [new]})
    first.requires_grad_(False)
    before = [param.detach().clone() for param in (first, new, *others)]
    optimizer.begin_step()
    moved = [not torch.equal(old, param) for old, param in zip(before, (first, new, *others), strict=True)]
    assert moved == [False, False, *[True] * len(others)]
    assert new not in optimizer.base.state
    optimizer.give_up_step()
    assert all(torch.equal(old, param) for old, param in zip(before, (first, new, *others), strict=True))


@pytest.mark.parametrize(
    "base",
    [
        lambda params: torch.optim.SGD(params, lr=0.1),
        lambda params: torch.optim.Adam(params, betas=(0.0, 0.9)),
        lambda params: torch.optim.RMSprop(params, momentum=0.9),
    ],
    ids=["sgd", "adam", "rmsprop"],
)
def test_a_base_without_known_momentum_is_not_followed(base) -> None:
    model = MLP.model()
    optimizer = cflat.CFlatTurbo(base(model.parameters()), model=model)
    assert (optimizer.ahead, optimizer.looks_ahead) == (0.0, False)
    with pytest.raises(ValueError, match="ahead follows the momentum of torch's SGD or Adam"):
        cflat.CFlatTurbo(base(model.parameters()), model=model, ahead=2.0)


@pytest.mark.parametrize(
    "keywords", [{"k": 1, "schedule": False}, {"evaluations": 4}, {"rules": "paper"}, {"ahead": 0}]
)
def test_what_is_c_flat_or_printed_stays_at_the_weights(keywords) -> None:
    assert not turbo(**keywords)[1].looks_ahead


# -- steps that would overshoot ------------------------------------------------------------------------------


def parabola(base: torch.optim.Optimizer, theta: torch.Tensor, curvature: float, ahead: float, num_steps: int) -> float:
    """Return how far from the minimum training ends that takes its gradients some steps ahead."""
    for _ in range(num_steps):
        buffer = base.state[theta].get("momentum_buffer")
        move = 0.0 if buffer is None else -base.param_groups[0]["lr"] * buffer
        theta.grad = curvature * (theta.detach() + ahead * move)
        base.step()
        if abs(theta.item()) > 1e3:
            break
    return abs(theta.item())


@pytest.mark.parametrize("momentum", [0.0, 0.3, 0.9, 0.95])
@pytest.mark.parametrize("ahead", [0.0, 1.0, 5.0])
@pytest.mark.parametrize("kind", ["", "nesterov", "damped"])
def test_the_bearable_curvature_is_where_sgd_diverges(momentum: float, ahead: float, kind: str) -> None:
    ahead = ahead if momentum else 0.0
    for factor in (0.98, 1.02):
        theta = torch.nn.Parameter(torch.ones((), dtype=torch.float64))
        keywords = {"nesterov": kind == "nesterov" and momentum > 0, "dampening": 0.4 if kind == "damped" else 0.0}
        base = torch.optim.SGD([theta], lr=0.02, momentum=momentum, **keywords)
        curvature = factor * bearable_curvature(base, ahead)
        end = parabola(base, theta, curvature, ahead, 3000)
        assert end < 1e-2 if factor < 1 else end > 1e2


def test_only_sgd_can_overshoot_and_the_fastest_group_decides() -> None:
    theta, other = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    assert bearable_curvature(torch.optim.Adam([theta], lr=10.0), 5.0) == math.inf
    groups = [{"params": [theta], "lr": 0.1}, {"params": [other], "lr": 0.4}]
    assert bearable_curvature(torch.optim.SGD(groups), 0.0) == pytest.approx(2 / 0.4)
    assert bearable_curvature(torch.optim.SGD([theta], lr=0.0), 0.0) == math.inf


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_rate_that_is_too_high_does_not_diverge(momentum: float) -> None:
    """A valley of curvatures 1 and 50: SGD bears rates of up to 0.04 without momentum and 0.076 with it."""
    curvatures = torch.tensor([1.0, 50.0], dtype=torch.float64)

    def end(make, lr: float) -> tuple[float, torch.optim.Optimizer]:
        theta = torch.nn.Parameter(torch.ones(2, dtype=torch.float64))
        optimizer = make(torch.optim.SGD([theta], lr=lr, momentum=momentum))

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = (curvatures * theta**2).sum() / 2
            loss.backward()
            return loss

        for _ in range(300):
            optimizer.step(closure)
        return theta.abs().max().item(), optimizer

    def make_turbo(base):
        return cflat.CFlatTurbo(base, rho=0.01)

    reached, optimizer = end(make_turbo, 0.2)
    assert reached < 2
    assert optimizer.telemetry.shortened > 100
    assert end(cflat.Plain, 0.2)[0] > 1e6
    reached, optimizer = end(make_turbo, 0.001)
    assert (reached < 1, optimizer.telemetry.shortened) == (True, 0)


@pytest.mark.parametrize("kind", ["", "damped", "groups"])
def test_shortened_steps_are_those_of_the_reference(kind: str) -> None:
    def make_base(model: torch.nn.Module) -> torch.optim.Optimizer:
        keywords = {"dampening": 0.3} if kind == "damped" else {}
        first, *others = model.parameters()
        groups = [{"params": [first], "lr": 0.1}, {"params": others}] if kind == "groups" else model.parameters()
        return torch.optim.SGD(groups, lr=0.5, momentum=0.9, **keywords)

    model, copy = MLP.model(), MLP.model()
    optimizer = ADAPTIVE.make(make_base(model), model=model)
    trainer = ReferenceTrainer(copy, make_base(copy), REFERENCES[ADAPTIVE.name](**ADAPTIVE.settings), loss_of)
    shares = []
    for step in range(60):
        optimizer.step(closure_of(model, MLP.batch(step)))
        trainer.step(MLP.batch(step))
        shares.append(optimizer.telemetry.last.get("share", 1.0))
    assert shares == pytest.approx(trainer.algorithm.shares, rel=1e-6)
    assert 0 < optimizer.telemetry.shortened == sum(share < 1 for share in shares) < 60


@pytest.mark.parametrize("keywords", [{"k": 1, "schedule": False}, {"evaluations": 4}, {"rules": "measured"}])
def test_c_flat_and_the_rule_of_the_design_note_are_not_bounded(keywords) -> None:
    model = MLP.model()
    optimizer = cflat.CFlatTurbo(torch.optim.SGD(model.parameters(), lr=2.0), model=model, **keywords)
    train(optimizer, model, MLP, 20)
    assert optimizer.telemetry.shortened == 0


@pytest.mark.parametrize(("dtype", "rho"), [(torch.float32, 1e-7), (torch.float32, 1e-5), (torch.bfloat16, 1e-3)])
def test_rounding_errors_are_not_taken_for_curvature(dtype: torch.dtype, rho: float) -> None:
    """Over such a radius weights and gradients differ by rounding alone; divided by it, that would be any curvature."""
    model = MLP.model(dtype)
    optimizer = cflat.CFlatTurbo(BASES["sgd"](model), model=model, rho=rho, evaluations=2.0)
    train(optimizer, model, MLP, 60)
    assert optimizer.telemetry.sharpness.refreshed > 20
    assert optimizer.telemetry.shortened == 0


def test_a_state_from_before_the_bound_loads() -> None:
    model, optimizer = turbo()
    train(optimizer, model, MLP, 10)
    state = optimizer.state_dict()
    del state["wrapper"]["extra"]["curvature"], state["wrapper"]["extra"]["size"]
    del state["wrapper"]["telemetry"]["shortened"]
    model, other = turbo()
    other.load_state_dict(state)
    assert (other.telemetry.steps, other.telemetry.shortened) == (10, 0)
    train(other, model, MLP, 3, start=10)


# -- settings ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keywords", "says"),
    [
        ({"evaluations": 1.3, "k": 5}, "evaluations is a budget and k"),
        ({"evaluations": 1.3, "schedule": False}, "evaluations is a budget and schedule=False"),
        ({"evaluations": 1.3, "rules": "paper"}, "evaluations needs rules that can keep a budget"),
        ({"evaluations": 1.0}, "evaluations must be above 1"),
        ({"evaluations": 5}, "evaluations must be above 1 and at most 4"),
        ({"trigger": True}, "trigger belongs to the rules"),
        ({"trigger": None, "schedule": None}, "schedule must be True or False"),
        ({"rules": "adaptiv"}, "Did you mean"),
        ({"rules": "paper", "ahead": 5.0}, "ahead belongs to the rules 'adaptive' and 'measured'"),
    ],
)
def test_settings_that_exclude_each_other_are_refused(keywords, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        turbo(**keywords)


@pytest.mark.parametrize(("saved", "loading"), [("adaptive", "paper"), ("steady", "measured")])
def test_a_state_of_other_rules_is_refused(saved: str, loading: str) -> None:
    model, optimizer = turbo(rules=saved)
    train(optimizer, model, MLP, 3)
    with pytest.raises(ValueError, match="was saved under the rules"):
        turbo(rules=loading)[1].load_state_dict(optimizer.state_dict())


def test_a_state_of_version_0_1_loads() -> None:
    """It held the base apart, and knew no surrogate error."""
    model, optimizer = turbo(rules="paper", k=3)
    train(optimizer, model, MLP, 5)
    state = optimizer.state_dict()
    wrapper = {**state.pop("wrapper"), "version": 1}
    wrapper["telemetry"] = {key: value for key, value in wrapper["telemetry"].items() if key != "surrogate"}
    _, other = turbo(rules="paper", k=3)
    other.load_state_dict({"base": state, "wrapper": wrapper})
    assert (other.telemetry.steps, other.telemetry.surrogate.count) == (5, 0)


def test_k_takes_the_place_of_the_budget() -> None:
    model, optimizer = turbo(rho=0.05, lam=0.2, beta=0.8, k=5)  # the two lines of the README
    assert optimizer.evaluations is None
    counts = train(optimizer, model, MLP, 30)
    refreshes = [step for step, count in enumerate(counts) if count > 1]
    assert {later - earlier for earlier, later in pairwise(refreshes)} == {5}
