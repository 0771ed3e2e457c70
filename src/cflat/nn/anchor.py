"""A quadratic penalty on the way that weights have moved: the common part of EWC, SI and their kin."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn


class WeightAnchor(nn.Module):
    """Penalize each trained weight by ``importance * (weight - center)^2``, summed; all of it is in the state dict.

    Heads grow with the classes: `resize_` gives new rows the importance 0: only known rows are held.

    >>> network = nn.Linear(2, 1)
    >>> anchor = WeightAnchor()
    >>> anchor.resize_(network)
    >>> anchor(network).item()
    0.0
    """

    def resize_(self, network: nn.Module) -> None:
        """Take the shapes of the network's trained weights; needs no values, hence a restored run can call it."""
        for name, weight in _trained(network).items():
            for kind in ("importance", "center"):
                known = self._buffers.get(_key(kind, name))
                grown = torch.zeros_like(weight, requires_grad=False)
                if known is not None:
                    grown[tuple(slice(size) for size in known.shape)] = known
                self.register_buffer(_key(kind, name), grown)

    def forward(self, network: nn.Module) -> Tensor:
        """Return the sum over all weights, with its graph."""
        terms = [
            (self.importance(name) * (weight - self.center(name)).square()).sum()
            for name, weight in _trained(network).items()
        ]
        return torch.stack(terms).sum()

    def importance(self, name: str) -> Tensor:
        """Return the importance of each entry of a weight."""
        return self.get_buffer(_key("importance", name))

    def center(self, name: str) -> Tensor:
        """Return where a weight is held."""
        return self.get_buffer(_key("center", name))

    @torch.no_grad()
    def add_(self, network: nn.Module, importance: Mapping[str, Tensor]) -> None:
        """Add a penalty around the present weights.

        A sum of quadratic penalties around several centers is one around their weighted mean, but for a constant. So
        one pair of buffers serves any number of tasks.
        """
        for name, weight in _trained(network).items():
            total = self.importance(name).add_(importance[name])
            # Where neither penalty holds the weight, 0 / 0: the new center is as good as any.
            part = torch.where(total > 0, importance[name] / total, 1.0)
            self.center(name).lerp_(weight, part)

    @torch.no_grad()
    def replace_(self, network: nn.Module, importance: Mapping[str, Tensor], *, decay: float = 0.0) -> None:
        """Move the center to the present weights; ``decay`` times the old importance stays."""
        for name, weight in _trained(network).items():
            self.importance(name).mul_(decay).add_(importance[name])
            self.center(name).copy_(weight)


def _trained(network: nn.Module) -> dict[str, Tensor]:
    return {name: weight for name, weight in network.named_parameters() if weight.requires_grad}


def _key(kind: str, name: str) -> str:
    return f"{kind}:{name.replace('.', '/')}"  # names of buffers have no dots
