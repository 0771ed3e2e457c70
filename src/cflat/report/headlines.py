"""The sentences at the top of a report: what was gained, how sure that is, and what it cost.

Compared are only groups that differ in the optimizer alone. Every number of a sentence is taken over the same seeds, so
that the difference it states is that of the means it shows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from cflat.metrics import PairedDifference, Spread, paired_difference, spread
from cflat.report.groups import Group, grouped

SIGNIFICANT = 0.05
MAX_TOLD = 3
"""Optimizers that get a sentence of their own where there are no validation images to choose one by."""
VISIBLE_POINTS = 0.005
"""Smaller differences vanish in two digits."""


def reference_of(groups: Sequence[Group]) -> Group | None:
    """Return the group that the others of a family are compared with: the base optimizer alone, or else the first."""
    done = [group for group in groups if group.finished]
    return next((group for group in done if group.config.optimizer.name == "none"), done[0] if done else None)


def difference_to(reference: Group, group: Group, metric: str) -> PairedDifference | None:
    """Return how a group differs from the reference on the seeds that both have; None if they share none."""
    ours, theirs = group.by_seed(metric), reference.by_seed(metric)
    seeds = [seed for seed in ours if seed in theirs]
    return paired_difference([ours[s] for s in seeds], [theirs[s] for s in seeds]) if seeds else None


def headlines(groups: Sequence[Group]) -> list[str]:
    """Return what to say about the groups of a subject: one sentence for each family that can be compared."""
    if not any(group.finished for group in groups):
        done = max(len(record.stage_accuracy) for group in groups for record in group.records)
        return [f"No run is finished yet; the furthest has learned {done} tasks."]
    families = grouped(groups, lambda group: group.circumstances).values()
    told = [[group for group in family if group.finished] for family in families]
    compared = [family for family in told if len(family) > 1]
    if compared:
        return [_comparison(family) for family in compared]
    alone = [family[0] for family in told if family]
    if len(alone) == 1:
        return [f"{_facts(alone[0])}."]
    said = f"No two of these {len(alone)} configurations differ in the optimizer alone, so that none is compared."
    best = _best_on_validation(alone)
    return [said if best is None else f"{said} {_facts(best)}; it is the best of them on validation images."]


def _facts(group: Group) -> str:
    cost = group.spread("evaluations_per_step").mean
    return (
        f"With {group.variant}, accuracy ({group.score}) is {_percent(group.spread('avg'))} on average over the stream "
        f"and {_percent(group.spread('last'))} at its end, for {cost:.2f} evaluations per step"
    )


@dataclass(frozen=True)
class _Pair:
    """A group beside its reference, on the seeds that both have; on all of each if they share none."""

    group: Group
    reference: Group

    def means(self, metric: str) -> tuple[Spread, Spread]:
        ours, theirs = self.group.by_seed(metric), self.reference.by_seed(metric)
        shared = [seed for seed in ours if seed in theirs]
        return spread([ours[seed] for seed in shared or ours]), spread([theirs[seed] for seed in shared or theirs])

    def points(self, metric: str) -> float:
        """Return the difference of the two means as they are written."""
        ours, theirs = self.means(metric)
        return round(100 * ours.mean, 2) - round(100 * theirs.mean, 2)


def _comparison(family: Sequence[Group]) -> str:
    reference = reference_of(family)
    assert reference is not None
    others = [group for group in family if group is not reference]
    best = _best_on_validation(others)
    if best is not None and len(others) > 1:
        return f"{_told(_Pair(best, reference))} Of {len(others)}, it is the best on validation images."
    told = " ".join(_told(_Pair(group, reference)) for group in others[:MAX_TOLD])
    more = len(others) - MAX_TOLD
    return told + (f" {more} more in the table; test images choose no best one." if more > 0 else "")


def _best_on_validation(groups: Sequence[Group]) -> Group | None:
    """Return the group with the best Avg on validation images; None if some have none: test images choose nothing."""
    found = [(group, group.validation) for group in groups]
    known = [(group, value.mean) for group, value in found if value is not None]
    return max(known, key=lambda entry: entry[1])[0] if known and len(known) == len(found) else None


def _told(pair: _Pair) -> str:
    evaluations, _ = pair.means("evaluations_per_step")
    ours, theirs = pair.means("images_per_second")
    speed = ours.mean / max(theirs.mean, 1e-12)
    cost = f"for {evaluations.mean:.2f} evaluations per step at {speed:.2f} times its speed"
    return f"{_gain(pair)}{_at_the_end(pair)} on {pair.group.split} images, {cost}."


def _gain(pair: _Pair) -> str:
    change = pair.points("avg")
    ours, theirs = pair.means("avg")
    found = difference_to(pair.reference, pair.group, "avg")
    sure = "on other seeds" if found is None else _certainty(found)
    if abs(change) < VISIBLE_POINTS:
        return f"{pair.group.variant} is as accurate as {pair.reference.variant} ({_percent(ours)}; {sure})"
    verb, over = ("gains", "over") if change > 0 else ("loses", "to")
    points = f"{abs(change):.2f} points of average accuracy ({pair.group.score})"
    means = f"{_percent(ours)} against {_percent(theirs)}"
    return f"{pair.group.variant} {verb} {points} {over} {pair.reference.variant} ({means}; {sure})"


def _at_the_end(pair: _Pair) -> str:
    """Say what the stream's end adds, where seeds can be paired."""
    found = difference_to(pair.reference, pair.group, "last")
    if found is None or found.n < 2:
        return ""
    p = "" if math.isnan(found.p) else f" (p = {found.p:.2g})"
    return f", with {pair.points('last'):+.2f} points at the end of the stream{p}"


def _certainty(found: PairedDifference) -> str:
    if found.n < 2:
        return "one seed, so nothing is known about chance"
    if math.isnan(found.p):
        return f"the same on all {found.n} seeds"
    if found.p < SIGNIFICANT:
        return f"paired over {found.n} seeds, p = {found.p:.2g}"
    return f"{found.n} seeds cannot tell this from chance, p = {found.p:.2g}"


def _percent(value: Spread) -> str:
    return f"{value.text(scale=100)}\u00a0%"
