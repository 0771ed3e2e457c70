"""Every optimizer x every method x every stream, with no glue between them."""

import pytest
import torch

import cflat
from cflat.methods import get_method_spec, list_methods
from cflat.optim import optimizer_settings
from cflat.train.runtime import seed_everything
from runs import tiny_method, tiny_run, tiny_stream, tiny_trainer


def at_no_radius(optimizer):
    """Return the settings under which an optimizer evaluates everything at the weights themselves, up to rounding."""
    known = optimizer_settings(optimizer)
    return {key: 1e-12 for key in ("rho", "rho_fd") if key in known}


@pytest.mark.parametrize("method", list_methods())
def test_every_optimizer_evaluates_the_loss_of_every_method(method):
    """No method knows of optimizers: at radius zero, each evaluation of each of them is the plain closure."""
    stream = tiny_stream()
    trainer = tiny_trainer(tiny_method(method, stream), stream)
    task = stream.tasks[0]
    trainer.start_task(task)
    phases = trainer.method.phases(task)
    if not phases:
        pytest.skip(f"{method} trains nothing by gradients")
    active = trainer.start_phase(task, phases[0])
    trainer.method.set_train_mode()
    batch = active.objective.prepare(active.with_replay(next(active.loader.epoch(0)), 0, 0))
    evaluate, params = active.objective.closure(batch), active.optimizer.all_params()

    def losses_of(optimizer):
        made = cflat.create_optimizer(
            optimizer, torch.optim.SGD(params, lr=0.0), model=trainer.method.network, **at_no_radius(optimizer)
        )
        made.start_task(0)
        found = []

        def closure():
            found.append(evaluate())
            return found[-1]

        seed_everything(7)
        made.step(closure)
        return torch.stack(found)

    (plain,) = losses_of("none")
    for optimizer in cflat.list_optimizers():
        losses = losses_of(optimizer)
        per_step = cflat.get_optimizer_spec(optimizer).evaluations
        if per_step.isdigit():
            assert len(losses) == int(per_step), optimizer
        torch.testing.assert_close(losses, plain.expand(len(losses)), rtol=1e-5, atol=1e-6, msg=optimizer)


@pytest.mark.parametrize(
    ("method", "scenario"),
    [(name, s) for name in list_methods() for s in get_method_spec(name).scenarios if s == "task"],
)
def test_task_streams_run(method, scenario):
    stream = tiny_stream(scenario)
    result = tiny_run(tiny_method(method, stream), stream, optimizer="c_flat_turbo", epochs=1)
    assert next(iter(result.accuracy.values())).num_stages == 2


def test_evaluations_are_those_of_the_optimizer():
    stream = tiny_stream()
    cost = tiny_run(tiny_method("replay", stream), stream, optimizer="c_flat", epochs=2).cost
    assert cost.evaluations_per_step == 4
    assert cost.evaluations_by_kind["flatness.refreshed"] == cost.steps
    assert cost.images_per_second > 0
    assert cost.trainable_parameters > 0
