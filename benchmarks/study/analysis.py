"""From final runs to verdicts. Frozen: the rule is the same in both directions, and was fixed before the first run.

On a stream the effect of a contrast is the mean difference over replicates. Over streams it is a random-effects mean:
between-stream variance after Paule and Mandel, interval and p-value after Hartung and Knapp with their variance never
below the one without correction. Holm's procedure over the contrasts of a family gives each contrast its level, at
which its interval is taken and its verdict reached. A contrast with missing runs counts as p = 1: it can only
make the others' levels stricter, so that a verdict that was given stays.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from benchmarks.study.definition import (
    BLOCK_OF,
    BLOCKS,
    CONTRASTS,
    CONVERGED_LOSS,
    LEVEL,
    MARGIN,
    METRIC,
    POSITIVE_FRACTION,
    SPEED_FACTOR,
    SPEED_LIMITED,
    STOPPED_FALLING,
    TUNED_BLOCKS,
    Claim,
    Contrast,
)
from scipy.optimize import brentq
from scipy.stats import spearmanr
from scipy.stats import t as student

NOT_YET = "not yet decided"
UNDECIDED = "undecided here"
_LEAST_VARIANCE = 1e-8
"""In squared points: differences that are all equal would otherwise weigh infinitely much."""


class FinalRun(Protocol):
    """What is needed of a line of the ledger."""

    stream: str
    row: str
    replicate: int
    stage: str
    machine: str
    avg: float
    last: float
    end_loss: float
    late_loss: float
    evaluations_per_step: float


Finals = Mapping[int, Mapping[str, FinalRun]]
"""Final runs of a stream by replicate and row."""


def final_runs(lines: Sequence[FinalRun], stream: str) -> Finals:
    """Return the final runs of a stream: of each replicate, those of the kind of machine that has run most rows."""
    groups: dict[int, dict[str, dict[str, FinalRun]]] = {}
    for line in lines:
        if line.stream == stream and line.stage == "final":
            groups.setdefault(line.replicate, {}).setdefault(line.machine, {})[line.row] = line
    return {
        replicate: max(sorted(machines.items()), key=lambda item: len(item[1]))[1]
        for replicate, machines in sorted(groups.items())
    }


def differences(finals: Finals, contrast: Contrast, metric: str = METRIC) -> list[float]:
    """Return the differences in points, replicate by replicate, where both rows were run."""
    return [
        100 * (getattr(rows[contrast.row], metric) - getattr(rows[contrast.reference], metric))
        for rows in finals.values()
        if contrast.row in rows and contrast.reference in rows
    ]


def row_means(finals: Finals, metric: str) -> dict[str, float]:
    """Return the mean of a number over replicates, by row."""
    names = dict.fromkeys(row for rows in finals.values() for row in rows)
    return {
        name: statistics.fmean(getattr(rows[name], metric) for rows in finals.values() if name in rows)
        for name in names
    }


@dataclass(frozen=True)
class Effect:
    """A mean difference in points, with its standard error."""

    mean: float
    error: float
    df: int
    n: int
    """Replicates of one stream, or streams."""

    def interval(self, level: float = LEVEL) -> tuple[float, float]:
        half = float(student.ppf(1 - level / 2, self.df)) * self.error if self.df > 0 else math.inf
        return self.mean - half, self.mean + half

    @property
    def p(self) -> float:
        if self.df < 1:
            return 1.0
        return float(2 * student.sf(abs(self.mean) / self.error, self.df))


@dataclass(frozen=True)
class Verdict:
    """What a contrast has come to."""

    text: str
    effect: Effect | None
    """Over the streams that decide; None without two of them."""
    level: float
    """Of the contrast in Holm's order."""
    streams: Mapping[str, Effect]
    """Of every stream with at least two pairs, also of those that do not decide."""
    left_out: tuple[str, ...] = ()
    """Speed-limited streams, if the contrast is about flatness."""


def stream_effect(differences: Sequence[float]) -> Effect | None:
    """Return the effect on one stream, from differences in points; None for fewer than two."""
    n = len(differences)
    if n < 2:
        return None
    variance = max(statistics.variance(differences), _LEAST_VARIANCE)
    return Effect(statistics.fmean(differences), math.sqrt(variance / n), n - 1, n)


