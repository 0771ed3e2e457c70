"""`analyze`: the paper's figures for a run of one's own.

The figures need the run with other optimizers, intervals and surrogate lengths beside it. Everything random is decided
by the configuration, so these runs can be made at any time; each result is kept as one file and is not made twice.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cflat._errors import ConfigError, DataError
from cflat._files import plain_values, read_text, write_json
from cflat.config.choices import parse_optimizer
from cflat.config.presets import radius_of
from cflat.config.run_config import RunConfig
from cflat.figures.gradients import (
    GradientHistory,
    correction_ratios,
    drift,
    evolution,
    normality,
    terms_over_tasks,
)
from cflat.figures.landscapes import connectivity_figure, plane_figure, slice_figure, spectrum_figure
from cflat.figures.model import FigureData
from cflat.figures.runs import StrategyPoint, SweepPoint, scheduler_comparison, sensitivity
from cflat.figures.static import save
from cflat.report.groups import title_of
from cflat.runs.run import run
from cflat.studies.recording import Recording, check_watchable

__all__ = ["FORMATS", "WATCHED", "Variant", "analyze", "check_request", "plan_variants"]

RECORDED = ("none", "c_flat", "c_flat_turbo")
INTERVALS = (2, 5, 10)
SCHEDULED = INTERVALS[1:]
"""Intervals at which a constant and a growing k are compared: growth matters little to short ones."""
BETAS = (0.4, 0.8, 1.2)
FORMATS = ("svg", "pdf", "png")
ALONE: dict[str, Callable[[GradientHistory], FigureData]] = {
    "correction_ratios": correction_ratios,
    "gradient_drift": drift,
    "terms_over_tasks": terms_over_tasks,
    "normality": normality,
}
"""Figures that need the run itself and nothing beside it."""
WATCHED = (*ALONE, "evolution")
"""Figures that need no grid around the run and no landscapes, so that they can be asked for alone."""


@dataclass(frozen=True)
class Variant:
    """The analysed run with another optimizer or setting."""

    name: str
    """Also of its file."""
    config: RunConfig
    is_recorded: bool
    """Whether its gradients are watched, or only its accuracy and speed are wanted."""
    has_landscapes: bool = False
    """Whether it is also looked around where its tasks end."""


def analyze(
    config: RunConfig,
    out: Path,
    *,
    every: int = 5,
    seeds: Sequence[int] = (),
    formats: Sequence[str] = ("svg",),
    only: Sequence[str] = (),
    tell: Callable[[Variant, int, int], None] = lambda variant, index, total: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> list[FigureData]:
    """Make what is missing, and draw all figures.

    Args:
        config: The run that the figures are about.
        out: Folder of figures and data; what is there is reused if it belongs to the same configuration.
        every: Steps from one gradient record to the next.
        seeds: Further seeds for sensitivity and schedules, which have a spread then.
        formats: Of `FORMATS`; the figures' data is always written as JSON.
        only: Some of `WATCHED`, to make only what they need; empty makes all figures.
        tell: Told before each variant that has to be trained.
        should_stop: Asked after every step; True raises `TrainingInterrupted`.

    Raises:
        ConfigError: If the run cannot be watched.
        DataError: If the folder is not usable.
    """
    check_request(config, formats, only)
    variants, rho = plan_variants(config, seeds, only), radius_of(config)
    results: dict[str, dict[str, Any]] = {}
    for index, variant in enumerate(variants):
        file = out / "data" / f"{variant.name}.json"
        values = _load(file, variant, rho, every)
        if values is None:
            tell(variant, index, len(variants))
            values = _make(variant, rho, every, should_stop)
            file.parent.mkdir(parents=True, exist_ok=True)
            write_json(file, values)
            values = _load(file, variant, rho, every)
        assert values is not None
        if variant.is_recorded and not values["recording"]["history"]["records"]:
            raise ConfigError(
                f"{config.method.name} takes no step that could be watched: choose a method that is trained by "
                f"gradients, or a smaller --every than {every}."
            )
        results[variant.name] = values
    figures = [f for f in _figures(config, variants, results) if not only or f.name in only]
    for figure in figures:
        write_json(out / f"{figure.name}.json", figure.to_dict())
        for suffix in formats:
            save(figure, out / f"{figure.name}.{suffix}")
    return figures


def check_request(config: RunConfig, formats: Sequence[str], only: Sequence[str] = ()) -> None:
    """Refuse what cannot be done before anything is trained.

    Raises:
        ConfigError: If the run cannot be watched, a format is unknown, or a figure cannot be asked for alone.
    """
    check_watchable(config.runtime)
    for name in only:
        if name not in WATCHED:
            raise ConfigError(f"The figure {name!r} cannot be made alone. Known: {', '.join(WATCHED)}.")
    for name in formats:
        if name not in FORMATS:
            raise ConfigError(f"Unknown format {name!r}. Known: {', '.join(FORMATS)}.")


def plan_variants(config: RunConfig, seeds: Sequence[int] = (), only: Sequence[str] = ()) -> list[Variant]:
    """Return the run itself, what it is compared with, and the grid around C-Flat Turbo.

    Args:
        config: The run.
        seeds: Further seeds for the grid.
        only: Some of `WATCHED`, to plan only what they need; empty plans everything.
    """
    own = config.optimizer.name
    rho = radius_of(config)
    turbo = config.optimizer.keywords() if own == "c_flat_turbo" else {"rho": rho}
    printed = _printed(config)
    settings = {"none": {}, "c_flat": {"rho": rho}, "c_flat_turbo": turbo, own: config.optimizer.keywords()}
    beside = () if only and set(only) <= ALONE.keys() else RECORDED
    variants = [
        Variant(name, _with(config, name, **settings[name]), is_recorded=True, has_landscapes=not only)
        for name in dict.fromkeys((own, *beside))
    ]
    if only:
        return variants
    known = [variant.config for variant in variants]
    changes: list[dict[str, Any]] = [{"k": k} for k in INTERVALS]
    changes += [{"k": k, "schedule": growing} for growing in (True, False) for k in SCHEDULED]
    changes += [{"beta": beta} for beta in BETAS]
    for seed in dict.fromkeys((config.seed, *seeds)):
        for change in changes:
            varied = replace(_with(config, "c_flat_turbo", **{**printed.optimizer.keywords(), **change}), seed=seed)
            if varied not in known:
                known.append(varied)
                words = "-".join(f"{key}={value}" for key, value in change.items())
                variants.append(Variant(f"c_flat_turbo-{words}-seed{seed}", varied, is_recorded=False))
        for name in RECORDED if seed != config.seed else ():
            varied = replace(_with(config, name, **settings[name]), seed=seed)
            if varied not in known:
                known.append(varied)
                variants.append(Variant(f"{name}-seed{seed}", varied, is_recorded=False))
    return variants


def _printed(config: RunConfig) -> RunConfig:
    """Return the run with C-Flat Turbo as printed: the paper's figures vary k and beta, which no other rules have."""
    own = config.optimizer.keywords()
    kept = {key: own[key] for key in ("lam", "rho_fd") if own.get(key) is not None and config.optimizer.name != "gam"}
    return _with(config, "c_flat_turbo", rho=radius_of(config), rules="paper", k=INTERVALS[1], beta=BETAS[1], **kept)


