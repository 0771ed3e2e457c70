"""Blocks that run a function in the place of their own forward pass, and that may forget their activations.

Adapters, prompts and prefixes reach into a block. What acts on a block as a whole, activation checkpointing and the
hooks by which FSDP2 gathers its weights, must act on such a pass as well: it runs *inside* the block. A block becomes
an instance of a subclass of its own class, as FSDP2 does it: names, state dicts and copies stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from cflat.nn.ranks import current_share, sharing

T = TypeVar("T")

_BatchNorm = nn.modules.batchnorm._BatchNorm
_KINDS: dict[type[nn.Module], type[nn.Module]] = {}


class HostBlock(nn.Module):
    """A block that can be entered.

    Attributes:
        forgets: Whether activations are computed again in the backward pass, under the random numbers of the first
            one (dropout, stochastic depth) and without counting a batch twice (BatchNorm).
    """

    forgets = False

    def forward(self, *inputs: Any, function: Callable[..., Any] | None = None, **options: Any) -> Any:
        """Do what the block does, or what ``function`` does."""
        run: Callable[..., Any] = super().forward if function is None else function
        if not self.forgets or not torch.is_grad_enabled():
            return run(*inputs, **options)
        norms = [part for part in self.modules() if isinstance(part, _BatchNorm) and part.track_running_stats]
        # The reentrant kind has no gradients where inputs need none: prefixes in the first block of a frozen network.
        return checkpoint(_repeatable(run, norms), *inputs, use_reentrant=False, **options)


def host_(block: nn.Module) -> HostBlock:
    """Make it possible to enter a block."""
    kind = type(block)
    if not isinstance(block, HostBlock):
        if kind not in _KINDS:
            _KINDS[kind] = type(f"Host{kind.__name__}", (HostBlock, kind), {})
        block.__class__ = _KINDS[kind]
    assert isinstance(block, HostBlock)
    return block


def inside(block: nn.Module, function: Callable[..., T], *inputs: Any) -> T:
    """Return what ``function``, which uses parts of ``block``, gives when it runs in the place of the block."""
    if not isinstance(block, HostBlock):
        return function(*inputs)
    return block(*inputs, function=function)


def _repeatable(run: Callable[..., T], norms: list[Any]) -> Callable[..., T]:
    """Return ``run`` such that all calls but the first repeat it: with the same shared batch, which is not counted."""
    calls, share = count(), current_share()

    def run_or_repeat(*inputs: Any, **options: Any) -> T:
        if next(calls) == 0:
            return run(*inputs, **options)
        with sharing(share), _statistics_kept(norms):
            return run(*inputs, **options)

    return run_or_repeat


@contextmanager
def _statistics_kept(norms: list[Any]) -> Iterator[None]:
    """Normalise by the batch without counting it in."""
    before = [(norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm in norms:  # a momentum of 0 updates nothing; without a counter none is increased
        norm.momentum, norm.num_batches_tracked = 0.0, None
    try:
        yield
    finally:
        for norm, (momentum, counter) in zip(norms, before, strict=True):
            norm.momentum, norm.num_batches_tracked = momentum, counter
