"""`reproduce`: run what a table or figure of the paper needs, at a scale of one's choice, and set it beside the paper.

Run directories are named by their configuration: tables share them, and nothing is trained twice.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

from cflat._errors import ConfigError, DataError
from cflat._registry import require_known
from cflat.config.documents import Layer, flatten, merge
from cflat.config.presets import resolve_config
from cflat.config.run_config import RunConfig
from cflat.config.validation import require_mapping
from cflat.data import dataset_spec, locate_dataset
from cflat.methods import get_method_spec
from cflat.metrics import Spread, spread
from cflat.paper.exhibits import Exhibit, Line, Published
from cflat.paper.measures import SCORED, config_value, is_accuracy, is_config, measure, metric_title
from cflat.runs.jobs import Executor, Job, run_jobs

SCALES: dict[str, Layer] = {
    "paper": {"preset": "paper"},
    # Not preset cpu: the protocol stays the paper's, on a smaller network.
    "cpu": {"preset": "paper", "backbone": {"name": "vit_tiny", "image_size": 64}},
    "smoke": {"preset": "smoke", "stream": {"max_tasks": 2}},
}
"""What a scale sets in all runs; the settings of exhibit and user are laid over it."""
MEANINGS = {
    "paper": "",
    "cpu": "Compare signs and ratios with the paper, not values.",
    "smoke": "Tiny random networks on digits: this shows that everything runs, and nothing else.",
}
"""What the numbers of a scale are good for."""
UNLISTED = ("preset", "seed", "data.root", "backbone.weights", "runtime.", "stream.order_seed")
"""Keys that do not make another experiment of a run."""
SECOND = ("avg", "last")
"""What is also shown of scores that were not published."""
HERE, PAPER = "here", "the paper"
SPEED, COUNTED = "images_per_second", "evaluations_per_step"
SMOKE_KEEPS = ("method", "optimizer", "stream")
"""Sections of an exhibit that mean something on tiny networks and images."""


@dataclass(frozen=True)
class Plan:
    """The runs behind each number: for every line and column one job per seed, empty where data is missing."""

    exhibit: Exhibit
    scale: str
    jobs: tuple[tuple[tuple[Job, ...], ...], ...]
    """By line, column, seed."""
    missing: Mapping[str, str]
    """Why columns, or single lines in them, are left out, by their names."""
    meaning: str = ""
    """How these runs differ from the paper's, and what they are good for."""
    score: str | None = None
    """The score that the user asks for, in methods that have it."""

    def score_of(self, method: str) -> str:
        """Return the score by which a method is shown: the user's, the published one, or its headline."""
        known = get_method_spec(method).scores
        return self.score if self.score in known else self.exhibit.scores.get(method, known[0])

    def users_of(self, job: Job) -> list[str]:
        """Return the lines and columns that show a job."""
        return [
            f"{line.group} {line.name}, {column.name}".strip()
            for line, cells in zip(self.exhibit.rows, self.jobs, strict=True)
            for column, own in zip(self.exhibit.columns, cells, strict=True)
            if job in own
        ]

    @property
    def all_jobs(self) -> list[Job]:
        """Every job once."""
        # Lines share runs, such as their reference.
        listed = (job for line in self.jobs for column in line for job in column if not self.exhibit.needs_no_run)
        return list({job.out: job for job in listed}.values())


@dataclass(frozen=True)
class Entry:
    """One number: as published, and as measured here; accuracies in percent."""

    metric: str
    title: str
    published: Published | None
    measured: Spread | None
    by_seed: tuple[float, ...] = ()
    score: str = ""
    """Of an accuracy: the score that it is of."""

    def number(self, where: str) -> Spread | None:
        """Return the number from `HERE` or from `PAPER`."""
        return self.measured if where == HERE else self.published

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for ``table.json``."""
        values: dict[str, Any] = {"metric": self.metric, "title": self.title, "score": self.score}
        for name, number in (("published", self.published), ("measured", self.measured)):
            values |= {name: number and number.mean, f"{name}_std": number and number.std}
        return {**values, "by_seed": list(self.by_seed)}


@dataclass(frozen=True)
class Reproduction:
    """A table of the paper with our numbers beside it."""

    exhibit: Exhibit
    scale: str
    entries: tuple[tuple[tuple[Entry, ...], ...], ...]
    """By line, column, metric."""
    missing: Mapping[str, str]
    num_seeds: int
    """Runs behind each number; 0 if nothing had to be run."""
    meaning: str = ""
    """How the runs differ from the paper's, and what they are good for."""

    @property
    def repeats(self) -> str:
        """How many runs are behind each number, in words."""
        what = "class order" if self.exhibit.repeat == "order" else "seed"
        return f"one {what}" if self.num_seeds == 1 else f"{self.num_seeds} {what}s"

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for ``table.json``."""
        rows = []
        for line, cells in zip(self.exhibit.rows, self.entries, strict=True):
            pairs = zip(self.exhibit.columns, cells, strict=True)
            columns = [{"name": column.name, "entries": [entry.to_dict() for entry in cell]} for column, cell in pairs]
            rows.append({"group": line.group, "name": line.name, "columns": columns})
        head = {"name": self.exhibit.name, "title": self.exhibit.title, "note": self.exhibit.note, "scale": self.scale}
        head["meaning"] = self.meaning
        return {**head, "num_seeds": self.num_seeds, "missing": dict(self.missing), "rows": rows}


@dataclass(frozen=True)
class Request:
    """What a user asks for."""

    scale: str = "paper"
    weights: str | None = None
    """Weights of the pretrained backbone; exhibits that train from scratch do not take them."""
    chosen: Mapping[str, Any] = field(default_factory=dict)
    """Settings of all runs, above those of the exhibit."""
    seeds: tuple[int, ...] = ()
    """Instead of the exhibit's own; of those, small scales take the first."""
    score: str | None = None
    """Shown instead of the published one, in methods that have it."""

    def __post_init__(self) -> None:
        if len(set(self.seeds)) < len(self.seeds):
            raise ConfigError(f"Seeds must be given once each: {list(self.seeds)} would pretend a spread.")
        require_known("scale", self.scale, SCALES)


