"""Networks for vectors, such as the cached features of a frozen backbone: a plain MLP, and none at all."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor, nn

from cflat._ranges import Count, checked

__all__ = ["MLP", "Identity"]


class MLP(nn.Module):
    """Hidden layers of equal width with ReLU; the last of them is the feature. Inputs are flattened.

    No normalisation layer: the weights are all there is, so that a perturbation of them is all that changes.

    Args:
        num_inputs: Numbers per input.
        width: Units of each hidden layer; at least 1.
        depth: Hidden layers; at least 1.
    """

    @checked
    def __init__(self, num_inputs: int, width: Count = 256, depth: Count = 2) -> None:
        super().__init__()
        self.num_features = width
        sizes = [num_inputs, *[width] * depth]
        self.layers = nn.ModuleList(nn.Linear(*pair) for pair in pairwise(sizes))
        for layer in self.layers:
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")  # type: ignore[arg-type]
            nn.init.zeros_(layer.bias)  # type: ignore[arg-type]

    def forward(self, inputs: Tensor) -> Tensor:
        """Return features of shape (B, width)."""
        hidden = inputs.flatten(1)
        for layer in self.layers:
            hidden = layer(hidden).relu()
        return hidden


class Identity(nn.Module):
    """Hand vectors on as they are: the features were computed before, and only a head or class means are learned."""

    def __init__(self, num_inputs: int) -> None:
        super().__init__()
        self.num_features = num_inputs

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the vectors, (B, D)."""
        return inputs.flatten(1)
