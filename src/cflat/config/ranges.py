"""The range of every number that a configuration holds."""

from __future__ import annotations

from typing import TypedDict

from cflat._errors import ConfigError, check

__all__ = ["RANGES", "check_range"]

LARGEST = 2**31 - 1
"""No count or seed is larger; keeps a slip of the finger from asking for more than any machine holds."""


class Range(TypedDict, total=False):
    """The keywords of `cflat._errors.check`."""

    above: float
    at_least: float
    below: float
    at_most: float
    integer: bool


_COUNT = Range(at_least=1, at_most=LARGEST, integer=True)
_COUNT_OR_NONE = Range(at_least=0, at_most=LARGEST, integer=True)
_POSITIVE = Range(above=0)
_NOT_NEGATIVE = Range(at_least=0)

RANGES: dict[str, Range] = {
    "seed": _COUNT_OR_NONE,
    "base.lr": _POSITIVE,
    "base.first_lr": _POSITIVE,
    "base.momentum": Range(at_least=0, below=1),
    "base.weight_decay": _NOT_NEGATIVE,
    "base.first_weight_decay": _NOT_NEGATIVE,
    "base.milestones": _COUNT,
    "base.gamma": Range(above=0, at_most=1),
    "base.warmup_epochs": _COUNT_OR_NONE,
    "train.epochs": _COUNT_OR_NONE,
    "train.first_epochs": _COUNT_OR_NONE,
    "train.batch_size": _COUNT,
    "train.eval_batch_size": _COUNT,
    "train.clip_norm": _POSITIVE,
    "train.checkpoint_minutes": _NOT_NEGATIVE,
    "backbone.image_size": Range(at_least=4, at_most=8192, integer=True),
    "backbone.drop_path_rate": Range(at_least=0, below=1),
    "backbone.width": Range(at_least=1, at_most=1 << 20, integer=True),
    "backbone.depth": Range(at_least=1, at_most=1000, integer=True),
    "data.train_per_class": _COUNT,
    "data.test_per_class": _COUNT,
    "data.subsample_seed": _COUNT_OR_NONE,
    "data.short_side": Range(at_least=4, at_most=8192, integer=True),
    "stream.initial": _COUNT_OR_NONE,
    "stream.increment": _COUNT,
    "stream.order_seed": _COUNT_OR_NONE,
    "stream.task_order_seed": _COUNT_OR_NONE,
    "stream.max_tasks": _COUNT,
    "runtime.devices": Range(at_least=1, at_most=4096, integer=True),
    "runtime.num_nodes": Range(at_least=1, at_most=4096, integer=True),
    "runtime.threads": Range(at_least=1, at_most=4096, integer=True),
    "runtime.prefetch": Range(at_least=0, at_most=4096, integer=True),
    "sweep.seeds": _COUNT_OR_NONE,
    "sweep.sample": Range(at_least=1, at_most=10_000, integer=True),
    "sweep.sample_seed": _COUNT_OR_NONE,
    "method.memory_total": _COUNT,
    "method.memory_per_class": _COUNT,
    "method.temperature": _POSITIVE,
    "method.auxiliary_weight": _NOT_NEGATIVE,
    "method.bottleneck": _COUNT,
    "method.dropout": Range(at_least=0, below=1),
    "method.scale": _NOT_NEGATIVE,
    "method.pool_size": _COUNT,
    "method.length": _COUNT,
    "method.top_k": _COUNT,
    "method.pull": _NOT_NEGATIVE,
    "method.general_layers": _COUNT_OR_NONE,
    "method.expert_layers": _COUNT_OR_NONE,
    "method.alpha": _NOT_NEGATIVE,
    "method.beta": _NOT_NEGATIVE,
    "method.num_projections": _COUNT,
    "method.merge_ratio": _NOT_NEGATIVE,
    "method.transport_ratio": Range(at_least=0, at_most=1),
    "method.regularization": _POSITIVE,
    "method.backbone_lr_scale": _NOT_NEGATIVE,
    "method.retrain_epochs": _COUNT_OR_NONE,
}


def check_range(path: str, value: object) -> None:
    """Refuse a number outside the range of its key; numbers without an entry must be finite.

    Raises:
        ConfigError: With path, rule and value.
    """
    if isinstance(value, tuple):
        for member in value:
            check_range(path, member)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        try:
            check(path, value, **RANGES.get(path, {}))
        except ValueError as error:
            raise ConfigError(str(error)) from None
        except OverflowError:
            raise ConfigError(f"{path} must be at most {LARGEST}, got a number too large to print.") from None