def plan_exhibit(exhibit: Exhibit, request: Request, out: Path, *, needs_data: bool = True) -> Plan:
    """Plan the runs of a table below ``out``, where those that are there are reused.

    Every configuration is checked before any run begins. Without ``needs_data`` the runs on missing data are planned as
    well, to be listed.

    Raises:
        ConfigError: If the scale has no line of the table.
        DataError: If no dataset of the table is there.
    """
    # A table of settings shows those of preset paper at every scale.
    request = replace(request, scale="paper") if exhibit.needs_no_run else request
    if exhibit.rows and not exhibit.at(request.scale).rows:
        others = " or ".join(dict.fromkeys(scale for line in exhibit.rows for scale in line.scales))
        raise ConfigError(f"{exhibit.name} has none of these lines at scale {request.scale}; choose scale {others}.")
    exhibit = exhibit.at(request.scale)
    # By default small scales take one of the seeds: they show directions, not spreads.
    seeds = request.seeds or (exhibit.seeds if request.scale == "paper" else exhibit.seeds[:1])
    absences: dict[tuple[int, int], str] = {}
    planned = []
    for row, line in enumerate(exhibit.rows):
        cells: list[tuple[Job, ...]] = []
        for index, column in enumerate(exhibit.columns):
            configs = [_config(exhibit, request, line.settings_in(column), seed) for seed in seeds]
            try:
                if not exhibit.needs_no_run:
                    # Seeds of one cell share their data.
                    locate_dataset(configs[0].data.name, configs[0].data.root)
            except DataError as error:
                absences[row, index] = str(error)
            is_planned = (row, index) not in absences or not needs_data
            jobs = tuple(Job(config, out / request.scale / _folder(config)) for config in configs)
            cells.append(jobs if is_planned else ())
        planned.append(tuple(cells))
    if needs_data and absences and len(absences) == len(exhibit.rows) * len(exhibit.columns):
        raise DataError(" ".join(dict.fromkeys(absences.values())))
    meaning = _meaning(exhibit, request, seeds[0])
    plan = Plan(exhibit, request.scale, tuple(planned), _missing(exhibit, absences), meaning, request.score)
    _check_score(plan)
    return plan


def reproduce(plan: Plan, executor: Executor | None = None) -> Reproduction:
    """Run what is missing, and set the results beside the published numbers."""
    jobs = plan.all_jobs
    results = {job.out: summary for job, summary in zip(jobs, run_jobs(jobs, executor), strict=True)}

    def value(job: Job, metric: str) -> float:
        if is_config(metric):
            return config_value(job.config, metric)
        return measure(results[job.out].judged_by(plan.score_of(job.config.method.name)), metric)

    def entry(metric: str, title: str, published: Published | None, own: Sequence[Job]) -> Entry:
        values = [value(job, metric) for job in own]
        # A method without a score, or a stream without so many tasks, has no number there.
        known = [number for number in values if not math.isnan(number)]
        score = plan.score_of(own[0].config.method.name) if own and is_accuracy(metric) else ""
        score = metric.partition(SCORED)[2] or score
        # Every value, NaN included: `contrasts` pairs two lines by position.
        return Entry(metric, title, published, spread(known) if known else None, tuple(values), score)

    def cell(line: Line, index: int, own: Sequence[Job]) -> tuple[Entry, ...]:
        column = plan.exhibit.columns[index]
        printed = [entry(m, column.title(i), line.number(index, i), own) for i, m in enumerate(column.metrics)]
        return (*printed, *(entry(metric, metric_title(metric), None, own) for metric in _further(plan, index)))

    entries = tuple(
        tuple(cell(line, index, own) for index, own in enumerate(cells))
        for line, cells in zip(plan.exhibit.rows, plan.jobs, strict=True)
    )
    num_seeds = max((len(own) for cells in plan.jobs for own in cells if not plan.exhibit.needs_no_run), default=0)
    return Reproduction(plan.exhibit, plan.scale, entries, plan.missing, num_seeds, plan.meaning)


