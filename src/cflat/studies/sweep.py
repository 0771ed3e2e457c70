"""Run a grid: every combination with every seed, in folders with readable names; finished runs are reused."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from cflat._errors import ConfigError, DataError
from cflat._files import csv_text, write_atomic, write_json
from cflat.config.documents import Layer
from cflat.config.presets import resolve_config
from cflat.config.run_config import RunConfig
from cflat.figures.static import save
from cflat.figures.sweeps import SweepCase, sweep_figure
from cflat.methods import get_method_spec
from cflat.metrics import HEADLINES, PairedDifference, Spread, paired_difference
from cflat.report.groups import SeedRuns
from cflat.report.write import write_report
from cflat.runs.folder import FLATNESS, RunFolder
from cflat.runs.jobs import Executor, Job, run_jobs
from cflat.studies.space import Settings, Sweep, describe, value_text

COLUMNS = (*HEADLINES, "images_per_second", "evaluations_per_step", *FLATNESS)
MAX_NAME = 120
"""Characters of a folder's name."""


@dataclass(frozen=True)
class Combination:
    """Settings, and one job for each seed."""

    settings: Settings
    jobs: tuple[Job, ...]


@dataclass(frozen=True)
class SweepRow(SeedRuns):
    """One combination: its numbers over the seeds."""

    settings: Settings
    folders: tuple[Path, ...]
    """One for each seed."""

    @property
    def spreads(self) -> dict[str, Spread]:
        """The numbers of all `COLUMNS`, and of the scores that are not the headline."""
        return {name: self.spread(name) for name in (*COLUMNS, *self.further)}

    def difference(self, reference: SweepRow, column: str) -> PairedDifference:
        """Return how this combination differs from another, seed by seed."""
        return paired_difference(self.values(column), reference.values(column))


@dataclass(frozen=True)
class SweepResult:
    """All combinations of a sweep."""

    name: str
    axes: tuple[str, ...]
    seeds: tuple[int, ...]
    rows: tuple[SweepRow, ...]
    tuned: Mapping[str, Settings] = field(default_factory=dict)
    """Settings that belong to values of ``optimizer.name``."""

    @property
    def split(self) -> str:
        """The images that the rows' accuracies speak of: test, validation, or "test or validation" if rows differ."""
        return " or ".join(sorted({summary.split for row in self.rows for summary in row.summaries}))

    @property
    def scores(self) -> tuple[str, ...]:
        """The scores that the rows' accuracies are of; several only if methods differ."""
        return tuple(dict.fromkeys(row.score for row in self.rows))

    @property
    def further(self) -> tuple[str, ...]:
        """Metrics of other scores that some rows have."""
        return tuple(dict.fromkeys(name for row in self.rows for name in row.further))

    @property
    def ranked(self) -> list[SweepRow]:
        """The rows by their mean Avg on validation images, the best first; in their own order if there are none."""
        means = [row.validation.mean for row in self.rows if row.validation is not None]
        if len(means) < len(self.rows):
            return list(self.rows)  # never rank by test images
        by_mean = sorted(zip(means, self.rows, strict=True), key=lambda pair: (math.isnan(pair[0]), -pair[0]))
        return [row for _, row in by_mean]

    @property
    def best(self) -> SweepRow | None:
        """The row with the best mean Avg on validation images; None if there are none to choose by."""
        return None if any(row.validation is None for row in self.rows) else self.ranked[0]

    def to_dict(self) -> dict[str, Any]:
        """Return the content of ``sweep.json``; the best combination first, if there are images to choose it by."""
        rows = [
            {
                "settings": row.settings,
                "score": row.score,
                **{name: asdict(value) for name, value in row.spreads.items()},
                **({} if row.validation is None else {"validation": {"avg": asdict(row.validation)}}),
                "runs": [str(folder) for folder in row.folders],
            }
            for row in self.ranked
        ]
        grid = {"name": self.name, "axes": self.axes, "seeds": self.seeds, "images": self.split}
        return {**grid, "best": None if self.best is None else self.best.settings, "rows": rows}

    def to_csv(self) -> str:
        """Return the content of ``sweep.csv``: one row for each run."""
        lines: list[list[Any]] = [[*self.axes, "seed", "score", *COLUMNS, *self.further, "run"]]
        for row in self.rows:
            cells = ["" if key not in row.settings else value_text(row.settings[key]) for key in self.axes]
            for folder, summary in zip(row.folders, row.summaries, strict=True):
                numbers = [summary.value(name) for name in (*COLUMNS, *self.further)]
                lines.append([*cells, summary.config.seed, summary.score, *numbers, str(folder)])
        return csv_text(lines)


