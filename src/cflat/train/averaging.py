"""Averaged weights: an exponential moving average of what a phase trains, with torch's own `swa_utils`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from cflat.train.shards import own_part, part_of, spread_like


class WeightAverage:
    """The moving average of some parameters; it begins with their values before the first step.

    Args:
        params: What the optimizer trains; frozen parameters are not copied.
        decay: Fraction of the average that a step keeps, in [0, 1).
    """

    def __init__(self, params: Sequence[Tensor], decay: float) -> None:
        self.params = params
        update = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]
        self.average = AveragedModel(self._weights(), multi_avg_fn=update)
        # AveragedModel merely copies at its first update; without this one, that would be the first step's.
        self.update()

    def update(self) -> None:
        """Take in the weights as they are after a step."""
        self.average.update_parameters(self._weights())

    @torch.no_grad()
    def replace_weights(self) -> None:
        """Give the parameters the values of their average."""
        for weight, average in zip(self._weights(), self.average.module.parameters(), strict=True):
            weight.copy_(average)

    def state_dict(self) -> dict[str, Any]:
        """Return the average and how often it was updated."""
        averages = zip(self.average.module.parameters(), self.params, strict=True)
        return {
            "averages": [spread_like(average.detach(), param) for average, param in averages],
            "num_updates": int(self.average.n_averaged),
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        for own, value, param in zip(self.average.module.parameters(), state["averages"], self.params, strict=True):
            own.copy_(own_part(part_of(value, param)))
        self.average.n_averaged.fill_(state["num_updates"])

    def _weights(self) -> nn.ParameterList:
        """Return this rank's parts of the weights; they share memory with the parameters."""
        return nn.ParameterList([own_part(param.detach()) for param in self.params])


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
