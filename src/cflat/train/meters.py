"""What a run costs: images per second, evaluations per step by kind, memory, arithmetic."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

import torch
from torch.utils.flop_counter import FlopCounterMode

from cflat._settings import settings_class
from cflat.optim import SurrogateError, Telemetry

WARMUP_STEPS = 10


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
    shortened_steps: int = 0
    """Steps that Turbo shortened because the learning rate was too high for the curvature that it measured."""
    step_seconds: float
    """Mean time of a step, data excluded."""
    data_seconds: float
    """Mean time that a step waits for its batch."""
    peak_memory_bytes: int
    trainable_parameters: int
    """Parameters trained in the last phase."""
    flops: float
    """Estimated floating-point operations of all evaluations and preparations."""


@dataclass
class CostMeter:
    """Running sums of what `Cost` tells, over all steps of a run; survives restarts as part of the checkpoint.

    Steps after the first ten are warm: speed is measured on these alone if there are at least ten.
    """

    steps: int = 0
    images: int = 0
    step_seconds: float = 0.0
    data_seconds: float = 0.0
    warm_steps: int = 0
    warm_images: int = 0
    warm_step_seconds: float = 0.0
    warm_data_seconds: float = 0.0
    evaluations: int = 0
    nonfinite: int = 0
    shortened: int = 0
    branches: dict[str, int] = field(default_factory=dict)
    surrogate: dict[str, float] = field(default_factory=dict)
    """Number and sums of the measured surrogate errors, as in `SurrogateError`."""
    flops: float = 0.0
    trainable_parameters: int = 0

    def add_step(self, num_images: int, step_seconds: float, data_seconds: float) -> None:
        """Count one step."""
        self.steps += 1
        self.images += num_images
        self.step_seconds += step_seconds
        self.data_seconds += data_seconds
        if self.steps > WARMUP_STEPS:
            self.warm_steps += 1
            self.warm_images += num_images
            self.warm_step_seconds += step_seconds
            self.warm_data_seconds += data_seconds

    def add_phase(self, telemetry: Telemetry, flops_per_step: float, flops_per_evaluation: float) -> None:
        """Take over an optimizer's counters when its phase ends."""
        self.evaluations += telemetry.evaluations
        self.nonfinite += telemetry.nonfinite
        self.shortened += telemetry.shortened
        self.flops += telemetry.steps * flops_per_step + telemetry.evaluations * flops_per_evaluation
        for name, value in asdict(telemetry.surrogate).items():
            self.surrogate[name] = self.surrogate.get(name, 0) + value
        for branch in ("sharpness", "flatness"):
            for outcome, count in asdict(getattr(telemetry, branch)).items():
                key = f"{branch}.{outcome}"
                self.branches[key] = self.branches.get(key, 0) + count

    def add_wait(self, seconds: float) -> None:
        """Count time that belongs to the last steps: work of a device that was still under way."""
        self.step_seconds += seconds
        if self.warm_steps:
            self.warm_step_seconds += seconds

    def summary(self) -> Cost:
        """Return what the run has cost so far."""
        is_warm = self.warm_steps >= WARMUP_STEPS
        steps = self.warm_steps if is_warm else self.steps
        images = self.warm_images if is_warm else self.images
        step_seconds = self.warm_step_seconds if is_warm else self.step_seconds
        data_seconds = self.warm_data_seconds if is_warm else self.data_seconds
        surrogate = SurrogateError(**self.surrogate)  # type: ignore[arg-type]
        return Cost(
            steps=self.steps,
            images=self.images,
            images_per_second=images / step_seconds if step_seconds else 0.0,
            evaluations=self.evaluations,
            evaluations_per_step=self.evaluations / self.steps if self.steps else 0.0,
            evaluations_by_kind=dict(self.branches),
            surrogate_error=surrogate.mean,
            surrogate_error_orthogonal=surrogate.mean_orthogonal,
            nonfinite_steps=self.nonfinite,
            shortened_steps=self.shortened,
            step_seconds=step_seconds / steps if steps else 0.0,
            data_seconds=data_seconds / steps if steps else 0.0,
            peak_memory_bytes=peak_memory_bytes(),
            trainable_parameters=self.trainable_parameters,
            flops=self.flops,
        )


class StopWatch:
    """Measure laps of work on a device; unless it is exact, a GPU's work may count towards a later lap."""

    def __init__(self, device: torch.device, *, is_exact: bool = True) -> None:
        self.device = device
        self.is_exact = is_exact or device.type != "cuda"
        self._start = time.perf_counter()

    def lap(self) -> float:
        """Return the seconds since the last lap."""
        if self.is_exact and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = time.perf_counter()
        elapsed, self._start = now - self._start, now
        return elapsed


def count_flops(function: Callable[[], object]) -> float:
    """Return the floating-point operations of matrix products and convolutions while ``function`` runs."""
    with FlopCounterMode(display=False) as counter:
        function()
    return float(counter.get_total_flops())


def peak_memory_bytes() -> int:
    """Return the most memory this process has used: on the device if it has one, else resident; 0 if unknown."""
    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    try:
        import resource
    except ModuleNotFoundError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
