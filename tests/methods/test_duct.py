"""DUCT: merging, the second phase, transport, and blocks of rows in every kind of stream."""

import numpy as np
import pytest
import torch
from torch.nn import functional

from cflat.data import BatchLoader, Stream, Task, build_stream
from cflat.methods.duct import DUCTConfig
from cflat.nn.transport import transport_plan
from cflat.train import BaseSettings
from cflat.train.evaluate import Extractor
from cflat.train.objective import Objective
from data.synthetic import dataset
from runs import cpu, tiny_inputs, tiny_method, tiny_run, tiny_stream


def started(config=None, stream=None, num_tasks=1):
    """Return a method in the first phase of a task, with its stream and extractor; earlier tasks are skipped over."""
    stream = stream or tiny_stream()
    method = tiny_method("duct", stream, config=config)
    extract = Extractor(method, tiny_inputs().eval, 16, cpu())
    for task in stream.tasks[:num_tasks]:
        method.grow(task)
        method.start_task(task, extract)
        method.param_groups(task, method.phases(task)[0])
    return method, stream, extract


def retrain(method, task, extract):
    phase = method.phases(task)[1]
    method.start_phase(task, phase, extract)
    method.param_groups(task, phase)
    method.set_train_mode()


def named_weights(module):
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


@torch.no_grad()
def shift_(backbone, amount):
    for parameter in backbone.parameters():
        parameter += amount * torch.randn_like(parameter)
    return named_weights(backbone)


def assert_weights(module, expected):
    for name, value in module.named_parameters():
        torch.testing.assert_close(value.detach(), expected[name], msg=name)


def test_one_task_with_full_weight_is_plain_training():
    method, stream, extract = started(DUCTConfig(merge_ratio=1.0, similarity_scales=False))
    trained = shift_(method.network.backbone, 0.01)
    retrain(method, stream.tasks[0], extract)
    assert_weights(method.network.backbone, trained)
    assert_weights(method.merged, trained)


def test_changes_add_up_over_tasks_and_each_starts_from_the_pretrained_weights():
    method, stream, extract = started(DUCTConfig(merge_ratio=0.3, similarity_scales=False))
    start = named_weights(method.pretrained)
    first = shift_(method.network.backbone, 0.01)
    retrain(method, stream.tasks[0], extract)
    method.grow(stream.tasks[1])
    method.start_task(stream.tasks[1], extract)
    assert_weights(method.network.backbone, start)
    second = shift_(method.network.backbone, 0.01)
    retrain(method, stream.tasks[1], extract)
    expected = {name: 0.3 * first[name] + 0.3 * second[name] + 0.4 * start[name] for name in start}
    assert_weights(method.network.backbone, expected)
    assert_weights(method.pretrained, start)


def test_changes_are_scaled_by_the_similarity_of_class_means():
    method, stream, extract = started(DUCTConfig(merge_ratio=1.0))
    task, start = stream.tasks[0], named_weights(method.pretrained)
    trained = shift_(method.network.backbone, 0.05)
    similarities = []
    for label in task.classes:
        images = task.train.of_classes([label])
        before, after = (extract(images, module).mean(0) for module in (method.pretrained, method.network.backbone))
        similarities.append(functional.cosine_similarity(before, after, dim=0))
    scale = torch.stack(similarities).mean()
    assert scale < 0.99
    retrain(method, task, extract)
    expected = {name: start[name] + scale * (trained[name] - start[name]) for name in start}
    assert_weights(method.network.backbone, expected)


def test_the_head_learns_from_features_that_are_computed_once():
    method, stream, extract = started()
    objective = Objective(method, method.network, cpu())
    batch = next(iter(BatchLoader(stream.tasks[0].train, tiny_inputs().train, 16, shuffle=True)))
    assert objective.prepare(batch) is batch  # everything is trained, nothing is constant
    retrain(method, stream.tasks[0], extract)
    method.enter_phase(stream.tasks[0], method.phases(stream.tasks[0])[1])
    prepared = objective.prepare(batch)
    assert set(prepared.extras) == {"features"}
    cached, uncached = (gradients(method, objective, one) for one in (prepared, batch))
    assert cached.keys() == uncached.keys() == {"head.weight", "head.sigma"}
    for key, value in cached.items():
        torch.testing.assert_close(value, uncached[key])


def gradients(method, objective, batch):
    method.network.zero_grad()
    objective.closure(batch)()
    return {key: p.grad.clone() for key, p in method.network.named_parameters() if p.grad is not None}


def test_phases_train_what_they_say():
    method, stream, _ = started()
    first, second = method.phases(stream.tasks[0])
    head, backbone = method.param_groups(stream.tasks[0], first)
    assert (head.lr_scale, backbone.lr_scale) == (1.0, 0.01)
    assert len(backbone.params) == len(list(method.network.backbone.parameters()))
    (alone,) = method.param_groups(stream.tasks[0], second)
    assert alone.params == head.params
    for phase, is_frozen in ((first, False), (second, True)):
        method.enter_phase(stream.tasks[0], phase)
        assert method.network.is_frozen == is_frozen
    assert (first.epochs, second.epochs) == (None, 5)


