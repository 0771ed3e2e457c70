"""Figures of runs: accuracy over the stream, speed, triggers, losses, sweeps. Numbers in, `FigureData` out.

Accuracies come in as fractions and are shown in percent. Bands and whiskers are standard deviations over seeds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

import numpy as np

from cflat.figures.figure import MAX_POINTS, Bars, Curve, FigureData, Heatmap, Mark, Panel, downsampled

BRANCHES = ("sharpness", "flatness")
OUTCOMES = ("refreshed", "reused", "skipped")
SPREAD = "Bands and whiskers: standard deviation over seeds."
MAX_BANDS = 6
"""More curves than this are drawn without their bands, which would cover each other."""


Cost: TypeAlias = Literal["images_per_second", "evaluations_per_step"]


@dataclass(frozen=True)
class RunGroup:
    """Runs that differ in their seed alone; each list has one entry for each seed."""

    name: str
    stage_accuracy: Sequence[Sequence[float]]
    """For each seed, the accuracy on everything seen so far, after each task."""
    images_per_second: Sequence[float] = ()
    evaluations_per_step: Sequence[float] = ()
    matrices: Sequence[Sequence[Sequence[float | None]]] = ()
    """For each seed, the accuracy on task i after stage t; None where the task was not seen."""
    is_finished: bool = True

    @property
    def average(self) -> list[float]:
        """For each seed, the mean over stages."""
        return [float(np.mean(stages)) for stages in self.stage_accuracy if len(stages)]


@dataclass(frozen=True)
class Timeline:
    """What happened over the steps of a run (or the mean over seeds), one entry for each epoch."""

    name: str
    steps: Sequence[float]
    """Steps since the run began, at the end of each epoch."""
    loss: Sequence[float]
    evaluations_per_step: Sequence[float]
    shares: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Fraction of the epoch's steps by ``"sharpness.refreshed"`` and so on; absent where there is no such branch."""
    cache_age: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Steps since each branch was computed exactly, at the end of each epoch."""
    surrogate_error: Sequence[float] = ()
    """Mean error of the surrogates measured in each epoch, NaN where none was; empty without surrogates."""


@dataclass(frozen=True)
class SweepPoint:
    """One value of a swept key, with one entry for each seed."""

    name: str
    """Of the curve or the bars, for example the optimizer."""
    value: float
    accuracy: Sequence[float]
    images_per_second: Sequence[float]


def accuracy_curves(groups: Sequence[RunGroup]) -> FigureData:
    """Return the accuracy over the stream, mean and band over seeds; unfinished groups are dashed."""
    has_bands = len(groups) <= MAX_BANDS
    curves = []
    for group in groups:
        num_stages = max((len(stages) for stages in group.stage_accuracy), default=0)
        # Unfinished seeds have fewer stages.
        by_stage = [[s[stage] for s in group.stage_accuracy if len(s) > stage] for stage in range(num_stages)]
        curve = _with_band(group.name, [stage + 1.0 for stage in range(num_stages)], by_stage, 100.0)
        low, high = (
            # Mean plus deviation may exceed what an accuracy can be.
            [min(max(edge, 0.0), 100.0) for edge in edges] if edges and has_bands else None
            for edges in (curve.low, curve.high)
        )
        curves.append(replace(curve, low=low, high=high, style="line+points" if group.is_finished else "dashed"))
    panel = Panel("Accuracy over the stream", "tasks learned", "accuracy on all classes so far (%)", curves)
    caption = SPREAD if has_bands else "Means over seeds; the table has their deviations."
    return FigureData("accuracy-curves", "Accuracy over the stream", [panel], caption)


def accuracy_heatmap(group: RunGroup) -> FigureData:
    """Return the accuracy on each task after each stage, mean over seeds."""
    mean = 100 * np.array(group.matrices, dtype=float).mean(axis=0)  # None becomes NaN
    values = [[None if np.isnan(v) else round(float(v), 2) for v in row] for row in mean]
    stages, tasks = ([str(index + 1) for index in range(size)] for size in mean.shape)
    heatmap = Heatmap(values, tasks, stages, "accuracy (%)", shows_values=len(tasks) <= 12)
    panel = Panel(group.name, "task", "after learning task", [heatmap])
    caption = "Each row is a moment, each column a task; reading down a column shows what was forgotten."
    return FigureData("accuracy-matrix", f"Accuracy by task: {group.name}", [panel], caption)


COSTS: dict[Cost, tuple[str, str]] = {
    "images_per_second": ("Speed against accuracy", "training images per second"),
    "evaluations_per_step": ("Evaluations against accuracy", "evaluations (forward + backward) per step"),
}
"""What accuracy can be set against: its title and its axis. Wall time depends on the machine, a count does not."""


def speed_front(groups: Sequence[RunGroup], cost: Cost = "images_per_second") -> FigureData:
    """Return cost against accuracy, with those marked that no other beats in both."""
    title, label = COSTS[cost]
    is_speed = cost == "images_per_second"
    points = [(_mean(getattr(group, cost)), 100 * _mean(group.average)) for group in groups]
    front = pareto_front([(x if is_speed else -x, y) for x, y in points])  # a count is better if it is lower
    marks = [
        Curve(group.name, [x], [y], style="points", labels=[group.name])
        for group, (x, y) in zip(groups, points, strict=True)
    ]
    if len(front) > 1:
        best = sorted(points[index] for index in front)
        marks.append(Curve("best trade-offs", [x for x, _ in best], [y for _, y in best], style="dashed"))
    panel = Panel(title, label, "average accuracy (%)", marks)
    caption = (
        "Up is better, and so is to the right for images per second, to the left for evaluations; the dashed line "
        "joins those that no other beats in both."
    )
    name = "speed-front" if is_speed else "evaluation-front"
    return FigureData(name, title, [panel], caption, meta={"front": front})


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Return which points no other reaches in one coordinate and beats in the other.

    >>> pareto_front([(1.0, 3.0), (2.0, 2.0), (1.5, 1.0), (3.0, 1.0)])
    [0, 1, 3]
    """
    return [
        index
        for index, (x, y) in enumerate(points)
        if not (math.isnan(x) or math.isnan(y)) and not any(a >= x and b >= y and (a > x or b > y) for a, b in points)
    ]


