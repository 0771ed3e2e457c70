"""Prompts for a frozen ViT: the pool of L2P and the prefixes of DualPrompt (both Wang et al., 2022).

Choosing is apart from using: `select` gives ids once per batch, without gradients, and everything else takes ids.
Evaluations of one step at perturbed keys therefore never flip the choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from cflat._ranges import CountOrZero, check, checked
from cflat.nn.backbone import Backbone
from cflat.nn.heads import full_precision
from cflat.nn.ranks import sum_over_batch
from cflat.nn.vit import Prefix, insert_prompts, num_read, pool, run_blocks, vit_of


class PromptPool(nn.Module):
    """Prompts of ``length`` tokens with keys; an image uses the ``top_k`` with keys nearest to its query (L2P)."""

    first_block = 0
    """Where prompts first act."""

    def __init__(self, dim: int, *, pool_size: int = 10, length: int = 5, top_k: int = 5) -> None:
        super().__init__()
        check("top_k", top_k, at_least=1, at_most=pool_size, integer=True)
        self.top_k = top_k
        self.prompts = nn.Parameter(torch.empty(pool_size, length, dim).uniform_(-1, 1))
        self.keys = nn.Parameter(torch.empty(pool_size, dim).uniform_(-1, 1))

    @torch.no_grad()
    def select(self, query: Tensor, *, batchwise: bool = True) -> Tensor:
        """Return prompt ids (B, top_k) for queries (B, D), the features of images under the plain backbone.

        ``batchwise`` gives all images the ids that most of them want. In a test set sorted by class this leaks the
        task; ``False`` lets each image choose for itself.
        """
        ids = _cosine(query, self.keys).topk(self.top_k, dim=1).indices
        return majority(ids, len(self.keys)) if batchwise else ids

    def tokens(self, ids: Tensor) -> Tensor:
        """Return the prompt tokens of ids (B, top_k), (B, top_k * length, D), for `vit.insert_prompts`."""
        return self.prompts[ids].flatten(1, 2)

    def features(self, backbone: Backbone, tokens: Tensor, ids: Tensor) -> Tensor:
        """Return the mean output (B, D) of the prompts of ids behind the class token of embedded images."""
        prompts, vit = self.tokens(ids), vit_of(backbone)
        first = vit.num_prefix_tokens
        prompted = insert_prompts(backbone, tokens, prompts)
        # Patches come last and are not read.
        outputs = run_blocks(backbone, prompted, num_outputs=first + prompts.shape[1])
        return vit.norm(outputs[:, first:]).mean(1)

    def agreement(self, query: Tensor, ids: Tensor) -> Tensor:
        """Return the cosine of each query with the keys of its ids, summed over ids, mean over the batch."""
        return _cosine(query, self.keys).gather(1, ids).sum(1).mean()


class PrefixPrompts(nn.Module):
    """Key and value prefixes: general ones for all tasks, experts from a pool with keys (DualPrompt).

    ``legacy_layout`` hands out expert prefixes as the public PyTorch code does, which merges the key/value axis with
    the batch axis: half of the batch gets keys for values and vice versa. To match numbers only.
    """

    def __init__(
        self,
        backbone: Backbone,
        *,
        pool_size: int = 10,
        length: int = 5,
        general_layers: Sequence[int] = (0, 1),
        expert_layers: Sequence[int] = (2, 3, 4),
        legacy_layout: bool = False,
    ) -> None:
        super().__init__()
        vit = vit_of(backbone)
        layers = [*general_layers, *expert_layers]
        if len(set(layers)) < len(layers) or not set(layers) <= set(range(len(vit.blocks))):
            raise ValueError(
                f"Prefix layers must be different blocks of the {len(vit.blocks)} that {backbone.name} has, "
                f"got {layers}."
            )
        self.general_layers = tuple(general_layers)
        self.expert_layers = tuple(expert_layers)
        self.first_block = min(layers, default=0)
        """Where prompts first act."""
        self.legacy_layout = legacy_layout
        attention: Any = vit.blocks[0].attn
        shape = (length, attention.num_heads, vit.embed_dim // attention.num_heads)
        # Axis 1: keys, values.
        self.general = nn.Parameter(torch.empty(len(self.general_layers), 2, *shape).uniform_(-1, 1))
        self.experts = nn.Parameter(torch.empty(len(self.expert_layers), 2, pool_size, *shape).uniform_(-1, 1))
        self.keys = nn.Parameter(torch.empty(pool_size, vit.embed_dim).uniform_(-1, 1))

    @property
    def pool_size(self) -> int:
        """Number of experts."""
        return len(self.keys)

    @torch.no_grad()
    def select(self, query: Tensor, *, batchwise: bool = True, among: int | None = None) -> Tensor:
        """Return the nearest expert's id for each query, (B,), ``among`` the first so many; see `PromptPool.select`."""
        ids = _cosine(query, self.keys[:among]).argmax(1, keepdim=True)
        return (majority(ids, self.pool_size) if batchwise else ids).squeeze(1)

    def prefixes(self, ids: Tensor) -> dict[int, Prefix]:
        """Return the prefixes of all prompted blocks for expert ids (B,), for `vit.run_blocks`."""
        found = {
            layer: (_heads_first(keys[None]), _heads_first(values[None]))
            for layer, (keys, values) in zip(self.general_layers, self.general, strict=True)
        }
        for layer, experts in zip(self.expert_layers, self.experts, strict=True):
            chosen = experts[:, ids]  # (2, B, length, heads, head_dim)
            if self.legacy_layout:
                chosen = chosen.reshape(len(ids), 2, *chosen.shape[2:]).transpose(0, 1)
            found[layer] = (_heads_first(chosen[0]), _heads_first(chosen[1]))
        return found

    def features(self, backbone: Backbone, tokens: Tensor, ids: Tensor) -> Tensor:
        """Return the features (B, D) of tokens that enter the first prompted block, with the experts of ids (B,)."""
        prefixes, num_outputs = self.prefixes(ids), num_read(backbone)
        return pool(
            backbone, run_blocks(backbone, tokens, self.first_block, prefixes=prefixes, num_outputs=num_outputs)
        )

    def agreement(self, query: Tensor, ids: Tensor) -> Tensor:
        """Return the mean cosine of the queries with the keys of their experts."""
        return _cosine(query, self.keys).gather(1, ids[:, None]).mean()

    @checked
    def add_experts(self, num_new: CountOrZero) -> None:
        """Enlarge the pool; new experts and keys are random. Replaces parameters: build the optimizer afterwards."""
        for name, axis in (("experts", 2), ("keys", 0)):
            known: nn.Parameter = getattr(self, name)
            shape = [*known.shape[:axis], num_new, *known.shape[axis + 1 :]]
            grown = torch.cat([known.detach(), known.new_empty(shape).uniform_(-1, 1)], dim=axis)
            setattr(self, name, nn.Parameter(grown, requires_grad=known.requires_grad))

    @torch.no_grad()
    def copy_expert_(self, source: int, target: int) -> None:
        """Start an expert's prefixes from another's; its key stays its own."""
        self.experts[:, :, target] = self.experts[:, :, source]