def random_effects(effects: Sequence[Effect]) -> Effect | None:
    """Return the mean over streams; None for fewer than two.

    >>> both = random_effects([Effect(1.0, 0.5, 23, 24), Effect(1.0, 0.5, 23, 24)])
    >>> round(both.mean, 6), round(both.error, 6), both.df
    (1.0, 0.353553, 1)
    """
    k = len(effects)
    if k < 2:
        return None

    def weights(between: float) -> list[float]:
        return [1 / (effect.error**2 + between) for effect in effects]

    def mean(own: Sequence[float]) -> float:
        return sum(w * e.mean for w, e in zip(own, effects, strict=True)) / sum(own)

    def excess(between: float) -> float:
        own = weights(between)
        center = mean(own)
        return sum(w * (e.mean - center) ** 2 for w, e in zip(own, effects, strict=True)) - (k - 1)

    spread = (max(e.mean for e in effects) - min(e.mean for e in effects)) ** 2 * k + 1.0
    between = float(brentq(excess, 0.0, spread)) if excess(0.0) > 0 else 0.0
    own = weights(between)
    center = mean(own)
    scale = sum(w * (e.mean - center) ** 2 for w, e in zip(own, effects, strict=True)) / (k - 1)
    return Effect(center, math.sqrt(max(scale, 1.0) / sum(own)), k - 1, k)


def holm_levels(p_values: Sequence[float]) -> list[tuple[float, bool]]:
    """Return the level of each test in Holm's order, and whether it is rejected there.

    >>> holm_levels([0.04, 0.01, 0.03])
    [(0.05, False), (0.016666666666666666, True), (0.025, False)]
    """
    count, is_open = len(p_values), True
    found: list[tuple[float, bool]] = [(LEVEL, False)] * count
    for rank, index in enumerate(sorted(range(count), key=lambda one: p_values[one])):
        level = LEVEL / (count - rank)
        is_open = is_open and p_values[index] <= level
        found[index] = (level, is_open)
    return found


@dataclass(frozen=True)
class Evidence:
    """What is known of a contrast before the family is looked at."""

    streams: Mapping[str, Effect]
    left_out: tuple[str, ...]
    is_complete: bool

    @property
    def deciding(self) -> list[Effect]:
        return [effect for stream, effect in self.streams.items() if stream not in self.left_out]

    @property
    def pooled(self) -> Effect | None:
        return random_effects(self.deciding)


def decide_family(family: Sequence[Evidence]) -> list[Verdict]:
    """Return the verdict of each contrast of a family."""
    pooled = [evidence.pooled for evidence in family]
    is_ready = [evidence.is_complete and effect is not None for evidence, effect in zip(family, pooled, strict=True)]
    p_values = [
        effect.p if ready and effect is not None else 1.0 for effect, ready in zip(pooled, is_ready, strict=True)
    ]
    verdicts = []
    for evidence, effect, ready, (level, is_rejected) in zip(
        family, pooled, is_ready, holm_levels(p_values), strict=True
    ):
        if not evidence.is_complete:
            text = NOT_YET
        elif not ready or effect is None:
            text = UNDECIDED
        else:
            text = decide(effect, evidence.deciding, level, is_rejected)
        verdicts.append(Verdict(text, effect, level, evidence.streams, evidence.left_out))
    return verdicts


def decide(effect: Effect, streams: Sequence[Effect], level: float, is_rejected: bool) -> str:
    """Return the verdict of one contrast, by the same rule in both directions."""
    for sign, word in ((1, "better"), (-1, "worse")):
        agreeing = sum(sign * one.mean > 0 for one in streams) >= POSITIVE_FRACTION * len(streams)
        if is_rejected and sign * effect.mean > 0 and agreeing and not _contradicted(streams, sign):
            return word
    low, high = effect.interval(level)
    is_as_good, is_no_better = low > -MARGIN, high < MARGIN
    if is_as_good and is_no_better:
        return "level"
    if is_as_good:
        return "as good"
    return "no better" if is_no_better else UNDECIDED


def _contradicted(streams: Sequence[Effect], sign: int) -> bool:
    """Whether some stream has the other sign, significantly by Holm's procedure over the streams."""
    found = holm_levels([one.p for one in streams])
    return any(is_rejected and sign * one.mean < 0 for one, (_, is_rejected) in zip(streams, found, strict=True))


MEANINGS = {
    "better": "Holm's interval is above 0, at least two thirds of the streams agree and none contradicts",
    "worse": "the same with the other sign",
    "level": f"Holm's interval lies within {MARGIN} points of 0",
    "as good": f"Holm's interval is above -{MARGIN} points",
    "no better": f"Holm's interval is below +{MARGIN} points",
    UNDECIDED: "all runs are there and none of these is the case",
    NOT_YET: "runs are missing",
}


def rank_correlation(end_losses: Sequence[float], accuracies: Sequence[float]) -> float:
    """Return Spearman's correlation of end loss and Avg over the rows of a stream; NaN for fewer than four rows."""
    if len(end_losses) < 4 or len(set(end_losses)) < 2 or len(set(accuracies)) < 2:
        return math.nan
    return float(spearmanr(end_losses, accuracies).statistic)


