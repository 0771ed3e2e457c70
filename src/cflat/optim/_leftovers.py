"""Tell the gradients that a step has left in the parameters from those that the caller accumulated since."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from cflat._errors import ClosureError

_MARK = "_cflat_version"


def mark_gradients(params: Iterable[Tensor]) -> None:
    """Note on each gradient that this step has left it, as it is now."""
    for param in params:
        if param.grad is not None:
            gradient = _local(param.grad)
            setattr(gradient, _MARK, gradient._version)


def holds_foreign_gradient(params: Iterable[Tensor]) -> bool:
    """Return whether some gradient is neither empty, nor zero, nor what a step has left."""
    gradients = [_local(param.grad) for param in params if param.grad is not None]
    return any(_is_nonzero(gradient) for gradient in gradients if getattr(gradient, _MARK, None) != gradient._version)


def refuse_late_changes(params: Iterable[Tensor]) -> None:
    """Raise if gradients were changed after the step that has used them."""
    if holds_foreign_gradient(params):
        raise ClosureError(
            "Gradients were changed after the loop over passes(), which has stepped already: the change would have no "
            "effect. To clip, pass options=StepOptions(max_norm=...); call backward inside the loop only."
        )


def _local(gradient: Tensor) -> Tensor:
    """Return the tensor that backward writes to: of a DTensor, this rank's shard."""
    shard: Tensor = getattr(gradient, "_local_tensor", gradient)
    return shard


def _is_nonzero(gradient: Tensor) -> bool:
    return bool((gradient._values() if gradient.layout is torch.sparse_coo else gradient).count_nonzero())
