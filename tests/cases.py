"""What the optimizer tests run over: a table of optimizers, small problems with minibatches, and base optimizers.

Everything is a pure function of integers: a problem gives the same model for the same seed and the same batch for
the same step, so two runs differ only in what a test changes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

import cflat

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Case:
    """One row of the table: an optimizer with settings under which all its branches are taken within 30 steps."""

    id: str
    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)

    def make(self, base: Optimizer, *, model: nn.Module | None = None, **overrides: Any) -> cflat.SharpnessAware:
        return cflat.create_optimizer(self.name, base, model=model, **{**self.settings, **overrides})

    def but(self, suffix: str = "", **overrides: Any) -> Case:
        return replace(self, id=self.id + suffix, settings={**self.settings, **overrides})

    def __str__(self) -> str:
        return self.id


_TURBO = {"rho": 0.1, "lam": 0.2, "beta": 0.8, "k": 3, "k_growth": 4.0, "threshold": 0.2}

_LISTED = (
    Case("none", "none"),
    Case("sam", "sam", {"rho": 0.1}),
    Case("asam", "asam", {"rho": 0.3, "eta": 0.01}),
    Case("gsam", "gsam", {"rho": 0.1, "alpha": 0.4}),
    Case("looksam", "looksam", {"rho": 0.1, "k": 4, "alpha": 0.7}),
    Case("gam", "gam", {"rho": 0.2, "rho_fd": 0.05, "gamma": 0.1}),
    Case("ss_sam", "ss_sam", {"rho": 0.1, "p": 0.5}),
    Case("ae_sam", "ae_sam", {"rho": 0.1, "total_steps": 120}),
    Case("friendly_sam", "friendly_sam", {"rho": 0.1, "sigma": 1.0, "decay": 0.9}),
    Case("msam", "msam", {"rho": 0.2, "momentum": 0.9}),
    Case("vasso", "vasso", {"rho": 0.1, "theta": 0.4}),
    Case("async_sam", "async_sam", {"rho": 0.1}),
    Case("random_sam", "random_sam", {"rho": 0.2, "seed": 3}),
    Case("c_flat", "c_flat", {"rho": 0.1, "lam": 0.2}),
    Case(
        "c_flat_plus",
        "c_flat_plus",
        {"rho": 0.1, "lam": 0.2, "amplitude": 3.0, "steepness": 0.3, "midpoint": 8.0, "gain": 0.8},
    ),
    Case("c_flat_turbo", "c_flat_turbo", _TURBO),
    Case("c_flat_forecast", "c_flat_forecast", {"rho": 0.1, "lam": 0.2, "evaluations": 1.6}),
)
_OTHERS = sorted(set(cflat.list_optimizers()) - {row.name for row in _LISTED})

OPTIMIZERS = (*_LISTED, *(Case(name, name) for name in _OTHERS))
"""The base alone and the sixteen optimizers, one row each; a new one is here by itself, with its defaults."""


AWAY = ("msam", "async_sam", "random_sam")
"""Those whose only evaluation is not at theta."""


def case(name: str) -> Case:
    """Return the row of one registry name."""
    return next(row for row in OPTIMIZERS if row.name == name)


TURBO = case("c_flat_turbo")
FORECAST = case("c_flat_forecast")

TURBO_VARIANTS = (
    TURBO.but("-calibrated", reading="calibrated"),
    TURBO.but("-reuse", trigger=False, schedule=False),
    TURBO.but("-consistent", reading="consistent"),
    TURBO.but("-reuse-consistent", trigger=False, schedule=False, reading="consistent", rho_fd=0.02),
    TURBO.but("-reuse-calibrated", trigger=False, schedule=False, reading="calibrated"),
    TURBO.but("-schedule", trigger=False),
    TURBO.but("-rho_fd", trigger=False, rho_fd=0.02),
    TURBO.but("-rho_fd-calibrated", rho_fd=0.02, reading="calibrated"),
    TURBO.but("-ema", trigger=False, cache_decay=0.6),
    TURBO.but("-ema-calibrated", cache_decay=0.3, reading="calibrated"),
)
"""The ablation rows of Turbo under all readings of its open points."""

FORECAST_VARIANTS = (
    FORECAST.but("-poor", evaluations=1.2),
    FORECAST.but("-rich", evaluations=2.7),
    FORECAST.but("-default", evaluations=1.3, rho=0.05),
    FORECAST.but("-rho_fd", rho_fd=0.02, lam=0.7),
)

VARIANTS = (
    case("c_flat").but("-rho_fd", rho_fd=0.02),
    case("c_flat_plus").but("-rho_fd", rho_fd=0.02),
    case("ae_sam").but("-constant", total_steps=None),
    case("gam").but("-betas", betas=(0.5, -0.3, 0.7)),
    case("random_sam").but("-growing", total_steps=15),
    *TURBO_VARIANTS,
    *FORECAST_VARIANTS,
)
"""Further settings of the same optimizers that change their formula."""


@dataclass(frozen=True)
class Problem:
    """A small classification problem: a seeded model and an endless, seeded stream of minibatches."""

    name: str
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    num_classes: int = 3
    batch_size: int = 12

    def model(self, dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Module:
        """Return the model with the weights of this seed; the global generator is left alone."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.build().to(torch.float64).to(dtype)

    @lru_cache(maxsize=512)  # noqa: B019 - problems are module constants
    def batch(self, step: int, dtype: torch.dtype = torch.float64) -> Batch:
        """Return the minibatch of one step: a fixed linear rule, with noise that no two batches share."""
        fixed = torch.Generator().manual_seed(1)
        rule = torch.randn(torch.Size(self.shape).numel(), self.num_classes, generator=fixed, dtype=torch.float64)
        fresh = torch.Generator().manual_seed(1000 + step)
        inputs = torch.randn(self.batch_size, *self.shape, generator=fresh, dtype=torch.float64)
        noise = torch.randn(self.batch_size, self.num_classes, generator=fresh, dtype=torch.float64)
        return inputs.to(dtype), (inputs.flatten(1) @ rule + noise).argmax(dim=1)

    def __str__(self) -> str:
        return self.name


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean cross-entropy."""
    inputs, labels = batch
    return F.cross_entropy(model(inputs), labels)


def closure_of(model: nn.Module, batch: Batch, log: list[float] | None = None) -> Callable[[], Tensor]:
    """Return torch's closure for one batch; ``log`` collects the loss of every evaluation."""

    def closure() -> Tensor:
        loss = loss_of(model, batch)
        loss.backward()
        if log is not None:
            log.append(loss.item())
        return loss

    return closure


