"""Does flatness change the update here, at which radius, and at what cost? A few dozen steps show it.

A `Probe` rides along an ordinary training run. In each step it asks shadows of the optimizers for their directions at
the same weights and batch, and compares them with the plain gradient and with exact C-Flat.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from cflat._ranges import Count, CountOrZero, check, checked
from cflat.analysis.recorder import GradientRecorder
from cflat.analysis.shadow import Shadow
from cflat.optim.engine import EPS, Vector, dot

__all__ = ["RADII", "Probe", "ProbeResult", "ProbeRow", "Stability", "probe"]

RADII = (0.01, 0.05, 0.2, 0.5)
EXACT = "C-Flat"
LASTING = 0.5
"""Cosine of a cached direction with the present one from which on reuse approximates C-Flat."""
OURS = "Forecast"
VISIBLE, DESTRUCTIVE = 0.98, 0.5
"""Cosines with the plain gradient: above the first flatness changes next to nothing, below the second nearly all."""


@dataclass(frozen=True)
class ProbeRow:
    """One optimizer at one radius, means over the probed steps."""

    rho: float
    optimizer: str
    evaluations_per_step: float
    cosine_plain: float
    """Cosine of its update with the plain gradient."""
    norm_ratio: float
    """Its norm over that of the plain gradient."""
    cosine_exact: float
    """Cosine with exact C-Flat at this radius."""
    error_exact: float
    """|update - exact| / |exact|; for the rows "reuse only" over steps that reuse."""
    surrogate_error: float
    """|d^ - d| / |d|, over all steps: d is what C-Flat adds to the gradient, d^ what this row adds. Plain: 1."""
    surrogate_error_orthogonal: float
    """The same for the parts orthogonal to the gradient, which are no mere change of the learning rate."""
    sharpness_rate: float
    """Fraction of steps in which the sharpness branch was on; NaN for optimizers without one."""
    flatness_rate: float


@dataclass(frozen=True)
class Stability:
    """How far C-Flat's vectors turn within one interval k at one radius: mean cosines with k steps earlier."""

    rho: float
    interval: int
    cosines: dict[str, float]


@dataclass(frozen=True)
class ProbeResult:
    """Everything a probe has found, and what it means in words."""

    steps: int
    rows: list[ProbeRow]
    stability: list[Stability]
    verdict: str
    """Whether flatness changes the update at the first radius, in one sentence."""
    remarks: list[str]
    """A sentence each on reuse and on approximations of C-Flat."""
    suggested_rho: float | None
    """The radius to try; None if none of those tried is worth it."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)

    def row(self, rho: float, optimizer: str) -> ProbeRow:
        """Return one row of the table."""
        return next(row for row in self.rows if row.rho == rho and row.optimizer == optimizer)


class Probe:
    """Compare the directions of optimizers along a training run; `look` before each of its steps.

    Costs about 18 evaluations per radius and step. Holds the caches of Turbo and the recorder for each radius.

    Args:
        params: The parameters that are trained.
        model: The module whose buffers must be left alone; optional.
        radii: The radii to try; the first is the one that the verdict is about.
        lam: Weight of the flatness term.
        beta: Norm of Turbo's printed surrogate, relative to the gradient's.
        k: Turbo's interval.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        model: nn.Module | None = None,
        *,
        radii: Sequence[float] = RADII,
        lam: float = 0.2,
        beta: float = 0.8,
        k: int = 5,
    ) -> None:
        if not radii:
            raise ValueError("radii must hold at least one radius, got none.")
        for rho in radii:
            check("radii", rho, above=0)
        params = list(params)
        self.interval = k
        self._plain = Shadow("none", params, model)
        # Without repetitions but in the caller's order: the verdict is about the first.
        self._lanes = [_Lane(rho, params, model, lam, beta, k) for rho in dict.fromkeys(radii)]
        self.steps = 0

    def look(self, closure: Callable[[], Any]) -> bool:
        """Look at one step; False if its gradient is Inf, NaN or zero, so that there was nothing to compare."""
        g = self._plain.look(closure)
        if g is None or not g.tensors or g.norm == 0:  # no direction to compare with
            return False
        for lane in self._lanes:
            lane.look(closure, g)
        self.steps += 1
        return True

    def result(self) -> ProbeResult:
        """Return what was found so far.

        Raises:
            ValueError: If no step could be compared.
        """
        if self.steps == 0:
            raise ValueError("The probe has seen no step with a finite gradient. Train for at least one step.")
        rows = [row for lane in self._lanes for row in lane.rows()]
        stability = [lane.stability(self.interval) for lane in self._lanes]
        exact = {row.rho: row.cosine_plain for row in rows if row.optimizer == EXACT}
        verdict, suggested = _judge(exact, first=self._lanes[0].rho)
        first = [row for row in rows if row.rho == self._lanes[0].rho]
        remarks = [text for text in (_judge_reuse(stability[0]), _judge_surrogates(first)) if text]
        return ProbeResult(self.steps, rows, stability, verdict, remarks, suggested)


