"""Compare optimizers on one method and dataset over several seeds: a sweep whose only axis is the optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from cflat._errors import ConfigError
from cflat._files import write_json
from cflat.config.documents import merge
from cflat.config.variants import parse_variant
from cflat.figures.runs import RunGroup, comparison_overview
from cflat.figures.static import save
from cflat.metrics import HEADLINES
from cflat.report.groups import title_of
from cflat.runs.jobs import Executor
from cflat.studies.space import Settings, Sweep, parse_sweep
from cflat.studies.sweep import SweepResult, SweepRow, run_sweep, write_page


def compare(
    chosen: Mapping[str, Any],
    optimizers: Sequence[str],
    seeds: Sequence[int],
    out: str | Path,
    executor: Executor | None = None,
    tuned: Mapping[str, Settings] | None = None,
    score: str | None = None,
) -> SweepResult:
    """Run every optimizer with every seed; the rows have the order of the optimizers.

    Args:
        chosen: What all runs share, as for `resolve_config`; settings under ``optimizer`` go to those that have them.
        optimizers: Names, with settings of their own where wanted: ``c_flat_turbo:k=10``. Differences are to the
            first.
        seeds: Seeds.
        out: Folder of the run directories; those that are finished are only read.
        executor: Where to run; by default here, one after the other.
        tuned: Settings of each optimizer under dotted keys, as ``tune(...).settings``.
        score: What they are judged by; None takes the method's headline.
    """
    measured = merge({"train": {"flatness": True}}, chosen)  # what these optimizers are about, unless switched off
    return run_sweep(replace(comparison_sweep(measured, optimizers, seeds), tuned=tuned or {}), out, executor, score)


def comparison_sweep(chosen: Mapping[str, Any], optimizers: Sequence[str], seeds: Sequence[int]) -> Sweep:
    """Return the grid of a comparison."""
    for what, given in (("optimizers", optimizers), ("seeds", seeds)):
        if not given or len(set(given)) < len(given):
            raise ConfigError(f"{what} must be given once each, separated by commas, got {list(given)!r}.")
    base = {key: value for key, value in chosen.items() if key != "seed"}  # a file of one run has a seed
    return parse_sweep({"base": base, "axes": {"optimizer.name": list(optimizers)}, "seeds": list(seeds)}, "compare")


def optimizer_of(row: SweepRow) -> str:
    """Return the optimizer of a row, with the settings that it may carry."""
    return parse_variant(str(row.settings["optimizer.name"])).text


def row_title(row: SweepRow) -> str:
    """Return what tables, figures and sentences call a row; ``none`` has the name of its base optimizer."""
    return title_of(optimizer_of(row), row.summaries[0].config.base.name)


def comparison_values(result: SweepResult) -> dict[str, Any]:
    """Return the content of ``comparison.json``: every row, and how it differs from the first."""
    first = result.rows[0]
    config = first.summaries[0].config
    rows = [
        {
            "optimizer": optimizer_of(row),
            **({"tuned": result.tuned[optimizer_of(row)]} if optimizer_of(row) in result.tuned else {}),
            **{name: asdict(value) for name, value in row.spreads.items()},
            "differences": {name: asdict(row.difference(first, name)) for name in HEADLINES if row is not first},
        }
        for row in result.rows
    ]
    subject = {"method": config.method.name, "data": config.data.name, "score": first.score, "seeds": result.seeds}
    return {**subject, "images": result.split, "reference": optimizer_of(first), "rows": rows}


def write_comparison(folder: Path, result: SweepResult, headlines: Sequence[str] = ()) -> tuple[Path, Path]:
    """Write ``comparison.json``, ``comparison.png`` and ``report.html``; return the last two paths.

    ``headlines`` are sentences to put at the top of the page instead of its own.
    """
    values = comparison_values(result)
    write_json(folder / "comparison.json", values)
    groups = []
    for row in result.rows:
        curves = [summary.headline.stage_accuracy.tolist() for summary in row.summaries]
        costs = row.values("images_per_second"), row.values("evaluations_per_step")
        groups.append(RunGroup(row_title(row), curves, *costs))
    title = f"{values['method']} on {values['data']}"
    images = ", validation images" if result.split == "validation" else ""  # test images go without saying
    heading = f"{title}, score {values['score']}, {len(result.seeds)} seeds{images}"
    picture = save(comparison_overview(groups, heading), folder / "comparison.png")
    return picture, write_page(folder, result, title, headlines)
