"""Counters that let a user verify what an optimizer really did and what it cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

Branch = Literal["sharpness", "flatness"]
Outcome = Literal["refreshed", "reused", "skipped"]


@dataclass
class BranchCounter:
    """How often one regularization branch was computed exactly, taken from its cache, or left out."""

    refreshed: int = 0
    reused: int = 0
    skipped: int = 0


@dataclass
class SurrogateError:
    """How far a cached surrogate was from what it stands for, wherever a refresh told.

    e = |d^ - d| / |d|, where d is the exact increment over the gradient and d^ its surrogate. Plain training has e = 1
    by definition: a rule with e >= 1 is farther from C-Flat than doing nothing.
    """

    count: int = 0
    total: float = 0.0
    total_orthogonal: float = 0.0

    def add(self, error: float, orthogonal: float) -> None:
        """Take one measurement into the means."""
        self.count += 1
        self.total += error
        self.total_orthogonal += orthogonal

    @property
    def mean(self) -> float | None:
        """Mean of e; None before the first measurement."""
        return self.total / self.count if self.count else None

    @property
    def mean_orthogonal(self) -> float | None:
        """Mean of e of the parts orthogonal to the gradient, which are no mere change of the learning rate."""
        return self.total_orthogonal / self.count if self.count else None


@dataclass
class Telemetry:
    """What an optimizer has done since it was made; part of its ``state_dict``.

    Attributes:
        steps: Completed steps, skipped ones included.
        evaluations: Forward and backward passes that these steps took.
        sharpness: Outcomes of the zeroth-order branch (g_s).
        flatness: Outcomes of the first-order branch (g_f).
        surrogate: Error of forecasts or cached components, measured at refreshes; Turbo measures its sharpness branch.
        nonfinite: Steps that were skipped because a gradient was Inf or NaN.
        cache_age: For each cached branch, the steps since it was computed exactly.
        last: Norms and decisions of the last completed step.
    """

    steps: int = 0
    evaluations: int = 0
    sharpness: BranchCounter = field(default_factory=BranchCounter)
    flatness: BranchCounter = field(default_factory=BranchCounter)
    surrogate: SurrogateError = field(default_factory=SurrogateError)
    nonfinite: int = 0
    cache_age: dict[str, int] = field(default_factory=dict)
    last: dict[str, Any] = field(default_factory=dict)

    @property
    def evaluations_per_step(self) -> float:
        """Mean number of evaluations per completed step; 0 before the first."""
        return self.evaluations / self.steps if self.steps else 0.0

    def add_step(self, num_evaluations: int, noted: Mapping[str, Any] | None) -> None:
        """Count a step with what it has noted; None counts one that was skipped because it was not finite.

        Counted are outcomes of branches and ``error`` and ``error_orthogonal`` of a surrogate; everything is in
        ``last``.
        """
        self.steps += 1
        self.evaluations += num_evaluations
        if noted is None:
            self.nonfinite += 1
            self.last = {"evaluations": num_evaluations, "nonfinite": True}
            return
        for branch in get_args(Branch):
            if branch in noted:
                counter, outcome = getattr(self, branch), noted[branch]
                setattr(counter, outcome, getattr(counter, outcome) + 1)
        if "error" in noted:
            self.surrogate.add(noted["error"], noted["error_orthogonal"])
        self.last = {"evaluations": num_evaluations, **noted}

    def as_dict(self) -> dict[str, Any]:
        """Return all counters as plain numbers, for logs and checkpoints."""
        return {**asdict(self), "evaluations_per_step": self.evaluations_per_step}

    def load(self, values: dict[str, Any]) -> None:
        """Take over the counters that `as_dict` returned."""
        self.steps, self.evaluations = values["steps"], values["evaluations"]
        self.sharpness = BranchCounter(**values["sharpness"])
        self.flatness = BranchCounter(**values["flatness"])
        self.surrogate = SurrogateError(**values["surrogate"])
        self.nonfinite, self.cache_age = values["nonfinite"], dict(values["cache_age"])
        self.last = dict(values["last"])
