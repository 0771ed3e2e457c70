"""What L2P and DualPrompt have in common: constants once per step, queries once per run, two honest names."""

import pytest
import torch
from torch.nn import functional

from cflat.data import BatchLoader, build_stream
from cflat.methods import create_method, get_method_spec
from cflat.methods.dualprompt import DualPromptConfig
from cflat.methods.l2p import L2PConfig
from cflat.nn import vit
from cflat.nn.backbone import create_backbone
from cflat.train.objective import Objective
from data.synthetic import dataset
from runs import cpu, tiny_inputs, tiny_method, tiny_run, tiny_stream

METHODS = ["l2p", "dualprompt"]


def begun(name, task_index=1, config=None):
    """Return a method that has grown for some tasks, whose images do not all want the same prompts, and its stream."""
    stream = tiny_stream()
    method = tiny_method(name, stream, config=config)
    for task in stream.tasks[: task_index + 1]:
        method.grow(task)
    method.set_train_mode()
    with torch.no_grad():  # a random ViT sees all images nearly alike: let the keys look at what differs
        common = functional.normalize(method.network.backbone(batch_of(stream.tasks[0].test).images).mean(0), dim=0)
        keys = method.network.prompts.keys
        keys -= (keys @ common)[:, None] * common
    return method, stream


def batch_of(images, size=16):
    return next(iter(BatchLoader(images, tiny_inputs().eval, size, shuffle=True)))


