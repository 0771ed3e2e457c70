"""Features of test images are computed once, and never taken for those of other images or other weights."""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch

from cflat.data import BatchLoader
from cflat.methods import _feature_cache
from cflat.methods._feature_cache import FeatureCache
from cflat.nn import vit
from runs import tiny_inputs, tiny_method, tiny_run, tiny_stream

FIXED_FEATURES = ["simplecil", "ranpac", "aper"]
"""Methods whose answers follow from features that do not change after the first task."""
CACHED = [*FIXED_FEATURES, "l2p", "dualprompt", "coda_prompt"]


def trained(name):
    """Return a method after two tasks, and a batch of test images of the first."""
    stream = tiny_stream()
    method = tiny_method(name, stream)
    result = tiny_run(method, stream, epochs=1)
    method.eval()
    return method, next(iter(BatchLoader(stream.tasks[0].test, tiny_inputs().eval, 16, shuffle=False))), result


def answers(method, batch):
    with torch.no_grad():
        return torch.cat(list(method.predict(batch).values()))


@pytest.mark.parametrize("name", CACHED)
def test_a_run_with_the_cache_gives_the_same_bits_as_without(name, monkeypatch):
    method, batch, result = trained(name)
    with_cache = answers(method, batch)
    monkeypatch.setattr(FeatureCache, "__call__", lambda self, batch, compute: compute())
    other, _, other_result = trained(name)
    assert torch.equal(with_cache, answers(other, batch))
    assert result.accuracy == other_result.accuracy


@pytest.mark.parametrize("name", FIXED_FEATURES)
def test_images_pass_through_the_network_once(name):
    method, batch, _ = trained(name)
    stem = method.network.model if name == "simplecil" else vit.vit_of(method.network.backbone).patch_embed
    passes = []
    stem.register_forward_hook(lambda *_: passes.append(1))
    fresh = replace(batch, images=batch.images + 0.5)
    assert torch.equal(answers(method, fresh), answers(method, fresh))
    assert len(passes) == 1


@pytest.mark.parametrize("name", ["ranpac", "aper"])
@pytest.mark.parametrize("change", ["write", "load", "train"])
def test_other_weights_give_other_features(name, change):
    method, batch, _ = trained(name)
    before = answers(method, batch)
    adapters = method.network.adapters
    if change == "load":
        state = {key: value + 0.5 if "adapters" in key else value for key, value in method.state_dict().items()}
        method.load_state_dict(state)
    elif change == "write":
        with torch.no_grad():
            for parameter in adapters.parameters():
                parameter += 0.5
    else:
        optimizer = torch.optim.SGD(adapters.parameters(), lr=100.0)
        method.network(batch.images).square().sum().backward()
        optimizer.step()
    after = answers(method, batch)
    assert not torch.equal(before, after)
    copy = deepcopy(method)  # whose tensors are others
    assert torch.equal(after, answers(copy, batch))


@pytest.mark.parametrize("change", [lambda images: images.flip(-1), lambda images: images.flip(-2), torch.zeros_like])
def test_equal_rows_of_different_images_do_not_share_features(change):
    """Also where the same pixels stand in other places: somebody asks about an image, then about its mirror image."""
    method, batch, _ = trained("aper")
    other = replace(batch, images=change(batch.images))
    answers(method, batch)
    cached = answers(method, other)
    method.cache = FeatureCache(method.network)
    assert torch.equal(cached, answers(method, other))
    assert len(method.cache) == len(batch)


def test_whoever_differentiates_gets_a_graph():
    method, batch, _ = trained("simplecil")
    answers(method, batch)
    images = batch.images.clone().requires_grad_()
    method.predict(replace(batch, images=images))["logits"].sum().backward()
    assert images.grad is not None
    assert images.grad.abs().sum() > 0


def test_another_precision_computes_its_own_features():
    method, batch, _ = trained("simplecil")
    with torch.no_grad():
        single = method.cache(batch, lambda: method.network(batch.images))
        with torch.autocast("cpu", torch.bfloat16):
            half = method.cache(batch, lambda: method.network(batch.images))
    assert not torch.equal(single.float(), half.float())


def test_ever_new_images_do_not_fill_the_memory(monkeypatch):
    method, batch, _ = trained("simplecil")
    monkeypatch.setattr(_feature_cache, "MAX_IMAGES", 2 * len(batch))
    found = [answers(method, replace(batch, images=batch.images + shift)) for shift in (0.0, 0.1, 0.2, 0.3, 0.0)]
    assert len(method.cache) <= 2 * len(batch)
    assert torch.equal(found[0], found[-1])
