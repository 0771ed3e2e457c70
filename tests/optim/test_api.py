"""The interface of a torch optimizer: schedulers, arguments, wrong use, import cost."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch.optim import lr_scheduler

import cflat
from cases import case
from faults import DOORS, EVERY, Run, differences, walk

NAMES = cflat.list_optimizers()


def _base() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)


@pytest.mark.parametrize("row", EVERY, ids=str)
@pytest.mark.parametrize("door", DOORS)
def test_a_scheduler_on_the_wrapper_reaches_the_base(row, door):
    """Also if the first step is skipped: no warning about the order of calls, which would be an error here."""
    run = Run(row)
    scheduler = lr_scheduler.ExponentialLR(run.optimizer, gamma=0.5)

    def bad():
        run.closure(0)()
        run.model.hidden.weight.grad.fill_(float("nan"))

    walk(door, run.optimizer, bad)
    scheduler.step()
    for step in range(3):
        walk(door, run.optimizer, run.closure(step))
        scheduler.step()
    assert run.base.param_groups[0]["lr"] == 0.1 * 0.5**4


@pytest.mark.parametrize("row", EVERY, ids=str)
def test_a_scheduler_resumes_with_the_optimizer(row):
    def fresh():
        run = Run(row)
        return run, lr_scheduler.SequentialLR(
            run.optimizer,
            [
                lr_scheduler.LinearLR(run.optimizer, total_iters=2),
                lr_scheduler.CosineAnnealingLR(run.optimizer, T_max=6),
            ],
            milestones=[2],
        )

    def advance(run, scheduler, *steps):
        for step in steps:
            run.train(step)
            scheduler.step()

    whole = fresh()
    advance(*whole, *range(6))
    first = fresh()
    advance(*first, 0, 1, 2)
    second = fresh()
    second[0].model.load_state_dict(first[0].model.state_dict())
    second[0].optimizer.load_state_dict(first[0].state())
    second[1].load_state_dict(first[1].state_dict())
    torch.set_rng_state(_random_after(row, 3))
    advance(*second, 3, 4, 5)
    assert second[0].base.param_groups[0]["lr"] == whole[0].base.param_groups[0]["lr"]
    assert not differences(second[0].model.state_dict(), whole[0].model.state_dict())


def _random_after(row, num_steps):
    run = Run(row)
    run.train(*range(num_steps))
    return torch.get_rng_state()


@pytest.mark.parametrize("door", DOORS)
def test_a_scheduler_called_too_early_still_warns(door):
    run = Run(case("sam"))
    scheduler = lr_scheduler.StepLR(run.optimizer, 1)
    with pytest.warns(UserWarning, match="before `optimizer.step"):
        scheduler.step()
    walk(door, run.optimizer, run.closure(0))


@pytest.mark.parametrize("row", EVERY, ids=str)
def test_step_returns_what_the_first_evaluation_returned(row):
    run = Run(row)
    for step in range(4):
        results = []

        def closure(step=step, results=results):
            results.append((run.closure(step)(), {"step": step, "call": len(results)}))
            return results[-1]

        assert run.optimizer.step(closure) is results[0]


@pytest.mark.parametrize("row", EVERY, ids=str)
def test_both_doors_are_the_same_step(row):
    worlds = []
    for door in DOORS:
        run = Run(row)
        for step in range(8):
            walk(door, run.optimizer, run.closure(step))
        worlds.append((run.world(), run.state()))
    assert not differences(worlds[0], worlds[1])
    assert not differences(worlds[0], worlds[2])


@pytest.mark.parametrize("row", EVERY, ids=str)
def test_a_closure_may_clear_gradients_itself(row):
    plain, torch_style = Run(row), None
    plain.train(0, 1, 2)
    torch_style = Run(row)
    for step in range(3):

        def closure(step=step):
            torch_style.optimizer.zero_grad()
            return torch_style.closure(step)()

        torch_style.optimizer.step(closure)
    assert not differences(torch_style.model.state_dict(), plain.model.state_dict())


@pytest.mark.parametrize("name", NAMES)
def test_step_without_closure_says_what_to_write(name):
    optimizer = cflat.create_optimizer(name, _base())
    with pytest.raises(cflat.ClosureError, match=r"needs a closure .*Write optimizer\.step\(closure\), or loop over"):
        optimizer.step()


def test_a_closure_without_gradient_mode_is_given_it():
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = cflat.SAM(torch.optim.SGD([weight], lr=0.1))
    with torch.no_grad():
        optimizer.step(lambda: weight.square().sum().backward())
    assert not torch.equal(weight, torch.ones(2))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("base", "message"),
    [
        (torch.optim.SGD, "base must be a torch optimizer, for example"),
        ([torch.nn.Parameter(torch.ones(1))], "base must be a torch optimizer, for example"),
        (None, "base must be a torch optimizer, for example"),
        (cflat.SAM(_base()), "base must be a plain torch optimizer, got SAM"),
        (
            torch.optim.LBFGS([torch.nn.Parameter(torch.ones(1))]),
            "base must be able to step without a closure, got LBFGS",
        ),
    ],
    ids=["class", "list", "none", "wrapper", "lbfgs"],
)
def test_a_wrong_base_is_refused(name, base, message):
    with pytest.raises(TypeError, match=message):
        cflat.create_optimizer(name, base)


WRONG = {
    "rho": (-0.1, 0.0, float("nan"), "0.1", None),
    "rho_fd": (-0.1, 0.0, float("inf")),
    "eta": (-1.0, "a"),
    "alpha": (-0.5, None),
    "k": (0, 2.5, "5"),
    "gamma": (-0.1,),
    "betas": ((1.0, 2.0), (1.0, "a", 1.0), 3.0, (1.0, float("nan"), 1.0), (1.0, 1.0, float("inf")), (True, 1.0, 1.0)),
    "p": (-0.1, 1.1, float("nan")),
    "seed": (0.5, None),
    "decay": (1.0, -0.1),
    "start": (float("nan"), "x"),
    "end": (float("inf"), "x"),
    "total_steps": (0, 1.5),
    "sigma": (-1.0,),
    "momentum": (1.0, -0.1),
    "lam": (-0.2, None),
    "evaluations": (1.0, 4.5, "2"),
    "amplitude": (0.0, -1.0),
    "steepness": (0.0,),
    "midpoint": (-1.0,),
    "gain": (0.0, 1.5),
    "beta": (-0.8, "b"),
    "k_growth": (-1.0,),
    "theta": (-0.1, 1.1),
    "threshold": (-1.0, None),
    "trigger": ("yes", 1, None),
    "schedule": ("no", 0),
    "reading": ("paper", None, 3),
    "cache_decay": (1.0, -0.1, None),
    "options": ({"max_norm": 1.0}, "final"),
}
"""Wrong values of every keyword that any optimizer has."""


@pytest.mark.parametrize("name", NAMES)
def test_every_wrong_keyword_is_named_with_its_value(name):
    settings = cflat.optimizer_settings(name)
    assert settings.keys() <= WRONG.keys()
    for key in settings:
        for value in WRONG[key]:
            if value is None and settings[key] is None:
                continue
            with pytest.raises(ValueError, match=rf"{key} must be .*, got ") as caught:
                cflat.create_optimizer(name, _base(), **{key: value})
            assert repr(value) in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_norm": 0.0}, "max_norm must be above 0, got 0.0"),
        ({"max_norm": "1"}, "max_norm must be above 0, got '1'"),
        ({"clip": "last"}, "clip must be 'final' or 'each', got 'last'"),
        ({"perturbation": "global"}, "perturbation must be 'synced' or 'local', got 'global'"),
        ({"process_group": "world"}, "process_group must be .*'auto'.*, got 'world'"),
    ],
)
def test_wrong_step_options_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        cflat.StepOptions(**settings)


@pytest.mark.parametrize("name", NAMES)
def test_unknown_names_and_keywords_get_a_suggestion(name):
    with pytest.raises(ValueError, match=f"Unknown optimizer '{name}x'. Did you mean"):
        cflat.create_optimizer(name + "x", _base())
    with pytest.raises(ValueError, match=f"{name} has no setting 'option'. Did you mean 'options'"):
        cflat.create_optimizer(name, _base(), option=None)


@pytest.mark.parametrize(("index", "num_tasks"), [(-1, None), (0.5, None), (2, 2), (0, 0), ("0", None)])
def test_wrong_tasks_are_named(index, num_tasks):
    with pytest.raises(ValueError, match=r"(index|num_tasks) must be .*, got"):
        cflat.SAM(_base()).start_task(index, num_tasks)


class TestRadius:
    def test_the_convergence_schedule_shrinks_with_the_square_root(self):
        run = Run(case("sam"), rho=cflat.InverseSqrt(0.2))
        radii = []
        for step in range(4):
            run.train(step)
            radii.append(run.optimizer.telemetry.last["rho"])
        assert radii == [0.2 / t**0.5 for t in (1, 2, 3, 4)]

    @pytest.mark.parametrize("row", [row for row in EVERY if row.name != "none"], ids=str)
    def test_a_radius_of_zero_is_the_base_optimizer(self, row):
        """Tied to a learning rate that starts at zero, as in a warm-up."""
        run = Run(row, lr=0.0, rho=cflat.TiedToLR(rho_max=0.1, lr_max=0.1))
        run.train(0, 1)
        assert run.optimizer.rho == 0.0
        assert run.optimizer.telemetry.nonfinite == 0
        run.optimizer.param_groups[0]["lr"] = 0.05
        run.train(2, 3)
        assert run.optimizer.rho == pytest.approx(0.05)
        assert all(torch.isfinite(p).all() for p in run.model.parameters())

    def test_a_tied_radius_stays_between_its_ends(self):
        tied = cflat.TiedToLR(rho_max=0.2, lr_max=0.1, rho_min=0.05, lr_min=0.01)
        assert [tied(0, lr) for lr in (0.0, 0.01, 0.1, 1.0)] == [0.05, 0.05, 0.2, 0.2]

    def test_a_schedule_that_goes_wrong_is_named(self):
        run = Run(case("sam"), rho=lambda step, lr: 0.1 - step)
        run.train(0)
        with pytest.raises(ValueError, match=r"rho at step 1 must be at least 0, got -0\.9"):
            run.train(1)


def test_importing_the_package_needs_torch_alone():
    """Against what torch itself imports: it takes numpy along if that is there."""
    script = (
        "import sys, torch; before = set(sys.modules); import cflat; "
        "print(*sorted({name.split('.')[0] for name in set(sys.modules) - before}))"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    allowed = set(sys.stdlib_module_names) | {"cflat", "torch"}
    assert set(found) <= allowed


def test_a_base_whose_step_knows_no_closure_is_welcome():
    class Bare(torch.optim.SGD):
        def step(self):
            return super().step()

    model = torch.nn.Linear(2, 1)
    optimizer = cflat.SAM(Bare(model.parameters(), lr=0.1), model=model)
    before = model.weight.detach().clone()

    def closure():
        loss = model(torch.ones(1, 2)).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert not torch.equal(model.weight, before)
