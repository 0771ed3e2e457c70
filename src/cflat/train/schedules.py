"""Base optimizers and their learning rates; stateless, so that a resumed run only needs to know its epoch."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.optim import Optimizer

from cflat.methods import ParamGroup
from cflat.train.settings import BaseSettings


def make_base(groups: list[ParamGroup], settings: BaseSettings, *, is_first_task: bool) -> Optimizer:
    """Return the torch optimizer over a method's parameter groups."""
    lr = settings.first_lr if is_first_task and settings.first_lr is not None else settings.lr
    decay = settings.weight_decay
    if is_first_task and settings.first_weight_decay is not None:
        decay = settings.first_weight_decay
    params: list[dict[str, Any]] = [
        {
            "params": group.params,
            "lr": lr * group.lr_scale,
            "full_lr": lr * group.lr_scale,
            "weight_decay": decay if group.weight_decay is None else group.weight_decay,
        }
        for group in groups
        if group.params
    ]
    if settings.name == "sgd":
        return torch.optim.SGD(params, lr=lr, momentum=settings.momentum, nesterov=settings.nesterov)
    make = torch.optim.Adam if settings.name == "adam" else torch.optim.AdamW
    return make(params, lr=lr)


def lr_factor(settings: BaseSettings, epoch: int, num_epochs: int, *, is_first_task: bool = False) -> float:
    """Return the learning rate of an epoch relative to the full one.

    >>> lr_factor(BaseSettings(schedule="cosine"), epoch=5, num_epochs=10)
    0.5
    """
    if epoch < settings.warmup_epochs:
        return (epoch + 1) / (settings.warmup_epochs + 1)
    if settings.schedule == "cosine":
        done = (epoch - settings.warmup_epochs) / max(num_epochs - settings.warmup_epochs, 1)
        return round(0.5 * (1 + math.cos(math.pi * done)), 12)
    if settings.schedule == "multistep":
        has_own = is_first_task and settings.first_milestones is not None
        milestones = (settings.first_milestones or ()) if has_own else settings.milestones
        return settings.gamma ** sum(epoch >= milestone for milestone in milestones)
    return 1.0


def set_lr(optimizer: Optimizer, factor: float) -> None:
    """Give every parameter group its full learning rate times ``factor``."""
    for group in optimizer.param_groups:
        group["lr"] = group["full_lr"] * factor