@checked
def probe(
    model: nn.Module,
    loss: Callable[[nn.Module, Any], Tensor],
    loader: Iterable[Any],
    base: Optimizer,
    *,
    steps: Count = 24,
    warmup: CountOrZero = 0,
    radii: Sequence[float] = RADII,
    lam: float = 0.2,
    beta: float = 0.8,
    k: int = 5,
) -> ProbeResult:
    """Probe any model: train it with ``base`` for a few steps and look at what flatness would change.

    Args:
        model: Is trained, so pass a copy if you want to keep it as it is.
        loss: Computes the scalar loss of the model on a batch.
        loader: Yields batches; is started again when it ends.
        base: The plain optimizer that moves the weights.
        steps: Steps to look at.
        warmup: Steps to train before.
        radii: As in `Probe`, like all that follow.
        lam: Weight of the flatness term.
        beta: Norm of Turbo's printed surrogate, relative to the gradient's.
        k: Turbo's interval.

    >>> import torch
    >>> model = torch.nn.Linear(4, 3)
    >>> batches = [(torch.randn(8, 4), torch.randint(0, 3, (8,))) for _ in range(4)]
    >>> loss = lambda model, batch: torch.nn.functional.cross_entropy(model(batch[0]), batch[1])
    >>> found = probe(model, loss, batches, torch.optim.SGD(model.parameters(), lr=0.1), steps=6, radii=[0.05])
    >>> found.steps
    6
    """
    params = [param for group in base.param_groups for param in group["params"]]
    watched = Probe(params, model, radii=radii, lam=lam, beta=beta, k=k)
    for index, batch in zip(range(warmup + steps), _endless(loader), strict=False):

        def closure(batch: Any = batch) -> Tensor:
            value = loss(model, batch)
            value.backward()  # type: ignore[no-untyped-call]
            return value

        if index >= warmup:
            watched.look(closure)
        base.zero_grad()  # those of the last step, which `look` has put back
        with torch.enable_grad():
            closure()
        base.step()
    return watched.result()


class _Lane:
    """All contenders at one radius."""

    def __init__(
        self, rho: float, params: list[Tensor], model: nn.Module | None, lam: float, beta: float, k: int
    ) -> None:
        turbo: dict[str, Any] = {"rho": rho, "lam": lam, "beta": beta, "k": k, "schedule": False}
        reuse = {**turbo, "trigger": False}
        self.rho = rho
        self.shadows = {
            EXACT: Shadow("c_flat", params, model, rho=rho, lam=lam),
            "SAM": Shadow("sam", params, model, rho=rho),
            "LookSAM": Shadow("looksam", params, model, rho=rho, k=k),
            OURS: Shadow("c_flat_forecast", params, model, rho=rho, lam=lam),
            "Turbo": Shadow("c_flat_turbo", params, model, **turbo),
            "Turbo calibrated": Shadow("c_flat_turbo", params, model, reading="calibrated", **turbo),
            "reuse only": Shadow("c_flat_turbo", params, model, **reuse),
            "reuse only, consistent": Shadow("c_flat_turbo", params, model, reading="consistent", **reuse),
            "reuse only, calibrated": Shadow("c_flat_turbo", params, model, reading="calibrated", **reuse),
        }
        self.seen: dict[str, list[tuple[float, ...]]] = {name: [] for name in self.shadows}
        # As far apart as two refreshes of Turbo: that is how long a cached direction has to last.
        self.recorder = GradientRecorder(every=k, lag=k)
        self.recorder.attach(self.shadows[EXACT].optimizer)

    def look(self, closure: Callable[[], Any], g: Vector) -> None:
        exact = self.shadows[EXACT].look(closure)
        if exact is None:
            return
        d = exact.minus(g)  # what C-Flat adds to the gradient
        norms = d.norm, _norm_across(d, g)
        for name, shadow in self.shadows.items():
            direction = exact if name == EXACT else shadow.look(closure)
            if direction is None:
                continue
            difference = direction.minus(exact)
            # A row about reuse would look better than it is if its exact steps counted.
            counts_error = "reuse" not in name or shadow.optimizer.telemetry.last.get("sharpness") == "reused"
            error = difference.norm / (exact.norm + EPS) if counts_error else math.nan
            errors = _surrogate_errors(difference, g, *norms)
            numbers = (_cosine(direction, g), direction.norm / g.norm, _cosine(direction, exact), error, *errors)
            self.seen[name].append(numbers)

    def rows(self) -> list[ProbeRow]:
        """Return one row for each optimizer that had a step to compare."""
        rows = []
        for name, seen in self.seen.items():
            if seen:
                counters = self.shadows[name].optimizer.telemetry
                means = [_mean(column) for column in zip(*seen, strict=True)]
                rates = [_rate_on(branch) for branch in (counters.sharpness, counters.flatness)]
                rows.append(ProbeRow(self.rho, name, counters.evaluations_per_step, *means, *rates))
        return rows

    def stability(self, interval: int) -> Stability:
        """Return how far the vectors turn from one exact computation to the next."""
        turns = [record.turns for record in self.recorder.records if record.turns]
        names = ("g", "g_0", "g_vs", "g_vf")
        means = {name: statistics.fmean(turn[name] for turn in turns) if turns else math.nan for name in names}
        return Stability(self.rho, interval, means)


