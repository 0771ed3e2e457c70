"""Parameters that are spread over ranks (DTensors of FSDP2 or tensor parallelism).

Vectors hold this rank's shards as plain tensors and all algebra stays local; what has to be global is a sum over
elements, and `total_over_ranks` completes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from torch import Tensor
from torch.nn import Parameter

Layouts: TypeAlias = dict[Any, list[int]]
"""Mesh and placements with the positions of the parameters that are spread so; None for those that are whole."""


def layouts_of(params: Sequence[Tensor]) -> Layouts | None:
    """Return how these parameters are spread, or None if each is whole on this rank."""
    if not any(map(is_sharded, params)):
        return None
    layouts: Layouts = {}
    for index, param in enumerate(params):
        spread: Any = param
        layout = (spread.device_mesh, spread.placements) if is_sharded(param) else None
        layouts.setdefault(layout, []).append(index)
    return layouts


def total_over_ranks(sums: Tensor, layouts: Layouts) -> Tensor:
    """Return the sum over all tensors and ranks, given this rank's sum for each tensor."""
    parts = [_complete(sums[members].sum(), layout) for layout, members in layouts.items()]
    return sum(parts[1:], start=parts[0])


def _complete(local: Tensor, layout: Any) -> Tensor:
    if layout is None:  # the same on all ranks already
        return local
    from torch.distributed.tensor import DTensor, Partial, Replicate

    mesh, placements = layout
    reductions = [Partial() if placement.is_shard() else Replicate() for placement in placements]
    return DTensor.from_local(local, mesh, reductions, run_check=False).full_tensor()


def is_sharded(tensor: Tensor) -> bool:
    """Return whether this is a DTensor, without importing its module for those who have none."""
    kind = type(tensor)
    return kind is not Parameter and kind is not Tensor and hasattr(tensor, "device_mesh")


def local_part(tensor: Any, param: Any) -> Tensor:
    """Return this rank's part of a DTensor, spread as ``param`` is; it shares memory where the layouts agree."""
    if is_sharded(tensor):
        if tensor.placements != param.placements:
            tensor = tensor.redistribute(placements=param.placements)
        tensor = tensor.to_local()
    whole: Tensor = tensor
    return whole


def like_parameter(part: Tensor, param: Any) -> Tensor:
    """Return the DTensor of which ``part`` is this rank's part, or ``part`` itself for a whole parameter."""
    if not is_sharded(param):
        return part
    from torch.distributed.tensor import DTensor

    mesh, placements = param.device_mesh, param.placements
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=param.shape, stride=param.stride())


def shard_like(whole: Tensor, param: Any) -> Tensor:
    """Return this rank's part of a tensor that all ranks have, spread as ``param`` is."""
    if not is_sharded(param):
        return whole
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole, param.device_mesh, param.placements, src_data_rank=None).to_local()
