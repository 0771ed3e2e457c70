"""The zeroth-order family (optimizers.md 5.1, 5.2)."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from reference.space import Algorithm, Gradient, MovingStatistics, inner, norm, orthogonal, unit


class Plain(Algorithm):
    """g."""

    def direction(self, theta: Tensor, gradient: Gradient) -> Tensor:
        return gradient(theta)


class SAM(Algorithm):
    """g_s = grad L(theta + rho g / ||g||) (Eq. 4)."""

    def direction(self, theta: Tensor, gradient: Gradient) -> Tensor:
        g = gradient(theta)
        return gradient(theta + self.rho * unit(g))


class ASAM(Algorithm):
    """e = rho * T unit(T g), T = diag(|theta| + eta)."""

    def __init__(self, rho: float, eta: float) -> None:
        super().__init__(rho)
        self.eta = eta

    def direction(self, theta: Tensor, gradient: Gradient) -> Tensor:
        g = gradient(theta)
        t = theta.abs() + self.eta
        return gradient(theta + self.rho * t * unit(t * g))


class GSAM(Algorithm):
    """h = g - (<g, g_s> / ||g_s||^2) g_s; g_s - alpha h."""

    def __init__(self, rho: Any, alpha: float) -> None:
        super().__init__(rho)
        self.alpha = alpha

    def direction(self, theta: Tensor, gradient: Gradient) -> Tensor:
        g = gradient(theta)
        g_s = gradient(theta + self.rho * unit(g))
        h = g - inner(g, g_s) / norm(g_s) ** 2 * g_s
        return g_s - self.alpha * h


class LookSAM(Algorithm):
    """On steps 0, k, 2k, ... of a task g_s, caching g_v; else g + alpha * ||g|| * unit(g_v)."""

    def __init__(self, rho: float, k: int, alpha: float) -> None:
        super().__init__(rho)
        self.k, self.alpha = k, alpha
        self.g_v = torch.empty(0)

    def direction(self, theta: Tensor, gradient: Gradient) -> Tensor:
        g = gradient(theta)
        if (self.j - 1) % self.k == 0:
            g_s = gradient(theta + self.rho * unit(g))
            self.g_v = orthogonal(g_s, g)
            return g_s
        return g + self.alpha * norm(g) * unit(self.g_v)


class SSSAM(Algorithm):
    """Bernoulli(p(t)) chooses SAM or plain; here p(t) must be 0 or 1, so that there is nothing to draw."""

    def __init__(self, rho: float, p: Callable[[int], float]) -> None:
        super().__init__(rho)
        self.p = p

    def direction(self, theta: Tensor, gradient: Gradient) -> Tensor:
        g = gradient(theta)
        return gradient(theta + self.rho * unit(g)) if self.p(self.t) == 1 else g


class AESAM(Algorithm):
    """SAM if ||g||^2 >= mu + c_t sqrt(var), c_t = (t/T) l1 + (1 - t/T) l2, with l1 = -1 and l2 = +1."""

    def __init__(self, rho: float, total_steps: int | None, decay: float = 0.9) -> None:
        super().__init__(rho)
        self.total_steps, self.decay = total_steps, decay
        self.statistics = MovingStatistics(decay, root=True)

    def start_task(self, index: int, num_tasks: int | None) -> None:
        super().start_task(index, num_tasks)
        self.statistics = MovingStatistics(self.decay, root=True)

    def direction(self, theta: Tensor, gradient: Gradient) -> Tensor:
        g = gradient(theta)
        share = 0.5 if self.total_steps is None else self.t / self.total_steps
        c_t = share * -1 + (1 - share) * 1
        if not self.statistics.is_large(norm(g) ** 2, c_t):
            return g
        return gradient(theta + self.rho * unit(g))


class FriendlySAM(Algorithm):
    """Perturb along g - sigma m with the m of the step before; then m = decay m + (1 - decay) g. m begins with the
    first gradient, which is perturbed along as it is (nblt/F-SAM)."""

    def __init__(self, rho: float, sigma: float, decay: float) -> None:
        super().__init__(rho)
        self.sigma, self.decay = sigma, decay
        self.m: Tensor | None = None

    def start_task(self, index: int, num_tasks: int | None) -> None:
        super().start_task(index, num_tasks)
        self.m = None

    def direction(self, theta: Tensor, gradient: Gradient) -> Tensor:
        g = gradient(theta)
        if self.m is None:
            self.m = g
            return gradient(theta + self.rho * unit(g))
        e = self.rho * unit(g - self.sigma * self.m)
        self.m = self.decay * self.m + (1 - self.decay) * g
        return gradient(theta + e)


class MSAM(Algorithm):
    """Gradient at theta_p = theta - rho unit(v), v = momentum v + g + decay theta_p; before the first step v = 0.

    The authors' update takes the decay at theta_p, too (MarlonBecker/MSAM), and the base adds it at theta.
    """

    def __init__(self, rho: float, momentum: float) -> None:
        super().__init__(rho)
        self.momentum = momentum
        self.v: Tensor | None = None

    def start_task(self, index: int, num_tasks: int | None) -> None:
        super().start_task(index, num_tasks)
        self.v = None

    def direction(self, theta: Tensor, gradient: Gradient) -> Tensor:
        v = torch.zeros_like(theta) if self.v is None else self.v
        theta_p = theta - self.rho * unit(v)
        g = gradient(theta_p)
        self.v = self.momentum * v + g + self.weight_decay * theta_p
        return g + self.weight_decay * (theta_p - theta)


class VaSSO(Algorithm):
    """Perturb along d = (1 - theta) d + theta g, which contains this step's g and begins with the first one."""

    def __init__(self, rho: float, theta: float) -> None:
        super().__init__(rho)
        self.theta = theta
        self.d: Tensor | None = None

    def start_task(self, index: int, num_tasks: int | None) -> None:
        super().start_task(index, num_tasks)
        self.d = None

    def direction(self, theta: Tensor, gradient: Gradient) -> Tensor:
        g = gradient(theta)
        self.d = g if self.d is None else (1 - self.theta) * self.d + self.theta * g
        return gradient(theta + self.rho * unit(self.d))


