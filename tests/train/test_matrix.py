"""Any optimizer x any method x any stream works, with no glue between them."""

import pytest

import cflat
from cflat.methods import get_method_spec, list_methods
from runs import tiny_method, tiny_run, tiny_stream


@pytest.mark.parametrize("optimizer", cflat.list_optimizers())
@pytest.mark.parametrize("method", list_methods())
def test_every_optimizer_trains_every_method(method, optimizer):
    stream = tiny_stream()
    result = tiny_run(tiny_method(method, stream), stream, optimizer=optimizer, epochs=1)
    for matrix in result.accuracy.values():
        assert matrix.num_stages == 2
        assert 0 <= matrix.last <= 1
    trained = result.cost.steps > 0
    assert result.cost.evaluations >= result.cost.steps
    assert (result.cost.flops > 0) == trained
    assert result.cost.nonfinite_steps == 0


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
