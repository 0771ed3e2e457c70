"""Slices of a loss through weight space: along a direction, over a plane, and between two sets of weights.

Random directions are filter-normalised (Li et al., 2018): each filter of the direction is as long as the filter of the
weights, so that slices of nets whose weights differ in scale can be compared.

Throughout, ``loss`` returns the scalar loss of the present weights and does not call backward; the weights ``params``
are put back bit for bit in every exit; and buffers of ``model``, if it is given, are left alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor, nn

from cflat._ranges import Range, checked
from cflat.analysis._point import Loss, Point

__all__ = ["Connection", "Plane", "Slice", "connect", "line", "plane", "random_direction"]


@dataclass(frozen=True)
class Slice:
    """The loss along a direction."""

    distances: list[float]
    losses: list[float]


@dataclass(frozen=True)
class Plane:
    """The loss over a plane; ``losses[i][j]`` belongs to ``ys[i]`` and ``xs[j]``."""

    xs: list[float]
    ys: list[float]
    losses: list[list[float]]


@dataclass(frozen=True)
class Connection:
    """The loss along the straight line between two sets of weights."""

    fractions: list[float]
    """0 at the start, 1 at the end."""
    losses: list[float]
    barrier: float
    """How far the loss rises above the linear interpolation of its ends, at most; 0 if never, NaN if a loss is."""


def random_direction(params: Sequence[Tensor], *, seed: int, with_vectors: bool = False) -> list[Tensor]:
    """Draw a filter-normalised Gaussian direction.

    A filter is a slice along the first axis (an output channel or neuron). Tensors of one axis or none (biases, norm
    layers) are zero by default, since the loss reacts to them on another scale.

    Args:
        params: The weights.
        seed: Seed of the direction; two seeds span a plane.
        with_vectors: Whether to fill tensors of one axis, too, each normalised as one filter.
    """
    generator = torch.Generator().manual_seed(seed)
    return [_normalised(param.detach(), generator, with_vectors) for param in params]


def line(
    loss: Loss,
    params: Sequence[Tensor],
    direction: Sequence[Tensor],
    distances: Sequence[float],
    *,
    model: nn.Module | None = None,
) -> Slice:
    """Return the loss at theta + distance * direction, in one forward pass for each distance.

    A direction is a list of tensors like the parameters: `random_direction`, or an eigenvector of the Hessian.
    """
    places = [float(distance) for distance in distances]
    with Point(loss, params, model) as point:
        along = point.vector("direction", direction)
        return Slice(places, [point.value_at((along, place)) for place in places])


def plane(
    loss: Loss,
    params: Sequence[Tensor],
    directions: tuple[Sequence[Tensor], Sequence[Tensor]],
    xs: Sequence[float],
    ys: Sequence[float],
    *,
    model: nn.Module | None = None,
) -> Plane:
    """Return the loss at theta + x * directions[0] + y * directions[1], in ``len(xs) * len(ys)`` forward passes."""
    columns, rows = ([float(place) for place in places] for places in (xs, ys))
    with Point(loss, params, model) as point:
        across, up = (point.vector(f"directions[{i}]", direction) for i, direction in enumerate(directions))
        return Plane(columns, rows, [[point.value_at((across, x), (up, y)) for x in columns] for y in rows])


@checked
def connect(
    loss: Loss,
    params: Sequence[Tensor],
    start: Sequence[Tensor],
    end: Sequence[Tensor],
    *,
    points: Annotated[int, Range(at_least=3, integer=True)] = 21,
    model: nn.Module | None = None,
) -> Connection:
    """Return the loss on the straight line between two sets of weights, such as the minima of two tasks.

    Takes ``points`` evaluations, both ends included; at least 3. The present weights need not lie on the line. Buffers
    are not interpolated: the statistics of BatchNorm are those of the caller's model in eval mode, and those of the
    batch in train mode.
    """
    fractions = [index / (points - 1) for index in range(points)]
    with Point(loss, params, model) as point:
        first, last = point.vector("start", start), point.vector("end", end)
        losses = []
        for fraction in fractions:
            point.put_between(first, last, fraction)
            losses.append(point.value())
    # The ends lie on the straight line by definition, so only the points between them can rise above it.
    straight = ((1 - t) * losses[0] + t * losses[-1] for t in fractions[1:-1])
    rises = [loss - level for loss, level in zip(losses[1:-1], straight, strict=True)]
    # max() would pass over NaN, and a path on which training breaks down would seem flat.
    barrier = math.nan if any(map(math.isnan, rises)) else max(0.0, *rises)
    return Connection(fractions, losses, barrier)


def _normalised(weights: Tensor, generator: torch.Generator, with_vectors: bool) -> Tensor:
    if weights.dim() <= 1 and not with_vectors:
        return torch.zeros_like(weights)
    wide = torch.promote_types(weights.dtype, torch.float32)  # bfloat16 is too coarse for norms
    # Drawn on the CPU, to be the same on every device.
    drawn = torch.randn(weights.shape, generator=generator, dtype=wide).to(weights.device)
    num_filters = weights.shape[0] if weights.dim() > 1 else 1
    filters = drawn.reshape(num_filters, -1)
    lengths = weights.to(wide).reshape(num_filters, -1).norm(dim=1, keepdim=True)
    filters.mul_(lengths / filters.norm(dim=1, keepdim=True))
    return filters.reshape(weights.shape).to(weights.dtype)