def _with(config: RunConfig, name: str, **settings: Any) -> RunConfig:
    return replace(config, optimizer=parse_optimizer({"name": name, **settings}))


def _make(variant: Variant, rho: float, every: int, should_stop: Callable[[], bool]) -> dict[str, Any]:
    recording = Recording(rho, every, has_landscapes=variant.has_landscapes) if variant.is_recorded else None
    observers = [] if recording is None else [recording]
    summary = run(variant.config, observers=observers, should_stop=should_stop)
    return {
        "config": variant.config.to_dict(),
        "watched": _watched(variant, rho, every),
        "summary": summary.to_dict(),
        "recording": None if recording is None else recording.to_dict(),
    }


def _load(file: Path, variant: Variant, rho: float, every: int) -> dict[str, Any] | None:
    """Read a result; None if it is not there, broken, or of another configuration."""
    try:
        values = json.loads(read_text(file))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{str(file)!r} cannot be read: {error}. Delete it to make it anew.") from error
    wanted = (plain_values(variant.config.to_dict()), _watched(variant, rho, every))
    is_own = isinstance(values, dict) and (values.get("config"), values.get("watched")) == wanted
    return values if is_own else None


def _watched(variant: Variant, rho: float, every: int) -> list[Any] | None:
    return [rho, every, variant.has_landscapes] if variant.is_recorded else None


