"""Parameters that are spread over ranks (DTensors of FSDP2 or tensor parallelism).

Vectors hold this rank's shards as plain tensors, so that all algebra stays local; what has to be global is a sum over
elements, and `Sharding.total` completes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.nn import Parameter


class Sharding:
    """How the tensors of a vector are spread, by parameter; those of plain parameters are the same on all ranks."""

    def __init__(self, params: Sequence[Tensor]) -> None:
        self._members: dict[Any, list[int]] = {}
        for index, param in enumerate(params):
            layout = (param.device_mesh, param.placements) if is_sharded(param) else None  # type: ignore[attr-defined]
            # By layout, so that `total` takes one collective for each layout instead of one for each tensor.
            self._members.setdefault(layout, []).append(index)

    def total(self, sums: Tensor) -> Tensor:
        """Return the sum over all tensors and ranks, given this rank's sum for each tensor."""
        parts = [_complete(sums[members].sum(), layout) for layout, members in self._members.items()]
        return sum(parts[1:], start=parts[0])


def sharding_of(params: Sequence[Tensor]) -> Sharding | None:
    """Return how these parameters are spread, or None if each is whole on this rank."""
    return Sharding(params) if any(is_sharded(param) for param in params) else None


def is_sharded(tensor: Tensor) -> bool:
    """Return whether this is a DTensor, without importing its module for those who have none."""
    kind = type(tensor)
    return kind is not Parameter and kind is not Tensor and hasattr(tensor, "device_mesh")


def local_part(tensor: Tensor, param: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, spread as ``param`` is; it shares memory where the layouts agree."""
    if not is_sharded(tensor):
        return tensor
    spread: Any = tensor
    if spread.placements != param.placements:  # type: ignore[attr-defined]
        spread = spread.redistribute(placements=param.placements)  # type: ignore[attr-defined]
    part: Tensor = spread.to_local()
    return part


def like_parameter(part: Tensor, param: Tensor) -> Tensor:
    """Return the DTensor of which ``part`` is this rank's part, or ``part`` itself for a whole parameter."""
    if not is_sharded(param):
        return part
    from torch.distributed.tensor import DTensor

    spread: Any = param
    # The check would communicate; without shape and stride, shards are assumed to be even.
    return DTensor.from_local(
        part, spread.device_mesh, spread.placements, run_check=False, shape=param.shape, stride=param.stride()
    )


def shard_like(whole: Tensor, param: Tensor) -> Tensor:
    """Return this rank's part of a tensor that all ranks have, spread as ``param`` is."""
    if not is_sharded(param):
        return whole
    from torch.distributed.tensor import distribute_tensor

    spread: Any = param
    # src_data_rank=None: nothing is broadcast, as every rank has the same values already.
    part: Tensor = distribute_tensor(whole, spread.device_mesh, spread.placements, src_data_rank=None).to_local()
    return part


def _complete(local: Tensor, layout: Any) -> Tensor:
    if layout is None:
        return local
    from torch.distributed.tensor import DTensor, Partial, Replicate

    mesh, placements = layout
    # Replicas hold equal sums already; adding these up would count a shard several times.
    reductions = [Partial() if placement.is_shard() else Replicate() for placement in placements]
    return DTensor.from_local(local, mesh, reductions, run_check=False).full_tensor()
