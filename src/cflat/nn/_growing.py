"""Modules whose tensors grow with the classes and that load whatever size they were saved with."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn


class GrowingModule(nn.Module):
    """Give the tensors named in ``growing`` the shape that a loaded state dict has for them.

    Growing and loading another size replace the `nn.Parameter` objects: build the optimizer afterwards.
    """

    growing: ClassVar[tuple[str, ...]]
    """Tensors with a row for each class; the first has a column for each feature."""

    @property
    def num_classes(self) -> int:
        """Number of classes that have a score."""
        rows: Tensor = getattr(self, self.growing[0])
        return rows.shape[0]

    @property
    def feature_dim(self) -> int:
        """Width of the features."""
        rows: Tensor = getattr(self, self.growing[0])
        return rows.shape[1]

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any
    ) -> None:  # torch's hook for modules that prepare themselves for a state dict
        for name in self.growing:
            saved = state_dict.get(prefix + name)
            current: Tensor = getattr(self, name)
            if saved is not None and saved.shape != current.shape:
                self._replace(name, torch.empty(saved.shape, dtype=current.dtype, device=current.device))
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _replace(self, name: str, values: Tensor) -> None:
        """Put ``values`` in the place of a parameter or a buffer."""
        current = getattr(self, name)
        if isinstance(current, nn.Parameter):
            values = nn.Parameter(values, requires_grad=current.requires_grad)
        setattr(self, name, values)
