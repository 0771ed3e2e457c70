"""Runs as a report needs them: finished or not, with their history; what cannot be read becomes a problem."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from cflat._errors import CFlatError, DataError
from cflat._files import read_text
from cflat.config.documents import flatten
from cflat.config.run_config import RunConfig
from cflat.config.variants import parse_variant
from cflat.data import Outline
from cflat.figures.interactive import plot
from cflat.figures.model import MAX_POINTS, Curve, FigureData, Mark, downsampled
from cflat.figures.runs import BRANCHES, OUTCOMES, Timeline
from cflat.report.build import embed_json
from cflat.report.model import Problem
from cflat.runs.folder import RunFolder, RunSummary, find_runs
from cflat.train import EpochRecord, TaskRecord
from cflat.train.records import read_records as parse_records

T = TypeVar("T")

MALFORMED = (KeyError, TypeError, ValueError, AttributeError, IndexError, ArithmeticError, RecursionError)


@dataclass(frozen=True)
class RunRecord:
    """One run directory."""

    name: str
    """Its folder, below what all runs of the report share."""
    config: RunConfig
    summary: RunSummary | None
    """None while the run is not finished."""
    stage_accuracy: tuple[float, ...]
    """Accuracy on everything seen so far, after each finished task."""
    timeline: Timeline | None
    environment: Mapping[str, Any]
    figures: tuple[FigureData, ...]
    """What ``cflat analyze`` has put into the run's ``analysis`` folder."""
    outline: Outline | None = None
    """Tasks and class names; None for a run that did not write them."""
    tuned: tuple[str, ...] = ()
    """Keys whose values were tuned for its optimizer."""
    tuned_by: str = ""
    """A hash of the search that tuned them."""

    @property
    def is_finished(self) -> bool:
        """Whether there is a result."""
        return self.summary is not None


def read_records(roots: Iterable[Path]) -> tuple[list[RunRecord], list[Problem]]:
    """Read all runs at or below some folders; each thing that cannot be read is a problem, and the rest goes on."""
    problems: list[Problem] = []
    folders = {}
    for root in roots:
        found: list[RunFolder] = _noted(str(root), problems, partial(list, find_runs(root))) or []
        folders.update({folder.path.resolve(): folder for folder in found})
    base = os.path.commonpath([path.parent for path in folders]) if folders else ""
    records = []
    for path, folder in folders.items():
        name = os.path.relpath(path, base)
        record = _noted(name, problems, partial(_read, folder, name, problems))
        if record is not None:
            records.append(record)
    return records, problems


def require_records(roots: Iterable[str | Path], purpose: str) -> tuple[list[RunRecord], list[Problem]]:
    """Read all runs as `read_records` does; raise a `DataError` if there is none that can be read."""
    records, problems = read_records(map(Path, roots))
    if not records:
        reasons = " ".join(dict.fromkeys(problem.message for problem in problems))
        raise DataError(f"There is no run to {purpose}. {reasons}".rstrip())
    return records, problems


def _noted(where: str, problems: list[Problem], read: Callable[[], T]) -> T | None:
    """Return what could be read, or go on without it."""
    try:
        return read()
    except (CFlatError, OSError) as error:
        problems.append(Problem(where, str(error)))
        return None


def _read(folder: RunFolder, name: str, problems: list[Problem]) -> RunRecord:
    summary = folder.load_summary() if folder.is_finished else None
    if summary is not None and summary.headline.num_stages == 0:
        raise DataError(f"{str(folder.summary_file)!r} holds no accuracy: no task was finished.")
    config = folder.load_config() if summary is None else summary.config
    stages, timeline = _noted(name, problems, partial(_history, folder, name)) or ((), None)
    environment = _noted(name, problems, folder.load_environment) or {}
    outline = _noted(name, problems, folder.load_outline)
    if summary is not None:
        stages = tuple(float(value) for value in summary.headline.stage_accuracy)
    files = sorted((folder.path / "analysis").glob("*.json"))
    figures = tuple(figure for file in files if (figure := _figure(file, name, problems)) is not None)
    tuned = _tuned(folder, config)
    return RunRecord(name, config, summary, stages, timeline, environment, figures, outline, *tuned)


