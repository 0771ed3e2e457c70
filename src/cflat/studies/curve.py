"""The learning-rate curve: validation accuracy of every optimizer over a grid of rates, and how wide its plateau is."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from cflat._errors import ConfigError
from cflat._files import write_json
from cflat.config.documents import merge
from cflat.config.presets import resolve_config
from cflat.config.variants import parse_variant
from cflat.figures.runs import SweepPoint
from cflat.figures.static import save
from cflat.figures.sweeps import rate_figure
from cflat.methods import get_method_spec
from cflat.metrics import spread
from cflat.report.groups import title_of
from cflat.runs.folder import RunFolder
from cflat.runs.jobs import Executor, Job, finish_jobs
from cflat.studies.space import Settings
from cflat.studies.tune import DEFAULT_SEEDS, trial_layers, validation_layer
from cflat.studies.tuned import Metric, Protocol, ValidationStudy, validation_score

WITHIN = 0.02
"""Rates whose accuracy is at most this far below the best count as good."""
NUM_RATES, DECADES = 9, 1.0
"""Rates of the usual grid, and how far it reaches below and above the preset's."""


@dataclass(frozen=True)
class Plateau:
    """The rates around the best one whose accuracy is close to the best."""

    best_rate: float
    best_accuracy: float
    low: float
    """Lowest good rate, between two rates of the grid where the line through their accuracies crosses the limit."""
    high: float
    decades: float
    """Width on the logarithmic axis."""
    num_rates: int
    """Rates of the grid that are good."""
    is_cut_off: bool
    """Whether it reaches an end of the grid and may be wider."""


@dataclass(frozen=True)
class RateCurve:
    """One optimizer."""

    optimizer: str
    settings: Settings
    """What it has besides the rate, under dotted keys."""
    accuracy: tuple[tuple[float, ...], ...]
    """For each rate, one for each seed; on validation images."""
    plateau: Plateau
    """Of the means over the seeds."""
    by_seed: tuple[Plateau, ...]


@dataclass(frozen=True)
class RateCurves(ValidationStudy):
    """Several optimizers over one grid of rates."""

    rates: tuple[float, ...]
    within: float
    curves: tuple[RateCurve, ...]
    base: str
    """The base optimizer that all of them wrap."""

    def to_dict(self) -> dict[str, Any]:
        """Return the content of ``rates.json``."""
        found = {
            curve.optimizer: {
                "settings": curve.settings,
                "accuracy": [list(values) for values in curve.accuracy],
                "plateau": asdict(curve.plateau),
                "plateau_decades": asdict(spread([one.decades for one in curve.by_seed])),
                "by_seed": [asdict(one) for one in curve.by_seed],
            }
            for curve in self.curves
        }
        return {**super().to_dict(), "rates": list(self.rates), "within": self.within, "optimizers": found}


def rate_curves(
    chosen: Mapping[str, Any],
    optimizers: Sequence[str],
    out: str | Path,
    *,
    rates: Sequence[float] | None = None,
    seeds: Sequence[int] = DEFAULT_SEEDS,
    protocol: Protocol = "stream",
    metric: Metric = "avg",
    score: str | None = None,
    tuned: Mapping[str, Settings] | None = None,
    within: float = WITHIN,
    executor: Executor | None = None,
) -> RateCurves:
    """Train every optimizer with every rate and seed, and measure it on validation images.

    Without ``rates`` there are nine, a decade below to a decade above the preset's; those whose accuracy is at most
    ``within`` below the best count as good. With ``tuned``, as in ``tune(...).settings``, every optimizer has its own
    radius and not the preset's. Everything else is as for `tune`; runs in ``out`` that are finished are only read.
    """
    # The rate is what the curve varies; of tuned settings, the others are kept.
    own = {
        name: {key: value for key, value in settings.items() if key != "base.lr"}
        for name, settings in (tuned or {}).items()
    }
    layers = trial_layers(validation_layer(chosen), optimizers, seeds, own)
    first = resolve_config({**next(iter(layers.values())), "seed": seeds[0]})
    score = get_method_spec(first.method.name).score(score)
    grid = usual_rates(first.base.lr) if rates is None else sorted(rates)
    if len(set(grid)) < max(2, len(grid)) or not all(0 < rate < math.inf for rate in grid):
        raise ConfigError(f"A curve needs several different learning rates above 0, got {list(grid)}.")
    stage = 1 if protocol == "first-task" else None  # of the whole stream, not of a stream of one task
    jobs: dict[tuple[str, float, int], Job] = {}
    for name, layer in layers.items():
        if "base.lr" in parse_variant(name).settings:
            raise ConfigError(f"{name!r} sets base.lr itself, which is what the curve is drawn over; leave it out.")
        for rate in grid:
            for seed in seeds:
                config = resolve_config({**merge(layer, {"base": {"lr": rate}}), "seed": seed})
                folder = Path(out) / "rates" / f"{parse_variant(name).slug}-lr{rate:g}-seed{seed}"
                # A rate at which training diverges is a point of the curve, with accuracy 0.
                jobs[name, rate, seed] = Job(config, folder, stage, may_diverge=True)
    finish_jobs(list(jobs.values()), executor)
    curves = []
    for name in layers:
        accuracy = tuple(
            tuple(validation_score(RunFolder(jobs[name, rate, seed].out), metric, score, stage) for seed in seeds)
            for rate in grid
        )
        means = [float(np.mean(values)) for values in accuracy]
        by_seed = tuple(plateau(grid, values, within) for values in zip(*accuracy, strict=True))
        curves.append(RateCurve(name, own.get(name, {}), accuracy, plateau(grid, means, within), by_seed))
    subject = (first.method.name, first.data.name, protocol, metric, score, tuple(seeds))
    found = RateCurves(*subject, tuple(grid), within, tuple(curves), first.base.name)
    write_json(Path(out) / "rates.json", found.to_dict())
    return found