def _rate_on(branch: Any) -> float:
    """Return the fraction of steps in which a branch was not skipped."""
    total = branch.refreshed + branch.reused + branch.skipped
    return 1 - branch.skipped / total if total else math.nan


def _judge(cosines: dict[float, float], first: float) -> tuple[str, float | None]:
    """Say in words what the cosine of C-Flat with the plain gradient means at each radius."""
    useful = [rho for rho, value in cosines.items() if DESTRUCTIVE <= value <= VISIBLE]
    if first not in cosines:
        at = f"At rho = {first:g} exact C-Flat met Inf or NaN in every step: this radius is too large."
        smaller = [rho for rho in useful if rho < first]
        return (f"{at} Try rho = {min(smaller):g}.", min(smaller)) if smaller else (at, None)
    cosine = cosines[first]
    change = _change(cosine)
    at = f"At rho = {first:g} exact C-Flat has cosine {cosine:.3f} with the plain gradient, a turn by {change:.0%}"
    if first in useful:
        return f"{at}: flatness changes the update at this radius.", first
    if cosine < DESTRUCTIVE:
        at += ": the perturbation overrides the gradient, this radius is too large."
        useful = [rho for rho in useful if rho < first]
    else:
        at += ": flatness changes next to nothing here, plain training would do the same for less."
        useful = [rho for rho in useful if rho > first]
    if useful:
        return f"{at} Try rho = {min(useful):g}.", min(useful)
    if cosine > VISIBLE and change > 1e-6:  # the turn grows about linearly with a small radius
        rho = float(f"{first * _change(VISIBLE) / change:.1g}")
        return f"{at} No tried radius is in the useful range; extrapolated, rho = {rho:g} would be.", rho
    return f"{at} No tried radius is in the useful range.", None


def _judge_reuse(stability: Stability) -> str:
    """Say whether a cached direction still means something when it is used for the last time."""
    kept = [stability.cosines[name] for name in ("g_vs", "g_vf")]
    if any(math.isnan(value) for value in kept):
        return ""
    numbers = f"cosines {kept[0]:.2f} (g_vs) and {kept[1]:.2f} (g_vf) after {stability.interval} steps"
    if min(kept) >= LASTING:
        return f"Cached directions last: {numbers}."
    return f"Cached directions do not last, {numbers}: reuse is a regularizer here, not an approximation of C-Flat."


def _judge_surrogates(rows: Sequence[ProbeRow]) -> str:
    """Say which approximations are nearer to C-Flat than plain training, and which are not."""
    judged = [row for row in rows if row.optimizer not in (EXACT, "SAM") and not math.isnan(row.surrogate_error)]
    own = next((row for row in judged if row.optimizer == OURS), None)
    if own is None:
        return ""
    farther = [row for row in judged if row.surrogate_error >= 1]
    text = (
        f"What Forecast adds to the gradient is {own.surrogate_error:.2f} of C-Flat's increment away from it at "
        f"{own.evaluations_per_step:.2f} evaluations per step; plain training has 1."
    )
    names = ", ".join(f"{row.optimizer} ({row.surrogate_error:.2f})" for row in farther)
    return f"{text} Farther than plain training: {names}." if farther else text


def _change(cosine: float) -> float:
    """The distance of two unit vectors."""
    return math.sqrt(max(0.0, 2 - 2 * cosine))


def _surrogate_errors(difference: Vector, g: Vector, norm: float, norm_across: float) -> tuple[float, float]:
    """Return |d^ - d| / |d|, where ``difference`` is d^ - d, and the same across g; NaN where C-Flat adds nothing."""
    if norm == 0:
        return math.nan, math.nan
    return difference.norm / norm, _norm_across(difference, g) / norm_across if norm_across > EPS * norm else math.nan


def _norm_across(vector: Vector, g: Vector) -> float:
    """Return the norm of the part that is orthogonal to g."""
    return vector.clone().remove_along_(g, float(dot(vector, g))).norm


def _cosine(left: Vector, right: Vector) -> float:
    return float(dot(left, right)) / max(left.norm * right.norm, EPS**2)


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return statistics.fmean(known) if known else math.nan


def _endless(loader: Iterable[Any]) -> Iterable[Any]:
    # Not itertools.cycle: a loader that shuffles draws a new order on every pass, and an empty one must end.
    is_empty = False
    while not is_empty:
        is_empty = True
        for batch in loader:
            is_empty = False
            yield batch