def _figures(
    config: RunConfig, variants: Sequence[Variant], results: Mapping[str, Mapping[str, Any]]
) -> list[FigureData]:
    recorded = {variant.name: results[variant.name]["recording"] for variant in variants if variant.is_recorded}
    histories = {
        name: GradientHistory.from_dict(title_of(name), values["history"]) for name, values in recorded.items()
    }
    watched = [make(histories[config.optimizer.name]) for make in ALONE.values()]
    watched.append(evolution(list(histories.values())))
    if not any(variant.has_landscapes for variant in variants):
        return watched
    return [
        *watched,
        *_sweeps(variants, results),
        *_landscapes({title_of(name): values["landscapes"] for name, values in recorded.items()}),
    ]


def _sweeps(variants: Sequence[Variant], results: Mapping[str, Mapping[str, Any]]) -> list[FigureData]:
    turbo = [variant for variant in variants if variant.config.optimizer.name == "c_flat_turbo"]
    reference = _printed(variants[0].config).optimizer.keywords()
    figures = []
    for key, values in (("k", INTERVALS), ("beta", BETAS)):
        points = []
        for value in dict.fromkeys((*values, reference[key])):
            accuracies, speeds = _measured(turbo, results, {**reference, key: value})
            points.append(SweepPoint("C-Flat Turbo", float(value), accuracies, speeds))
        figures.append(sensitivity(f"optimizer.{key}", points))
    strategies = []
    exact = [variant for variant in variants if variant.config.optimizer.name == "c_flat"]
    for k in SCHEDULED:
        accuracies, speeds = _measured(exact, results, exact[0].config.optimizer.keywords())
        strategies.append(StrategyPoint("C-Flat", float(k), accuracies, speeds))
        for schedule, name in ((False, "Turbo, constant k"), (True, "Turbo, growing k")):
            accuracies, speeds = _measured(turbo, results, {**reference, "k": k, "schedule": schedule})
            strategies.append(StrategyPoint(name, float(k), accuracies, speeds))
    return [*figures, scheduler_comparison(strategies)]


def _measured(
    variants: Sequence[Variant], results: Mapping[str, Mapping[str, Any]], settings: Mapping[str, Any]
) -> tuple[list[float], list[float]]:
    """Return accuracies and speeds of the variants with these settings, one for each seed."""
    chosen = [
        results[variant.name]["summary"] for variant in variants if variant.config.optimizer.keywords() == settings
    ]
    return [float(summary["avg"]) for summary in chosen], [float(summary["images_per_second"]) for summary in chosen]


def _landscapes(found: Mapping[str, Mapping[str, Any]]) -> list[FigureData]:
    lines = {name: values["lines"][-1] for name, values in found.items() if values["lines"]}
    figures = [slice_figure({name: (entry["distances"], _numbers(entry["losses"])) for name, entry in lines.items()})]
    last = {name: values for name, values in found.items() if "plane" in values}
    if last:  # methods that train in the first task alone never come to the last
        planes = {name: values["plane"] for name, values in last.items()}
        figures += [
            plane_figure({name: (p["xs"], p["ys"], list(map(_numbers, p["losses"]))) for name, p in planes.items()}),
            spectrum_figure(
                {name: (values["spectrum"]["grid"], values["spectrum"]["density"]) for name, values in last.items()},
                top={name: values["eigenvalues"]["values"] for name, values in last.items()},
            ),
        ]
    connections = {
        f"{name}, task {entry['task']} to {entry['task'] + 1}": (entry["fractions"], _numbers(entry["losses"]))
        for name, values in found.items()
        for entry in values["connections"][-1:]
    }
    return [*figures, connectivity_figure(connections)] if connections else figures


def _numbers(values: Sequence[float | None]) -> list[float]:
    return [math.nan if value is None else value for value in values]
