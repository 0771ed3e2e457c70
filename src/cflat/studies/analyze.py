"""`analyze`: the paper's figures for a run of one's own.

The figures need the run with other optimizers, intervals and surrogate norms beside it. Each of these variants has a
run directory of its own, is resumed if it was interrupted, and is not trained twice. What is recorded is written there
as ``recording.json``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cflat._errors import ConfigError, DataError
from cflat._files import read_text, write_json
from cflat._registry import require_known
from cflat._settings import LARGEST
from cflat.config.choices import parse_optimizer
from cflat.config.presets import radius_of
from cflat.config.run_config import RunConfig
from cflat.figures.figure import FigureData
from cflat.figures.gradients import GradientHistory, correction_ratios, drift, evolution, normality, terms_over_tasks
from cflat.figures.landscapes import connectivity_figure, plane_figure, slice_figure, spectrum_figure
from cflat.figures.runs import SweepPoint, scheduler_comparison, sensitivity
from cflat.figures.static import FORMATS, save
from cflat.report.groups import title_of
from cflat.runs.folder import RunFolder, RunSummary
from cflat.runs.jobs import Job, run_job
from cflat.studies.recording import Recording, check_watchable

RECORDED = ("none", "c_flat", "c_flat_turbo")
INTERVALS = (2, 5, 10)
SCHEDULED = INTERVALS[1:]
"""Intervals at which a constant and a growing k are compared: growth matters little to short ones."""
RECORDING = "recording.json"
BETAS = (0.4, 0.8, 1.2)
ALONE: dict[str, Callable[[GradientHistory], FigureData]] = {
    "correction_ratios": correction_ratios,
    "gradient_drift": drift,
    "terms_over_tasks": terms_over_tasks,
    "normality": normality,
}
"""Figures that need the run itself and nothing beside it."""
WATCHED = (*ALONE, "evolution")
"""Figures that need no grid around the run and no landscapes: they can be made alone."""


@dataclass(frozen=True)
class Variant:
    """The analysed run with another optimizer or setting."""

    name: str
    """Also that of its folder."""
    config: RunConfig
    is_recorded: bool
    """Whether its gradients are recorded, or only its accuracy and speed are used."""
    has_landscapes: bool = False
    """Whether the loss around the end of each task is recorded, too."""


def analyze(
    config: RunConfig,
    out: Path,
    *,
    subject: Path | None = None,
    every: int = 5,
    seeds: Sequence[int] = (),
    formats: Sequence[str] = ("svg",),
    only: Sequence[str] = (),
    tell: Callable[[Variant, int, int], None] = lambda variant, index, total: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> list[FigureData]:
    """Make what is missing, and draw all figures about a run into ``out``, which also has the runs beside it.

    Args:
        config: The run that the figures are about.
        out: Folder of the figures; what is there is reused.
        subject: Run directory of the analysed run, used if it was recorded; see `record_run`.
        every: Steps from one gradient record to the next.
        seeds: Further seeds for sensitivity and schedules, which have a spread then.
        formats: Of `FORMATS`; the figures' data is always written as JSON.
        only: Some of `WATCHED`, to make only what they need; empty makes all figures.
        tell: Called before each variant that has to be trained.
        should_stop: Called after every step; True raises `TrainingInterrupted`.
    """
    check_request(config, formats, only, seeds)
    variants, rho = plan_variants(config, seeds, only), radius_of(config)
    summaries: dict[str, RunSummary] = {}
    recorded: dict[str, dict[str, Any]] = {}
    for index, variant in enumerate(variants):
        folder, observers = out / "runs" / variant.name, []
        if variant.is_recorded:
            # The name has what else decides about a recording: another --every must not reuse this one.
            folder = out / "runs" / f"{variant.name}-every{every}{'-landscapes' if variant.has_landscapes else ''}"
            recording = Recording(rho, every, has_landscapes=variant.has_landscapes)
            if index == 0 and subject is not None and _is_recorded(subject, recording):
                folder = subject  # the analysed run was recorded while it was trained
            recording.file = folder / RECORDING
            observers.append(recording)
        job = Job(variant.config, folder)
        if not job.is_finished:
            tell(variant, index, len(variants))
            run_job(job, observers, should_stop=should_stop)
        summaries[variant.name] = RunFolder(folder).load_summary()  # read back, whether trained now or before
        if variant.is_recorded:
            found = recorded[variant.name] = _read(folder)
            if "history" not in found:
                raise DataError(
                    f"{str(folder / RECORDING)!r} is not complete. Delete {str(folder)!r} to record it again."
                )
            if not found["history"]["records"]:
                raise ConfigError(
                    f"{config.method.name} takes no step that could be recorded: choose a method that is trained by "
                    f"gradients, or a smaller --every than {every}."
                )
    histories = {
        name: GradientHistory.from_dict(title_of(name, config.base.name), found["history"])
        for name, found in recorded.items()
    }
    figures = [make(histories[config.optimizer.name]) for make in ALONE.values()]
    figures.append(evolution(list(histories.values())))
    if not only:
        figures += _sweeps(variants, summaries)
        figures += _landscapes(
            {title_of(name, config.base.name): found["landscapes"] for name, found in recorded.items()}
        )
    figures = [figure for figure in figures if not only or figure.name in only]
    for figure in figures:
        # `cflat report` embeds the JSON files in a run's analysis folder.
        write_json(out / f"{figure.name}.json", figure.to_dict())
        for suffix in formats:
            save(figure, out / f"{figure.name}.{suffix}")
    return figures


def record_run(
    config: RunConfig,
    out: Path,
    *,
    every: int = 5,
    has_landscapes: bool = True,
    should_stop: Callable[[], bool] = lambda: False,
) -> None:
    """Train the run that is to be analysed and record it; one that was begun without a recording has none."""
    recording = Recording(radius_of(config), every, has_landscapes=has_landscapes, file=out / RECORDING)
    # A recording must cover the run from its first step, so it cannot be attached to one that was begun.
    is_watched = not RunFolder(out).config_file.is_file() or _is_recorded(out, recording)
    job = Job(config, out)
    if not job.is_finished:
        run_job(job, [recording] if is_watched else [], should_stop=should_stop)


def check_request(
    config: RunConfig, formats: Sequence[str], only: Sequence[str] = (), seeds: Sequence[int] = ()
) -> None:
    """Reject a request that cannot be met before anything is trained."""
    check_watchable(config.runtime)
    for seed in seeds:
        if not 0 <= seed <= LARGEST:
            raise ConfigError(f"Seeds must be whole numbers from 0 to {LARGEST}, got {seed}.")
    for name in only:
        if name not in WATCHED:
            raise ConfigError(f"The figure {name!r} cannot be made alone. Known: {', '.join(WATCHED)}.")
    for name in formats:
        require_known("format", name, FORMATS)


def plan_variants(config: RunConfig, seeds: Sequence[int] = (), only: Sequence[str] = ()) -> list[Variant]:
    """Return the run itself, what it is compared with, and the grid around C-Flat Turbo, also with further seeds.

    ``only`` has some of `WATCHED`, to plan only what they need; empty plans everything.
    """
    own, rho = config.optimizer.name, radius_of(config)
    turbo = config.optimizer.keywords() if own == "c_flat_turbo" else {"rho": rho}
    settings = {"none": {}, "c_flat": {"rho": rho}, "c_flat_turbo": turbo, own: config.optimizer.keywords()}
    beside = () if only and set(only) <= ALONE.keys() else RECORDED
    variants = [
        Variant(name, _with(config, name, **settings[name]), is_recorded=True, has_landscapes=not only)
        for name in dict.fromkeys((own, *beside))
    ]
    if only:
        return variants
    changes: list[dict[str, Any]] = [{"k": k} for k in INTERVALS]
    changes += [{"k": k, "schedule": growing} for growing in (True, False) for k in SCHEDULED]
    changes += [{"beta": beta} for beta in BETAS]
    printed = _printed(config).optimizer.keywords()
    grid = {}
    for change in changes:
        words = "-".join(f"{key}={value}" for key, value in change.items())
        grid[f"c_flat_turbo-{words}"] = _with(config, "c_flat_turbo", **{**printed, **change})
    again = {name: _with(config, name, **settings[name]) for name in RECORDED}
    for seed in dict.fromkeys((config.seed, *seeds)):
        for name, plain in (grid if seed == config.seed else {**grid, **again}).items():
            varied = replace(plain, seed=seed)
            # The grid meets itself (k=5 is also the default) and may meet the run: each is trained once.
            if all(variant.config != varied for variant in variants):
                variants.append(Variant(f"{name}-seed{seed}", varied, is_recorded=False))
    return variants


def _printed(config: RunConfig) -> RunConfig:
    """Return the run with C-Flat Turbo, whose k and beta the paper's figures vary."""
    own = config.optimizer.keywords()
    # GAM's rho_fd is a step of another algorithm.
    kept = {key: own[key] for key in ("lam", "rho_fd") if own.get(key) is not None and config.optimizer.name != "gam"}
    return _with(config, "c_flat_turbo", rho=radius_of(config), k=INTERVALS[1], beta=BETAS[1], **kept)