def gradients(method, loss):
    method.network.zero_grad()
    loss.backward()
    return {key: p.grad.clone() for key, p in method.network.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", METHODS)
def test_the_loss_masks_other_tasks_and_pulls_the_keys(name):
    method, stream = begun(name)
    batch = batch_of(stream.tasks[1].train)
    prepared = Objective(method, method.network, cpu()).prepare(batch)
    query, ids = prepared.extras["query"], prepared.extras["ids"]
    features = method.network.features(method.network.tokens(batch.images), ids)
    logits = method.network.head(features)
    logits[:, :3] = -torch.inf
    keys = method.network.prompts.keys[ids].view(len(batch), -1, query.shape[1])
    cosines = functional.cosine_similarity(query[:, None], keys, dim=2)
    expected = functional.cross_entropy(logits, batch.labels) - 0.1 * cosines.sum(1).mean()
    torch.testing.assert_close(method.loss(method.network, prepared).total, expected)


@pytest.mark.parametrize("name", METHODS)
def test_cached_constants_give_the_gradients_of_uncached_ones(name):
    method, stream = begun(name)
    batch = batch_of(stream.tasks[1].train)
    prepared = Objective(method, method.network, cpu()).prepare(batch)
    assert set(prepared.extras) == {"tokens", "query", "ids"}
    assert not any(value.requires_grad for value in prepared.extras.values())
    cached = gradients(method, method.loss(method.network, prepared).total)
    query = method.network.backbone(batch.images)  # the plain ViT, inside the graph
    naive = batch.with_(tokens=method.network.tokens(batch.images), query=query, ids=method.training_ids(query))
    uncached = gradients(method, method.loss(method.network, naive).total)
    assert cached.keys() == uncached.keys()
    assert not any(key.startswith("backbone") for key in cached)
    for key, value in cached.items():
        torch.testing.assert_close(value, uncached[key], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", METHODS)
def test_ids_stay_when_the_keys_are_perturbed(name):
    method, stream = begun(name)
    batch = batch_of(stream.tasks[1].train)
    prepared = Objective(method, method.network, cpu()).prepare(batch)
    before = gradients(method, method.loss(method.network, prepared).parts["classify"])
    with torch.no_grad():
        method.network.prompts.keys.neg_()
    after = gradients(method, method.loss(method.network, prepared).parts["classify"])
    for key, value in before.items():
        assert torch.equal(value, after[key]), key


@pytest.mark.parametrize("name", METHODS)
def test_ids_do_not_depend_on_the_order_within_a_batch(name):
    method, stream = begun(name)
    batch = batch_of(stream.tasks[0].test)
    order = torch.randperm(len(batch))
    query = method.network.backbone(batch.images)
    for batchwise in (False, True):
        ids = method.test_ids(query, batchwise=batchwise)
        assert (ids == ids[0]).all() == batchwise
        assert torch.equal(method.test_ids(query[order], batchwise=batchwise), ids[order])


@pytest.mark.parametrize("name", METHODS)
def test_a_batch_of_one_is_instance_wise(name):
    method, stream = begun(name)
    images = stream.tasks[0].test
    with torch.no_grad():
        together = method.predict(batch_of(images, len(images)))
        alone = [method.predict(batch) for batch in BatchLoader(images, tiny_inputs().eval, 1, shuffle=False)]
    for scores in alone:
        assert torch.equal(scores["instancewise"], scores["batchwise"])
    assert not torch.equal(together["instancewise"], together["batchwise"])
    order = torch.argsort(batch_of(images, len(images)).rows)
    rows = torch.argsort(torch.from_numpy(images.rows))
    expected = torch.cat([scores["instancewise"] for scores in alone])
    torch.testing.assert_close(together["instancewise"][order], expected[rows], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", METHODS)
def test_training_leaves_the_backbone_alone(name):
    stream = tiny_stream()
    method = tiny_method(name, stream)
    before = {key: value.clone() for key, value in method.network.backbone.state_dict().items()}
    result = tiny_run(method, stream, epochs=1, optimizer="c_flat")
    for key, value in method.network.backbone.state_dict().items():
        assert torch.equal(value, before[key]), key
    assert tuple(result.accuracy) == ("instancewise", "batchwise")


@pytest.mark.parametrize("name", METHODS)
def test_queries_of_test_images_are_computed_once_per_run(name):
    method, stream = begun(name)
    method.eval()
    batch, passes = batch_of(stream.tasks[0].test), []
    vit.vit_of(method.network.backbone).blocks[-1].register_forward_hook(lambda *_: passes.append(1))
    with torch.no_grad():
        first = method.predict(batch)
        num_first = len(passes)
        method.network.head.grow(1)  # another task changes much, but no query
        second = method.predict(batch)
    assert len(passes) - num_first == num_first - 1
    assert torch.equal(first["instancewise"], second["instancewise"][:, :-1])
    assert len(method.queries) == len(batch)


@pytest.mark.parametrize("config", [L2PConfig(pool_size=2, top_k=1), DualPromptConfig(pool_size=2)], ids=METHODS)
def test_streams_may_have_more_tasks_than_the_pool_prompts(config):
    stream = tiny_stream(num_tasks=4)
    name = "l2p" if isinstance(config, L2PConfig) else "dualprompt"
    result = tiny_run(tiny_method(name, stream, config=config), stream, epochs=1)
    assert result.accuracy["instancewise"].num_stages == 4


@pytest.mark.parametrize("labels", ["shared", "growing"])
@pytest.mark.parametrize("name", METHODS)
def test_domain_streams_run(name, labels):
    stream = build_stream(dataset(3, num_domains=2), "domain", labels=labels)
    method = tiny_method(name, stream)
    tiny_run(method, stream, epochs=1)
    assert method.network.head.num_classes == (3 if labels == "shared" else 6)


@pytest.mark.parametrize("name", METHODS)
def test_other_networks_are_refused(name):
    spec, stream = get_method_spec(name), tiny_stream()
    info = tiny_method(name, stream).info
    assert spec.is_pretrained
    with pytest.raises(ValueError, match=f"{name} runs on vit backbones, not on small_cnn"):
        create_method(name, create_backbone("small_cnn"), info)


@pytest.mark.parametrize("config", [L2PConfig(top_k=1), DualPromptConfig()], ids=METHODS)
def test_half_precision_does_not_decide_between_near_keys(config):
    method, _ = begun("l2p" if isinstance(config, L2PConfig) else "dualprompt", config=config)
    keys = method.network.prompts.keys
    query = keys[[1]].detach().clone()
    with torch.no_grad():
        keys.fill_(-1.0)
        keys[0], keys[1] = query[0] * (1 + 0.02 * torch.rand(64)), query[0]  # cosines differ by some 1e-5
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ids = method.test_ids(query, batchwise=False)
        assert method.network.prompts.agreement(query, ids).dtype == torch.float32
    assert ids.flatten().tolist() == [1]
