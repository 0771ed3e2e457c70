"""Runs as a report needs them: finished or not, with their history; what cannot be read becomes a problem."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numpy as np

from cflat._errors import CFlatError, DataError
from cflat._files import read_text
from cflat.config.documents import flatten
from cflat.config.run_config import RunConfig
from cflat.config.variants import parse_variant
from cflat.data import Outline
from cflat.figures.interactive import plot
from cflat.figures.model import MAX_POINTS, Bars, Curve, FigureData, Heatmap, downsampled
from cflat.figures.runs import OUTCOMES, Timeline
from cflat.report.build import embed_json
from cflat.report.model import Problem
from cflat.runs.folder import RunFolder, RunSummary, find_runs
from cflat.train import EpochRecord, TaskRecord
from cflat.train.records import read_records as parse_records

T = TypeVar("T")
History: TypeAlias = "tuple[tuple[float, ...], Timeline | None]"
_NO_HISTORY: History = ((), None)

BRANCHES = ("sharpness", "flatness")
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
    folders = {folder.path.resolve(): folder for root in roots for folder in _find(root, problems)}
    base = os.path.commonpath([path.parent for path in folders]) if folders else ""
    found = [_try_read(folder, os.path.relpath(path, base), problems) for path, folder in folders.items()]
    return [record for record in found if record is not None], problems


def _find(root: Path, problems: list[Problem]) -> list[RunFolder]:
    try:
        return list(find_runs(root))
    except (CFlatError, OSError) as error:
        problems.append(Problem(str(root), str(error)))
        return []


def _try_read(folder: RunFolder, name: str, problems: list[Problem]) -> RunRecord | None:
    try:
        return _read(folder, name, problems)
    except (CFlatError, OSError) as error:
        problems.append(Problem(name, str(error)))
        return None


def _read(folder: RunFolder, name: str, problems: list[Problem]) -> RunRecord:
    summary = _summary(folder) if folder.is_finished else None
    config = folder.load_config() if summary is None else summary.config

    def attempt(read: Callable[[], T], otherwise: T) -> T:
        try:
            return read()
        except DataError as error:
            problems.append(Problem(name, str(error)))
            return otherwise

    stages, timeline = attempt(lambda: _history(folder, name), _NO_HISTORY)
    environment: Mapping[str, Any] = attempt(folder.load_environment, {})
    outline = attempt(folder.load_outline, None)
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
        text = file.read_bytes()
        entries = json.loads(text)["optimizers"]
        if any(all(own.get(key) == value for key, value in one["settings"].items()) for one in entries.values()):
            keys = [key for name, one in entries.items() for key in (*one["settings"], *parse_variant(name).settings)]
            return tuple(dict.fromkeys(keys)), hashlib.sha256(text).hexdigest()
    except (OSError, CFlatError, *MALFORMED):
        pass
    return (), ""


def _summary(folder: RunFolder) -> RunSummary:
    """Read the result of a run that has one."""
    summary = folder.load_summary()
    if summary.headline.num_stages == 0:
        raise DataError(f"{str(folder.summary_file)!r} holds no accuracy: no task was finished.")
    return summary


def _history(folder: RunFolder, name: str) -> History:
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
    counted = np.array([_counters(record) for record in epochs], dtype=float)
    starts = [index == 0 or _phase(epochs[index - 1]) != _phase(record) for index, record in enumerate(epochs)]
    before = np.vstack([np.zeros(counted.shape[1]), counted[:-1]])
    before[starts] = 0
    grown = counted - before
    steps = np.maximum(grown[:, 0], 1)
    shares = {
        f"{branch}.{outcome}": (grown[:, 2 + 3 * b + o] / steps).tolist()
        for b, branch in enumerate(BRANCHES)
        if counted[:, 2 + 3 * b : 5 + 3 * b].any()
        for o, outcome in enumerate(OUTCOMES)
    }
    ages = {
        branch: [float(record.cache_age.get(branch, np.nan)) for record in epochs]
        for branch in BRANCHES
        if any(branch in record.cache_age for record in epochs)
    }
    measured, total = grown[:, -2], grown[:, -1]
    errors = np.divide(total, measured, out=np.full(len(epochs), np.nan), where=measured > 0)
    return Timeline(
        name,
        np.cumsum(grown[:, 0]).tolist(),
        [record.loss for record in epochs],
        (grown[:, 1] / steps).tolist(),
        shares,
        ages,
        errors.tolist() if measured.any() else (),
    )


def _phase(record: EpochRecord) -> tuple[int, str]:
    return record.task, record.phase


def _counters(record: EpochRecord) -> list[float]:
    branches = {"sharpness": record.sharpness, "flatness": record.flatness}
    outcomes = [branches[branch].get(outcome, 0) for branch in BRANCHES for outcome in OUTCOMES]
    errors = [record.surrogate.get("count", 0), record.surrogate.get("total", 0)]
    return [record.steps, record.evaluations, *outcomes, *errors]


def _figure(file: Path, name: str, problems: list[Problem]) -> FigureData | None:
    """Read a figure that can be drawn."""
    try:
        figure = FigureData.from_dict(json.loads(read_text(file)))
        embed_json([figure.title, figure.caption, plot(figure)])
    except (OSError, *MALFORMED) as error:
        problems.append(Problem(f"{name}/analysis/{file.name}", f"This is not a figure: {error!r:.200}."))
        return None
    panels = [replace(panel, marks=[_thinned(mark) for mark in panel.marks]) for panel in figure.panels]
    return replace(figure, panels=panels)


def _thinned(mark: Curve | Bars | Heatmap) -> Curve | Bars | Heatmap:
    """Thin out a long curve; a band has no peaks of its own to keep, so it is dropped with the points."""
    if not isinstance(mark, Curve) or len(mark.x) <= MAX_POINTS:
        return mark
    x, y = downsampled(mark.x, mark.y)
    return replace(mark, x=x, y=y, low=None, high=None, labels=None)