def comparison_overview(groups: Sequence[RunGroup], title: str) -> FigureData:
    """Return accuracy over the stream beside what it cost: evaluations per step and images per second."""

    def bars(label: str, of: Cost) -> list[Bars]:
        values = [(group.name, getattr(group, of)) for group in groups]
        return [Bars(name, [label], [_mean(seeds)], [deviation_of(seeds)]) for name, seeds in values]

    panels = [
        accuracy_curves(groups).panels[0],
        # No y labels for the costs: panels with equal labels share a scale, and these have different units.
        Panel("Evaluations per step", "", "", bars("forward + backward passes", "evaluations_per_step")),
        Panel("Speed", "", "", bars("training images per second", "images_per_second")),
    ]
    return FigureData("comparison", title, panels, SPREAD)


def trigger_timeline(timeline: Timeline, limit: int = MAX_POINTS) -> FigureData:
    """Return how the steps of each epoch got each direction: computed, taken from the cache, or left out."""
    panels = []
    for branch in BRANCHES:
        known = {outcome: timeline.shares.get(f"{branch}.{outcome}") for outcome in OUTCOMES}
        marks = [
            Curve(outcome, *downsampled(timeline.steps, [100 * share for share in shares], limit), style="steps")
            for outcome, shares in known.items()
            if shares is not None
        ]
        if marks:
            panels.append(Panel(f"{branch.capitalize()} direction", "step", "steps of the epoch (%)", marks))
    caption = "Refreshed: computed exactly. Reused: rebuilt from the cached part. Skipped: left out by the trigger."
    return FigureData("trigger-timeline", f"Triggers: {timeline.name}", panels, caption)


def evaluation_timeline(timelines: Sequence[Timeline], limit: int = MAX_POINTS) -> FigureData:
    """Return the evaluations per step over the run."""
    marks = _over_steps(((line, line.evaluations_per_step) for line in timelines), limit)
    panel = Panel("Evaluations per step", "step", "forward + backward passes", marks)
    return FigureData("evaluations", "Evaluations per step over the run", [panel])


def cache_ages(timelines: Sequence[Timeline], limit: int = MAX_POINTS) -> FigureData:
    """Return the age of the cached directions at the end of each epoch."""
    panels = []
    for branch in BRANCHES:
        having = [line for line in timelines if branch in line.cache_age]
        marks = _over_steps(((line, line.cache_age[branch]) for line in having), limit)
        if marks:
            panels.append(Panel(f"{branch.capitalize()} cache", "step", "age in steps", marks))
    whose = {line.name for line in timelines if line.cache_age}
    caption = f"Steps since the cached direction was computed exactly{f': {whose.pop()}' if len(whose) == 1 else ''}."
    return FigureData("cache-age", "Age of the caches", panels, caption)


