"""APER joins plain and adapted features and stops training after the first task; what it shares with its kin."""

import pytest
import torch
from torch import nn

from cflat.data import BatchLoader
from cflat.methods._adapted import AdaptedClassifier, AdapterConfig
from cflat.methods.aper import APER
from cflat.nn.adapters import AdapterSet
from cflat.nn.backbone import create_backbone
from cflat.nn.surgery import train_unfrozen_
from methods.streams import domain_stream, uneven_stream
from nn.passes import vit_features
from runs import tiny_inputs, tiny_method, tiny_run, tiny_stream


def adapted_classifier(name="vit_smoke") -> AdaptedClassifier:
    backbone = create_backbone(name, image_size=32)
    network = AdaptedClassifier(backbone, AdapterConfig(bottleneck=8).make_adapters(backbone))
    network.head.grow(3)
    for parameter in network.adapters.parameters():
        nn.init.normal_(parameter, std=0.3)
    train_unfrozen_(network)
    return network


def gradients(network, *inputs):
    torch.manual_seed(5)  # dropout
    network.zero_grad()
    network(*inputs).square().sum().backward()
    return {name: p.grad.clone() for name, p in network.named_parameters() if p.grad is not None}


def test_published_size_on_vit_base():
    with torch.device("meta"):
        backbone = create_backbone("vit_base")
        network = AdaptedClassifier(backbone, AdapterConfig().make_adapters(backbone))
        network.head.grow(10)
    trained = {name: p.numel() for name, p in network.named_parameters() if p.requires_grad}
    assert sum(size for name, size in trained.items() if name.startswith("adapters.")) == 1_189_632
    assert sum(trained.values()) == 1_189_632 + 10 * 768 + 1


def test_a_cached_stem_gives_bit_equal_gradients():
    network, images = adapted_classifier(), torch.rand(4, 3, 32, 32)
    with torch.no_grad():
        stem = network.stem(images)
    cached, uncached = gradients(network, images, *stem.values()), gradients(network, images)
    assert cached.keys() == uncached.keys() == {n for n, _ in network.named_parameters() if "backbone" not in n}
    for name, gradient in cached.items():
        assert torch.equal(gradient, uncached[name]), name


@pytest.mark.parametrize("name", ["vit_smoke", "timm:vit_medium_patch16_gap_240"])
@torch.no_grad()
def test_features_are_those_of_the_vit_with_adapters(name):
    network, images = adapted_classifier(name).eval(), torch.rand(3, 3, 32, 32)
    expected = vit_features(network.backbone, images, adapters=list(network.adapters))
    torch.testing.assert_close(network.features(images), expected, atol=1e-4, rtol=1e-4)
    fresh = AdaptedClassifier(network.backbone, AdapterSet(network.backbone)).eval()
    torch.testing.assert_close(fresh.features(images), network.backbone(images), atol=1e-4, rtol=1e-4)
    assert (fresh.features(images) - expected).abs().max() > 1e-2


@pytest.mark.parametrize("name", ["aper", "ranpac", "ease"])
def test_the_stem_is_computed_once_per_step(name):
    stream = tiny_stream()
    method = tiny_method(name, stream)
    method.grow(stream.tasks[0])
    batch = next(iter(BatchLoader(stream.tasks[0].train, tiny_inputs().train, 8, shuffle=True)))
    with torch.no_grad():
        prepared = method.prepare(batch)
    losses = [method.eval().loss(method.network, b).total for b in (prepared, batch)]
    assert set(prepared.extras) == {"attended", "mixed"}
    assert torch.equal(*losses)


def test_features_are_plain_and_adapted():
    stream = uneven_stream()
    method = tiny_method("aper", stream)
    tiny_run(method, stream)
    images, network = torch.rand(3, 3, 8, 8), method.network
    with torch.no_grad():
        adapted = vit_features(network.backbone, images, adapters=list(network.adapters))
        expected = torch.cat([network.backbone(images), adapted], dim=1)
        assert (expected[:, :64] - expected[:, 64:]).abs().max() > 1e-3
        torch.testing.assert_close(method.features(images), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["aper", "ranpac"])
@pytest.mark.parametrize("stream", [uneven_stream(), domain_stream()], ids=["class", "domain"])
def test_only_the_first_task_trains(name, stream):
    method = tiny_method(name, stream)
    first = type(stream)(stream.scenario, stream.tasks[:1], stream.num_classes, stream.class_names)
    tiny_run(method, first)
    trained = {key: value.clone() for key, value in method.network.state_dict().items()}
    again = tiny_method(name, stream)
    result = tiny_run(again, stream)
    assert result.cost.steps == 2 * -(-len(stream.tasks[0].train) // 16)
    assert again.network.head.num_classes == stream.tasks[0].num_classes
    assert trained.keys() == again.network.state_dict().keys()
    for key, value in again.network.state_dict().items():
        assert torch.equal(value, trained[key]), key


def test_domains_share_one_mean_per_class():
    stream = domain_stream()
    method: APER = tiny_method("aper", stream)
    tiny_run(method, stream)
    assert method.means.counts.tolist() == [12.0] * 6


def test_adapters_that_would_never_learn_are_rejected():
    with pytest.raises(ValueError, match="scale"):
        AdapterConfig(scale=0)
