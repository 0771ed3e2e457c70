"""Runs as a report needs them: finished or not, with their history; what cannot be read becomes a problem."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cflat._errors import CFlatError, DataError
from cflat._files import read_text
from cflat._registry import require_known
from cflat.config.documents import flatten
from cflat.config.run_config import RunConfig
from cflat.config.variants import parse_variant
from cflat.data import Outline
from cflat.figures.figure import MAX_POINTS, Curve, FigureData, Mark, downsampled
from cflat.figures.interactive import plot
from cflat.figures.runs import BRANCHES, OUTCOMES, Timeline
from cflat.report.build import embed_json
from cflat.report.page import Problem
from cflat.runs.folder import RunFolder, RunSummary, find_runs
from cflat.train import EpochRecord, TaskRecord
from cflat.train.observer import read_records

# Any JSON may be in the files: integers too large for a float are an ArithmeticError, deep nesting a RecursionError.
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
    score: str
    """The score that its accuracies are of."""
    outline: Outline | None = None
    """Tasks and class names; None for a run that did not write them."""
    tuned: tuple[str, ...] = ()
    """Keys whose values were tuned for its optimizer."""
    tuned_by: str = ""
    """A hash of the search that tuned them."""

    @property
    def scores(self) -> tuple[str, ...]:
        """All scores that it has; of an unfinished run, the one that is shown."""
        return (self.score,) if self.summary is None else tuple(self.summary.accuracy)

    @property
    def is_finished(self) -> bool:
        """Whether there is a result."""
        return self.summary is not None


def require_records(
    roots: Iterable[str | Path], purpose: str, score: str | None = None
) -> tuple[list[RunRecord], list[Problem]]:
    """Read all runs at or below some folders; what cannot be read is listed as a problem, and the rest is returned.

    Runs are judged by ``score`` if their method has it, else by its headline.

    Raises:
        DataError: If there is no run that can be read.
    """
    problems: list[Problem] = []
    folders = {}
    for root in roots:
        with _noting(str(root), problems):
            # A run that is given twice is shown once.
            folders.update({folder.path.resolve(): folder for folder in find_runs(Path(root))})
    # The parents: a single run would otherwise be called ".".
    base = os.path.commonpath([path.parent for path in folders]) if folders else ""
    records = []
    for path, folder in folders.items():
        name = os.path.relpath(path, base)
        with _noting(name, problems):
            records.append(_read(folder, name, problems, score))
    if not records:
        reasons = " ".join(dict.fromkeys(problem.message for problem in problems))
        raise DataError(f"There is no run to {purpose}. {reasons}".rstrip())
    if score is not None:
        require_known("score of these runs", score, dict.fromkeys(one for record in records for one in record.scores))
    return records, problems


@contextmanager
def _noting(where: str, problems: list[Problem]) -> Iterator[None]:
    """List what cannot be read as a problem; a report of a hundred runs must not fail because of one file."""
    try:
        yield
    except (CFlatError, OSError) as error:
        problems.append(Problem(where, str(error)))


def _read(folder: RunFolder, name: str, problems: list[Problem], wanted: str | None) -> RunRecord:
    summary = folder.load_summary() if folder.is_finished else None
    if summary is not None and wanted in summary.accuracy:
        summary = summary.judged_by(wanted)  # methods without this score keep their headline
    if summary is not None and summary.headline.num_stages == 0:
        raise DataError(f"{str(folder.summary_file)!r} holds no accuracy: no task was finished.")
    config = folder.load_config(is_past=True) if summary is None else summary.config
    history: tuple[str, tuple[float, ...], Timeline | None] = "", (), None
    environment: dict[str, Any] = {}
    outline = None
    # One by one: a broken history must not cost the environment or the outline.
    with _noting(name, problems):
        history = _history(folder, name, wanted)
    with _noting(name, problems):
        environment = folder.load_environment()
    with _noting(name, problems):
        outline = folder.load_outline() if folder.stream_file.exists() else None
    score, stages, timeline = history
    if summary is not None:
        score, stages = summary.score, tuple(float(value) for value in summary.headline.stage_accuracy)
    files = sorted((folder.path / "analysis").glob("*.json"))
    figures = tuple(figure for file in files if (figure := _figure(file, name, problems)) is not None)
    tuned = _tuned(folder, config)
    return RunRecord(name, config, summary, stages, timeline, environment, figures, score, outline, *tuned)


def _tuned(folder: RunFolder, config: RunConfig) -> tuple[tuple[str, ...], str]:
    """Return which keys of a run were tuned, and by which search: ``tuned.json`` beside it, if it has these values."""
    file = folder.path.parent / "tuned.json"
    own = flatten(config.to_dict())
    try:
        text = read_text(file)
        entries = json.loads(text)["optimizers"]
        chosen = {name: one["settings"] for name, one in entries.items() if one["settings"] is not None}
        # With other values, it is the file of another search than that of this run.
        if any(all(own.get(key) == value for key, value in settings.items()) for settings in chosen.values()):
            keys = [key for name, settings in chosen.items() for key in (*settings, *parse_variant(name).settings)]
            return tuple(dict.fromkeys(keys)), hashlib.sha256(text.encode()).hexdigest()
    except (OSError, CFlatError, *MALFORMED):
        pass
    return (), ""


def _history(folder: RunFolder, name: str, wanted: str | None) -> tuple[str, tuple[float, ...], Timeline | None]:
    """Return the score that is shown, its accuracy after each task, and what happened in each epoch."""
    if not folder.metrics_file.is_file():
        return "", (), None
    try:
        records = read_records(folder.load_metrics())
    except DataError as error:
        raise DataError(f"{str(folder.metrics_file)!r} holds other records than those of a run: {error}.") from error
    # With data.evaluate=validation there are no scores on test images.
    answers = [record.scores or record.validation for record in records if isinstance(record, TaskRecord)]
    known = list(answers[0]) if answers else [""]
    score = wanted if wanted in known else known[0]
    stages = tuple(answer[score].stage_accuracy for answer in answers if score in answer)
    epochs = [record for record in records if isinstance(record, EpochRecord)]
    return score, stages, _timeline(name, epochs) if epochs else None


def _timeline(name: str, epochs: list[EpochRecord]) -> Timeline:
    """Turn counters that grow over a phase into what happened in each epoch."""
    phases, counted = [(record.task, record.phase) for record in epochs], [record.telemetry for record in epochs]
    starts = [index for index, phase in enumerate(phases) if index and phases[index - 1] != phase]

    def grown(counters: Iterable[float]) -> npt.NDArray[np.float64]:
        counted = np.fromiter(counters, dtype=float)
        increments = np.diff(counted, prepend=0)
        increments[starts] = counted[starts]  # counters start anew in each phase
        return increments

    taken = grown(one.steps for one in counted)
    steps = np.maximum(taken, 1)  # an epoch may have taken no step
    shares = {
        f"{branch}.{outcome}": (grown(getattr(getattr(one, branch), outcome) for one in counted) / steps).tolist()
        for branch in BRANCHES
        if any(any(asdict(getattr(one, branch)).values()) for one in counted)
        for outcome in OUTCOMES
    }
    ages = {
        branch: [float(one.cache_age.get(branch, np.nan)) for one in counted]
        for branch in BRANCHES
        if any(branch in one.cache_age for one in counted)
    }
    measured, total = (grown(getattr(one.surrogate, key) for one in counted) for key in ("count", "total"))
    errors = np.divide(total, measured, out=np.full(len(epochs), np.nan), where=measured > 0)
    return Timeline(
        name,
        np.cumsum(taken).tolist(),
        [record.loss for record in epochs],
        (grown(one.evaluations for one in counted) / steps).tolist(),
        shares,
        ages,
        errors.tolist() if measured.any() else (),
    )


def _figure(file: Path, name: str, problems: list[Problem]) -> FigureData | None:
    try:
        figure = FigureData.from_dict(json.loads(read_text(file)))
        # Drawn once to find errors here: inside the page, one broken figure would prevent all of it.
        embed_json([figure.title, figure.caption, plot(figure)])
    except (OSError, *MALFORMED) as error:
        problems.append(Problem(f"{name}/analysis/{file.name}", f"This is not a figure: {error!r:.200}."))
        return None
    panels = [replace(panel, marks=[_thinned(mark) for mark in panel.marks]) for panel in figure.panels]
    return replace(figure, panels=panels)


def _thinned(mark: Mark) -> Mark:
    """Thin out a long curve; its band has no peaks of its own to keep, and is dropped."""
    if not isinstance(mark, Curve) or len(mark.x) <= MAX_POINTS:
        return mark
    x, y = downsampled(mark.x, mark.y)
    return replace(mark, x=x, y=y, low=None, high=None, labels=None)
