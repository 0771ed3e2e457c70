"""The trigger: is this gradient large compared with its recent past?"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class EmaTrigger:
    """Fire when a value reaches its moving mean plus a multiple of its moving dispersion.

    mu_j = d mu_{j-1} + (1 - d) x_j and sigma_j = d sigma_{j-1} + (1 - d) (x_j - mu_j)^2: first both are updated with
    the current value, then x_j >= mu_j + m sigma_j is tested (or m sqrt(sigma_j), if ``is_rooted``). Zero never
    fires: there is no direction to regularize along.

    Args:
        decay: The share d of the past, in [0, 1).
        is_rooted: Whether the dispersion is a standard deviation (scale-free) or the printed squared deviation.
    """

    decay: float
    is_rooted: bool
    # The initial values of Algorithm 1. From a mean of 0 the trigger fires on the first steps of a task (about seven
    # with the root and the default threshold), which fills Turbo's caches.
    mean: float = 0.0
    spread: float = 1e-8

    def fires(self, value: float, threshold: float) -> bool:
        """Take the value into the statistics and test it against them."""
        keep = self.decay
        self.mean = keep * self.mean + (1 - keep) * value
        self.spread = keep * self.spread + (1 - keep) * (value - self.mean) ** 2
        dispersion = self.spread**0.5 if self.is_rooted else self.spread
        return value > 0 and value >= self.mean + threshold * dispersion

    def state(self) -> dict[str, float]:
        """Return what a checkpoint must hold."""
        return {"mean": self.mean, "spread": self.spread}

    def load(self, state: dict[str, float]) -> None:
        """Take over what `state` returned."""
        self.mean, self.spread = state["mean"], state["spread"]