class Residual(nn.Module):
    """A basic residual block with BatchNorm, as in a CIFAR ResNet but thin."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )

    def forward(self, images: Tensor) -> Tensor:
        return torch.relu(images + self.body(images))


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 3))


def _conv() -> nn.Module:
    # No bias before BatchNorm: its gradient is zero but for rounding, which Adam would blow up to full size.
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, bias=False),
        nn.BatchNorm2d(4),
        nn.Tanh(),
        nn.Conv2d(4, 5, 3, bias=False),
        nn.BatchNorm2d(5),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(20, 3),
    )


def _resnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU(), Residual(6), Residual(6),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(24, 3),
    )  # fmt: skip


MLP = Problem("mlp", _mlp, (6,))
CONV = Problem("conv", _conv, (2, 6, 6))
RESNET = Problem("resnet", _resnet, (2, 6, 6))


def _sgd(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-3)


def _adam(model: nn.Module) -> Optimizer:
    return torch.optim.Adam(model.parameters(), lr=5e-3)


def _groups(model: nn.Module) -> Optimizer:
    """Three groups with their own learning rate and decay, not in the order of the model."""
    params = list(model.parameters())
    biases = [param for param in params if param.ndim == 1]
    weights = [param for param in params if param.ndim > 1]
    groups = [
        {"params": biases, "lr": 0.03, "weight_decay": 0.0},
        {"params": weights[1:], "lr": 0.1},
        {"params": weights[:1], "lr": 0.05, "momentum": 0.5},
    ]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=5e-3)


def _qhm(model: nn.Module) -> Optimizer:
    return cflat.QHM(model.parameters(), lr=0.3, momentum=0.9, nu=0.7, weight_decay=5e-3)


BASES: Mapping[str, Callable[[nn.Module], Optimizer]] = {"sgd": _sgd, "adam": _adam, "groups": _groups, "qhm": _qhm}
"""Base optimizers by name, each made for a model."""


def flat_weights(model: nn.Module) -> Tensor:
    """Return all parameters as one vector, in the order of the model."""
    return torch.cat([param.detach().reshape(-1) for param in model.parameters()])


def train(
    optimizer: cflat.SharpnessAware, model: nn.Module, problem: Problem, num_steps: int, *, start: int = 0
) -> list[int]:
    """Take steps through the closure door and return the evaluations that each of them took."""
    dtype = next(model.parameters()).dtype
    counts = []
    for step in range(start, start + num_steps):
        log: list[float] = []
        optimizer.step(closure_of(model, problem.batch(step, dtype), log))
        counts.append(len(log))
    return counts
