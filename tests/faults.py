"""What the fault battery shares: a network with all that a step may disturb, doors to step through, snapshots."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

import cflat
from cases import BASES, OPTIMIZERS, TURBO_VARIANTS, Case

EVERY = (*OPTIMIZERS, *TURBO_VARIANTS[:3], TURBO_VARIANTS[-1])
"""All optimizers, and Turbo with all readings of its open points."""

DOORS = ("step", "with", "bare")


class Net(nn.Module):
    """Two layers with BatchNorm, dropout, a buffer that is replaced, and a parameter that the loss never uses."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(5, 8)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 3)
        self.unused = nn.Parameter(torch.ones(4))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        self.seen = self.seen + len(inputs)
        return self.head(F.dropout(torch.tanh(self.norm(self.hidden(inputs))), 0.2, self.training))


def batch_of(step: int, size: int = 8, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Return the batch of one step."""
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(size, 5, generator=generator, dtype=dtype)
    return inputs, inputs.argmax(dim=1) % 3


class Run:
    """A network in training: the same for the same case, whatever happened before."""

    def __init__(self, case: Case, lr: float = 0.1, guarded: bool = True, base: str = "", **settings: Any) -> None:
        torch.manual_seed(7)
        self.model = Net()
        self.base: Optimizer = torch.optim.SGD(self.model.parameters(), lr=lr, momentum=0.9, weight_decay=1e-2)
        if base:
            self.base = BASES[base](self.model)
        self.optimizer = case.make(self.base, model=self.model if guarded else None, **settings)

    def closure(self, step: int) -> Callable[[], Tensor]:
        inputs, labels = batch_of(step)

        def closure() -> Tensor:
            loss = F.cross_entropy(self.model(inputs), labels)
            loss.backward()
            return loss

        return closure

    def train(self, *steps: int) -> None:
        for step in steps:
            self.optimizer.step(self.closure(step))

    def count(self, step: int) -> int:
        """Return how many evaluations a step would take, without taking it."""
        with torch.random.fork_rng(devices=[]):
            model, optimizer = copy.deepcopy((self.model, self.optimizer))
            twin = copy.copy(self)
            twin.model, twin.optimizer = model, optimizer
            before = optimizer.telemetry.evaluations
            twin.train(step)
            return optimizer.telemetry.evaluations - before

    def world(self) -> dict[str, Any]:
        """Return a copy of what a step can change outside the optimizer."""
        return copy.deepcopy({"model": dict(self.model.state_dict()), "random": torch.get_rng_state()})

    def state(self) -> dict[str, Any]:
        """Return a copy of the optimizer's state; restores a step that was left in the middle."""
        return copy.deepcopy(self.optimizer.state_dict())


def walk(door: str, optimizer: cflat.SharpnessAware, closure: Callable[[], Any], **options: Any) -> None:
    """Take one step through one of the doors."""
    if door == "step":
        optimizer.step(closure, **options)
    elif door == "with":
        with optimizer.passes(**options) as passes:
            for _ in passes:
                closure()
    else:
        for _ in optimizer.passes(**options):
            closure()


def nth(closure: Callable[[], Any], number: int, event: Callable[[], None]) -> Callable[[], Any]:
    """Return a closure that lets ``event`` happen at the end of evaluation ``number`` (from 1)."""
    calls = iter(range(1, 100))

    def wrapped() -> Any:
        result = closure()
        if next(calls) == number:
            event()
        return result

    return wrapped


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the tensors and scalars of nested containers with their paths."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else None
    if items is None:
        yield path, value
        return
    for key, item in items:
        yield from leaves(item, f"{path}/{key}")


def differences(left: Any, right: Any) -> list[str]:
    """Return the paths at which two nested containers are not bit-equal."""
    a, b = dict(leaves(left)), dict(leaves(right))
    wrong = sorted(a.keys() ^ b.keys())
    for path in a.keys() & b.keys():
        same = torch.equal(a[path], b[path]) if isinstance(a[path], Tensor) else a[path] == b[path]
        if not same:
            wrong.append(path)
    return wrong
