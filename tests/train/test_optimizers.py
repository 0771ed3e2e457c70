"""Learning rates follow torch's schedulers, without their state."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import cflat
from cflat.methods import ParamGroup
from cflat.train import BaseSettings
from cflat.train.optimizers import lr_factor, make_base, set_lr
from cflat.train.settings import base_class, list_bases


def torch_lrs(make, epochs):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler, lrs = make(optimizer), []
    for _ in range(epochs):
        lrs.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return lrs


@given(st.integers(1, 30))
def test_cosine_is_torchs(epochs):
    expected = torch_lrs(lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=epochs), epochs)
    settings = BaseSettings(schedule="cosine")
    assert [lr_factor(settings, e, epochs) for e in range(epochs)] == pytest.approx(expected, abs=1e-9)


@given(st.lists(st.integers(1, 20), max_size=3, unique=True).map(sorted))
def test_multistep_is_torchs(milestones):
    expected = torch_lrs(lambda o: torch.optim.lr_scheduler.MultiStepLR(o, milestones, gamma=0.1), 20)
    settings = BaseSettings(schedule="multistep", milestones=tuple(milestones))
    assert [lr_factor(settings, e, 20) for e in range(20)] == pytest.approx(expected)


def test_the_first_task_has_its_own_milestones_if_it_is_given_some():
    settings = BaseSettings(schedule="multistep", milestones=(8,), first_milestones=(2, 4), gamma=0.5)
    first, later = ([lr_factor(settings, e, 10, is_first_task=flag) for e in (1, 3, 5, 9)] for flag in (True, False))
    assert (first, later) == ([1, 0.5, 0.25, 0.25], [1, 1, 1, 0.5])
    shared = BaseSettings(schedule="multistep", milestones=(8,))
    assert lr_factor(shared, 9, 10, is_first_task=True) == pytest.approx(0.1)


def test_constant_stays_and_warmup_rises():
    assert [lr_factor(BaseSettings(), e, 3) for e in range(3)] == [1, 1, 1]
    rising = [lr_factor(BaseSettings(warmup_epochs=3), e, 6) for e in range(6)]
    assert rising == sorted(rising)
    assert rising[0] > 0
    assert rising[3:] == [1, 1, 1]


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
def test_groups_keep_their_relative_learning_rates(name):
    parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    settings = BaseSettings(name=name, lr=0.1, first_lr=0.2, weight_decay=0.5, first_weight_decay=0.25)
    groups = [ParamGroup(parameters[:1]), ParamGroup(parameters[1:], lr_scale=0.01, weight_decay=0.0)]
    later, first = (make_base(groups, settings, is_first_task=flag) for flag in (False, True))
    assert [g["lr"] for g in later.param_groups] == pytest.approx([0.1, 0.001])
    assert [g["lr"] for g in first.param_groups] == pytest.approx([0.2, 0.002])
    assert [g["weight_decay"] for g in later.param_groups] == [0.5, 0.0]
    assert [g["weight_decay"] for g in first.param_groups] == [0.25, 0.0]
    set_lr(later, 0.5)
    assert [g["lr"] for g in later.param_groups] == pytest.approx([0.05, 0.0005])


@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_is_what_was_asked_for(nesterov):
    groups = [ParamGroup([torch.nn.Parameter(torch.zeros(1))])]
    settings = BaseSettings(keywords={"momentum": 0.8, "nesterov": nesterov})
    base = make_base(groups, settings, is_first_task=True)
    assert (base.param_groups[0]["momentum"], base.param_groups[0]["nesterov"]) == (0.8, nesterov)
    assert BaseSettings().keywords["momentum"] == 0.9


@pytest.mark.parametrize("name", list_bases())
def test_every_base_optimizer_trains_under_a_wrapper(name):
    """On a bowl, each lowers the loss with its own settings; what is listed works."""
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(3, 4))
    settings = BaseSettings(name=name, lr=0.1)
    base = make_base([ParamGroup([weight], weight_decay=0.0)], settings, is_first_task=True)
    assert type(base) is base_class(name)
    optimizer = cflat.create_optimizer("c_flat", base, rho=0.01)
    before = weight.detach().norm()
    for _ in range(20):
        optimizer.step(lambda: weight.square().sum().backward())
    assert weight.detach().norm() < before


def test_keywords_are_checked_in_code_too():
    with pytest.raises(ValueError, match=r"keywords: adam has no 'beta'. Did you mean 'betas'"):
        BaseSettings(name="adam", keywords={"beta": 1})
    with pytest.raises(ValueError, match="nu must be at least 0 and at most 1"):
        BaseSettings(name="qhm", keywords={"nu": 2.0})
    with pytest.raises(ValueError, match="sparseadam cannot be a base optimizer"):
        BaseSettings(name="sparseadam")
