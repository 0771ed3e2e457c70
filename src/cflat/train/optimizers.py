"""The optimizer of a phase, and its learning rate: a function of the epoch, hence nothing to save."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.optim import Optimizer

from cflat._errors import ConfigError
from cflat.methods import ParamGroup
from cflat.optim import SharpnessAware, StepOptions, create_optimizer
from cflat.train.perturb import FirstTask, Perturbed, perturbs_any, restrict_radius
from cflat.train.settings import BaseSettings, base_class


@dataclass(frozen=True)
class OptimizerChoice:
    """A flatness-aware optimizer by name, with its keywords."""

    name: str = "none"
    settings: dict[str, Any] = field(default_factory=dict)
    perturb: Perturbed = "all"
    """Which parameters are perturbed."""
    first_task: FirstTask = "same"
    """Whether the first task is trained with the base optimizer alone (plain), as in the official C-Flat code."""

    def for_task(self, index: int) -> OptimizerChoice:
        """Return the optimizer of a task."""
        return OptimizerChoice() if index == 0 and self.first_task == "plain" else self


def make_optimizer(
    choice: OptimizerChoice,
    groups: list[ParamGroup],
    base: BaseSettings,
    network: nn.Module,
    *,
    task: int,
    num_tasks: int,
    clip_norm: float | None,
) -> SharpnessAware:
    """Return the optimizer of a task over a method's parameter groups."""
    groups = restrict_radius(groups, network, choice.perturb)
    # A later phase may train nothing of what is perturbed, such as the head alone.
    choice = choice.for_task(task) if perturbs_any(groups) else OptimizerChoice()
    settings = dict(choice.settings)
    if clip_norm is not None:
        settings["options"] = StepOptions(max_norm=clip_norm)
    made = make_base(groups, base, is_first_task=task == 0)
    optimizer = create_optimizer(choice.name, made, model=network, **settings)
    optimizer.start_task(task, num_tasks)
    return optimizer


def make_base(groups: list[ParamGroup], settings: BaseSettings, *, is_first_task: bool) -> Optimizer:
    """Return the base optimizer over a method's parameter groups."""
    lr = settings.first_lr if is_first_task and settings.first_lr is not None else settings.lr
    decay = settings.weight_decay
    if is_first_task and settings.first_weight_decay is not None:
        decay = settings.first_weight_decay
    params: list[dict[str, Any]] = [
        {
            "params": group.params,
            "lr": lr * group.lr_scale,
            "full_lr": lr * group.lr_scale,  # what `set_lr` multiplies: factors must not compound over epochs
            "weight_decay": decay if group.weight_decay is None else group.weight_decay,
            **({} if group.rho is None else {"rho": group.rho}),
        }
        for group in groups
        if group.params
    ]
    # Adadelta's rho is its decay rate; a group cannot hold that and a radius under one key.
    if "rho" in settings.keywords and any(group.rho is not None for group in groups):
        raise ConfigError(
            f"base.name {settings.name} has a rho of its own, so that its groups cannot have a radius; set "
            "optimizer.perturb=all, or choose another base optimizer."
        )
    make: Any = base_class(settings.name)
    base: Optimizer = make(params, lr=lr, **settings.keywords)
    return base


def lr_factor(settings: BaseSettings, epoch: int, num_epochs: int, *, is_first_task: bool = False) -> float:
    """Return the learning rate of an epoch relative to the full one.

    >>> lr_factor(BaseSettings(schedule="cosine"), epoch=5, num_epochs=10)
    0.5
    """
    if epoch < settings.warmup_epochs:
        return (epoch + 1) / (settings.warmup_epochs + 1)
    if settings.schedule == "cosine":
        # Torch's CosineAnnealingLR with T_max=num_epochs, in closed form.
        done = (epoch - settings.warmup_epochs) / max(num_epochs - settings.warmup_epochs, 1)
        return round(0.5 * (1 + math.cos(math.pi * done)), 12)  # cos(pi / 2) is not quite 0
    if settings.schedule == "multistep":
        has_own = is_first_task and settings.first_milestones is not None
        milestones = (settings.first_milestones or ()) if has_own else settings.milestones
        return settings.gamma ** sum(epoch >= milestone for milestone in milestones)
    return 1.0


def set_lr(optimizer: Optimizer, factor: float) -> None:
    """Give every parameter group its full learning rate times ``factor``."""
    for group in optimizer.param_groups:
        group["lr"] = group["full_lr"] * factor