def plan_sweep(sweep: Sweep, out: Path) -> list[Combination]:
    """Return all combinations with their jobs; every configuration is checked before any run begins.

    A run that is in ``out`` already, under whatever name, keeps its folder: axes can be added or reordered later.
    """
    configs: dict[str, tuple[Settings, RunConfig]] = {}
    for settings in sweep.combinations():
        config = _resolve(sweep, settings)
        # Two combinations may be one configuration: a listed value can be the default.
        configs.setdefault(config.fingerprint(), (settings, config))
    members = [(own, [replace(config, seed=seed) for seed in sweep.seeds]) for own, config in configs.values()]
    known = _known_runs(out)
    # Folders that this sweep uses already. A folder that holds anything else is an error, as everywhere.
    taken = {known[key] for _, own in members for key in (one.fingerprint() for one in own) if key in known}

    def folder(settings: Settings, config: RunConfig) -> Path:
        return known.get(config.fingerprint()) or _free_folder(out, settings, config, taken)

    return [Combination(own, tuple(Job(one, folder(own, one)) for one in seeds)) for own, seeds in members]


def run_sweep(sweep: Sweep, out: str | Path, executor: Executor | None = None, score: str | None = None) -> SweepResult:
    """Run every combination with every seed, and gather the results; finished runs in ``out`` are only read.

    ``score`` is what the runs are judged by; None takes the headline of each method.
    """
    combinations = plan_sweep(sweep, Path(out))
    jobs = [job for combination in combinations for job in combination.jobs]
    for job in jobs:  # an unknown score must not be found out after hours of training
        get_method_spec(job.config.method.name).score(score)
    summaries = iter([summary.judged_by(score) for summary in run_jobs(jobs, executor)])
    rows = []
    for combination in combinations:
        own = tuple(next(summaries) for _ in combination.jobs)
        rows.append(SweepRow(own, combination.settings, tuple(job.out for job in combination.jobs)))
    return SweepResult(sweep.name, tuple(sweep.axes), sweep.seeds, tuple(rows), sweep.tuned)


def write_sweep(folder: Path, result: SweepResult) -> tuple[Path, Path]:
    """Write ``sweep.json``, ``sweep.csv``, ``sweep.png`` and ``report.html``; return the last two paths."""
    write_json(folder / "sweep.json", result.to_dict())
    write_atomic(folder / "sweep.csv", result.to_csv())
    cases = [SweepCase(row.settings, row.values("avg"), row.values("images_per_second")) for row in result.ranked]
    picture = save(sweep_figure(result.name, cases), folder / "sweep.png")
    return picture, write_page(folder, result, f"Sweep {result.name}")


def write_page(folder: Path, result: SweepResult, title: str, headlines: Sequence[str] = ()) -> Path:
    """Write ``report.html`` about the runs of a grid; return its path."""
    page = folder / "report.html"
    score = result.scores[0] if len(result.scores) == 1 else None
    write_report([path for row in result.rows for path in row.folders], page, title, score=score, sentences=headlines)
    return page


def _free_folder(out: Path, settings: Settings, config: RunConfig, taken: set[Path]) -> Path:
    """Return a folder and take it; a name that is taken (they are cut off) gets the configuration's hash."""
    name = folder_name(settings)
    path = out / f"{name}-seed{config.seed}"
    if path in taken:
        path = out / f"{name}-{config.fingerprint()[:8]}-seed{config.seed}"
    taken.add(path)
    return path


def folder_name(settings: Settings) -> str:
    """Return a readable name that is safe for every file system.

    >>> folder_name({"optimizer.name": "c_flat", "optimizer.rho": 0.05, "base.milestones": [10, 15]})
    'c_flat-rho0.05-milestones10-15'
    """
    words = []
    for key, value in settings.items():
        # Of a path to data or weights, the last part is enough.
        text = Path(value).stem if isinstance(value, str) and "/" in value else value_text(value)
        is_number = isinstance(value, int | float)
        # The minus of a number stays, the plus in 1e+30 goes.
        safe = text.replace("+", "") if is_number else re.sub(r"[^A-Za-z0-9._]+", "-", text).strip("-.")
        words.append(safe if key.endswith(".name") else f"{key.rpartition('.')[2]}{safe}")
    return "-".join(word for word in words if word)[:MAX_NAME]


def _known_runs(out: Path) -> dict[str, Path]:
    """Return the runs in a folder by configuration; those of other versions are passed over."""
    known = {}
    for file in sorted(out.glob("*/config.yaml")):
        with suppress(DataError):  # a run of another version
            known[RunFolder(file.parent).load_config(is_past=True).fingerprint()] = file.parent
    return known


def _resolve(sweep: Sweep, settings: Settings) -> RunConfig:
    try:
        return resolve_config({**sweep.layer(settings), "seed": sweep.seeds[0]})
    except ConfigError as error:
        if str(error) == _trouble(sweep.layer({})):  # the base alone has it, so no combination is to blame
            raise
        raise ConfigError(f"With {describe(settings)}: {error}") from None


def _trouble(layer: Layer) -> str:
    """Return the error of a configuration, if any."""
    try:
        resolve_config(layer)
    except ConfigError as error:
        return str(error)
    return ""
