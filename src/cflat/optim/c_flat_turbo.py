"""C-Flat Turbo: C-Flat at little more than one evaluation per step.

Reference: "A Faster Path to Continual Learning" (2026), Algorithm 1; symbols follow its notation table. The points
that the paper leaves open, and the rules that go beyond it, are named in `TurboRules` and explained in
docs/deviations.md. This file says what can be chosen; the algorithms are `Measured` and `Printed`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from torch import nn
from torch.optim import Optimizer

from cflat._ranges import Count, Fraction, NotNegative, Positive, Range, Share, checked
from cflat._registry import suggest
from cflat.optim._ahead import has_known_momentum
from cflat.optim._base import SharpnessAware, StepOptions
from cflat.optim._catalog import register_optimizer
from cflat.optim._passes import Direction
from cflat.optim._schedules import Radius
from cflat.optim._turbo_measured import Measured
from cflat.optim._turbo_printed import Printed
from cflat.optim._weights import Weights

__all__ = ["CFlatTurbo", "TurboRules"]


@checked
@dataclass(frozen=True)
class TurboRules:
    """What stands in for C-Flat's terms between exact computations, and when these take place.

    ``"adaptive"`` (the default) and ``"measured"`` predict the increment with coefficients that were measured out of
    sample; ``"paper"`` is the literal reading of Algorithm 1, ``"steady"`` a calibrated reading of it.

    Attributes:
        surrogate: A reused step adds a g + c |g| u with measured a and c (``"measured"``); or each branch is
            ref + beta |ref| unit(cache) (``"amplified"``), as printed, or a ref + c |ref| unit(cache) with a and c of
            the last refresh (``"calibrated"``; no beta).
        power: A measured surrogate grows with this power of |g|: 1 is in proportion; C-Flat's increments were seen to
            grow roughly with the square root.
        make_up: How many steps a refresh of a measured surrogate stands for at the most: what predictions have missed
            since the last one is added to it. 1 makes nothing up.
        keep: Share of the past in the cached direction of a measured surrogate; 0 keeps the last one alone.
        full_every: Of so many refreshes of a measured surrogate one computes the flatness term, too.
        is_guarded: Whether a measured surrogate is left out while its error is 1 or more.
        is_bounded: Whether steps are shortened where SGD would overshoot, by the curvature that refreshes of a measured
            surrogate have seen: a learning rate that is too high does not make training diverge.
        evaluations: Budget in evaluations per step of a measured surrogate; None refreshes by the interval k.
        ahead: Steps along the momentum to where a measured surrogate takes its gradients; 0 stays at the weights.
        dispersion: Sigma of the trigger is the moving ``"variance"``, as printed, or the ``"deviation"``, its root,
            which does not change with the scale of the loss.
        refresh: Caches of the printed rules are refreshed when j mod k = 0 (``"modulo"``), or when they are k or more
            steps old (``"age"``), each branch by itself.
    """

    surrogate: Literal["measured", "amplified", "calibrated"] = "amplified"
    power: Share = 1.0
    make_up: Count = 1
    keep: Fraction = 0.0
    full_every: Count = 1
    is_guarded: bool = False
    is_bounded: bool = False
    evaluations: float | None = None
    ahead: NotNegative = 0.0
    dispersion: Literal["variance", "deviation"] = "variance"
    refresh: Literal["modulo", "age"] = "modulo"

    @property
    def is_measured(self) -> bool:
        """Whether coefficients are measured, instead of printed or taken from the last refresh."""
        return self.surrogate == "measured"

    @classmethod
    def named(cls, name: str) -> TurboRules:
        """Return the rules called ``name``."""
        if name not in _NAMED_RULES:
            known = list(_NAMED_RULES)
            raise ValueError(f"rules must be one of {known} or TurboRules, got {name!r}.{suggest(str(name), known)}")
        return _NAMED_RULES[name]


_NAMED_RULES = {
    "adaptive": TurboRules(
        "measured",
        power=0.5,
        make_up=2,
        keep=0.8,
        full_every=10,
        is_guarded=True,
        is_bounded=True,
        evaluations=1.38,  # with the exact step that begins a task, 1.4 in all
        ahead=5.0,
    ),
    "measured": TurboRules("measured"),
    "steady": TurboRules("calibrated", dispersion="deviation", refresh="age"),
    "paper": TurboRules("amplified"),
}


@register_optimizer(
    "c_flat_turbo",
    title="C-Flat Turbo",
    summary="C-Flat approximated from earlier measurements, within an evaluation budget",
    evaluations="1.4, or as set",
    held=4,
    kept=1,
    paper="A Faster Path to Continual Learning (2026)",
)
class CFlatTurbo(SharpnessAware):
    """Descend along C-Flat's direction, computed on some steps and predicted on the others.

    By default most steps take one evaluation, some two, a few four: 1.4 on average or less. One gradient-sized buffer
    is kept between steps, three more are held during extra evaluations. ``telemetry.surrogate`` says how far the
    predictions were from C-Flat.

    Args:
        base: Any torch optimizer; its groups and schedules stay in charge of the update.
        model: The module whose buffers extra evaluations must leave alone; optional.
        rho: Radius of the neighbourhood; above 0, or a schedule.
        rho_fd: Step of the finite difference in g_f (rho'); None means ``rho``.
        lam: Weight of the flatness term; at least 0.
        evaluations: Budget in evaluations per step, above 1 and at most 4; predictions that are good enough make it
            cost less. None uses the default of the rules: 1.38 for ``"adaptive"``; with the others, refreshes follow
            ``k``.
        ahead: Take all gradients at the weights to which this many further steps along the momentum of ``base`` would
            lead, but no farther than a tenth of the length of the weights; at least 0. None is the default of the
            rules: 5 for ``"adaptive"`` if ``base`` has momentum and is torch's SGD or Adam (or derives from them), 0
            otherwise. With ``k=1`` Turbo is C-Flat and takes 0.
        k: Steps from one refresh to the next in the first task, at least 1, instead of a budget; None is 5.
        k_growth: How much k grows over the whole stream (c of the appendix); at least 0.
        schedule: Whether k grows with the tasks; False refreshes every k steps throughout.
        rules: ``"adaptive"``, ``"measured"``, ``"steady"``, ``"paper"`` or a `TurboRules`.
        beta: Length of a reused component relative to its reference gradient; at least 0. Printed rules only.
        trigger: Whether to skip branches whose gradient is not large; None is True for the printed rules, which alone
            have a trigger.
        threshold: How many dispersions above its mean |g|^2 must lie to trigger (m); at least 0.
        decay: Decay of the trigger's moving statistics (delta), in [0, 1).
        options: How steps are taken; see `StepOptions`.

    >>> import torch
    >>> model = torch.nn.Linear(2, 1)
    >>> opt = CFlatTurbo(torch.optim.SGD(model.parameters(), lr=0.1), model=model, rho=0.05)
    >>> opt.evaluations
    1.38
    >>> opt = CFlatTurbo(torch.optim.SGD(model.parameters(), lr=0.1), model=model, rho=0.05, k=5)
    >>> opt.start_task(3, num_tasks=10)
    >>> opt.interval
    8
    """

    def __init__(
        self,
        base: Optimizer,
        *,
        model: nn.Module | None = None,
        rho: Radius = 0.05,
        rho_fd: Positive | None = None,
        lam: NotNegative = 0.2,
        evaluations: Annotated[float, Range(above=1, at_most=4)] | None = None,
        ahead: NotNegative | None = None,
        k: Count | None = None,
        k_growth: NotNegative = 10.0,
        schedule: bool = True,
        rules: str | TurboRules = "adaptive",
        beta: NotNegative = 0.8,
        trigger: bool | None = None,
        threshold: NotNegative = 1.0,
        decay: Fraction = 0.9,
        options: StepOptions | None = None,
    ) -> None:
        super().__init__(base, model=model, rho=rho, options=options)
        self.rules = rules if isinstance(rules, TurboRules) else TurboRules.named(rules)
        self._check_rules(evaluations, k, schedule, trigger)
        self.ahead = self._steps_ahead(ahead)
        self.rho_fd, self.lam = rho_fd, lam
        self.k, self.k_growth, self.schedule = 5 if k is None else k, k_growth, schedule
        follows_k = k is not None or not schedule
        self.evaluations = evaluations if evaluations is not None or follows_k else self.rules.evaluations
        self.threshold, self.trigger = threshold, not self.rules.is_measured and trigger is not False
        self.decay, self.beta = decay, beta
        self.interval = self.k
        self._rule = self._new_rule()

    def direction(self, weights: Weights) -> Direction:
        """Return C-Flat's direction, or what the rules put in its place."""
        return self._rule.direction(weights)

    def start_task(self, index: int, num_tasks: int | None = None) -> None:
        """Begin a task: reset caches and statistics, and set k_t = floor(k + k_growth * t / N)."""
        super().start_task(index, num_tasks)
        self._rule = self._new_rule()
        self.interval = self.k
        if self.schedule and num_tasks is not None:
            self.interval += math.floor(self.k_growth * index / num_tasks + 1e-9)  # 1e-9: 7.0 may come out as 6.99...

    @property
    def looks_ahead(self) -> bool:
        """Whether the first gradient of a step is not taken where the step begins; exact C-Flat takes it there."""
        return self.ahead > 0 and not self.is_exact

    @property
    def is_exact(self) -> bool:
        """Whether every step is C-Flat's, by interval or by budget."""
        return self.refreshes_always or (self.evaluations is not None and self.evaluations >= 4)

    @property
    def refreshes_always(self) -> bool:
        """Whether every step is exact, so that nothing need be kept: this is C-Flat."""
        return self.evaluations is None and self.interval == 1

    @property
    def finite_step(self) -> float:
        """The step rho' of the finite difference in g_f."""
        return self.rho if self.rho_fd is None else self.rho_fd

    @property
    def flatness_ratio(self) -> float:
        """The factor rho / rho' of g_f; a schedule may end at rho = 0."""
        return 1.0 if self.rho_fd is None else self.rho / self.rho_fd

    def cache_age(self) -> dict[str, int]:
        """Return the steps since each branch was computed exactly, for those that are cached."""
        return self._rule.cache_age()

    def extra_state(self) -> dict[str, Any]:
        """Return interval, statistics, coefficients and ages."""
        return {"interval": self.interval, **self._rule.state()}

    def load_extra_state(self, state: dict[str, Any]) -> None:
        """Take over interval, statistics, coefficients and ages."""
        own = dict(state)
        is_measured = "along" in own
        if is_measured != self.rules.is_measured:
            theirs = "'adaptive' or 'measured'" if is_measured else "'paper' or 'steady'"
            raise ValueError(f"This state was saved under the rules {theirs}; make the optimizer with the same.")
        self.interval = own.pop("interval")
        self._rule.load(own)

    def _new_rule(self) -> Measured | Printed:
        return Measured(self) if self.rules.is_measured else Printed(self)

    def _check_rules(self, evaluations: float | None, k: int | None, schedule: bool, trigger: bool | None) -> None:
        if evaluations is not None and (k is not None or not schedule):
            other = "k" if k is not None else "schedule=False"
            raise ValueError(f"evaluations is a budget and {other} fixes the intervals; give one of them.")
        if evaluations is not None and not self.rules.is_measured:
            raise ValueError("evaluations needs rules that can keep a budget: 'adaptive' or 'measured'; use k instead.")
        if trigger and self.rules.is_measured:
            raise ValueError("trigger belongs to the rules 'paper' and 'steady'; measured rules have none.")

    def _steps_ahead(self, wanted: float | None) -> float:
        if wanted is None:
            return self.rules.ahead if has_known_momentum(self.base) else 0.0
        if wanted > 0 and not self.rules.is_measured:
            raise ValueError("ahead belongs to the rules 'adaptive' and 'measured'; leave it out, or choose these.")
        if wanted > 0 and not has_known_momentum(self.base):
            raise ValueError(
                f"ahead follows the momentum of torch's SGD or Adam, and this {type(self.base).__name__} has none that "
                "is known. Give it momentum, or leave ahead out."
            )
        return wanted
