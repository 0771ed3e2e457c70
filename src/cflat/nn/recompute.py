"""Activation checkpointing: keep the input of each block and compute what is inside it again in the backward pass.

A block becomes an instance of a subclass of its own class, as FSDP2 does it: names, state dicts and copies stay as
they are. Random numbers of the first pass are repeated (dropout, stochastic depth), and BatchNorm counts a batch once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

__all__ = ["Recomputing", "recompute_blocks_", "recomputed"]

_BatchNorm = nn.modules.batchnorm._BatchNorm
_KINDS: dict[type[nn.Module], type[nn.Module]] = {}


class Recomputing(nn.Module):
    """A block whose activations are not kept."""

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """Do what the block does."""
        return recomputed(self, super().forward, *inputs, **options)


def recompute_blocks_(blocks: Iterator[nn.Module]) -> int:
    """Let these blocks compute their activations again; return how many they are."""
    changed = [block for block in blocks if not isinstance(block, Recomputing)]
    for block in changed:
        block.__class__ = _recomputing(type(block))
    return len(changed)


def recomputed(block: nn.Module, function: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
    """Return what ``function``, a part of ``block``, gives; its activations are not kept if the block is recomputed."""
    if not isinstance(block, Recomputing) or not torch.is_grad_enabled():
        return function(*inputs, **options)
    norms = [part for part in block.modules() if isinstance(part, _BatchNorm) and part.track_running_stats]
    context: dict[str, Any] = {"context_fn": partial(_contexts, norms)} if norms else {}
    return checkpoint(function, *inputs, use_reentrant=False, **context, **options)


def _recomputing(kind: type[nn.Module]) -> type[nn.Module]:
    if kind not in _KINDS:
        _KINDS[kind] = type(f"Recomputing{kind.__name__}", (Recomputing, kind), {})
    return _KINDS[kind]


def _contexts(norms: list[Any]) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    return nullcontext(), _statistics_kept(norms)


@contextmanager
def _statistics_kept(norms: list[Any]) -> Iterator[None]:
    """Normalise by the batch without counting it in."""
    before = [(norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm in norms:
        norm.momentum, norm.num_batches_tracked = 0.0, None
    try:
        yield
    finally:
        for norm, (momentum, count) in zip(norms, before, strict=True):
            norm.momentum, norm.num_batches_tracked = momentum, count
