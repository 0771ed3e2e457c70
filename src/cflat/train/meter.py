"""What a run costs: images per second, evaluations per step by kind, memory, arithmetic."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from typing import Any, TypeVar

import torch
from pydantic import TypeAdapter
from torch.utils.flop_counter import FlopCounterMode

from cflat._settings import settings_class
from cflat.optim import Telemetry

WARMUP_STEPS = 10

T = TypeVar("T")


@settings_class
class Cost:
    """What a run has cost."""

    steps: int
    images: int
    """Images trained on, each once per step."""
    images_per_second: float
    evaluations: int
    """Forward and backward passes."""
    evaluations_per_step: float
    evaluations_by_kind: dict[str, int]
    """Outcomes of the sharpness and flatness branches, ``"sharpness.refreshed"`` and so on."""
    surrogate_error: float | None = None
    """Mean error of reused directions where it was measured; None if it never was."""
    surrogate_error_orthogonal: float | None = None
    """The part of it that is orthogonal to the reference gradient."""
    nonfinite_steps: int
    """Steps that were skipped because a gradient was Inf or NaN."""
    step_seconds: float
    """Mean time of a step, data excluded."""
    data_seconds: float
    """Mean time that a step waits for its batch."""
    peak_memory_bytes: int
    trainable_parameters: int
    """Parameters trained in the last phase."""
    total_parameters: int = 0
    """Parameters of the network in the last phase, trained and frozen."""
    flops: float
    """Estimated floating-point operations of all evaluations and preparations."""


@dataclass
class Pace:
    """Steps, and the time that they took."""

    steps: int = 0
    images: int = 0
    step_seconds: float = 0.0
    data_seconds: float = 0.0


@dataclass
class Counters:
    """Running sums over all steps of a run; part of the checkpoint."""

    all: Pace = field(default_factory=Pace)
    warm: Pace = field(default_factory=Pace)
    """Steps after the first ten: speed is measured on these alone if there are at least ten."""
    telemetry: Telemetry = field(default_factory=Telemetry)
    """The sums over the optimizers of all phases that are done."""
    flops: float = 0.0
    trainable_parameters: int = 0
    total_parameters: int = 0


class Meter:
    """Measure what a run costs: ``with meter.training()`` around what a step computes, ``meter.loading`` around data.

    Unless it is exact, work of a GPU may count towards a later stretch of time.
    """

    def __init__(
        self, device: torch.device, *, is_exact: bool = True, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.counters = Counters()
        self._clock = clock
        self._synchronizes = device.type == "cuda" and is_exact
        self._device = device

    @contextmanager
    def training(self) -> Iterator[None]:
        """Count the time inside as part of a step."""
        started = self._now()
        yield
        elapsed = self._now() - started
        for pace in self._paces():
            pace.step_seconds += elapsed

    def loading(self, batches: Iterator[T]) -> Iterator[T]:
        """Yield the batches, and count the time that they are waited for."""
        while True:
            started = self._now()
            batch = next(batches, None)  # batches are never None
            if batch is None:
                return
            elapsed = self._now() - started
            for pace in self._paces():
                pace.data_seconds += elapsed
            yield batch

    def add_step(self, num_images: int) -> None:
        """Count a completed step."""
        for pace in self._paces():
            pace.steps += 1
            pace.images += num_images

    def add_phase(self, telemetry: Telemetry, flops: tuple[float, float] | None) -> None:
        """Add an optimizer's counters when its phase ends; ``flops`` are those of a preparation and an evaluation."""
        sums, (per_step, per_evaluation) = self.counters, flops or (0.0, 0.0)
        _add(sums.telemetry, telemetry)
        sums.flops += telemetry.steps * per_step + telemetry.evaluations * per_evaluation

    def load(self, counters: Mapping[str, Any]) -> None:
        """Continue with the counters of a checkpoint."""
        self.counters = TypeAdapter(Counters).validate_python(counters)

    def summary(self) -> Cost:
        """Return what the run has cost so far."""
        sums = self.counters
        pace = sums.warm if sums.warm.steps >= WARMUP_STEPS else sums.all
        counted = sums.telemetry
        kinds = {"sharpness": counted.sharpness, "flatness": counted.flatness}
        return Cost(
            steps=sums.all.steps,
            images=sums.all.images,
            images_per_second=pace.images / pace.step_seconds if pace.step_seconds else 0.0,
            evaluations=counted.evaluations,
            evaluations_per_step=counted.evaluations_per_step,
            evaluations_by_kind={
                f"{kind}.{k}": n for kind, counter in kinds.items() for k, n in asdict(counter).items()
            },
            surrogate_error=counted.surrogate.mean,
            surrogate_error_orthogonal=counted.surrogate.mean_orthogonal,
            nonfinite_steps=counted.nonfinite,
            step_seconds=pace.step_seconds / pace.steps if pace.steps else 0.0,
            data_seconds=pace.data_seconds / pace.steps if pace.steps else 0.0,
            peak_memory_bytes=peak_memory_bytes(self._device),
            trainable_parameters=sums.trainable_parameters,
            total_parameters=sums.total_parameters,
            flops=sums.flops,
        )

    def _paces(self) -> tuple[Pace, ...]:
        sums = self.counters
        # All steps so far are completed ones: the tenth is the last that is not warm.
        return (sums.all, sums.warm) if sums.all.steps >= WARMUP_STEPS else (sums.all,)

    def _now(self) -> float:
        if self._synchronizes:  # kernels are asynchronous: their time would be charged to the next call that waits
            torch.cuda.synchronize(self._device)
        return self._clock()


def _add(sums: Any, counters: Any) -> None:
    """Add counters field by field; those inside a counter as well, and nothing that is no number."""
    for item in fields(sums):
        value = getattr(counters, item.name)
        if is_dataclass(value):
            _add(getattr(sums, item.name), value)
        elif isinstance(value, int | float):
            setattr(sums, item.name, getattr(sums, item.name) + value)


def count_flops(function: Callable[[], object]) -> float:
    """Return the floating-point operations of matrix products and convolutions while ``function`` runs."""
    with FlopCounterMode(display=False) as counter:
        function()
    return float(counter.get_total_flops())


def peak_memory_bytes(device: torch.device) -> int:
    """Return the most memory this process has used: on a GPU what was allocated there, else resident; 0 if unknown."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    try:
        import resource
    except ModuleNotFoundError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # In bytes on macOS, in KiB on Linux.
    return peak if sys.platform == "darwin" else peak * 1024