def is_speed_limited(correlation: float) -> bool:
    """Whether a stream orders its rows by how far they have trained."""
    return abs(correlation) > SPEED_LIMITED


def is_converged(end_loss: float, late_loss: float) -> bool:
    """Whether SGD has come to an end, or has stopped falling."""
    return end_loss < CONVERGED_LOSS or end_loss >= STOPPED_FALLING * late_loss


# -- from the ledger to verdicts ---------------------------------------------------------------------------------


def streams_of(contrast: Contrast, blocks: Sequence[str], scenarios: Sequence[str] = ()) -> list[str]:
    """Return the streams of some blocks on which both rows of a contrast are run."""
    return [
        name
        for block in blocks
        if {contrast.row, contrast.reference} <= set(BLOCKS[block].rows)
        for name, stream in BLOCKS[block].streams.items()
        if not scenarios or stream.scenario in scenarios
    ]


def stream_correlation(finals: Finals) -> float:
    """Return the rank correlation of end loss and Avg over the rows of a stream."""
    losses, accuracies = row_means(finals, "end_loss"), row_means(finals, METRIC)
    return rank_correlation(list(losses.values()), [accuracies[name] for name in losses])


def gather(lines: Sequence[FinalRun], contrast: Contrast, streams: Sequence[str]) -> Evidence:
    """Return what final runs say of a contrast on some streams."""
    effects, left_out, is_complete = {}, [], bool(streams)
    for stream in streams:
        finals = final_runs(lines, stream)
        found = differences(finals, contrast)
        is_complete &= len(found) >= BLOCKS[BLOCK_OF[stream]].final_replicates
        effect = stream_effect(found)
        if effect is not None:
            effects[stream] = effect
        if contrast.is_about_flatness and is_speed_limited(stream_correlation(finals)):
            left_out.append(stream)
    return Evidence(effects, tuple(left_out), is_complete)


def verdicts(
    lines: Sequence[FinalRun],
    contrasts: Sequence[Contrast],
    blocks: Sequence[str],
    scenarios: Sequence[str] = (),
) -> dict[Contrast, Verdict]:
    """Return the verdicts of a family of contrasts over the streams of some blocks."""
    family = [gather(lines, contrast, streams_of(contrast, blocks, scenarios)) for contrast in contrasts]
    return dict(zip(contrasts, decide_family(family), strict=True))


# -- the paper's claims ------------------------------------------------------------------------------------------

HOLDS, FAILS = "holds here", "does not hold here"
AGREEING = {"better": ("better",), "as good": ("better", "as good", "level")}
REFUTING = {"better": ("worse", "level", "no better"), "as good": ("worse",)}


def judge_claim(lines: Sequence[FinalRun], claim: Claim) -> tuple[str, dict[Contrast, Verdict]]:
    """Return the verdict on a claim, and those of its contrasts."""
    if claim.is_primary:
        family = verdicts(lines, CONTRASTS, TUNED_BLOCKS)
        found = {contrast: family[contrast] for contrast in claim.contrasts}
    else:
        found = verdicts(lines, claim.contrasts, claim.blocks, claim.scenarios)
    if claim.wanted == "faster":
        return _judge_speed(lines, claim), found
    texts = [verdict.text for verdict in found.values()]
    if NOT_YET in texts:
        return NOT_YET, found
    if all(text in AGREEING[claim.wanted] for text in texts):
        return HOLDS, found
    return (FAILS if any(text in REFUTING[claim.wanted] for text in texts) else UNDECIDED), found


def speed_ratios(finals: Finals, contrast: Contrast) -> list[float]:
    """Return how many evaluations the reference takes for one of the row, replicate by replicate."""
    return [
        rows[contrast.reference].evaluations_per_step / rows[contrast.row].evaluations_per_step
        for rows in finals.values()
        if contrast.row in rows and contrast.reference in rows
    ]


def _judge_speed(lines: Sequence[FinalRun], claim: Claim) -> str:
    """Decide by counted evaluations, which depend on no machine: on every stream, by the interval over replicates."""
    (contrast,) = claim.contrasts
    lows, highs = [], []
    for stream in streams_of(contrast, claim.blocks, claim.scenarios):
        ratios = speed_ratios(final_runs(lines, stream), contrast)
        effect = stream_effect(ratios)
        if effect is None or len(ratios) < BLOCKS[BLOCK_OF[stream]].final_replicates:
            return NOT_YET
        low, high = effect.interval()
        lows.append(low)
        highs.append(high)
    if min(lows) >= SPEED_FACTOR:
        return HOLDS
    return FAILS if min(highs) < SPEED_FACTOR else UNDECIDED