class AsyncSAM(Algorithm):
    """g_t = grad L_t(theta + rho unit(g_{t-1})); the first step of a task is plain."""

    def __init__(self, rho: float) -> None:
        super().__init__(rho)
        self.stale: Tensor | None = None

    def start_task(self, index: int, num_tasks: int | None) -> None:
        super().start_task(index, num_tasks)
        self.stale = None

    def direction(self, theta: Tensor, gradient: Gradient) -> Tensor:
        e = torch.zeros_like(theta) if self.stale is None else self.rho * unit(self.stale)
        self.stale = gradient(theta + e)
        return self.stale


class RandomSAM(Algorithm):
    """Gradient at theta + e with e_ij ~ N(0, rho^2 ||W_i||^2 / n), row by row of every tensor that has rows.

    The numbers are drawn in single precision, tensor by tensor in the order of the model.
    """

    def __init__(self, rho: float, seed: int, total_steps: int | None = None) -> None:
        super().__init__(rho)
        self.seed, self.total_steps, self.task = seed, total_steps, 0

    def start_task(self, index: int, num_tasks: int | None) -> None:
        super().start_task(index, num_tasks)
        self.task = index

    def direction(self, theta: Tensor, gradient: Gradient) -> Tensor:
        step = self.j - 1
        seed = random.Random(f"{self.seed}/{self.task}/{step}").getrandbits(63)
        generator = torch.Generator().manual_seed(seed)
        rho = self.rho
        if self.total_steps is not None:
            rho *= (1 - math.cos(math.pi * min(1, step / self.total_steps))) / 2
        parts = theta.split([param.numel() for param in self.params])
        e = [torch.zeros_like(part) for part in parts]
        for index, (param, part) in enumerate(zip(self.params, parts, strict=True)):
            if param.ndim > 1:
                rows = part.view(param.shape[0], -1)
                noise = torch.randn(param.shape, generator=generator).double().view_as(rows)
                scale = rho * rows.norm(dim=1, keepdim=True) / math.sqrt(rows.shape[1])
                e[index] = (scale * noise).view(-1)
        return gradient(theta + torch.cat(e))
