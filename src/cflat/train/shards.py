"""Networks whose blocks are spread over ranks: each keeps a part of every block and gathers the whole while it runs.

Blocks are FSDP2's, each by itself, because methods enter networks by many doors. What grows between tasks or is small
(heads, adapters, prompts, embeddings) is whole on every rank, where DistributedDataParallel averages its gradients.
Fabric's own strategy for FSDP2 wants one module with one door that never changes. Checkpoints hold whole tensors, so
that any number of ranks can resume from them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from cflat._errors import ConfigError
from cflat._lazy import LazyModule
from cflat.nn.blocks import host_
from cflat.nn.vit import blocks_of

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

spread = LazyModule("torch.distributed.tensor")


def shard_(network: nn.Module, device: torch.device, num_ranks: int) -> None:
    """Spread the blocks of every ViT in a network over the ranks, once and for all; there must be some."""
    try:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
    except ImportError as error:
        raise ConfigError(
            f"runtime.strategy 'fsdp' needs torch 2.7 or later, this is {torch.__version__}; use ddp."
        ) from error
    blocks = blocks_of(network)
    if not blocks:
        raise ConfigError("runtime.strategy 'fsdp' spreads the blocks of a ViT, and this network has none; use ddp.")
    mesh = init_device_mesh(device.type, (num_ranks,))
    # Resharding at once keeps one whole block in memory at a time; the price is a second gather in the backward pass.
    for block in blocks:
        fully_shard(host_(block), mesh=mesh, reshard_after_forward=True)


def replicate_rest_(network: nn.Module) -> None:
    """Let DistributedDataParallel leave those parameters alone that FSDP2 looks after."""
    names = [name for name, parameter in network.named_parameters() if _is_part(parameter)]
    # Torch has no public call for this (pytorch/pytorch#43690).
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(network, names)


def gather_whole(state: Any, *, keep: bool) -> Any:
    """Return nested dicts, lists and tuples with whole tensors in the place of parts.

    All ranks must call it; those that do not keep the result get None.
    """
    made = state
    if isinstance(state, Mapping):
        made = {key: gather_whole(value, keep=keep) for key, value in state.items()}
    elif isinstance(state, list | tuple):
        made = type(state)(gather_whole(value, keep=keep) for value in state)
    elif _is_part(state):
        gathered = state.full_tensor()
        made = gathered.cpu() if keep else None
    return made if keep else None


def module_parts(state: Mapping[str, Any], module: nn.Module) -> dict[str, Any]:
    """Return a module's state with this rank's parts in the place of whole tensors."""
    present = module.state_dict()
    return {name: part_of(value, present.get(name)) for name, value in state.items()}


def optimizer_parts(state: Mapping[str, Any], params: Sequence[Tensor]) -> dict[str, Any]:
    """Return what `SharpnessAware.state_dict` gave with this rank's parts in the place of whole tensors."""
    wrapper = state["wrapper"]
    memories = {
        name: {**memory, "tensors": {i: part_of(value, params[i]) for i, value in memory["tensors"].items()}}
        for name, memory in wrapper["memories"].items()
    }
    base = {i: {key: part_of(value, params[i]) for key, value in entry.items()} for i, entry in state["state"].items()}
    return {**state, "state": base, "wrapper": {**wrapper, "memories": memories}}


def own_part(value: Tensor) -> Tensor:
    """Return this rank's part of a tensor that is spread, sharing its memory, or the whole one."""
    return value.to_local() if _is_part(value) else value


def spread_like(part: Tensor, param: Tensor) -> Tensor:
    """Return the tensor of which ``part`` is this rank's part, spread as a parameter is."""
    if not _is_part(param):
        return part
    mesh, placements = param.device_mesh, param.placements
    shape, stride = param.shape, param.stride()
    # The check would be a collective for every tensor, and parts are made by us.
    whole: Tensor = spread.DTensor.from_local(part, mesh, placements, run_check=False, shape=shape, stride=stride)
    return whole


def part_of(value: Any, like: Any) -> Any:
    """Return this rank's part of a whole tensor that belongs to a parameter which is spread; all else as it is."""
    # Another shape is no part: counters such as an optimizer's `step` are whole on every rank.
    if not _is_part(like) or not isinstance(value, Tensor) or value.shape != like.shape:
        return value
    value = value.to(like.device)
    # Every rank has read the whole: none need be asked for its part.
    return spread.distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)


def _is_part(value: Any) -> TypeGuard[DTensor]:
    # By attribute: the package of DTensor is large, and imported only where something is spread.
    return isinstance(value, Tensor) and hasattr(value, "device_mesh")
