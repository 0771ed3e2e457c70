"""Adapters: silent at the start, the published size, and one batched pass for many sets."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from cflat.nn import vit
from cflat.nn.adapters import Adapter, AdapterSet, forward_adapters
from cflat.nn.backbone import Backbone, create_backbone
from nn.passes import vit_features


def trained_set(backbone: Backbone) -> AdapterSet:
    adapters = AdapterSet(backbone, bottleneck=8).eval()
    for parameter in adapters.parameters():
        nn.init.normal_(parameter, std=0.5)
    return adapters


def test_fresh_adapters_leave_features_bit_equal() -> None:
    backbone, images = create_backbone("vit_smoke").eval(), torch.rand(4, 3, 8, 8)
    adapters = AdapterSet(backbone)
    assert adapters.training  # dropout acts and still changes nothing
    assert torch.equal(vit_features(backbone, images, adapters=adapters), backbone(images))


def test_fresh_adapters_leave_real_features_bit_equal(shared: Path) -> None:
    weights = shared / "weights" / "vit_tiny_patch16_224.safetensors"
    backbone = create_backbone("vit_tiny", weights=weights, image_size=112).eval()
    images = torch.rand(2, 3, 112, 112)
    with torch.inference_mode():
        found = vit_features(backbone, images, adapters=AdapterSet(backbone))
        assert torch.equal(found, backbone(images))


def test_adapter_formula() -> None:
    adapter, tokens = Adapter(6, bottleneck=4, scale=0.3).eval(), torch.randn(2, 3, 6)
    for parameter in adapter.parameters():
        nn.init.normal_(parameter)
    hidden = (tokens @ adapter.down.weight.T + adapter.down.bias).clamp(min=0)
    expected = 0.3 * (hidden @ adapter.up.weight.T + adapter.up.bias)
    torch.testing.assert_close(adapter(tokens), expected)
    assert not torch.equal(adapter.train()(tokens), adapter(tokens))  # dropout


def test_adapters_stand_beside_the_mlp() -> None:
    backbone = create_backbone("vit_smoke").eval()
    adapters = trained_set(backbone)
    tokens = vit.embed(backbone, torch.rand(2, 3, 8, 8))
    block = backbone.model.blocks[0]
    attended = tokens + block.attn(block.norm1(tokens))
    expected = attended + block.mlp(block.norm2(attended)) + adapters[0](attended)
    torch.testing.assert_close(vit.run_blocks(backbone, tokens, 0, 1, adapters=adapters), expected)


def test_only_adapters_get_gradients_from_a_frozen_backbone() -> None:
    backbone = create_backbone("vit_smoke").eval().requires_grad_(False)
    adapters = trained_set(backbone)
    vit_features(backbone, torch.rand(2, 3, 8, 8), adapters=adapters).sum().backward()
    assert all(parameter.grad is not None for parameter in adapters.parameters())
    assert all(parameter.grad is None for parameter in backbone.parameters())


def test_parameter_count_on_vit_base() -> None:
    with torch.device("meta"):
        backbone = create_backbone("vit_base")
        adapters = AdapterSet(backbone)
    assert sum(p.numel() for p in adapters.parameters()) == 1_189_632


@pytest.mark.parametrize("name", ["vit_smoke", "timm:vit_medium_patch16_gap_240"])
@pytest.mark.parametrize("max_tokens", [None, 1, 120])
def test_many_sets_at_once_equal_separate_passes(name: str, max_tokens: int | None) -> None:
    backbone = create_backbone(name, image_size=32).eval()
    adapter_sets = [trained_set(backbone) for _ in range(3)]
    images = torch.rand(5, 3, 32, 32)
    with torch.inference_mode():
        tokens = vit.embed(backbone, images)
        together = forward_adapters(backbone, tokens, adapter_sets, max_tokens=max_tokens)
        separate = torch.stack([vit_features(backbone, images, adapters=one) for one in adapter_sets])
    assert together.shape == (3, 5, backbone.feature_dim)
    torch.testing.assert_close(together, separate, atol=1e-4, rtol=1e-4)
    assert (separate[0] - separate[1]).abs().max() > 1e-2


def test_many_sets_work_under_autocast() -> None:
    backbone = create_backbone("vit_smoke").eval()
    adapter_sets = [trained_set(backbone) for _ in range(2)]
    tokens = vit.embed(backbone, torch.rand(3, 3, 8, 8))
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        found = forward_adapters(backbone, tokens, adapter_sets)
    with torch.inference_mode():
        expected = forward_adapters(backbone, tokens, adapter_sets)
    torch.testing.assert_close(found.float(), expected, atol=0.15, rtol=0.1)
