"""Compare optimizers on one method and dataset over several seeds; finished runs are reused."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cflat._errors import ConfigError
from cflat._files import write_atomic
from cflat.config.choices import own_settings, require_shared_settings
from cflat.config.documents import merge
from cflat.config.presets import resolve_config
from cflat.figures.runs import RunGroup, comparison_overview
from cflat.figures.static import save
from cflat.metrics import PairedDifference, Spread, paired_difference, spread
from cflat.report.groups import title_of
from cflat.report.write import write_report
from cflat.runs.folder import RunSummary
from cflat.runs.jobs import Executor, Job, run_jobs

__all__ = ["Comparison", "Row", "compare", "plan_jobs", "write_comparison"]

ACCURACIES = ("avg", "last", "forgetting")
COLUMNS = (*ACCURACIES, "images_per_second", "evaluations_per_step")


@dataclass(frozen=True)
class Row:
    """One optimizer: its numbers over the seeds, and how it differs from the first optimizer."""

    optimizer: str
    summaries: tuple[RunSummary, ...]
    """One for each seed."""
    spreads: Mapping[str, Spread]
    differences: Mapping[str, PairedDifference]
    """Seed by seed, to the first optimizer; empty for the first."""


@dataclass(frozen=True)
class Comparison:
    """Optimizers side by side."""

    method: str
    data: str
    seeds: tuple[int, ...]
    rows: tuple[Row, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the content of ``comparison.json``."""
        return {
            "method": self.method,
            "data": self.data,
            "seeds": list(self.seeds),
            "reference": self.rows[0].optimizer,
            "rows": [
                {
                    "optimizer": row.optimizer,
                    **{name: _plain(value) for name, value in row.spreads.items()},
                    "differences": {name: _plain(value) for name, value in row.differences.items()},
                }
                for row in self.rows
            ],
        }


def compare(
    chosen: Mapping[str, Any],
    optimizers: Sequence[str],
    seeds: Sequence[int],
    out: str | Path,
    executor: Executor | None = None,
) -> Comparison:
    """Run every optimizer with every seed and set the results side by side.

    Args:
        chosen: What all runs share, as for `resolve_config`; settings under ``optimizer`` go to those that have them.
        optimizers: Names; differences are to the first.
        seeds: Seeds.
        out: Folder of the run directories; those that are finished are only read.
        executor: Where to run; by default here, one after the other.
    """
    jobs = plan_jobs(chosen, optimizers, seeds, Path(out))
    comparison = summarise(run_jobs(jobs, executor))
    write_atomic(Path(out) / "comparison.json", json.dumps(comparison.to_dict(), indent=2) + "\n")
    return comparison


def plan_jobs(chosen: Mapping[str, Any], optimizers: Sequence[str], seeds: Sequence[int], out: Path) -> list[Job]:
    """Return one job for each optimizer and seed; every configuration is checked before any run begins.

    Raises:
        ConfigError: If names or seeds are missing or doubled, or a configuration is wrong.
    """
    for what, given in (("optimizers", optimizers), ("seeds", seeds)):
        if not given or len(set(given)) < len(given):
            raise ConfigError(f"{what} must be given once each, separated by commas, got {list(given)!r}.")
    shared = {key: value for key, value in chosen.items() if key != "optimizer"}
    settings = chosen.get("optimizer") or {}
    if not isinstance(settings, Mapping):
        raise ConfigError(f"optimizer must hold settings that the compared optimizers share, got {settings!r}.")
    require_shared_settings(settings, optimizers)
    jobs = []
    for name in optimizers:
        for seed in seeds:
            config = resolve_config(merge(shared, {"optimizer": own_settings(settings, name), "seed": seed}))
            jobs.append(Job(config, out / f"{config.optimizer.name}-seed{seed}"))
    return jobs


def summarise(summaries: Iterable[RunSummary]) -> Comparison:
    """Set finished runs side by side, in the order in which their optimizers appear."""
    by_optimizer: dict[str, list[RunSummary]] = {}
    for summary in summaries:
        by_optimizer.setdefault(summary.config.optimizer.name, []).append(summary)
    reference = next(iter(by_optimizer.values()))
    rows = []
    for name, members in by_optimizer.items():
        columns = {column: [member.value(column) for member in members] for column in COLUMNS}
        differences = {
            column: paired_difference(columns[column], [other.value(column) for other in reference])
            for column in ACCURACIES
            if members is not reference
        }
        spreads = {column: spread(values) for column, values in columns.items()}
        rows.append(Row(name, tuple(members), spreads, differences))
    first = reference[0].config
    seeds = tuple(member.config.seed for member in reference)
    return Comparison(first.method.name, first.data.name, seeds, tuple(rows))


def write_comparison(folder: Path, comparison: Comparison) -> tuple[Path, Path]:
    """Write ``comparison.png`` and ``report.html`` into the folder of a comparison; return both paths."""
    numbers = [
        RunGroup(
            title_of(row.optimizer),
            [summary.headline.stage_accuracy.tolist() for summary in row.summaries],
            [summary.value("images_per_second") for summary in row.summaries],
            [summary.value("evaluations_per_step") for summary in row.summaries],
        )
        for row in comparison.rows
    ]
    title = f"{comparison.method} on {comparison.data}"
    picture = save(comparison_overview(numbers, f"{title}, {len(comparison.seeds)} seeds"), folder / "comparison.png")
    page = folder / "report.html"
    write_report([folder], page, title)
    return picture, page


def _plain(value: Spread | PairedDifference) -> dict[str, Any]:
    return {key: None if member != member else member for key, member in asdict(value).items()}
