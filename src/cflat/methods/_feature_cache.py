"""`FeatureCache`: what a network that is not trained any more makes of test images, computed once per run.

Every task is evaluated on the test images of all tasks before it, so a stream of T tasks would otherwise compute the
features of its first images T times.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from cflat.data import Batch

MAX_IMAGES = 100_000
"""Images whose features are kept: 300 MB of features of a ViT-B."""


class FeatureCache:
    """Features by image, valid while the weights of ``network`` stay as they are.

    Not part of checkpoints: what is missing is computed again.
    """

    def __init__(self, network: nn.Module) -> None:
        self._network = network
        self._features: dict[tuple[int, float], Tensor] = {}
        self._origin: object = None

    def __len__(self) -> int:
        return len(self._features)

    def __call__(self, batch: Batch, compute: Callable[[], Tensor]) -> Tensor:
        """Return the features of a batch, (B, D); ``compute`` is called unless all of them are known."""
        if torch.is_grad_enabled():  # whoever differentiates needs the graph
            return compute()
        origin = self._weights(), _precision(batch.images.device.type)
        if origin != self._origin:
            self._features, self._origin = {}, origin
        keys = _keys(batch)
        # Test batches are the same after every task: either all of their images are known or none.
        if not all(key in self._features for key in keys):
            if len(self._features) + len(keys) > MAX_IMAGES:
                self._features.clear()  # someone classifies ever new images: a stream's test images fit
            self._features.update(zip(keys, compute(), strict=True))
        return torch.stack([self._features[key] for key in keys])

    def _weights(self) -> list[tuple[int, int]]:
        """Return what changes with the weights: torch counts the writes to each tensor."""
        tensors = (*self._network.parameters(), *self._network.buffers())
        return [(id(tensor), tensor._version) for tensor in tensors]


def _keys(batch: Batch) -> list[tuple[int, float]]:
    """Return the row of each image with a weighted sum of its pixels.

    Equal rows of two splits, or other transforms, never get each other's features. The weights differ by place, which
    separates an image from its mirror image.
    """
    pixels = batch.images.flatten(1)
    places = torch.linspace(1, 2, pixels.shape[1], device=pixels.device)
    sums = (pixels * places).sum(dim=1, dtype=torch.float64)
    return list(zip(batch.rows.tolist(), sums.tolist(), strict=True))


def _precision(device: str) -> torch.dtype | None:
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
