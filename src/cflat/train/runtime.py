"""Devices, precision and ranks; the only file that knows Lightning Fabric."""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from enum import IntEnum
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from cflat._errors import ConfigError, OtherRankFailed
from cflat._lazy import LazyModule
from cflat.data import Batch
from cflat.data.loader import seed_sequence
from cflat.nn.ranks import shared_batch
from cflat.train.settings import RuntimeSettings
from cflat.train.shards import replicate_rest_, shard_

if TYPE_CHECKING:
    from lightning_fabric import Fabric

T = TypeVar("T")

logger = logging.getLogger(__name__)
fabric = LazyModule("lightning_fabric")
PATIENCE_SECONDS = 60.0
"""A rank that takes longer than this from one step to the next logs a warning."""
_PRECISIONS = {"bf16": torch.bfloat16, "16": torch.float16}


class Runtime:
    """Where a run takes place: one process, or one of several ranks that train together.

    Under torchrun the ranks are those that it has started, and settings that contradict it raise a `ConfigError`;
    otherwise Fabric launches them.
    """

    def __init__(self, settings: RuntimeSettings | None = None) -> None:
        settings = settings or RuntimeSettings()
        if settings.threads is not None:
            torch.set_num_threads(settings.threads)
        self.settings = settings
        devices, num_nodes = count_devices(settings)
        strategy = "auto"
        self._watch = _Watch(settings.timeout_seconds)
        if devices * num_nodes > 1:
            self._watch.start()
            strategy = fabric.strategies.DDPStrategy(
                timeout=timedelta(seconds=settings.timeout_seconds),
                find_unused_parameters=settings.strategy == "ddp_find_unused_parameters_true",
            )
        self._fabric: Fabric = fabric.Fabric(
            accelerator=choose_accelerator(settings), devices=devices, num_nodes=num_nodes, strategy=strategy
        )
        self._fabric.launch()
        # The autotuner chooses kernels by their speed at the moment, and some of cuDNN's convolutions add up in the
        # order in which their threads finish: a resumed run could then end with other bits.
        torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = False, True
        self.device: torch.device = self._fabric.device
        self.rank: int = self._fabric.global_rank
        """This process among all."""
        self.world_size: int = self._fabric.world_size
        """Number of processes."""
        self.is_main = self.rank == 0
        """Whether this rank writes files and talks to the user."""
        self.is_sharded = settings.strategy == "fsdp" and self.world_size > 1
        """Whether ranks keep parts of the network: then all must run it equally often, also without gradients."""

    def place(self, module: nn.Module) -> None:
        """Bring a module to the device, in the order of channels that the settings ask for."""
        module.to(self.device)
        if self.settings.channels_last:
            # Convolutions with such weights give such outputs, whatever their inputs are.
            module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def shard(self, network: nn.Module) -> None:
        """Spread the network over the ranks if the settings ask for it; once, before anything runs it."""
        if self.is_sharded:
            shard_(network, self.device, self.world_size)

    def wrap(self, network: nn.Module) -> nn.Module:
        """Return what gradient passes must call: the network itself, or its distributed wrapper."""
        if self.world_size == 1:
            return network
        if self.is_sharded:
            replicate_rest_(network)
        wrapped: nn.Module = self._fabric.setup_module(network)
        return wrapped

    def sharing(self, batch: Batch) -> AbstractContextManager[None]:
        """Return the context in which ranks compute on their parts of a batch what one would on the whole."""
        if self.world_size == 1:
            return nullcontext()
        syncs = self.settings.sync_batchnorm
        return shared_batch(len(batch), batch.num_images, is_filler=batch.is_filler, syncs_batchnorm=syncs)

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

    # -- collectives: all ranks must call these, in the same order -------------------------------------------------

    def sum_over_ranks(self, values: Tensor) -> Tensor:
        """Return the elementwise sum over all ranks."""
        if self.world_size == 1:
            return values
        # A copy, because Fabric reduces in place.
        total = self._fabric.all_reduce(values.to(self.device, copy=True), reduce_op="sum")
        self._watch.since = time.monotonic()
        assert isinstance(total, Tensor)
        return total

    def mean_over_ranks(self, value: Tensor) -> Tensor:
        """Return the mean over all ranks, in double precision where there are several."""
        return value if self.world_size == 1 else self.sum_over_ranks(value.double()) / self.world_size

    def agree(self, *wishes: bool) -> list[bool]:
        """Return for each wish whether any rank has it."""
        if self.world_size == 1:
            return list(wishes)
        return [count > 0 for count in self.sum_over_ranks(torch.tensor(wishes, dtype=torch.int32)).tolist()]

    def gather(self, values: Tensor) -> Tensor:
        """Return the values of all ranks, (world_size, ...); they must have the same shape.

        Torch's own: Fabric's goes through a function that torch is about to remove.
        """
        if self.world_size == 1:
            return values[None]
        gathered = [torch.empty_like(values) for _ in range(self.world_size)]
        torch.distributed.all_gather(gathered, values)
        return torch.stack(gathered)

    def share(self, value: T) -> T:
        """Return what rank 0 has; must be small, and can be pickled."""
        return self._fabric.broadcast(value) if self.world_size > 1 else value

    @torch.no_grad()
    def share_state(self, module: nn.Module) -> None:
        """Give all ranks the parameters and buffers of rank 0, bit for bit.

        Fabric broadcasts by pickling; torch's own collective fills the tensors in place.
        """
        for value in module.state_dict().values() if self.world_size > 1 else ():
            if type(value) in (Tensor, nn.Parameter):  # a part of a DTensor is this rank's own
                torch.distributed.broadcast(value, src=0)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Let what fails on one rank inside, where no rank may wait for another, fail on all with the same sentence.

        It is an `OtherRankFailed` on all ranks but the first, and there if only others have failed.
        """
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            failure = error
        if self.world_size > 1:
            texts: list[str | None] = [None] * self.world_size
            # Fabric gathers tensors only.
            torch.distributed.all_gather_object(texts, None if failure is None else str(failure) or repr(failure))
            first = next((rank for rank, text in enumerate(texts) if text is not None), None)
            if first is not None and (failure is None or not self.is_main):
                raise OtherRankFailed(f"Rank {first} of {self.world_size} cannot continue: {texts[first]}") from failure
        if failure is not None:
            raise failure


class _Watch(threading.Thread):
    """Warn when a rank makes no progress: if another one has stalled, it waits until the timeout.

    Ranks sum something up after every step, and between the batches of all other passes.
    """

    def __init__(self, limit: float) -> None:
        super().__init__(name="cflat-watch", daemon=True)
        self.limit = limit
        self.patience = min(PATIENCE_SECONDS, limit / 4)
        self.since = time.monotonic()

    def run(self) -> None:
        """Check from time to time, and report each stall once."""
        reported = 0.0
        while True:
            time.sleep(self.patience / 4)
            waited, since = time.monotonic() - self.since, self.since
            if waited > self.patience and since != reported:
                reported = since
                logger.warning(
                    "Rank %s has not got on for %.0f seconds: it waits for another rank, for at most %g seconds "
                    "(runtime.timeout_seconds), or has much to compute.",
                    *(os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")), waited, self.limit),
                )


def choose_accelerator(settings: RuntimeSettings) -> str:
    """Return ``"cuda"`` or ``"cpu"``: what the settings name, or for ``auto`` CUDA if there is a device.

    Fabric's own choice would be MPS on a Mac, which has no float64: sums of losses, resampling, ridge regression and
    class statistics need it.
    """
    if settings.accelerator != "auto":
        return settings.accelerator
    return "cuda" if torch.cuda.is_available() else "cpu"


def count_devices(settings: RuntimeSettings) -> tuple[int, int]:
    """Return devices per host and hosts: those of torchrun, if it has started this process and settings agree."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_torchelastic_launched()):
        return settings.devices, settings.num_nodes
    world = int(os.environ["WORLD_SIZE"])
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    hosts = max(1, world // local)
    # 1 is the default of both: torchrun decides then.
    if settings.devices not in (1, local) or settings.num_nodes not in (1, hosts):
        raise ConfigError(
            f"torchrun has started {local} ranks on each of {hosts} hosts, but runtime.devices is {settings.devices} "
            f"and runtime.num_nodes {settings.num_nodes}; leave both out, or start as many."
        )
    return local, hosts


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

    Called with (seed, task, epoch, step, ...) before everything that draws random numbers: a resumed run needs no saved
    generator state, and every step can be repeated alone.
    """
    state = seed_sequence(key).generate_state(2, np.uint64)
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


_has_cuda = cache(torch.cuda.is_available)
