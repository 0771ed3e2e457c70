"""Settings of parameter groups: a radius and a flatness weight of their own, and bases that maximize."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import cflat
from cases import case
from cflat import StepOptions
from faults import DOORS, EVERY, batch_of, differences, walk

RHO = 0.1


class Net(nn.Module):
    """A body with a norm layer, and a head."""

    def __init__(self):
        super().__init__()
        self.hidden, self.norm, self.head = nn.Linear(5, 8), nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, inputs):
        return self.head(torch.tanh(self.norm(self.hidden(inputs))))


def network(dtype=torch.float64):
    torch.manual_seed(3)
    return Net().to(dtype)


def closure_of(model, step, sign=1.0, seen=None):
    inputs, labels = batch_of(step, dtype=model.head.weight.dtype)

    def closure():
        if seen is not None:
            seen.append([param.detach().clone() for param in model.parameters()])
        loss = sign * F.cross_entropy(model(inputs), labels)
        loss.backward()
        return loss

    return closure


def grouped(model, **own):
    """Return one group per child, with the settings of that child."""
    return [{"params": list(child.parameters()), **own.get(name, {})} for name, child in model.named_children()]


def base_for(model, maximize=False, **own):
    groups = grouped(model, **own)
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=1e-2, maximize=maximize)


SEVERAL = [row for row in EVERY if row.name != "none"]


@pytest.mark.parametrize("row", SEVERAL, ids=str)
@pytest.mark.parametrize("door", DOORS[:2])
def test_a_group_with_radius_zero_never_moves_and_is_trained(row, door):
    model = network()
    optimizer = row.make(base_for(model, head={"rho": 0.0}, hidden={"rho": 0.0}), model=model)
    names = [name for name, _ in model.named_parameters()]
    for step in range(6):
        before = [param.detach().clone() for param in model.parameters()]
        seen = []
        walk(door, optimizer, closure_of(model, step, seen=seen))
        for values in seen:
            moved = {name for name, a, b in zip(names, values, before, strict=True) if not torch.equal(a, b)}
            assert moved <= {"norm.weight", "norm.bias"}
        if len(seen) > 1:
            assert any(not torch.equal(a, b) for a, b in zip(seen[1], before, strict=True))
        assert all(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("row", SEVERAL, ids=str)
def test_a_group_with_the_common_radius_changes_nothing(row):
    plain, own = network(), network()
    first = row.make(base_for(plain), model=plain)
    second = row.make(base_for(own, head={"rho": first.rho}), model=own)
    for step in range(6):
        first.step(closure_of(plain, step))
        second.step(closure_of(own, step))
    assert not differences(own.state_dict(), plain.state_dict())


@pytest.mark.parametrize("row", SEVERAL, ids=str)
def test_a_run_with_groups_resumes_bit_for_bit(row):
    def fresh():
        model = network()
        return model, row.make(base_for(model, head={"rho": 0.0}, norm={"rho": 0.03, "lam": 0.5}), model=model)

    whole, first, second = fresh(), fresh(), fresh()
    for step in range(7):
        whole[1].step(closure_of(whole[0], step))
        run = first if step < 3 else second
        if step == 3:
            second[0].load_state_dict(first[0].state_dict())
            second[1].load_state_dict(copy.deepcopy(first[1].state_dict()))
        run[1].step(closure_of(run[0], step))
    assert not differences(second[0].state_dict(), whole[0].state_dict())
    assert second[1].param_groups[1]["rho"] == 0.03


def gradients(model, step):
    model.zero_grad()
    closure_of(model, step)()
    return {name: param.grad.clone() for name, param in model.named_parameters()}


def at(model, offsets):
    moved = copy.deepcopy(model)
    with torch.no_grad():
        for name, param in moved.named_parameters():
            param.add_(offsets[name])
    return moved


def unit_step(direction, radii):
    """Return radius * d / |d|, the norm being over what has a radius."""
    norm = torch.sqrt(sum(part.square().sum() for name, part in direction.items() if radii[name]))
    return {name: radii[name] * part / norm for name, part in direction.items()}


@pytest.mark.parametrize("radii", [(0.1, 0.1, 0.0), (0.0, 0.05, 0.0), (0.1, 0.02, 0.3)])
def test_sam_and_c_flat_by_their_formulas(radii):
    by_child = dict(zip(("hidden", "norm", "head"), radii, strict=True))
    lams = {"hidden": 0.2, "norm": 0.5, "head": 0.0}
    own = {name: {"rho": by_child[name], "lam": lams[name]} for name in by_child}
    start = network()
    rho = {name: by_child[name.split(".")[0]] for name, _ in start.named_parameters()}

    g = gradients(start, 0)
    g_s = gradients(at(start, unit_step(g, rho)), 0)
    eps_1 = unit_step({name: g_s[name] - g[name] for name in g}, rho)
    g_0 = gradients(at(start, eps_1), 0)
    eps_2 = unit_step(g_0, rho)
    g_1 = gradients(at(start, {name: eps_1[name] + eps_2[name] for name in g}), 0)
    bar = {name: g_s[name] + lams[name.split(".")[0]] * (g_1[name] - g_0[name]) for name in g}

    for cls, expected in ((cflat.SAM, g_s), (cflat.CFlat, bar)):
        model = network()
        cls(torch.optim.SGD(grouped(model, **own), lr=1.0), rho=RHO).step(closure_of(model, 0))
        for name, param in model.named_parameters():
            torch.testing.assert_close(param, dict(start.named_parameters())[name] - expected[name], rtol=0, atol=1e-12)


def test_clipping_and_inf_are_about_all_parameters():
    """Norms of perturbations are not: a head that is not perturbed still counts for both."""
    model = network()
    optimizer = cflat.SAM(base_for(model, head={"rho": 0.0}), options=StepOptions(max_norm=1e-3))
    optimizer.step(closure_of(model, 0))
    norm = torch.sqrt(sum(param.grad.square().sum() for param in model.parameters()))
    assert norm == pytest.approx(1e-3)
    before = copy.deepcopy(model.state_dict())

    def poisoned():
        closure_of(model, 1)()
        model.head.weight.grad[0, 0] = float("inf")

    optimizer.step(poisoned)
    assert optimizer.telemetry.nonfinite == 1
    assert not differences(model.state_dict(), before)


@pytest.mark.parametrize("row", EVERY, ids=str)
def test_nothing_perturbed_is_allowed(row):
    model = network()
    optimizer = row.make(base_for(model, **{name: {"rho": 0.0} for name in ("hidden", "norm", "head")}), model=model)
    seen = []
    for step in range(4):
        before = [param.detach().clone() for param in model.parameters()]
        seen.clear()
        optimizer.step(closure_of(model, step, seen=seen))
        assert all(not differences(values, before) for values in seen)
    assert optimizer.telemetry.nonfinite == 0


@pytest.mark.parametrize(
    ("key", "value"), [("rho", -0.1), ("rho", None), ("rho", "small"), ("rho", float("nan")), ("lam", -1)]
)
def test_wrong_values_are_named(key, value):
    model = network()
    optimizer = cflat.CFlat(base_for(model, head={key: value}))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=rf"{key} of a parameter group must be at least 0, got "):
        optimizer.step(closure_of(model, 0))
    assert not differences(model.state_dict(), before)


def test_radii_may_change_during_training():
    """Remembered norms are over the parameters that were perturbed then."""
    model = network()
    optimizer = case("looksam").make(base_for(model, head={"rho": 0.0}), k=10)
    optimizer.step(closure_of(model, 0))
    optimizer.param_groups[2]["rho"] = 0.1
    optimizer.step(closure_of(model, 1))
    memory = optimizer.memory("g_v").state(optimizer.all_params())
    norm = torch.sqrt(sum(part.square().sum() for part in memory["tensors"].values()))
    assert memory["norm"] == pytest.approx(norm.item())


@pytest.mark.parametrize("row", EVERY, ids=str)
@pytest.mark.parametrize("door", DOORS[:2])
@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_a_base_that_maximizes_equals_the_negated_loss(row, door, name):
    """Where the base climbs, the worst point lies down the gradient."""

    def run(sign, maximize):
        model = network()
        if name == "sgd":
            base = base_for(model, maximize=maximize, head={"rho": 0.02})
        else:
            base = torch.optim.Adam(model.parameters(), lr=1e-2, maximize=maximize)
        optimizer = row.make(base, model=model)
        for step in range(6):
            walk(door, optimizer, closure_of(model, step, sign))
        return model, optimizer.telemetry.evaluations

    (climbing, ours), (descending, theirs) = run(-1.0, True), run(1.0, False)
    assert ours == theirs
    for mine, other in zip(climbing.parameters(), descending.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-13)


def test_one_player_climbs_while_the_other_descends():
    """A min-max game: each group is perturbed to where it is worst for itself."""
    ours, theirs = (nn.Parameter(torch.tensor([0.5], dtype=torch.float64)) for _ in range(2))
    base = torch.optim.SGD([{"params": [ours]}, {"params": [theirs], "maximize": True}], lr=0.1)
    seen = []

    def closure():
        seen.append((ours.item(), theirs.item()))
        (ours * 3 + theirs * 4).sum().backward()

    cflat.SAM(base, rho=0.1).step(closure)
    assert seen[1] == pytest.approx((0.5 + 0.06, 0.5 - 0.08))
    assert (ours.item(), theirs.item()) == pytest.approx((0.5 - 0.3, 0.5 + 0.4))