def test_transport_reaches_every_old_block():
    stream = build_stream(dataset(9, train_per_class=4), "class", initial=2, increment=3)
    assert [task.num_classes for task in stream.tasks] == [2, 3, 3, 1]
    method, stream, extract = started(DUCTConfig(regularization=0.5, transport_ratio=0.4), stream, num_tasks=4)
    rows, means = method.network.rows, method.means.means
    assert [*method.blocks] == [range(2), range(2, 5), range(5, 8), range(8, 9)]
    method.finish_task(stream.tasks[3], extract)
    for block in ([0, 1], [2, 3, 4], [5, 6, 7]):
        plan = transport_plan(means[[8]], means[block], regularization=0.5)
        torch.testing.assert_close(plan.sum(0), torch.full((len(block),), 1 / len(block)))
        expected = 0.6 * rows[block] + 0.4 * len(block) * plan.T @ rows[[8]]
        torch.testing.assert_close(method.network.rows[block], expected)
    assert torch.equal(method.network.rows[8:], rows[8:])


def test_the_published_scale_of_the_plan_changes_almost_nothing():
    stream = build_stream(dataset(20, train_per_class=2), "class", initial=10, increment=10)
    change = []
    for normalize in (True, False):
        method, _, extract = started(DUCTConfig(normalize_plan=normalize), stream, num_tasks=2)
        before = method.network.rows
        method.finish_task(stream.tasks[1], extract)
        change.append(functional.cosine_similarity(method.network.rows[:10], before[:10]))
    assert (1 - change[1] < 0.02).all()
    assert (change[0] < change[1]).all()


def test_old_rows_are_constants():
    stream = tiny_stream()
    method = tiny_method("duct", stream, config=DUCTConfig(transport_ratio=0.0))
    first = Stream(stream.scenario, stream.tasks[:1], stream.num_classes, stream.class_names)
    settings = {"epochs": 1, "base": BaseSettings(lr=0.1, weight_decay=0.01), "optimizer": "c_flat"}
    tiny_run(method, first, **settings)
    rows = method.network.rows
    later = Stream(stream.scenario, (with_index(stream.tasks[1], 0),), stream.num_classes, stream.class_names)
    tiny_run(method, later, **settings)
    assert torch.equal(method.network.rows[:3], rows)


def with_index(task, index):
    return Task(index, task.name, task.classes, task.train, task.test)


def test_rows_and_scale_of_a_new_block():
    for config, sigma in ((DUCTConfig(), 7.0), (DUCTConfig(reset_sigma=True, zero_rows=True), 1.0)):
        method, stream, _ = started(config)
        assert method.network.head.weight.abs().sum() > 0
        with torch.no_grad():
            method.network.head.sigma.fill_(7.0)
        method.grow(stream.tasks[1])
        assert method.network.head.sigma.item() == sigma
        assert (method.network.head.weight == 0).all() == config.zero_rows


def test_shared_and_growing_domain_labels_decide_alike():
    data = dataset(3, train_per_class=6, test_per_class=4, num_domains=3)
    outcomes, methods = [], []
    for labels in ("shared", "growing"):
        stream = build_stream(data, "domain", labels=labels)
        methods.append(tiny_method("duct", stream))
        outcomes.append(tiny_run(methods[-1], stream, epochs=1).accuracy["logits"])
    assert np.array_equal(outcomes[0].correct, outcomes[1].correct)
    assert torch.equal(methods[0].network.rows, methods[1].network.rows)
    batch = next(iter(BatchLoader(data.test, tiny_inputs().eval, 4, shuffle=False)))
    shared, growing = (method.predict(batch)["logits"] for method in methods)
    assert (shared.shape[1], growing.shape[1]) == (3, 9)
    assert torch.equal(shared.argmax(1), growing.argmax(1) % 3)


def test_a_domain_may_lack_a_class():
    data = dataset(3, train_per_class=4, num_domains=2)
    stream = build_stream(data, "domain", labels="shared")
    second = stream.tasks[1]
    lacking = Task(1, second.name, second.classes, second.train.of_classes([0, 1]), second.test)
    stream = Stream("domain", (stream.tasks[0], lacking), 3, stream.class_names)
    method = tiny_method("duct", stream)
    tiny_run(method, stream, epochs=1)
    assert method.means.counts.tolist() == [4, 4, 4, 4, 4, 0]
    assert method.network.rows.isfinite().all()
    batch = next(iter(BatchLoader(stream.tasks[0].test, tiny_inputs().eval, 1, shuffle=False)))
    with torch.no_grad():
        (feature,) = method.network.backbone(batch.images)
        method.network.old_rows[2] = -feature  # the worst row for this image
        method.network.head.weight[2] = feature  # the best one, but of a class that the domain lacks
        assert method.predict(batch)["logits"][0, 2] < 0


def test_transport_prefers_the_same_class_of_the_new_domain():
    old = 30 * torch.eye(4)
    new = old[[1, 0, 3, 2]] + 0.5 * torch.randn(4, 4)
    new_rows = torch.randn(4, 4)
    moved = 4 * transport_plan(new, old, regularization=0.02).T @ new_rows
    torch.testing.assert_close(moved, new_rows[[1, 0, 3, 2]], atol=1e-4, rtol=0)


@pytest.mark.parametrize("scenario", ["class", "task"])
def test_evaluation_uses_the_merged_backbone(scenario):
    stream = tiny_stream(scenario)
    method = tiny_method("duct", stream)
    tiny_run(method, stream, epochs=1)
    assert_weights(method.network.backbone, named_weights(method.merged))
    before, after = named_weights(method.pretrained), named_weights(method.merged)
    assert any(not torch.equal(before[name], after[name]) for name in before)
