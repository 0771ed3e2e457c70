"""Any optimizer x any method x any stream works, with no glue between them."""

from functools import cache

import pytest
import torch

import cflat
from cflat.methods import get_method_spec, list_methods
from runs import tiny_method, tiny_run, tiny_stream


@cache
def trained(method, optimizer):
    """Return the result of a tiny run, and the weights after it."""
    stream = tiny_stream()
    made = tiny_method(method, stream)
    result = tiny_run(made, stream, optimizer=optimizer, epochs=1)
    return result, {name: value.clone() for name, value in made.network.named_parameters()}


@pytest.mark.parametrize("optimizer", cflat.list_optimizers())
@pytest.mark.parametrize("method", list_methods())
def test_every_optimizer_trains_every_method(method, optimizer):
    result, weights = trained(method, optimizer)
    cost = result.cost
    for matrix in result.accuracy.values():
        assert matrix.total.tolist() == [len(task.test) for task in tiny_stream().tasks]
        assert matrix.num_stages == 2
    assert (cost.flops > 0) == (cost.steps > 0) == (cost.trainable_parameters > 0)
    assert cost.nonfinite_steps == 0
    per_step = cflat.get_optimizer_spec(optimizer).evaluations
    if per_step.isdigit():
        assert cost.evaluations == int(per_step) * cost.steps
    assert all(value.isfinite().all() for value in weights.values())
    _, plain = trained(method, "none")
    assert weights.keys() == plain.keys()
    moved = [name for name, value in weights.items() if not torch.equal(value, plain[name])]
    if optimizer == "msam":  # moves to the perturbed weights, at no further evaluation
        assert bool(moved) == (cost.steps > 0)
    else:  # ends elsewhere than plain training if, and only if, it has evaluated something more
        assert bool(moved) == (cost.evaluations > cost.steps)


@pytest.mark.parametrize(
    ("method", "scenario"),
    [(name, s) for name in list_methods() for s in get_method_spec(name).scenarios if s == "task"],
)
def test_task_streams_run(method, scenario):
    stream = tiny_stream(scenario)
    result = tiny_run(tiny_method(method, stream), stream, optimizer="c_flat_turbo", epochs=1)
    assert next(iter(result.accuracy.values())).num_stages == 2


def test_digits_are_learned_and_finetune_forgets_them():
    stream = tiny_stream(per_class=60)
    replay = tiny_run(tiny_method("replay", stream), stream, epochs=10).accuracy["logits"]
    finetune = tiny_run(tiny_method("finetune", stream), stream, epochs=10).accuracy["logits"]
    assert replay.last > 0.8
    assert finetune.last < 0.6
    assert finetune.forgetting > replay.forgetting


def test_evaluations_are_those_of_the_optimizer():
    stream = tiny_stream()
    cost = tiny_run(tiny_method("replay", stream), stream, optimizer="c_flat", epochs=2).cost
    assert cost.evaluations_per_step == 4
    assert cost.evaluations_by_kind["flatness.refreshed"] == cost.steps
    assert cost.images_per_second > 0
    assert cost.trainable_parameters > 0