def majority(ids: Tensor, pool_size: int) -> Tensor:
    """Give every row the k ids that are most frequent in ``ids`` (B, k), the most frequent first.

    Counts do not depend on the order of the batch. Ties fall as `torch.topk` orders the counts of the distinct
    ids in ascending order, padded with zeros to ``pool_size``: the rule of the public L2P code. In training, the
    images of all ranks that share the batch vote.
    """
    counts = sum_over_batch(torch.bincount(ids.flatten(), minlength=pool_size))
    distinct = counts.nonzero().squeeze(1)
    num_absent = pool_size - len(distinct)
    counts = functional.pad(counts[distinct], (0, num_absent))
    # The smallest id fills up, as in public code: it is repeated where the batch wants fewer than k different ones.
    distinct = torch.cat([distinct, distinct[:1].expand(num_absent)])
    winners = counts.topk(ids.shape[1]).indices
    return distinct[winners].expand(ids.shape)


def _cosine(query: Tensor, keys: Tensor) -> Tensor:
    with full_precision(query):
        return functional.normalize(query.to(keys.dtype), dim=1) @ functional.normalize(keys, dim=1).T


def _heads_first(prefix: Tensor) -> Tensor:
    return prefix.transpose(1, 2)  # (B, length, heads, head_dim) -> (B, heads, length, head_dim)
