"""Devices, precision and ranks; the only file that knows Lightning Fabric."""

from __future__ import annotations

import random
from contextlib import AbstractContextManager, nullcontext
from enum import IntEnum
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from cflat._lazy import LazyModule
from cflat.train.settings import RuntimeSettings

if TYPE_CHECKING:
    from lightning_fabric import Fabric

__all__ = ["Part", "Runtime", "seed_everything"]

fabric = LazyModule("lightning_fabric")
_PRECISIONS = {"bf16": torch.bfloat16, "16": torch.float16}


class Runtime:
    """Where a run takes place: one process, or one of several ranks that train together.

    Started by torchrun, or with more than one device, Fabric finds or launches the other ranks.

    Args:
        settings: Devices, precision and threads.
    """

    def __init__(self, settings: RuntimeSettings | None = None) -> None:
        settings = settings or RuntimeSettings()
        if settings.threads is not None:
            torch.set_num_threads(settings.threads)
        self.settings = settings
        self._fabric: Fabric = fabric.Fabric(
            accelerator=settings.accelerator,
            devices=settings.devices,
            num_nodes=settings.num_nodes,
            strategy=settings.strategy,
        )
        self._fabric.launch()
        torch.backends.cudnn.benchmark = False

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return self._fabric.device

    @property
    def rank(self) -> int:
        """This process among all."""
        return self._fabric.global_rank

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self._fabric.world_size

    @property
    def is_main(self) -> bool:
        """Whether this rank writes files and talks to the user."""
        return self.rank == 0

    def wrap(self, network: nn.Module) -> nn.Module:
        """Return what gradient passes must call: the network itself, or its distributed wrapper."""
        if self.world_size == 1:
            return network
        wrapped: nn.Module = self._fabric.setup_module(network)
        return wrapped

    def gradient_sync(self, model: nn.Module, *, enabled: bool) -> AbstractContextManager[Any]:
        """Return the context of a pass whose gradients all ranks average, or keep until one that is enabled."""
        if enabled or self.world_size == 1:
            return nullcontext()
        wrapped: Any = model  # what `wrap` returned
        return self._fabric.no_backward_sync(wrapped)

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the precision context of forward passes."""
        dtype = _PRECISIONS.get(self.settings.precision)
        return nullcontext() if dtype is None else torch.autocast(self.device.type, dtype=dtype)

    def make_scaler(self) -> torch.amp.GradScaler | None:
        """Return a loss scaler if the precision needs one."""
        return torch.amp.GradScaler(self.device.type) if self.settings.precision == "16" else None

    def sum_over_ranks(self, values: Tensor) -> Tensor:
        """Return the elementwise sum over all ranks."""
        if self.world_size == 1:
            return values
        total = self._fabric.all_reduce(values.to(self.device), reduce_op="sum")
        assert isinstance(total, Tensor)
        return total


class Part(IntEnum):
    """Keys that keep the random numbers of the different parts of a run apart; the numbers must never change."""

    GROW = 0
    START = 1
    STEP = 2
    FINISH = 3
    EVALUATE = 4
    BUILD = 5


def seed_everything(*key: int) -> None:
    """Set all global generators as a pure function of ``key``.

    Called with (seed, task, epoch, step, ...) before everything that draws random numbers, so that a resumed run needs
    no saved generator state and every step can be repeated alone.
    """
    state = np.random.SeedSequence(key).generate_state(2, np.uint64)
    _seed_torch(int(state[0]))
    np.random.seed(int(state[1] % 2**32))
    random.seed(int(state[1]))


def _seed_torch(seed: int) -> None:
    """Do as ``torch.manual_seed`` for the devices that are there.

    For devices that are not, torch notes each call with its stack for later: a third of the time of a small step, and
    a list that only grows.
    """
    torch.default_generator.manual_seed(seed)
    if _has_cuda():
        torch.cuda.manual_seed_all(seed)
    if _has_mps():
        torch.mps.manual_seed(seed)


_has_cuda, _has_mps = cache(torch.cuda.is_available), cache(torch.backends.mps.is_available)
