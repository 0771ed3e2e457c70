"""Run the blocks of a timm VisionTransformer with adapters, prompts and prefixes, without a fork.

A forward pass is ``pool(backbone, run_blocks(backbone, embed(backbone, images)))`` and equals
``backbone(images)``. Every function reads the timm model's own modules: weights and state dicts stay as timm has
them. Only attention with a prefix, or for some of the queries, repeats timm's arithmetic, because keys and values are
not reachable from outside.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from cflat._lazy import LazyModule
from cflat.nn.backbone import Backbone
from cflat.nn.blocks import inside

if TYPE_CHECKING:
    from timm.layers.attention import Attention
    from timm.models import VisionTransformer

models, layers = LazyModule("timm.models"), LazyModule("timm.layers")

Prefix: TypeAlias = tuple[Tensor, Tensor]
"""Keys and values to put before those of a block, each (B or 1, heads, length, head_dim)."""


def vit_of(backbone: Backbone) -> VisionTransformer:
    """Return the timm model of a ViT backbone; others raise a `ValueError`."""
    if not isinstance(backbone.model, models.VisionTransformer):
        raise ValueError(f"{backbone.name} is not a ViT; adapters and prompts need one, such as 'vit_tiny'.")
    return backbone.model


def blocks_of(network: nn.Module) -> list[nn.Module]:
    """Return the blocks of every timm ViT in a network."""
    return [block for part in network.modules() if isinstance(part, models.VisionTransformer) for block in part.blocks]


def embed(backbone: Backbone, images: Tensor) -> Tensor:
    """Return what enters the first block: patches with class token and positions, (B, N, D)."""
    vit = vit_of(backbone)
    return vit.norm_pre(vit.patch_drop(vit._pos_embed(vit.patch_embed(images))))


def insert_prompts(backbone: Backbone, tokens: Tensor, prompts: Tensor) -> Tensor:
    """Put prompt tokens (B, P, D) behind the class token of embedded ``tokens``; they get its position."""
    vit = vit_of(backbone)
    if vit.pos_embed is not None and not vit.no_embed_class:
        prompts = prompts + vit.pos_embed[:, :1]
    # `tokens` have passed norm_pre in `embed`; prompts join behind it and need it, too.
    prompts = vit.norm_pre(prompts).to(tokens.dtype)
    head, patches = tokens[:, : vit.num_prefix_tokens], tokens[:, vit.num_prefix_tokens :]
    return torch.cat([head, prompts, patches], dim=1)


def run_blocks(
    backbone: Backbone,
    tokens: Tensor,
    start: int = 0,
    stop: int | None = None,
    *,
    adapters: Sequence[nn.Module] | None = None,
    prefixes: Mapping[int, Prefix] | None = None,
    num_outputs: int | None = None,
) -> Tensor:
    """Run blocks ``start`` to ``stop`` (exclusive; `None`: all) on tokens (B, N, D) of `embed` or of earlier blocks.

    ``adapters``, one module per block of the ViT, each add their output for the post-attention tokens to the block's.
    ``prefixes`` are prepended to keys and values in some blocks, by block index. ``num_outputs`` computes, and returns,
    only the first tokens of the ViT's last block: the others are never read (see `num_read`).
    """
    blocks = list(vit_of(backbone).blocks)
    for index in range(len(blocks))[start:stop]:
        adapter = adapters[index] if adapters is not None else None
        prefix = prefixes.get(index) if prefixes is not None else None
        wanted = num_outputs if index == len(blocks) - 1 else None
        if adapter is None and prefix is None and wanted is None:
            tokens = blocks[index](tokens)
            continue
        tokens = inside(blocks[index], partial(_run_block, blocks[index], adapter, prefix, wanted), tokens)
    return tokens


def _run_block(
    block: Any, adapter: nn.Module | None, prefix: Prefix | None, wanted: int | None, tokens: Tensor
) -> Tensor:
    attended = attend(block, tokens, prefix, num_queries=wanted)
    mixed = mix(block, attended)
    return mixed if adapter is None else mixed + adapter(attended)


def num_read(backbone: Backbone) -> int | None:
    """Return how many of the last block's tokens `pool` reads: the class token alone, or None for all."""
    vit = vit_of(backbone)
    return 1 if vit.global_pool == "token" and vit.attn_pool is None else None


def pool(backbone: Backbone, tokens: Tensor) -> Tensor:
    """Return features (B, D) of the last block's tokens: final norm, then class token (or timm's pool)."""
    vit = vit_of(backbone)
    return vit.forward_head(vit.norm(tokens), pre_logits=True)


def attend(block: Any, tokens: Tensor, prefix: Prefix | None = None, *, num_queries: int | None = None) -> Tensor:
    """Return the residual stream behind the attention of one plain pre-norm block of timm; runs `inside` it.

    ``num_queries`` computes, and returns, the first tokens alone: enough when only the class token is read.
    """
    block = _plain(block)
    normed = block.norm1(tokens)
    if prefix is None and num_queries is None:
        mixed = block.attn(normed)
    else:
        mixed = _attention(block.attn, normed, prefix, num_queries)
    return tokens[:, :num_queries] + block.drop_path1(block.ls1(mixed))


def mix(block: Any, attended: Tensor) -> Tensor:
    """Return the residual stream behind the MLP of one timm block, given what `attend` returned; runs `inside` it."""
    block = _plain(block)
    return attended + block.drop_path2(block.ls2(block.mlp(block.norm2(attended))))


def _attention(attention: Attention, tokens: Tensor, prefix: Prefix | None, num_queries: int | None) -> Tensor:
    weight, bias, dim = attention.qkv.weight, attention.qkv.bias, attention.qkv.out_features // 3
    query_bias, rest_bias = (None, None) if bias is None else (bias[:dim], bias[dim:])
    # Apart from keys and values, which all tokens need: queries may be wanted of the first few alone.
    query = functional.linear(tokens[:, :num_queries], weight[:dim], query_bias)
    key, value = functional.linear(tokens, weight[dim:], rest_bias).chunk(2, dim=-1)
    query, key, value = (part.unflatten(-1, (attention.num_heads, -1)).transpose(1, 2) for part in (query, key, value))
    query, key = attention.q_norm(query), attention.k_norm(key)  # (B, heads, N, head_dim)
    if prefix is not None:
        key, value = (
            torch.cat([part.to(own.dtype).expand(len(own), -1, -1, -1), own], dim=2)
            for part, own in zip(prefix, (key, value), strict=True)
        )
    # The default scale, 1 / sqrt(head_dim), is timm's.
    output = functional.scaled_dot_product_attention(
        query, key, value, dropout_p=attention.attn_drop.p if attention.training else 0.0
    )
    return attention.proj_drop(attention.proj(output.transpose(1, 2).flatten(2)))


def _plain(block: nn.Module) -> Any:  # a timm Block; its submodules are untyped
    # Parallel, post-norm, gated and scale-normed variants compute something else: reject, do not approximate.
    if isinstance(block, models.vision_transformer.Block) and type(block.attn) is layers.attention.Attention:
        extras = (getattr(block.attn, "gate", None), getattr(block.attn, "norm", None))
        if all(extra is None or isinstance(extra, nn.Identity) for extra in extras):
            return block
    raise ValueError(f"Adapters and prefixes need timm's plain pre-norm blocks, got {type(block).__name__}.")