def _tuned(folder: RunFolder, config: RunConfig) -> tuple[tuple[str, ...], str]:
    """Return which keys of a run were tuned, and by which search: ``tuned.json`` beside it, if it has these values."""
    file = folder.path.parent / "tuned.json"
    own = flatten(config.to_dict())
    try:
        text = read_text(file)
        entries = json.loads(text)["optimizers"]
        if any(all(own.get(key) == value for key, value in one["settings"].items()) for one in entries.values()):
            keys = [key for name, one in entries.items() for key in (*one["settings"], *parse_variant(name).settings)]
            return tuple(dict.fromkeys(keys)), hashlib.sha256(text.encode()).hexdigest()
    except (OSError, CFlatError, *MALFORMED):
        pass
    return (), ""


def _history(folder: RunFolder, name: str) -> tuple[tuple[float, ...], Timeline | None]:
    if not folder.metrics_file.is_file():
        return (), None
    try:
        records = parse_records(folder.load_metrics())
    except DataError as error:
        raise DataError(f"{str(folder.metrics_file)!r} holds other records than those of a run: {error}.") from error
    stages = tuple(record.headline.stage_accuracy for record in records if isinstance(record, TaskRecord))
    epochs = [record for record in records if isinstance(record, EpochRecord)]
    return stages, _timeline(name, epochs) if epochs else None


def _timeline(name: str, epochs: list[EpochRecord]) -> Timeline:
    """Turn counters that grow over a phase into what happened in each epoch."""
    phases = [(record.task, record.phase) for record in epochs]
    starts = [index for index, phase in enumerate(phases) if index and phases[index - 1] != phase]

    def grown(counters: Iterable[float]) -> npt.NDArray[np.float64]:
        counted = np.fromiter(counters, dtype=float)
        increments = np.diff(counted, prepend=0)
        increments[starts] = counted[starts]
        return increments

    taken = grown(record.steps for record in epochs)
    steps = np.maximum(taken, 1)
    shares = {
        f"{branch}.{outcome}": (grown(getattr(record, branch).get(outcome, 0) for record in epochs) / steps).tolist()
        for branch in BRANCHES
        if any(any(getattr(record, branch).values()) for record in epochs)
        for outcome in OUTCOMES
    }
    ages = {
        branch: [float(record.cache_age.get(branch, np.nan)) for record in epochs]
        for branch in BRANCHES
        if any(branch in record.cache_age for record in epochs)
    }
    measured, total = (grown(record.surrogate.get(key, 0) for record in epochs) for key in ("count", "total"))
    errors = np.divide(total, measured, out=np.full(len(epochs), np.nan), where=measured > 0)
    return Timeline(
        name,
        np.cumsum(taken).tolist(),
        [record.loss for record in epochs],
        (grown(record.evaluations for record in epochs) / steps).tolist(),
        shares,
        ages,
        errors.tolist() if measured.any() else (),
    )


def _figure(file: Path, name: str, problems: list[Problem]) -> FigureData | None:
    try:
        figure = FigureData.from_dict(json.loads(read_text(file)))
        embed_json([figure.title, figure.caption, plot(figure)])
    except (OSError, *MALFORMED) as error:
        problems.append(Problem(f"{name}/analysis/{file.name}", f"This is not a figure: {error!r:.200}."))
        return None
    panels = [replace(panel, marks=[_thinned(mark) for mark in panel.marks]) for panel in figure.panels]
    return replace(figure, panels=panels)


def _thinned(mark: Mark) -> Mark:
    """Thin out a long curve; a band has no peaks of its own to keep, so it is dropped with the points."""
    if not isinstance(mark, Curve) or len(mark.x) <= MAX_POINTS:
        return mark
    x, y = downsampled(mark.x, mark.y)
    return replace(mark, x=x, y=y, low=None, high=None, labels=None)
