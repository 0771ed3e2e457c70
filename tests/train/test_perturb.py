"""What is perturbed, and the first task without: the bench's side of a radius per parameter group."""

import pytest
import torch
from torch import nn

import cflat
from cflat import ConfigError
from cflat.config.documents import parse_overrides
from cflat.config.presets import resolve_config
from cflat.methods import ParamGroup
from cflat.nn.adapters import Adapter
from cflat.nn.heads import GrowingModule
from cflat.train import BaseSettings, Observer, OptimizerChoice
from cflat.train.optimizers import make_base
from runs import tiny_method, tiny_run, tiny_stream


class Watch(Observer):
    """Notes which parameters are elsewhere when the gradient of a perturbed point is taken."""

    def __init__(self):
        self.moved, self.trained, self.evaluations = set(), set(), {}

    def on_phase_start(self, optimizer, network):
        self.network, self.optimizer = network, optimizer
        self.names = {param: name for name, param in network.named_parameters()}
        optimizer.register_gradient_hook(self.look)
        self.note()

    def note(self):
        self.before = {param: param.detach().clone() for param in self.optimizer.all_params()}

    def look(self, evaluation):
        if evaluation.name != "g":
            self.moved |= {self.names[p] for p, old in self.before.items() if not torch.equal(p, old)}

    def on_step(self, event):
        self.trained |= {self.names[p] for p, old in self.before.items() if not torch.equal(p, old)}
        self.evaluations.setdefault(event.task, set()).add(event.evaluations)
        self.note()


def inside(network, is_wanted):
    """Return the names of parameters in modules of one kind."""
    modules = [(name, module) for name, module in network.named_modules() if is_wanted(module)]
    return {f"{path}.{name}" for path, module in modules for name, _ in module.named_parameters()}


def run(method, **choice):
    watch, stream = Watch(), tiny_stream()
    tiny_run(tiny_method(method, stream), stream, epochs=1, observer=watch, choice=OptimizerChoice(**choice))
    return watch


@pytest.mark.parametrize(
    ("method", "what", "is_wanted"),
    [
        ("finetune", "norms", lambda module: isinstance(module, nn.BatchNorm2d)),
        ("ease", "adapters", lambda module: isinstance(module, Adapter)),
    ],
)
def test_only_what_is_wanted_moves_and_everything_is_trained(method, what, is_wanted):
    watch = run(method, name="sam", perturb=what)
    wanted = inside(watch.network, is_wanted)
    assert watch.moved
    assert watch.moved <= wanted
    assert watch.trained - wanted


def test_the_body_is_all_but_the_head():
    watch = run("icarl", name="c_flat", perturb="body")
    head = inside(watch.network, lambda module: isinstance(module, GrowingModule))
    assert head
    assert not watch.moved & head
    assert watch.trained & head
    assert watch.moved


def test_a_phase_that_trains_the_head_alone_is_plain():
    watch = run("duct", name="sam", perturb="body")
    assert watch.evaluations[0] | watch.evaluations[1] == {1, 2}


@pytest.mark.parametrize(("first_task", "expected"), [("same", 2), ("plain", 1)])
def test_the_first_task_may_be_plain(first_task, expected):
    watch = run("replay", name="sam", first_task=first_task)
    assert watch.evaluations == {0: {expected}, 1: {2}}


def test_nothing_to_perturb_is_an_error():
    with pytest.raises(ConfigError, match="perturb=adapters leaves nothing to perturb"):
        run("finetune", name="sam", perturb="adapters")


def test_a_base_with_a_rho_of_its_own_takes_no_radius():
    weight = nn.Parameter(torch.zeros(1))
    with pytest.raises(ConfigError, match="adadelta has a rho of its own"):
        make_base([ParamGroup([weight], rho=0.0)], BaseSettings(name="adadelta"), is_first_task=False)


def test_the_rho_of_a_base_is_not_taken_for_a_radius():
    weight, places = nn.Parameter(torch.ones(4)), []
    base = make_base([ParamGroup([weight])], BaseSettings(name="adadelta"), is_first_task=False)
    optimizer = cflat.SAM(base, rho=0.01)
    optimizer.register_gradient_hook(lambda evaluation: places.append(weight.detach().clone()))
    optimizer.step(lambda: weight.square().sum().backward())
    assert (places[1] - places[0]).norm().item() == pytest.approx(0.01, rel=1e-4)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["optimizer=sam", "optimizer.perturb=norm"],
            r"optimizer.perturb must be 'all', 'norms', .* or 'body'",
        ),
        (["optimizer=sam", "optimizer.first_task=no"], r"optimizer.first_task must be 'same' or 'plain'"),
        (["optimizer=none", "optimizer.perturb=norms"], r"Unknown key 'optimizer.perturb'"),
    ],
)
def test_wrong_values_are_rejected(overrides, message):
    with pytest.raises(ConfigError, match=message):
        resolve_config(parse_overrides(["method=icarl", "data=digits", *overrides]))


def test_a_configuration_holds_them_and_optimizers_do_not_see_them():
    config = resolve_config(parse_overrides(["method=icarl", "data=digits", "optimizer=sam", "optimizer.perturb=body"]))
    assert config.optimizer.of_trainer() == {"perturb": "body", "first_task": "same"}
    assert set(config.optimizer.keywords()) == {"rho"}
    assert config.to_dict()["optimizer"]["perturb"] == "body"
