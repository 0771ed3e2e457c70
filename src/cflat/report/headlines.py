"""The sentence at the top of a report: what was gained, how sure that is, and what it cost."""

from __future__ import annotations

import math
from collections.abc import Sequence

from cflat.metrics import PairedDifference, Spread, paired_difference
from cflat.report.groups import Group

__all__ = ["difference_to", "headline", "reference_of"]

SIGNIFICANT = 0.05
VISIBLE_POINTS = 0.005
"""Smaller differences vanish in two digits."""


def reference_of(groups: Sequence[Group]) -> Group | None:
    """Return the group that the others of a scenario are compared with: the plain optimizer, or else the first."""
    done = [group for group in groups if group.finished]
    return next((group for group in done if group.config.optimizer.name == "none"), done[0] if done else None)


def difference_to(reference: Group, group: Group, metric: str) -> PairedDifference | None:
    """Return how a group differs from the reference on the seeds that both have; None if they share none."""
    ours, theirs = group.by_seed(metric), reference.by_seed(metric)
    seeds = [seed for seed in ours if seed in theirs]
    return paired_difference([ours[s] for s in seeds], [theirs[s] for s in seeds]) if seeds else None


def headline(groups: Sequence[Group]) -> str:
    """Return what to say about the groups of a scenario."""
    reference = reference_of(groups)
    if reference is None:
        done = max(len(record.stage_accuracy) for group in groups for record in group.records)
        return f"No run is finished yet; the furthest has learned {done} tasks."
    others = [group for group in groups if group.finished and group is not reference]
    if not others:
        cost = reference.spread("evaluations_per_step").mean
        return (
            f"With {reference.variant}, accuracy is {_percent(reference.spread('avg'))} on average over the stream and "
            f"{_percent(reference.spread('last'))} at its end, for {cost:.2f} evaluations per step."
        )
    best = max(others, key=lambda group: group.spread("avg").mean)
    said = f"{_gain(best, reference)}{_at_the_end(best, reference)}, {_cost(best, reference)}."
    return said + _cheaper(best, others, reference)


def _gain(group: Group, reference: Group) -> str:
    found = difference_to(reference, group, "avg")
    if found is None:
        change = 100 * (group.spread("avg").mean - reference.spread("avg").mean)
        sure = "on other seeds"
    else:
        change, sure = 100 * found.mean, _certainty(found)
    if abs(change) < VISIBLE_POINTS:
        return f"{group.variant} is as accurate as {reference.variant} ({_percent(group.spread('avg'))}; {sure})"
    verb = "gains" if change >= 0 else "loses"
    means = f"{_percent(group.spread('avg'))} against {_percent(reference.spread('avg'))}"
    points = f"{abs(change):.2f} points of average accuracy"
    return f"{group.variant} {verb} {points} {'over' if change >= 0 else 'to'} {reference.variant} ({means}; {sure})"


def _at_the_end(group: Group, reference: Group) -> str:
    """Say what the stream's end adds, where seeds can be paired."""
    found = difference_to(reference, group, "last")
    if found is None or found.n < 2:
        return ""
    p = "" if math.isnan(found.p) else f" (p = {found.p:.2g})"
    return f", with {100 * found.mean:+.2f} points at the end of the stream{p}"


def _certainty(found: PairedDifference) -> str:
    if found.n < 2:
        return "one seed, so nothing is known about chance"
    if math.isnan(found.p):
        return f"the same on all {found.n} seeds"
    if found.p < SIGNIFICANT:
        return f"paired over {found.n} seeds, p = {found.p:.2g}"
    return f"{found.n} seeds cannot tell this from chance, p = {found.p:.2g}"


def _cost(group: Group, reference: Group) -> str:
    evaluations = group.spread("evaluations_per_step").mean
    speed = group.spread("images_per_second").mean / max(reference.spread("images_per_second").mean, 1e-12)
    return f"for {evaluations:.2f} evaluations per step at {speed:.2f} times its speed"


def _cheaper(best: Group, others: Sequence[Group], reference: Group) -> str:
    """Say where the cheapest of the others stands, if it is not the best."""
    cheapest = min(others, key=lambda group: group.spread("evaluations_per_step").mean)
    if cheapest is best:
        return ""
    change = 100 * (cheapest.spread("avg").mean - reference.spread("avg").mean)
    cost = cheapest.spread("evaluations_per_step").mean
    where = f"{abs(change):.2f} points {'above' if change >= 0 else 'below'} {reference.variant}"
    return f" {cheapest.variant} needs {cost:.2f} evaluations per step and ends up {where}."


def _percent(value: Spread) -> str:
    return f"{value.text(scale=100)}\u00a0%"
