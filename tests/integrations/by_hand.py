"""The loop that every client must equal: torch alone, and a closure that runs over all micro-batches of a step."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

import cflat
from cases import FORECAST, TURBO, Case, case
from faults import Net, batch_of

ROWS = (case("none"), case("sam"), case("c_flat"), TURBO, FORECAST, case("msam"))
SEED = 11


def network() -> Net:
    """Return a network with BatchNorm, dropout, a buffer that is replaced and a parameter that is never used."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return Net()


def optimizer_for(row: Case, model: nn.Module, **settings: Any) -> cflat.SharpnessAware:
    base = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-2)
    return row.make(base, model=model, **settings)


def batches(num: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [batch_of(index) for index in range(num)]


def windows(items: Sequence[Any], size: int) -> list[Sequence[Any]]:
    """Cut into the micro-batches of each step; the last step may have fewer."""
    return [items[start : start + size] for start in range(0, len(items), size)]


def train(
    optimizer: cflat.SharpnessAware,
    steps: Sequence[Sequence[Any]],
    loss_of: Callable[[Any], torch.Tensor],
    *,
    divisor: int = 1,
    after_backward: Callable[[], Any] | None = None,
    scheduler: Any = None,
) -> list[float]:
    """Take one step for each list of micro-batches; return the losses of their first evaluations."""
    losses = []
    for micro_batches in steps:

        def closure(micro_batches=micro_batches) -> float:
            total = 0.0
            for micro_batch in micro_batches:
                loss = loss_of(micro_batch) / divisor
                loss.backward()
                total += loss.item()
            if after_backward is not None:
                after_backward()
            return total

        losses.append(optimizer.step(closure))
        if scheduler is not None:
            scheduler.step()
    return losses


def snapshot(model: nn.Module, optimizer: cflat.SharpnessAware) -> dict[str, Any]:
    """Return all that must be equal: weights, buffers, the optimizer's state with its counters, random numbers."""
    state = {"model": dict(model.state_dict()), "optimizer": optimizer.state_dict(), "random": torch.get_rng_state()}
    return copy.deepcopy(state)
