"""Where the momentum of the base optimizer is heading: the weights some steps further along it."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, Optimizer

from cflat.optim._sharding import local_part
from cflat.optim._vectors import as_real
from cflat.optim._weights import Weights, data_of


def has_known_momentum(base: Optimizer) -> bool:
    """Whether this optimizer has momentum that can be read: torch's SGD, Adam, AdamW, and what derives from them."""
    if isinstance(base, SGD):
        return any(group["momentum"] > 0 for group in base.param_groups)
    return isinstance(base, Adam) and any(group["betas"][0] > 0 for group in base.param_groups)


def look_ahead(weights: Weights, base: Optimizer, steps: float) -> None:
    """Move from theta to where so many further steps along the momentum alone would lead.

    Before the first gradient of a step all trainable parameters that have momentum move; after it, only those that
    take part in the step. Nothing is remembered: the momentum is that of the base optimizer.
    """
    key, move = ("exp_avg", _along_adam) if isinstance(base, Adam) else ("momentum_buffer", _along_sgd)
    candidates = weights.params or weights.candidates
    moving = {param for param in candidates if param.requires_grad and base.state.get(param, {}).get(key) is not None}
    if not weights.params:
        weights.choose([param for param in candidates if param in moving])
    if not weights.params:
        return  # the first step, or a base without momentum
    weights.back()
    for group in base.param_groups:
        params = [param for param in group["params"] if param in moving]
        if params:
            move(group, params, [base.state[param] for param in params], steps * float(group["lr"]))


def _along_sgd(group: dict[str, Any], params: list[Tensor], states: list[dict[str, Any]], length: float) -> None:
    """Subtract length * v."""
    velocities = [_part(state["momentum_buffer"], param) for param, state in zip(params, states, strict=True)]
    torch._foreach_add_([data_of(param) for param in params], velocities, alpha=-length)


def _along_adam(group: dict[str, Any], params: list[Tensor], states: list[dict[str, Any]], length: float) -> None:
    """Subtract length * m / (sqrt(v) + eps), with m and v freed of their bias."""
    beta_1, beta_2 = (float(beta) for beta in group["betas"])
    square = "max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"
    for param, state in zip(params, states, strict=True):
        step = float(state["step"])
        scale = _part(state[square], param).sqrt().div_(math.sqrt(1 - beta_2**step)).add_(group["eps"])
        data_of(param).addcdiv_(_part(state["exp_avg"], param), scale, value=-length / (1 - beta_1**step))


def _part(tensor: Tensor, param: Tensor) -> Tensor:
    """Return this rank's part of a state as a dense real tensor."""
    return as_real(local_part(tensor, param))
