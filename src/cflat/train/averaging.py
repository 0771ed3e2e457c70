"""Averaged weights: an exponential moving average of what a phase trains."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from cflat.train.shards import own_part, part_of, spread_like


class WeightAverage:
    """The moving average of some parameters; it begins with their values before the first step.

    Args:
        params: What the optimizer trains; frozen parameters are not copied.
        decay: Fraction of the average that a step keeps, in [0, 1).
    """

    def __init__(self, params: Sequence[Tensor], decay: float) -> None:
        self.params = params
        self.decay = decay
        self.averages = [weight.clone() for weight in self._weights()]

    def update(self) -> None:
        """Take in the weights as they are after a step."""
        torch._foreach_lerp_(self.averages, self._weights(), 1 - self.decay)

    def replace_weights(self) -> None:
        """Give the parameters the values of their average."""
        torch._foreach_copy_(self._weights(), self.averages)

    def state_dict(self) -> dict[str, Any]:
        """Return the average."""
        pairs = zip(self.averages, self.params, strict=True)
        return {"averages": [spread_like(average, param) for average, param in pairs]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        for own, value, param in zip(self.averages, state["averages"], self.params, strict=True):
            own.copy_(own_part(part_of(value, param)))

    def _weights(self) -> list[Tensor]:
        """Return this rank's parts of the weights; they share memory with the parameters."""
        # Not torch's AveragedModel: it copies modules, and a part of a DTensor is none.
        return [own_part(param.detach()) for param in self.params]


@contextmanager
def fresh_batchnorm(network: nn.Module) -> Iterator[bool]:
    """Let forward passes inside measure the statistics of those BatchNorm layers anew that are in training mode.

    As `torch.optim.swa_utils.update_bn`, which would also reset frozen layers. Yields whether there is any layer.
    """
    kind = nn.modules.batchnorm._BatchNorm
    layers = [m for m in network.modules() if isinstance(m, kind) and m.training and m.track_running_stats]
    momenta = [layer.momentum for layer in layers]
    for layer in layers:
        layer.reset_running_stats()
        layer.momentum = None  # the mean over all batches
    try:
        yield bool(layers)
    finally:
        for layer, momentum in zip(layers, momenta, strict=True):
            layer.momentum = momentum
