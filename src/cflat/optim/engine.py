"""What authors of optimizers and of tools that watch them may build on; everything else here is private.

A new optimizer needs `Direction`, `Weights` and `Radius` for its types; tools that look at gradients need `Vector` and
`Evaluation`, and the guards to evaluate a model without leaving a trace.
"""

from cflat._ranges import Count, CountOrZero, Fraction, NotNegative, Number, Positive, Range, Share, Whole, check
from cflat.optim._base import SharpnessAware, StepOptions
from cflat.optim._catalog import register_optimizer
from cflat.optim._flatness import FlatnessAware
from cflat.optim._guards import BufferGuard, RandomGuard
from cflat.optim._memory import DirectionMemory
from cflat.optim._passes import Direction, Evaluation
from cflat.optim._schedules import Radius
from cflat.optim._sharding import shard_like
from cflat.optim._surrogate import Products, surrogate_errors
from cflat.optim._triggers import EmaTrigger
from cflat.optim._vectors import (
    EPS,
    Coefficients,
    NonFiniteError,
    Vector,
    as_real,
    clone_all,
    dot,
    filter_norms,
    read,
)
from cflat.optim._weights import Weights, data_of

__all__ = [
    "EPS", "BufferGuard", "Coefficients", "Count", "CountOrZero", "Direction", "DirectionMemory", "EmaTrigger",
    "Evaluation", "FlatnessAware", "Fraction", "NonFiniteError", "NotNegative", "Number", "Positive", "Products",
    "Radius", "RandomGuard", "Range", "Share", "SharpnessAware", "StepOptions", "Vector", "Weights", "Whole",
    "as_real", "check", "clone_all", "data_of", "dot", "filter_norms", "read", "register_optimizer", "shard_like",
    "surrogate_errors",
]  # fmt: skip
