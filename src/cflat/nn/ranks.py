"""What a forward pass must know of the other ranks while they share a batch: sums over all of its images.

Outside of `shared_batch` nothing here does anything: networks and methods need not know whether one rank trains them
or several.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.overrides import TorchFunctionMode


class Share(NamedTuple):
    """This rank's part of a batch, as given to `shared_batch`."""

    num_images: int
    total: int
    is_filler: bool
    syncs_batchnorm: bool


_share: ContextVar[Share | None] = ContextVar("share", default=None)


def shared_batch(
    num_images: int, total: int, *, is_filler: bool, syncs_batchnorm: bool = True
) -> AbstractContextManager[None]:
    """Let what is computed inside, forward and backward, be that of the whole batch which the ranks share.

    ``num_images`` are on this rank, a filler among them if it has none of its own, and ``total`` on all ranks, without
    fillers. ``syncs_batchnorm`` lets BatchNorm take its statistics over all ranks.
    """
    return sharing(Share(num_images, total, is_filler, syncs_batchnorm))


def current_share() -> Share | None:
    """Return what `sharing` needs for a part of the forward pass that the backward pass will repeat."""
    return _share.get()


@contextmanager
def sharing(share: Share | None) -> Iterator[None]:
    """Enter a shared batch again, from anywhere.

    Torch runs the backward pass outside of the mode below, and on GPUs in threads that see no context variables.
    """
    token = _share.set(share)
    try:
        with _BatchNormOverRanks() if share is not None and share.syncs_batchnorm else nullcontext():
            yield
    finally:
        _share.reset(token)


def sum_over_batch(values: Tensor) -> Tensor:
    """Return the sum over the ranks that share the batch, or ``values`` where none is shared; has no gradient."""
    share = _share.get()
    if share is None:
        return values
    # A filler is an image of another rank, which counts it.
    total = torch.zeros_like(values) if share.is_filler else values.clone()
    torch.distributed.all_reduce(total)
    return total


class _BatchNormOverRanks(TorchFunctionMode):
    """Give every BatchNorm that is in training mode the statistics of the whole batch.

    ``nn.SyncBatchNorm`` does so on GPUs alone, and counts fillers; this works on every device, and for every module
    that calls `torch.nn.functional.batch_norm`, without changing the network.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is nn.functional.batch_norm:
            return _batch_norm(*args, **kwargs)
        return func(*args, **kwargs)


def _batch_norm(
    inputs: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Do as `torch.nn.functional.batch_norm` on the images of all ranks."""
    if not training:
        return nn.functional.batch_norm(inputs, running_mean, running_var, weight, bias, False, momentum, eps)
    # Statistics of half-precision inputs are taken in single precision, as in torch's kernels.
    dtype = torch.promote_types(inputs.dtype, torch.float32)
    share = _share.get()
    assert share is not None
    # Values per channel and image, which are equally many on all ranks, times the images of all of them.
    count = inputs.numel() // inputs.shape[1] // share.num_images * share.total
    if count < 2:
        # In torch's words, by which `cflat.runs.failures` knows this error.
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {inputs.shape}")
    normalized, mean, variance = _Normalize.apply(inputs.to(dtype), count, eps)  # type: ignore[no-untyped-call]
    if running_mean is not None and running_var is not None:
        running_mean.lerp_(mean.to(running_mean), momentum)
        # Torch keeps the unbiased variance and normalizes by the biased one.
        running_var.lerp_((variance * (count / (count - 1))).to(running_var), momentum)
    shape = _channels_second(inputs)
    if weight is not None:
        normalized = normalized * weight.view(shape)
    if bias is not None:
        normalized = normalized + bias.view(shape)
    return normalized.to(inputs.dtype)


class _Normalize(Function):
    """Subtract the mean of each channel over all ranks and divide by the deviation."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, count: int, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        axes, shape = _other_axes(inputs), _channels_second(inputs)
        mean = sum_over_batch(inputs.sum(axes)) / count
        centered = inputs - mean.view(shape)
        # In a second pass: the mean square minus the squared mean would lose digits.
        variance = sum_over_batch(centered.square().sum(axes)) / count
        scale = (variance + eps).rsqrt()
        normalized = centered * scale.view(shape)
        ctx.save_for_backward(normalized, scale)
        # Kept for the backward pass: the threads in which autograd runs it on GPUs do not see context variables.
        ctx.count, ctx.share = count, _share.get()
        ctx.mark_non_differentiable(mean, variance)
        return normalized, mean, variance

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Tensor, None, None]:  # type: ignore[override]
        normalized, scale = ctx.saved_tensors
        axes, shape = _other_axes(gradient), _channels_second(gradient)
        sums = torch.stack([gradient.sum(axes), (gradient * normalized).sum(axes)])
        torch.distributed.all_reduce(sums)
        if ctx.share.is_filler:  # it had no part in the statistics
            return gradient * scale.view(shape), None, None
        along_one, along_normalized = (part.view(shape) / ctx.count for part in sums)
        return (gradient - along_one - normalized * along_normalized) * scale.view(shape), None, None


def _other_axes(tensor: Tensor) -> list[int]:
    """Return all axes but that of the channels."""
    return [axis for axis in range(tensor.dim()) if axis != 1]


def _channels_second(tensor: Tensor) -> list[int]:
    """Return the shape that a value for each channel needs to meet a tensor."""
    return [1, -1] + [1] * (tensor.dim() - 2)
