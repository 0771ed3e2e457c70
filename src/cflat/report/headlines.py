"""The sentences at the top of a report: what was gained, how sure that is, and what it cost.

Compared are only groups that differ in the optimizer alone. Every number of a sentence is taken over the same seeds, so
that the difference it states is that of the means it shows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from cflat.metrics import PairedDifference, Spread, paired_difference, spread
from cflat.report.groups import Group, families

SIGNIFICANT = 0.05
MAX_NAMED = 3
"""Optimizers that get a sentence of their own where there are no validation images to choose one by."""
VISIBLE_POINTS = 0.005
"""Smaller differences vanish in two digits."""


@dataclass(frozen=True)
class Pair:
    """A group beside its reference, on the seeds that both have; on all of each if they share none."""

    group: Group
    reference: Group

    def values(self, metric: str) -> tuple[list[float], list[float], bool]:
        """Return a metric of both, and whether the values belong to the same seeds."""
        ours, theirs = self.group.by_seed(metric), self.reference.by_seed(metric)
        shared = [seed for seed in ours if seed in theirs]
        return [ours[seed] for seed in shared or ours], [theirs[seed] for seed in shared or theirs], bool(shared)

    def means(self, metric: str) -> tuple[Spread, Spread]:
        """Return the spread of a metric in both."""
        ours, theirs, _ = self.values(metric)
        return spread(ours), spread(theirs)

    def difference(self, metric: str) -> PairedDifference | None:
        """Return how they differ seed by seed; None if they share no seed."""
        ours, theirs, is_paired = self.values(metric)
        return paired_difference(ours, theirs) if is_paired else None

    def points(self, metric: str) -> float:
        """Return the difference of the two means as they are written."""
        # Rounded first: a reader who subtracts the printed means must get the printed difference.
        ours, theirs = self.means(metric)
        return round(100 * ours.mean, 2) - round(100 * theirs.mean, 2)


def headlines(groups: Sequence[Group]) -> list[str]:
    """Return the sentences about the groups of a subject: one for each family that can be compared."""
    if not any(group.finished for group in groups):
        furthest = max(len(record.stage_accuracy) for group in groups for record in group.records)
        return [f"No run is finished yet; the furthest has learned {furthest} tasks."]
    found = families(groups)
    compared = [family for family in found if len(family) > 1]
    if compared:
        return [_comparison(family) for family in compared]
    alone = [family[0] for family in found]
    if len(alone) == 1:
        return [f"{_facts(alone[0])}."]
    text = f"No two of these {len(alone)} configurations differ in the optimizer alone, so none is compared."
    best = _best_on_validation(alone)
    return [text if best is None else f"{text} {_facts(best)}; it is the best of them on validation images."]


def _facts(group: Group) -> str:
    cost = group.spread("evaluations_per_step").mean
    return (
        f"With {group.variant}, accuracy ({group.score}) is {_percent(group.spread('avg'))} on average over the stream "
        f"and {_percent(group.spread('last'))} at its end, for {cost:.2f} evaluations per step"
    )


def _comparison(family: Sequence[Group]) -> str:
    reference, *others = family
    best = _best_on_validation(others)
    if best is not None and len(others) > 1:
        return f"{_sentence(Pair(best, reference))} Of {len(others)}, it is the best on validation images."
    text = " ".join(_sentence(Pair(group, reference)) for group in others[:MAX_NAMED])
    more = len(others) - MAX_NAMED
    return text + (f" {more} more in the table; test images choose no best one." if more > 0 else "")


def _best_on_validation(groups: Sequence[Group]) -> Group | None:
    """Return the group with the best Avg on validation images; None if some have none: test images choose nothing."""
    found = [(group, group.validation) for group in groups]
    known = [(group, value.mean) for group, value in found if value is not None]
    return max(known, key=lambda entry: entry[1])[0] if known and len(known) == len(found) else None


def _sentence(pair: Pair) -> str:
    evaluations, _ = pair.means("evaluations_per_step")
    ours, theirs = pair.means("images_per_second")
    speed = ours.mean / max(theirs.mean, 1e-12)  # a run of no step has no speed
    cost = f"for {evaluations.mean:.2f} evaluations per step at {speed:.2f} times its speed"
    return f"{_gain(pair)}{_at_the_end(pair)} on {pair.group.split} images, {cost}."


def _gain(pair: Pair) -> str:
    change = pair.points("avg")
    ours, theirs = pair.means("avg")
    found = pair.difference("avg")
    sure = "on other seeds" if found is None else _certainty(found)
    if abs(change) < VISIBLE_POINTS:
        return f"{pair.group.variant} is as accurate as {pair.reference.variant} ({_percent(ours)}; {sure})"
    verb, over = ("gains", "over") if change > 0 else ("loses", "to")
    points = f"{abs(change):.2f} points of average accuracy ({pair.group.score})"
    means = f"{_percent(ours)} against {_percent(theirs)}"
    return f"{pair.group.variant} {verb} {points} {over} {pair.reference.variant} ({means}; {sure})"


def _at_the_end(pair: Pair) -> str:
    """Return what the stream's end adds, where seeds can be paired."""
    found = pair.difference("last")
    if found is None or found.n < 2:
        return ""
    p = "" if math.isnan(found.p) else f" (p = {found.p:.2g})"
    return f", with {pair.points('last'):+.2f} points at the end of the stream{p}"


def _certainty(found: PairedDifference) -> str:
    if found.n < 2:  # no deviation, so no test
        return "one seed, so nothing is known about chance"
    if math.isnan(found.p):
        return f"the same on all {found.n} seeds"
    if found.p < SIGNIFICANT:
        return f"paired over {found.n} seeds, p = {found.p:.2g}"
    return f"{found.n} seeds cannot tell this from chance, p = {found.p:.2g}"


def _percent(value: Spread) -> str:
    return f"{value.text(scale=100)}\u00a0%"