def _further(plan: Plan, column: int) -> list[str]:
    """Return what a column also shows: evaluations beside speed, and Avg and Last of scores that were not published."""
    printed = plan.exhibit.columns[column].metrics
    counted = [COUNTED] if SPEED in printed and COUNTED not in printed else []  # a count depends on no machine
    shown = [metric for metric in SECOND if metric in printed]
    methods = dict.fromkeys(job.config.method.name for cells in plan.jobs for job in cells[column])
    others = [score for method in methods for score in get_method_spec(method).scores if score != plan.score_of(method)]
    return [*counted, *(f"{metric}{SCORED}{score}" for score in dict.fromkeys(others) for metric in shown)]


def watched_config(exhibit: Exhibit, request: Request) -> RunConfig:
    """Return the run whose gradients the exhibit's figures show: with C-Flat, unless it names an optimizer."""
    own = {} if "optimizer" in exhibit.settings else {"optimizer": "c_flat"}
    return _config(exhibit, request, own, (request.seeds or exhibit.seeds)[0])


def _config(exhibit: Exhibit, request: Request, settings: Layer, seed: int) -> RunConfig:
    scale = request.scale
    own = merge(exhibit.settings, exhibit.scales.get(scale, {}), settings)
    # Below the exhibit's own: some train from scratch, whatever weights the user has.
    weights: Layer = {} if request.weights is None else {"backbone": {"weights": request.weights}}
    if scale == "smoke":
        own, weights = _tiny(own), {}  # tiny networks have no pretrained weights
    repeat: Layer = {"seed": seed}
    if exhibit.repeat == "order":  # as in PILOT, whose seed shuffles the classes
        repeat["stream"] = {"order_seed": seed}
    return resolve_config(merge(SCALES[scale], weights, own, repeat, request.chosen))


def _meaning(exhibit: Exhibit, request: Request, seed: int) -> str:
    """Return a sentence on which settings differ from the paper's, and what the numbers are good for."""
    if request.scale == "smoke" or not exhibit.rows:
        return MEANINGS[request.scale]
    # Without the user's own changes, which are then listed as differences.
    paper = replace(request, scale="paper", chosen={})
    changed: dict[str, dict[tuple[Any, Any], None]] = {}
    for line, column in product(exhibit.rows, exhibit.columns):
        settings = line.settings_in(column)
        here, there = (flatten(_config(exhibit, one, settings, seed).to_dict()) for one in (request, paper))
        for key in here.keys() | there.keys():
            if here.get(key) != there.get(key) and not key.startswith(UNLISTED):
                changed.setdefault(key, {})[str(here.get(key)), str(there.get(key))] = None
    if not changed:
        return "The paper's settings."
    texts = [f"{key} {_listed(changed[key], 0)} (the paper: {_listed(changed[key], 1)})" for key in sorted(changed)]
    return f"What differs from the paper's runs: {', '.join(texts)}. {MEANINGS[request.scale]}".strip()


def _listed(pairs: Mapping[tuple[str, str], None], place: int) -> str:
    return " or ".join(dict.fromkeys(pair[place] for pair in pairs))


def _check_score(plan: Plan) -> None:
    """Reject a score that no method of the table has."""
    methods = dict.fromkeys(job.config.method.name for job in plan.all_jobs)
    known = dict.fromkeys(score for method in methods for score in get_method_spec(method).scores)
    if plan.score is not None:
        require_known(f"score of {plan.exhibit.name}", plan.score, known)


def _tiny(settings: Layer) -> Layer:
    """Return settings on embedded digits, rotated ones for domains: any table can be tried without data."""
    data, stream = (require_mapping(settings.get(key, {}), key) for key in ("data", "stream"))
    has_domains = stream.get("scenario") == "domain" or bool(dataset_spec(str(data.get("name", "digits"))).domains)
    kept = {key: value for key, value in settings.items() if key in SMOKE_KEEPS}
    return {**kept, "data": {"name": "rotated_digits" if has_domains else "digits"}}


def _missing(exhibit: Exhibit, absences: Mapping[tuple[int, int], str]) -> dict[str, str]:
    """Name what is left out: whole columns where no line has data, else the lines that have none."""
    missing: dict[str, str] = {}
    for (row, index), reason in absences.items():
        column, line = exhibit.columns[index], exhibit.rows[row]
        is_whole = all((other, index) in absences for other in range(len(exhibit.rows)))
        missing[column.name if is_whole else f"{line.group} {line.name}, {column.name}".strip()] = reason
    return missing


def _folder(config: RunConfig) -> str:
    """Return a readable name that no other configuration has."""
    # Of npz:PATH the kind alone: the path is part of the fingerprint.
    data = config.data.name.partition(":")[0]
    return f"{config.method.name}-{data}-{config.optimizer.name}-seed{config.seed}-{config.fingerprint()[:10]}"
