"""Activation checkpointing: the gradients, random numbers and statistics of a plain network, in less memory."""

from __future__ import annotations

import pytest
import torch

from cflat.methods import StreamInfo, create_method, get_method_spec
from cflat.nn.backbone import create_backbone
from cflat.nn.blocks import HostBlock
from runs import tiny_run, tiny_stream

NETWORKS = [("vit_smoke", 8), ("resnet8", 8), ("resnet18_cifar", 8)]


def built(name, image_size, checkpointing, drop_path=0.0):
    torch.manual_seed(0)
    return create_backbone(name, image_size=image_size, drop_path_rate=drop_path, checkpointing=checkpointing)


def trained_once(backbone, batch_size=4):
    """Return gradients, buffers and the next random number after one pass, and the bytes that were kept for it."""
    torch.manual_seed(1)
    storages = {p.untyped_storage().data_ptr() for p in backbone.parameters()}
    kept = 0

    def pack(tensor):
        nonlocal kept
        kept += tensor.numel() * tensor.element_size() * (tensor.untyped_storage().data_ptr() not in storages)
        return tensor

    images = torch.rand(batch_size, 3, backbone.image_size, backbone.image_size)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = backbone.train()(images).square().mean()
    loss.backward()
    gradients = {name: p.grad for name, p in backbone.named_parameters()}
    return {**gradients, **dict(backbone.named_buffers()), "random": torch.rand(3)}, kept


@pytest.mark.parametrize(("name", "size"), NETWORKS)
def test_gradients_statistics_and_random_numbers_are_those_of_the_plain_network(name, size):
    drop_path = 0.0 if name == "resnet8" else 0.4
    plain, bytes_plain = trained_once(built(name, size, False, drop_path))
    recomputed, bytes_recomputed = trained_once(built(name, size, True, drop_path))
    assert plain.keys() == recomputed.keys()
    assert [key for key in plain if not torch.equal(plain[key], recomputed[key])] == []
    assert bytes_recomputed < bytes_plain / 2


def test_memory_grows_with_the_inputs_of_blocks_alone():
    """One tensor (B, N, D) for each of the six blocks, and what lies before and behind them."""
    backbone = built("vit_smoke", 8, True)
    tokens = 4 * (1 + 16) * 64 * 4
    assert 6 * tokens <= trained_once(backbone)[1] <= 10 * tokens


@pytest.mark.parametrize("name", ["icarl", "memo", "ease", "l2p", "dualprompt", "duct"])
def test_methods_train_alike(name):
    """Teachers, copies of blocks, adapters, prompts, prefixes, merged weights: bit for bit."""
    stream, states = tiny_stream(per_class=5), []
    for checkpointing in (False, True):
        backbone = built("vit_smoke", 8, checkpointing)
        spec = get_method_spec(name)
        config = spec.config(**({"retrain_epochs": 1} if name == "duct" else {}))
        method = create_method(name, backbone, StreamInfo("class", stream.num_classes, stream.num_tasks), config)
        tiny_run(method, stream, optimizer="c_flat_turbo", epochs=1)
        assert any(isinstance(part, HostBlock) for part in method.network.modules()) == checkpointing
        states.append(method.state_dict())
    assert [key for key in states[0] if not torch.equal(states[0][key], states[1][key])] == []


def test_adapters_on_a_frozen_network_save_as_well():
    stream, kept = tiny_stream(per_class=5), []
    for checkpointing in (False, True):
        method = create_method("ease", built("vit_smoke", 8, checkpointing), StreamInfo("class", 6, 2))
        method.grow(stream.tasks[0])
        method.set_train_mode()
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):  # noqa: B023
            method.network(torch.rand(8, 3, 8, 8)).sum()
        kept.append(sum(sizes))
    assert kept[1] < kept[0] / 2


def test_networks_without_blocks_are_refused():
    with pytest.raises(ValueError, match="for the blocks of ViTs and ResNets, small_cnn has none"):
        create_backbone("small_cnn", checkpointing=True)