def usual_rates(around: float) -> list[float]:
    """Return nine rates at equal steps of the logarithm, around the one of a preset.

    >>> usual_rates(0.02)
    [0.002, 0.003557, 0.006325, 0.01125, 0.02, 0.03557, 0.06325, 0.1125, 0.2]
    """
    powers = np.linspace(-DECADES, DECADES, NUM_RATES)
    return [float(f"{around * 10**power:.4g}") for power in powers]


def plateau(rates: Sequence[float], accuracy: Sequence[float], within: float = WITHIN) -> Plateau:
    """Return the rates around the best one, without a gap, whose accuracy is at most ``within`` below the best.

    >>> found = plateau([0.01, 0.1, 1.0, 10.0], [0.80, 0.90, 0.89, 0.85], 0.02)
    >>> found.num_rates, round(found.low, 3), round(found.high, 2), round(found.decades, 2)
    (2, 0.063, 1.78, 1.45)
    """
    best = int(np.argmax(accuracy))
    limit = accuracy[best] - within
    first, low = _edge(rates, accuracy, limit, range(best, -1, -1))
    last, high = _edge(rates, accuracy, limit, range(best, len(rates)))
    is_cut_off = first == 0 or last == len(rates) - 1
    decades = math.log10(high / low)
    return Plateau(rates[best], accuracy[best], low, high, decades, last - first + 1, is_cut_off)


def _edge(
    rates: Sequence[float], accuracy: Sequence[float], limit: float, outwards: Sequence[int]
) -> tuple[int, float]:
    """Return the last good index on the way outwards, and the rate where the accuracy falls to the limit."""
    for inside, outside in pairwise(outwards):
        if accuracy[outside] < limit:
            # Between two rates of the grid, accuracy is taken as linear in the logarithm of the rate.
            fraction = (accuracy[inside] - limit) / (accuracy[inside] - accuracy[outside])
            return inside, float(rates[inside] * (rates[outside] / rates[inside]) ** fraction)
    return outwards[-1], rates[outwards[-1]]


def write_curves(folder: Path, found: RateCurves) -> Path:
    """Draw ``rates.png``; return its path."""
    points = [
        SweepPoint(title_of(curve.optimizer, found.base), rate, values, ())
        for curve in found.curves
        for rate, values in zip(found.rates, curve.accuracy, strict=True)
    ]
    title = f"{found.method} on {found.data}, score {found.score}, {len(found.seeds)} seeds, protocol {found.protocol}"
    plateaus = {
        title_of(curve.optimizer, found.base): (
            curve.plateau.low,
            curve.plateau.high,
            curve.plateau.best_accuracy - found.within,
        )
        for curve in found.curves
    }
    name = f"within {100 * found.within:g} points of the best"
    return save(rate_figure(title, points, plateaus, name), folder / "rates.png")
