"""What only C-Flat Turbo has: readings of Algorithm 1, caches that are kept, averaged and compared with the truth."""

from __future__ import annotations

import inspect

import pytest
import torch

import cflat
from cases import BASES, MLP, TURBO, TURBO_VARIANTS, Case, closure_of, flat_weights, train

ALWAYS = {"trigger": False, "schedule": False}


def turbo(**keywords) -> tuple[torch.nn.Module, cflat.CFlatTurbo]:
    model = MLP.model()
    return model, cflat.CFlatTurbo(BASES["sgd"](model), model=model, **keywords)


def test_defaults_are_those_of_the_paper() -> None:
    parameters = inspect.signature(cflat.CFlatTurbo).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.name not in ("base", "model", "options")}
    assert defaults == {
        "rho": 0.05, "rho_fd": None, "lam": 0.2, "beta": 0.8, "k": 5, "k_growth": 10.0, "schedule": True,
        "trigger": True, "threshold": 1.0, "decay": 0.9, "reading": "printed", "cache_decay": 0.0,
    }  # fmt: skip


@pytest.mark.parametrize("row", [TURBO, *TURBO_VARIANTS], ids=str)
def test_errors_of_the_sharpness_branch_are_measured(row: Case) -> None:
    """Set against vectors: on each refresh the old cache, as a reused step would have used it, against g_s - g."""
    model = MLP.model()
    optimizer = row.make(BASES["sgd"](model), model=model)
    seen: dict[str, torch.Tensor] = {}
    optimizer.register_gradient_hook(
        lambda evaluation: seen.update({evaluation.name: torch.cat([t.flatten() for t in evaluation.gradient.tensors])})
    )
    branch, errors = optimizer._sharp, 0
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


@pytest.mark.parametrize("number", [1, 2, 3, 4])
@pytest.mark.parametrize("reading", ["printed", "consistent", "calibrated"])
def test_a_step_that_is_given_up_leaves_both_caches(number: int, reading: str) -> None:
    """Also the third and fourth evaluation of a refresh, after which g_vs has been computed anew."""
    model, optimizer = turbo(k=3, reading=reading, **ALWAYS)
    train(optimizer, model, MLP, 5 if reading != "calibrated" else 3)
    before = {name: _cached(optimizer, name) for name in ("g_vs", "g_vf")}
    calls = 0

    def failing() -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == number:
            raise ZeroDivisionError
        return closure_of(model, MLP.batch(50))()

    with pytest.raises(ZeroDivisionError):
        optimizer.step(failing)
    assert {name: len(tensors) for name, tensors in before.items()} == {"g_vs": 6, "g_vf": 6}
    for name, tensors in before.items():
        assert all(torch.equal(a, b) for a, b in zip(tensors, _cached(optimizer, name), strict=True))


def _cached(optimizer: cflat.CFlatTurbo, name: str) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in optimizer.memory(name)._tensors.values()]


def test_averaged_caches_turn_less() -> None:
    """What ``cache_decay`` does: the cached direction is that of several refreshes, not of the last batch."""
    turns = {}
    for decay in (0.0, 0.9):
        model, optimizer = turbo(k=2, cache_decay=decay, **ALWAYS)
        cosines, last = [], None
        for step in range(40):
            train(optimizer, model, MLP, 1, start=step)
            v = torch.cat([tensor.flatten() for tensor in _cached(optimizer, "g_vf")])
            if last is not None and not torch.equal(v, last):
                cosines.append(torch.nn.functional.cosine_similarity(v, last, dim=0).item())
            last = v
        turns[decay] = sum(cosines) / len(cosines)
    assert turns[0.9] > 0.8 > turns[0.0]


def test_the_consistent_reading_differs_from_the_printed_one_by_g_0() -> None:
    """On a reused step the printed rule adds lam * g_0 more, and nothing else."""
    ends = {}
    for reading in ("printed", "consistent"):
        model = MLP.model()
        optimizer = TURBO.but(reading=reading, k=3, **ALWAYS).make(torch.optim.SGD(model.parameters(), lr=1.0))
        gradients = {}
        optimizer.register_gradient_hook(
            lambda e, found=gradients: found.update({e.name: torch.cat([t.flatten() for t in e.gradient.tensors])})
        )
        train(optimizer, model, MLP, 1)
        assert optimizer.telemetry.last["flatness"] == "refreshed"
        before = flat_weights(model)
        train(optimizer, model, MLP, 1, start=1)
        assert optimizer.telemetry.last["flatness"] == "reused"
        ends[reading] = before - flat_weights(model), gradients["g_0"]
    (printed, g_0), (consistent, same) = ends.values()
    torch.testing.assert_close(g_0, same)
    torch.testing.assert_close(printed - consistent, 0.2 * g_0)
