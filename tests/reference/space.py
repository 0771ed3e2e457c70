"""Flat parameter space: the few operations of the paper's notation, and what an algorithm is."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Gradient = Callable[[Tensor], Tensor]
"""theta -> gradient of the loss of the present minibatch at theta."""


def norm(x: Tensor) -> float:
    """||x||."""
    return torch.sqrt(torch.sum(x * x)).item()


def unit(x: Tensor) -> Tensor:
    """x / (||x|| + eps): the unit vector, and zero for zero (optimizers.md 5)."""
    return x / (norm(x) + 1e-12)


def inner(x: Tensor, y: Tensor) -> float:
    """<x, y>."""
    return torch.sum(x * y).item()


def orthogonal(x: Tensor, y: Tensor) -> Tensor:
    """x - <x, y> / ||y||^2 * y: the component of x orthogonal to y (Eq. 6 and 7)."""
    return x - inner(x, y) / norm(y) ** 2 * y


class Algorithm:
    """One optimizer. ``t`` counts steps from 0, ``j`` counts steps of the present task from 1."""

    def __init__(self, rho: float | Callable[[int, float], float] = 0.05) -> None:
        self.radius = rho
        self.rho = 0.0
        self.t = -1
        self.j = 0
        self.weight_decay: Tensor | float = 0.0
        """What the base adds to the gradient, as a multiple of theta."""
        self.params: list[Tensor] = []
        """The tensors of which theta consists, in order."""

    def start_task(self, index: int, num_tasks: int | None) -> None:
        """Forget what belongs to one task."""
        self.j = 0

    def next_direction(self, theta: Tensor, gradient: Gradient, lr: float) -> Tensor:
        """Begin the next step and return its direction of descent."""
        self.t += 1
        self.j += 1
        self.rho = self.radius(self.t, lr) if callable(self.radius) else self.radius
        return self.direction(theta, gradient)

    def direction(self, theta: Tensor, gradient: Gradient) -> Tensor:
        """Return the direction of descent at theta."""
        raise NotImplementedError


class MovingStatistics:
    """mu and sigma of Eq. 8: updated with the current value first, then compared with it."""

    def __init__(self, decay: float, *, root: bool) -> None:
        self.decay, self.root = decay, root
        self.mu, self.sigma = 0.0, 1e-8

    def is_large(self, x: float, m: float) -> bool:
        """x >= mu + m * sigma, sigma being the squared deviation or its root; a zero gradient never counts."""
        self.mu = self.decay * self.mu + (1 - self.decay) * x
        self.sigma = self.decay * self.sigma + (1 - self.decay) * (x - self.mu) ** 2
        return x != 0 and x >= self.mu + m * (self.sigma**0.5 if self.root else self.sigma)
