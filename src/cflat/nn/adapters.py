"""Parallel adapters of AdaptFormer (Chen et al., 2022) as EASE and RanPAC use them.

With x the residual stream behind a block's attention, the block gives
``x + MLP(LN(x)) + scale * up(dropout(relu(down(x))))``. The up-projection starts at zero: a fresh set leaves the
features bit-equal.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from cflat._ranges import Count, checked
from cflat.nn.backbone import Backbone
from cflat.nn.blocks import inside
from cflat.nn.vit import attend, mix, num_read, pool, vit_of


class Adapter(nn.Module):
    """One bottleneck beside the MLP of a block, for tokens of width ``dim``; hidden units are dropped in training."""

    @checked
    def __init__(self, dim: int, *, bottleneck: Count = 64, dropout: float = 0.1, scale: float = 0.1) -> None:
        super().__init__()
        self.down = nn.Linear(dim, bottleneck)  # torch's default weight is Kaiming-uniform with a = sqrt(5)
        self.up = nn.Linear(bottleneck, dim)
        self.dropout = nn.Dropout(dropout)
        self.scale = scale
        # With the weight above, what public code calls the "lora" start.
        for tensor in (self.down.bias, self.up.weight, self.up.bias):
            nn.init.zeros_(tensor)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return what is added to the block's output."""
        return self.scale * self.up(self.dropout(torch.relu(self.down(tokens))))


class AdapterSet(nn.ModuleList):
    """One adapter for each block of a ViT, for `cflat.nn.vit.run_blocks`."""

    def __init__(self, backbone: Backbone, *, bottleneck: int = 64, dropout: float = 0.1, scale: float = 0.1) -> None:
        vit = vit_of(backbone)
        super().__init__(
            Adapter(vit.embed_dim, bottleneck=bottleneck, dropout=dropout, scale=scale) for _ in vit.blocks
        )


def forward_adapters(
    backbone: Backbone, tokens: Tensor, adapter_sets: Sequence[AdapterSet], *, max_tokens: int | None = None
) -> Tensor:
    """Return the features of embedded images (B, N, D) under each of T adapter sets of one width, (T, B, D).

    Equals T separate passes in evaluation mode (dropout is not applied) and computes less: block 0 up to its
    adapters is the same for all sets and runs once, and of the last block only the class token is computed.
    In between the sets are stacked along the batch and their adapters are grouped matrix products.

    ``max_tokens`` are stacked at once, more images are taken in turns. `None` chooses what is quick: few on a CPU,
    whose caches decide, many elsewhere.
    """
    if max_tokens is None:
        max_tokens = 2048 if tokens.device.type == "cpu" else 262_144
    # All sets see an image at the same time, hence the number of sets divides the number of images.
    num_images = max(1, max_tokens // (len(adapter_sets) * tokens.shape[1]))
    stacks = [_Stack(adapters) for adapters in zip(*adapter_sets, strict=True)]
    return torch.cat([_forward_stacks(backbone, part, stacks) for part in tokens.split(num_images)], dim=1)


def _forward_stacks(backbone: Backbone, tokens: Tensor, stacks: Sequence[_Stack]) -> Tensor:
    vit = vit_of(backbone)
    grid = (stacks[0].num_sets, tokens.shape[0])

    def first(tokens: Tensor) -> Tensor:
        attended = attend(vit.blocks[0], tokens)
        return mix(vit.blocks[0], attended) + stacks[0](attended.expand(grid[0], *attended.shape))

    def later(hidden: Tensor, index: int) -> Tensor:
        is_last = index == len(stacks) - 1
        attended = attend(vit.blocks[index], hidden.flatten(0, 1), num_queries=num_read(backbone) if is_last else None)
        mixed: Tensor = mix(vit.blocks[index], attended).unflatten(0, grid)
        return mixed + stacks[index](attended.unflatten(0, grid))

    hidden = inside(vit.blocks[0], first, tokens)
    for index in range(1, len(stacks)):
        hidden = inside(vit.blocks[index], later, hidden, index)
    return pool(backbone, hidden.flatten(0, 1)).unflatten(0, grid)


class _Stack:
    """The adapters that T sets have for one block, as grouped matrix products."""

    def __init__(self, adapters: Sequence[Adapter]) -> None:
        self.num_sets = len(adapters)
        self.down_weight = torch.stack([adapter.down.weight.T for adapter in adapters])
        self.down_bias = torch.stack([adapter.down.bias[None] for adapter in adapters])
        # The scale is part of the weights: a multiplication for each of them, not for each token.
        self.up_weight = torch.stack([adapter.scale * adapter.up.weight.T for adapter in adapters])
        self.up_bias = torch.stack([adapter.scale * adapter.up.bias[None] for adapter in adapters])

    def __call__(self, tokens: Tensor) -> Tensor:
        """Apply adapter t to tokens[t], (T, B, N, D)."""
        rows = tokens.flatten(1, 2)
        hidden = torch.relu(torch.baddbmm(self.down_bias, rows, self.down_weight))
        return torch.baddbmm(self.up_bias, hidden, self.up_weight).view(tokens.shape)
