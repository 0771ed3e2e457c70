"""What authors of optimizers and of tools that watch them may build on; everything else here is private.

A new optimizer needs `Direction`, `Weights` and `Radius` for its types; tools that look at gradients need `Vector` and
`Evaluation`, and the guards to evaluate a model without leaving a trace.
"""

from cflat._ranges import Count, CountOrZero, Fraction, NotNegative, Positive, Range, Share, check
from cflat.optim._ahead import has_known_momentum, weights_ahead
from cflat.optim._base import SharpnessAware, StepOptions
from cflat.optim._catalog import register_optimizer
from cflat.optim._guards import BufferGuard, RandomGuard
from cflat.optim._passes import Direction, Evaluation
from cflat.optim._schedules import Radius
from cflat.optim._vectors import EPS, NonFiniteError, Vector, as_real, clone_all, dot
from cflat.optim._weights import Weights, data_of

__all__ = [
    "EPS", "BufferGuard", "Count", "CountOrZero", "Direction", "Evaluation", "Fraction", "NonFiniteError",
    "NotNegative", "Positive", "Radius", "RandomGuard", "Range", "Share", "SharpnessAware", "StepOptions", "Vector",
    "Weights", "as_real", "check", "clone_all", "data_of", "dot", "has_known_momentum",
    "register_optimizer", "weights_ahead",
]  # fmt: skip
