"""The methods of examples/: plug-ins written by the guide, with every optimizer, checkpoint and rule of the bench."""

import random
import runpy
from pathlib import Path

import pytest
import torch

import cflat
from cflat.data import ReservoirMemory
from cflat.methods._catalog import METHODS
from runs import tiny_method, tiny_run, tiny_stream
from train.test_resume import assert_same, run_to_end

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NAMES = {"my_ewc": "ewc_method", "si": "si_method", "agem": "agem_method"}


@pytest.fixture(autouse=True, scope="module")
def _plugins():
    """Importing a file registers its method and does nothing else; afterwards it is gone."""
    before = dict(METHODS._entries)
    for file in NAMES.values():
        runpy.run_path(str(EXAMPLES / f"{file}.py"), run_name="a plug-in")
    yield
    METHODS._entries = before


@pytest.mark.parametrize("optimizer", cflat.list_optimizers())
@pytest.mark.parametrize("name", NAMES)
def test_examples_train_with_every_optimizer(name, optimizer):
    stream = tiny_stream("task")
    method = tiny_method(name, stream)
    result = tiny_run(method, stream, optimizer=optimizer, epochs=1, check_purity=True)
    assert result.accuracy["logits"].num_stages == 2
    assert result.cost.nonfinite_steps == 0
    assert all(value.isfinite().all() for value in method.state_dict().values())


@pytest.mark.parametrize("name", NAMES)
def test_what_they_keep_from_step_to_step_is_in_every_checkpoint(name, tmp_path):
    settings = {"optimizer": "c_flat", "settings": {"rho": 0.1}}
    whole = run_to_end(name, None, [], **settings)
    chooser = random.Random(name)
    broken = run_to_end(name, tmp_path, [chooser.randrange(12) for _ in range(5)], **settings)
    assert_same(whole, broken)


@pytest.mark.parametrize("name", NAMES)
def test_they_forget_less_than_plain_training(name):
    stream = tiny_stream("task", per_class=60, num_tasks=4)
    plain = tiny_run(tiny_method("finetune", stream), stream, epochs=4).accuracy["logits"]
    own = tiny_run(tiny_method(name, stream), stream, epochs=4).accuracy["logits"]
    assert own.last > plain.last


def test_the_built_in_ewc_is_that_of_the_guide():
    stream = tiny_stream()
    states = []
    for name in ("my_ewc", "ewc"):
        method = tiny_method(name, stream)
        tiny_run(method, stream, optimizer="c_flat", epochs=1)
        states.append(method.state_dict())
    for key, value in states[0].items():
        torch.testing.assert_close(states[1][key], value)


def test_a_projected_update_does_not_raise_the_loss_of_stored_images():
    """To first order: after the edit, the direction and the stored images' gradient do not disagree."""
    stream = tiny_stream()
    method = tiny_method("agem", stream)
    dots = []
    edit = type(method).before_update

    def watched(self, batch):
        edit(self, batch)
        for stored in batch.replay:
            params = list(self.network.parameters())
            loss = torch.nn.functional.cross_entropy(self.network(stored.images), stored.labels)
            wanted = torch.autograd.grad(loss, params)
            along = sum((p.grad * g).sum() for p, g in zip(params, wanted, strict=True))
            size = sum(p.grad.square().sum() for p in params).sqrt() * sum(g.square().sum() for g in wanted).sqrt()
            dots.append((along / size).item())

    type(method).before_update = watched
    tiny_run(method, stream, optimizer="c_flat", epochs=2)
    assert len(dots) >= 4
    assert min(dots) > -1e-4
    assert isinstance(method.memory, ReservoirMemory)
