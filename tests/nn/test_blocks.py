"""Activation checkpointing: the gradients, random numbers and statistics of a plain network, in less memory."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from cflat.methods import StreamInfo, create_method, get_method_spec
from cflat.nn.backbone import create_backbone
from cflat.nn.blocks import HostBlock
from cflat.nn.ranks import shared_batch
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


@pytest.mark.parametrize(("name", "size"), NETWORKS[1:])  # a ViT's flash attention has no second derivative on CPUs
def test_a_graph_that_is_kept_can_be_recomputed_again(name, size):
    """Curvature and EWC differentiate more than once."""
    products = []
    for checkpointing in (False, True):
        backbone = built(name, size, checkpointing).train()
        parameters = list(backbone.parameters())
        torch.manual_seed(1)
        loss = backbone(torch.rand(4, 3, size, size)).square().mean()
        gradients = torch.autograd.grad(loss, parameters, create_graph=True)
        products.append(torch.autograd.grad(sum(part.square().sum() for part in gradients), parameters))
    for plain, recomputed in zip(*products, strict=True):
        assert torch.equal(plain, recomputed)


@pytest.fixture
def one_rank():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("runs_elsewhere", [False, True])
def test_recomputation_normalises_by_the_batch_of_all_ranks(one_rank, runs_elsewhere):
    """In the thread that calls it, and in one without its context variables, as autograd's on GPUs are."""
    plain, _ = trained_once(built("resnet8", 8, False))
    backbone = built("resnet8", 8, True)
    torch.manual_seed(1)
    images = torch.rand(4, 3, 8, 8)
    with shared_batch(4, 4, is_filler=False), ThreadPoolExecutor(1) as pool:
        loss = backbone.train()(images).square().mean()
        if runs_elsewhere:
            pool.submit(loss.backward).result()
        else:
            loss.backward()
    for name, parameter in backbone.named_parameters():
        torch.testing.assert_close(parameter.grad, plain[name], rtol=1e-3, atol=1e-6)
    for name, buffer in backbone.named_buffers():
        torch.testing.assert_close(buffer, plain[name])


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