def _with(config: RunConfig, name: str, **settings: Any) -> RunConfig:
    return replace(config, optimizer=parse_optimizer({"name": name, **settings}))


def _is_recorded(folder: Path, recording: Recording) -> bool:
    """Whether a run is recorded from its first step, in this way; landscapes may be recorded besides."""
    if not (folder / RECORDING).is_file():
        return False
    return _read(folder).get("watched") in (recording.watched, [*recording.watched[:2], True])


def _read(folder: Path) -> dict[str, Any]:
    try:
        values = json.loads(read_text(folder / RECORDING))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(
            f"{str(folder / RECORDING)!r} cannot be read: {error}. Delete {str(folder)!r} to record it again."
        ) from error
    return values if isinstance(values, dict) else {}


def _sweeps(variants: Sequence[Variant], summaries: Mapping[str, RunSummary]) -> list[FigureData]:
    turbo = [variant for variant in variants if variant.config.optimizer.name == "c_flat_turbo"]
    reference = _printed(variants[0].config).optimizer.keywords()
    figures = []

    def point(name: str, at: float, among: Sequence[Variant], settings: Mapping[str, Any]) -> SweepPoint:
        """Return accuracies and speeds of the variants with these settings, one for each seed."""
        chosen = [summaries[one.name] for one in among if one.config.optimizer.keywords() == settings]
        speeds = [found.value("images_per_second") for found in chosen]
        return SweepPoint(name, float(at), [found.value("avg") for found in chosen], speeds)

    for key, values in (("k", INTERVALS), ("beta", BETAS)):
        tried = dict.fromkeys((*values, reference[key]))  # the reference is a point of each curve
        points = [point("C-Flat Turbo", value, turbo, {**reference, key: value}) for value in tried]
        figures.append(sensitivity(f"optimizer.{key}", points))
    strategies = []
    exact = [variant for variant in variants if variant.config.optimizer.name == "c_flat"]
    for k in SCHEDULED:
        strategies.append(point("C-Flat", k, exact, exact[0].config.optimizer.keywords()))
        for schedule, name in ((False, "Turbo, constant k"), (True, "Turbo, growing k")):
            strategies.append(point(name, k, turbo, {**reference, "k": k, "schedule": schedule}))
    return [*figures, scheduler_comparison(strategies)]


def _landscapes(found: Mapping[str, Mapping[str, Any]]) -> list[FigureData]:
    lines = {name: values["lines"][-1] for name, values in found.items() if values["lines"]}
    figures = [slice_figure({name: (entry["distances"], _numbers(entry["losses"])) for name, entry in lines.items()})]
    last = {name: values for name, values in found.items() if "plane" in values}
    if last:  # a method that trains in the first task alone has no survey of the last
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
    # JSON has no NaN; a loss that was not finite comes back as null.
    return [math.nan if value is None else value for value in values]
