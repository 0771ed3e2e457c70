"""ViT internals: the pieces make timm's forward pass, prefixes attend as a naive attention does."""

from __future__ import annotations

import pytest
import torch

from cflat.nn import vit
from cflat.nn.backbone import Backbone, create_backbone
from nn.passes import vit_features


@pytest.fixture
def backbone() -> Backbone:
    return create_backbone("vit_smoke", image_size=16).eval()


@pytest.fixture
def images() -> torch.Tensor:
    return torch.rand(3, 3, 16, 16)


def random_prefix(length: int, batch_size: int = 3) -> vit.Prefix:
    keys, values = torch.randn(2, batch_size, 4, length, 16)
    return keys, values


@pytest.mark.parametrize("name", ["vit_smoke", "timm:vit_medium_patch16_gap_240", "timm:deit3_small_patch16_224"])
def test_pieces_make_the_whole(name: str) -> None:
    backbone = create_backbone(name, image_size=32).eval()
    images = torch.rand(2, 3, 32, 32)
    tokens = vit.run_blocks(backbone, vit.embed(backbone, images))
    assert torch.equal(vit.pool(backbone, tokens), backbone(images))


def test_blocks_can_be_run_in_parts(backbone: Backbone, images: torch.Tensor) -> None:
    tokens = vit.embed(backbone, images)
    halves = vit.run_blocks(backbone, vit.run_blocks(backbone, tokens, 0, 2), 2)
    assert torch.equal(halves, vit.run_blocks(backbone, tokens))


def test_empty_prefixes_change_nothing(backbone: Backbone, images: torch.Tensor) -> None:
    prefixes = dict.fromkeys(range(6), random_prefix(0))
    torch.testing.assert_close(vit_features(backbone, images, prefixes=prefixes), backbone(images))


def test_prefix_attention_equals_a_naive_one(backbone: Backbone) -> None:
    block, tokens = backbone.model.blocks[0], torch.randn(3, 5, 64)
    keys, values = random_prefix(2)
    attention, normed = block.attn, block.norm1(tokens)
    weights, biases = attention.qkv.weight.view(3, 4, 16, 64), attention.qkv.bias.view(3, 4, 16)
    expected = torch.empty(3, 5, 64)
    for sample in range(3):
        for head in range(4):
            query, key, value = (normed[sample] @ weights[i, head].T + biases[i, head] for i in range(3))
            key = torch.cat([keys[sample, head], key])
            value = torch.cat([values[sample, head], value])
            shares = (query @ key.T / 16**0.5).softmax(-1)
            expected[sample, :, 16 * head : 16 * head + 16] = shares @ value
    expected = tokens + attention.proj(expected)
    torch.testing.assert_close(vit.attend(block, tokens, (keys, values)), expected)


def test_one_prefix_serves_a_whole_batch(backbone: Backbone, images: torch.Tensor) -> None:
    keys, values = random_prefix(4, batch_size=1)
    repeated = keys.expand(3, -1, -1, -1), values.expand(3, -1, -1, -1)
    found = vit_features(backbone, images, prefixes={1: (keys, values)})
    assert torch.equal(found, vit_features(backbone, images, prefixes={1: repeated}))
    assert not torch.allclose(found, backbone(images))


def test_fewer_queries_give_the_first_tokens(backbone: Backbone) -> None:
    block, tokens = backbone.model.blocks[0], torch.randn(3, 5, 64)
    torch.testing.assert_close(vit.attend(block, tokens, num_queries=2), vit.attend(block, tokens)[:, :2])


def test_prompts_sit_behind_the_class_token_at_its_position(backbone: Backbone, images: torch.Tensor) -> None:
    tokens, prompts = vit.embed(backbone, images), torch.randn(3, 4, 64)
    prompted = vit.insert_prompts(backbone, tokens, prompts)
    assert torch.equal(prompted[:, :1], tokens[:, :1])
    assert torch.equal(prompted[:, 1:5], prompts + backbone.model.pos_embed[:, :1])
    assert torch.equal(prompted[:, 5:], tokens[:, 1:])


def test_gradients_reach_prefixes_and_spare_frozen_weights(backbone: Backbone, images: torch.Tensor) -> None:
    backbone.requires_grad_(False)
    keys, values = (part.requires_grad_() for part in random_prefix(2))
    vit_features(backbone, images, prefixes={2: (keys, values)}).square().sum().backward()
    assert keys.grad.abs().sum() > 0
    assert values.grad.abs().sum() > 0
    assert all(parameter.grad is None for parameter in backbone.parameters())


def test_prefixes_work_under_autocast(backbone: Backbone, images: torch.Tensor) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = vit_features(backbone, images, prefixes={0: random_prefix(2)})
    assert found.isfinite().all()


def test_other_networks_and_blocks_are_refused(images: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="resnet32 is not a ViT"):
        vit.embed(create_backbone("resnet32"), images)
    parallel = create_backbone("timm:vit_small_patch16_18x2_224", image_size=16)
    with pytest.raises(ValueError, match="plain pre-norm blocks, got ParallelThingsBlock"):
        vit_features(parallel, images, prefixes={0: random_prefix(2)})


@pytest.mark.parametrize("num_outputs", [1, 3])
def test_fewer_outputs_are_the_first_of_all(num_outputs: int):
    backbone = create_backbone("vit_smoke")
    tokens = vit.embed(backbone, torch.randn(2, 3, backbone.image_size, backbone.image_size))
    whole = vit.run_blocks(backbone, tokens)
    torch.testing.assert_close(vit.run_blocks(backbone, tokens, num_outputs=num_outputs), whole[:, :num_outputs])
    last = len(backbone.model.blocks) - 1
    before = vit.run_blocks(backbone, tokens, 0, last)
    torch.testing.assert_close(vit.run_blocks(backbone, tokens, 0, last, num_outputs=num_outputs), before)
    assert vit.num_read(backbone) == 1