def surrogate_errors(timelines: Sequence[Timeline], limit: int = MAX_POINTS) -> FigureData:
    """Return how far the surrogates were from what they stand for, over the run; 1 is plain training."""
    marks = _over_steps(((line, line.surrogate_error) for line in timelines), limit)
    ends = [min(line.steps[0] for line in timelines), max(line.steps[-1] for line in timelines)]
    plain = Curve("no surrogate (plain training)", ends, [1.0, 1.0], style="dashed")
    caption = "Measured at refreshes. At 1 and above, plain training is as near to C-Flat or nearer."
    panel = Panel("Surrogate error", "step", "|surrogate - exact| / |exact|", [*marks, plain])
    return FigureData("surrogate-error", "Surrogate error over the run", [panel], caption)


def loss_curves(timelines: Sequence[Timeline], limit: int = MAX_POINTS) -> FigureData:
    """Return the training loss over the steps of the run, one point for each epoch."""
    marks = _over_steps(((line, line.loss) for line in timelines), limit)
    return FigureData("loss", "Training loss", [Panel("Training loss", "step", "mean loss of the epoch", marks)])


def sensitivity(key: str, points: Sequence[SweepPoint]) -> FigureData:
    """Return accuracy and speed against a swept key, such as ``optimizer.k``, with their deviations."""
    scale: Literal["linear", "log"] = "log" if spans_decades([point.value for point in points]) else "linear"
    panels = [
        Panel(f"{title} against {key}", key, label, marks, x_scale=scale)
        for title, label, marks in _accuracy_and_speed(points, _with_band)
    ]
    return FigureData(f"sensitivity-{key}", f"Sensitivity to {key}", panels, SPREAD)


def scheduler_comparison(points: Sequence[SweepPoint]) -> FigureData:
    """Return accuracy and speed of several strategies side by side, for each k."""

    def bars(name: str, intervals: list[float], seeds: Sequence[Sequence[float]], factor: float) -> Bars:
        means, deviations = ([factor * of(values) for values in seeds] for of in (_mean, deviation_of))
        return Bars(name, [f"k = {k:g}" for k in intervals], means, deviations)

    panels = [Panel(title, "", label, marks) for title, label, marks in _accuracy_and_speed(points, bars)]
    return FigureData("schedulers", "Schedules of the interval", panels, SPREAD)


def _accuracy_and_speed(
    points: Sequence[SweepPoint], draw: Callable[[str, list[float], Sequence[Sequence[float]], float], Curve | Bars]
) -> Iterator[tuple[str, str, list[Mark]]]:
    """Yield title, label and marks of two panels: one mark for each name, over the values that it has."""
    for title, label, factor, of in (
        ("Accuracy", "average accuracy (%)", 100.0, "accuracy"),
        ("Speed", "images per second", 1.0, "images_per_second"),
    ):
        marks: list[Mark] = []
        for name in dict.fromkeys(point.name for point in points):
            own = sorted((point for point in points if point.name == name), key=lambda point: point.value)
            marks.append(draw(name, [point.value for point in own], [getattr(point, of) for point in own], factor))
        yield title, label, marks


def _with_band(name: str, x: list[float], seeds: Sequence[Sequence[float]], factor: float) -> Curve:
    """Return the mean over seeds, with a band of one deviation where there are several."""
    means, deviations = ([factor * of(values) for values in seeds] for of in (_mean, deviation_of))
    curve = Curve(name, x, means, style="line+points")
    if not any(deviation > 0 for deviation in deviations):
        return curve
    low, high = ([m + sign * d for m, d in zip(means, deviations, strict=True)] for sign in (-1, 1))
    return replace(curve, low=low, high=high)


def _over_steps(values: Iterable[tuple[Timeline, Sequence[float]]], limit: int) -> list[Curve]:
    return [Curve(line.name, *downsampled(line.steps, own, limit)) for line, own in values]


def spans_decades(values: Sequence[float]) -> bool:
    """Whether an axis over these numbers should be logarithmic."""
    return min(values) > 0 and max(values) / min(values) >= 50  # a zero has no logarithm


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else float("nan")


def deviation_of(values: Sequence[float]) -> float:
    """Return the standard deviation over seeds; 0 for a single one."""
    return float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
