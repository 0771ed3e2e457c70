"""Where the momentum of the base optimizer is heading, and how much curvature it can bear on the way."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import SGD, Adam, Optimizer

from cflat.optim._sharding import local_part, sharding_of
from cflat.optim._vectors import Vector, as_real, tensor_norms
from cflat.optim._weights import Weights, data_of

REACH = 0.1
"""Nobody looks farther ahead than this share of the length of the weights: momentum may explode, and this stops it."""


class _Move(NamedTuple):
    """What one step along the momentum alone adds to some parameters: rate * velocities."""

    params: list[Tensor]
    velocities: list[Tensor]
    rate: float


def has_known_momentum(base: Optimizer) -> bool:
    """Whether this optimizer has momentum that can be read: torch's SGD, Adam, AdamW, and what derives from them."""
    if isinstance(base, SGD):
        return any(group["momentum"] > 0 for group in base.param_groups)
    return isinstance(base, Adam) and any(group["betas"][0] > 0 for group in base.param_groups)


def steps_within_reach(weights: Weights, base: Optimizer, steps: float) -> float:
    """Return how many of these steps along the momentum stay near theta; to be asked before a step's first gradient.

    Names the parameters to move: all that are trainable and have momentum.
    """
    weights.choose([param for param in weights.candidates if param.requires_grad and _has_momentum(base, param)])
    moves = _moves(base, weights.params)
    if not moves:
        return 0.0  # the first step, or a base without momentum
    length, size = _lengths(moves, weights)
    is_sound = 0 < length < math.inf and size < math.inf  # else nothing moves, and the gradient will tell
    return min(steps, REACH * size / length) if is_sound else 0.0


def look_ahead(weights: Weights, base: Optimizer, steps: float) -> None:
    """Move from theta to where so many further steps along the momentum alone would lead.

    Nothing is remembered: the momentum is that of the base optimizer.
    """
    weights.back()
    for move in _moves(base, weights.params):
        torch._foreach_add_([data_of(param) for param in move.params], move.velocities, alpha=steps * move.rate)


@contextmanager
def weights_ahead(params: Sequence[Tensor], base: Optimizer, steps: float) -> Iterator[None]:
    """Hold the weights where a step that looks ``steps`` steps ahead takes its gradients, for tools that watch it."""
    weights = Weights(params)
    try:
        with torch.no_grad():
            if steps > 0 and (within := steps_within_reach(weights, base, steps)) > 0:
                look_ahead(weights, base, within)
        yield
    finally:
        with torch.no_grad():
            weights.restore()


def bearable_curvature(base: Optimizer, ahead: float) -> float:
    """Return the curvature from which on SGD diverges, its gradients being taken some steps ahead.

    On a parabola of curvature h, SGD with rate r, momentum b and gradients from s steps ahead converges while
    r h < 2 (1 + b) / (1 + 2 s). Nesterov's momentum looks b steps further. Infinite for optimizers whose steps do not
    grow with the gradient, as Adam's.
    """
    if not isinstance(base, SGD):
        return math.inf
    limits = []
    for group in base.param_groups:
        rate, momentum = float(group["lr"]), group["momentum"]
        if momentum > 0:  # torch dampens nothing without it
            rate *= 1 - group["dampening"]
        steps = ahead + momentum if group["nesterov"] else ahead
        limits.append(2 * (1 + momentum) / (1 + 2 * steps) / rate if rate > 0 else math.inf)
    return min(limits)


def _has_momentum(base: Optimizer, param: Tensor) -> bool:
    state = base.state.get(param, {})
    return state.get("exp_avg" if isinstance(base, Adam) else "momentum_buffer") is not None


def _moves(base: Optimizer, params: Sequence[Tensor]) -> list[_Move]:
    """Return what the next step would do without a gradient, group by group."""
    moving = {param for param in params if _has_momentum(base, param)}
    moves = []
    for group in base.param_groups:
        mine = [param for param in group["params"] if param in moving]
        if mine:
            moves.append(_Move(mine, [_velocity(base, group, param) for param in mine], -float(group["lr"])))
    return moves


def _lengths(moves: list[_Move], weights: Weights) -> tuple[float, float]:
    """Return the lengths of one step along the momentum and of the weights; the same on all ranks, as both are."""
    theta = weights.values()
    if theta.sharding is not None:
        parts = [Vector(m.velocities, sharding=sharding_of(m.params)).sq_norm() * m.rate**2 for m in moves]
        square, size = torch.stack([sum(parts[1:], parts[0]), theta.sq_norm()]).tolist()
        return math.sqrt(square), math.sqrt(size)
    norms = tensor_norms([velocity for move in moves for velocity in move.velocities] + theta.tensors)
    rates = [move.rate for move in moves for _ in move.velocities]
    return math.hypot(*map(operator.mul, rates, norms)), math.hypot(*norms[len(rates) :])


def _velocity(base: Optimizer, group: dict[str, Any], param: Tensor) -> Tensor:
    """Return SGD's momentum, or Adam's m / (sqrt(v) + eps), with m and v freed of their bias."""
    state = base.state[param]
    if not isinstance(base, Adam):
        return _part(state["momentum_buffer"], param)
    beta_1, beta_2 = (float(beta) for beta in group["betas"])
    step = float(state["step"])
    square = _part(state["max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"], param)
    scale = square.sqrt().div_(math.sqrt(1 - beta_2**step)).add_(group["eps"])
    return _part(state["exp_avg"], param).div(scale).div_(1 - beta_1**step)


def _part(tensor: Tensor, param: Tensor) -> Tensor:
    """Return this rank's part of a state as a dense real tensor."""
    return as_real(local_part(tensor, param))
