"""The contract of `Method.loss`: pure, and fed with constants that are computed once."""

from copy import deepcopy

import pytest
import torch
from torch.nn import functional

from cflat.data import BatchLoader
from cflat.methods import Loss, Method, StreamInfo, get_method_spec, list_methods
from cflat.methods.finetune import Finetune
from cflat.nn.backbone import create_backbone
from cflat.train.evaluate import Extractor
from cflat.train.objective import ImpureLossError, Objective
from runs import cpu, tiny_inputs, tiny_method, tiny_run, tiny_stream


def in_second_task(name):
    """Return a method that has learned one task and begun the next, with a batch of it and its objective."""
    stream = tiny_stream()
    method = tiny_method(name, stream)
    first = type(stream)(stream.scenario, stream.tasks[:1], stream.num_classes, stream.class_names)
    tiny_run(method, first, epochs=1)
    method.grow(stream.tasks[1])
    extract = Extractor(method, tiny_inputs().eval, 16, cpu())
    method.start_task(stream.tasks[1], extract)
    for phase in method.phases(stream.tasks[1])[:1]:
        method.start_phase(stream.tasks[1], phase, extract)
        method.enter_phase(stream.tasks[1], phase)
    method.set_train_mode()
    batch = next(iter(BatchLoader(method.train_images(stream.tasks[1]), tiny_inputs().train, 16, shuffle=True)))
    return method, batch, Objective(method, method.network, cpu())


@pytest.mark.parametrize("name", list_methods())
def test_two_evaluations_agree_to_the_bit(name):
    method, batch, objective = in_second_task(name)
    if not method.phases(tiny_stream().tasks[1]):
        pytest.skip(f"{name} does not train after its first task")
    before = {key: value.clone() for key, value in method.state_dict().items()}
    objective.check_purity(objective.prepare(batch))
    for key, value in method.state_dict().items():
        assert torch.equal(value, before[key]), key


@pytest.mark.parametrize("name", list_methods())
def test_what_is_prepared_does_not_depend_on_trained_weights(name):
    method, batch, objective = in_second_task(name)
    task = tiny_stream().tasks[1]
    phases = method.phases(task)
    if not phases:
        pytest.skip(f"{name} does not train after its first task")
    before = objective.prepare(batch).extras
    for phase in phases[:1]:
        for param in (p for group in method.param_groups(task, phase) for p in group.params):
            param.data.add_(torch.randn_like(param))
    after = objective.prepare(batch).extras
    assert before.keys() == after.keys()
    for key, value in before.items():
        if value.is_floating_point():  # which prompts are chosen is held fixed over a step, on purpose
            assert torch.equal(value, after[key]), key


def test_icarl_distils_from_the_network_as_it_was():
    """The gradients with the teacher that is cached are those of the loss written out, with a teacher of our own."""
    stream = tiny_stream()
    method = tiny_method("icarl", stream)
    tiny_run(method, type(stream)(stream.scenario, stream.tasks[:1], stream.num_classes, stream.class_names), epochs=1)
    teacher = deepcopy(method.network).eval()
    method.grow(stream.tasks[1])
    method.set_train_mode()
    batch = next(iter(BatchLoader(method.train_images(stream.tasks[1]), tiny_inputs().train, 16, shuffle=True)))
    objective = Objective(method, method.network, cpu())
    found = gradients(method, objective, objective.prepare(batch))
    method.network.zero_grad()
    logits = method.network(batch.images)
    with torch.no_grad():
        wanted = (teacher(batch.images) / method.config.temperature).softmax(dim=1)
    old = logits[:, : wanted.shape[1]] / method.config.temperature
    distilled = -(wanted * old.log_softmax(dim=1)).sum(dim=1).mean()
    (functional.cross_entropy(logits, batch.labels) + distilled).backward()
    assert wanted.shape[1] == len(stream.tasks[0].classes)
    for key, param in method.network.named_parameters():
        torch.testing.assert_close(found[key], param.grad, rtol=1e-4, atol=1e-6)


def gradients(method, objective, batch):
    method.network.zero_grad()
    objective.closure(batch)()
    return {key: p.grad.clone() for key, p in method.network.named_parameters() if p.grad is not None}


def test_memo_caches_what_is_frozen():
    stream = tiny_stream()
    config = get_method_spec("memo").config(train_base=False)
    method = tiny_method("memo", stream, config=config)
    for task in stream.tasks:
        method.grow(task)
    method.set_train_mode()
    batch = next(iter(BatchLoader(stream.tasks[1].train, tiny_inputs().train, 16, shuffle=True)))
    objective = Objective(method, method.network, cpu())
    prepared = objective.prepare(batch)
    assert set(prepared.extras) == {"shared", "old"}
    cached, uncached = (gradients(method, objective, b) for b in (prepared, batch))
    assert not any(key.startswith(("generalised", "stages.0")) for key in cached)
    for key, value in cached.items():
        torch.testing.assert_close(value, uncached[key], rtol=1e-5, atol=1e-7)


class Impure(Finetune):
    """Draws a fresh number at every call, from a generator that nobody replays."""

    noise = torch.Generator().manual_seed(0)

    def loss(self, model, batch):
        clean = super().loss(model, batch).parts["classify"]
        return Loss({"classify": clean * (1 + torch.rand((), generator=self.noise))})


def test_an_impure_loss_is_refused_with_advice():
    stream = tiny_stream()
    spec = get_method_spec("finetune")
    good = tiny_method("finetune", stream)
    method = Impure(spec.config(), create_backbone("small_cnn", image_size=8), good.info)
    with pytest.raises(ImpureLossError, match=r"not pure.*prepare\(\)"):
        tiny_run(method, stream, check_purity=True)
    tiny_run(good, stream, check_purity=True, epochs=1)


def test_a_method_that_does_not_grow_is_rejected_before_it_trains():
    class Forgetful(Method):
        def __init__(self, info):
            super().__init__(info)
            self.network = create_backbone("small_cnn")

        def phases(self, task):
            return ()

    stream = tiny_stream()
    with pytest.raises(NotImplementedError):
        tiny_run(Forgetful(StreamInfo("class", stream.num_classes)), stream, epochs=1)
