"""A comparison as a picture: accuracy over the stream with its spread, and what it cost."""

from __future__ import annotations

import base64
import html
import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cflat._files import write_atomic
from cflat.experiments.compare import Comparison, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw_comparison", "write_page"]

COLORS = ("#4d4d4d", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Told apart by colour-blind readers (Okabe and Ito)."""
TITLES = {"none": "plain", "c_flat": "C-Flat", "c_flat_turbo": "C-Flat Turbo"}


def draw_comparison(comparison: Comparison) -> Figure:
    """Return a figure with three panels: accuracy by task, evaluations per step, images per second."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    curve, cost, speed = figure.subplots(1, 3, width_ratios=(2.2, 1, 1))
    for row, color in zip(comparison.rows, COLORS * len(comparison.rows), strict=False):
        _draw_curve(curve, row, color)
    curve.set(xlabel="tasks learned", ylabel="accuracy on all classes so far (%)")
    curve.set_title("Accuracy over the stream", fontsize=10)
    curve.set_xticks(range(1, comparison.rows[0].summaries[0].headline.num_tasks + 1))
    curve.grid(alpha=0.25)
    curve.legend(frameon=False)
    _draw_bars(cost, comparison, "evaluations_per_step", "Evaluations per step", "{:.2f}")
    _draw_bars(speed, comparison, "images_per_second", "Training images per second", "{:.0f}")
    seeds = f"{len(comparison.seeds)} seeds; bands and whiskers: standard deviation"
    figure.suptitle(f"{comparison.method} on {comparison.data}, {seeds}", fontsize=11)
    return figure


def write_page(folder: Path, comparison: Comparison) -> tuple[Path, Path]:
    """Write ``comparison.png`` and a self-contained ``report.html`` with it and the table; return both paths."""
    image = io.BytesIO()
    draw_comparison(comparison).savefig(image, format="png", dpi=150)
    picture, page = folder / "comparison.png", folder / "report.html"
    write_atomic(picture, image.getvalue())
    write_atomic(page, _render(comparison, base64.b64encode(image.getvalue()).decode()))
    return picture, page


def _draw_curve(axes: Axes, row: Row, color: str) -> None:
    curves = 100 * np.array([summary.headline.stage_accuracy for summary in row.summaries])
    stages = np.arange(1, curves.shape[1] + 1)
    mean, deviation = curves.mean(axis=0), curves.std(axis=0, ddof=1) if len(curves) > 1 else np.zeros(len(stages))
    axes.plot(stages, mean, marker="o", markersize=4, color=color, label=_title(row))
    axes.fill_between(stages, mean - deviation, np.minimum(mean + deviation, 100), color=color, alpha=0.15, linewidth=0)


def _draw_bars(axes: Axes, comparison: Comparison, name: str, title: str, form: str) -> None:
    places = np.arange(len(comparison.rows))
    means = [row.spreads[name].mean for row in comparison.rows]
    deviations = np.nan_to_num([row.spreads[name].std for row in comparison.rows])
    colors = [COLORS[index % len(COLORS)] for index in places]
    axes.bar(places, means, yerr=deviations, color=colors, width=0.65, error_kw={"elinewidth": 1, "capsize": 3})
    for place, mean, deviation in zip(places, means, deviations, strict=True):
        axes.annotate(form.format(mean), (place, mean + deviation), (0, 3), textcoords="offset points", ha="center")
    axes.set_xticks(places, [_title(row).replace(" ", "\n") for row in comparison.rows])
    axes.set_title(title, fontsize=10)
    axes.margins(y=0.15)
    axes.spines[["top", "right"]].set_visible(False)


def _title(row: Row) -> str:
    return TITLES.get(row.optimizer, row.optimizer)


def _render(comparison: Comparison, picture: str) -> str:
    rows = "\n".join(_cells(row) for row in comparison.rows)
    title = html.escape(f"{comparison.method} on {comparison.data}")
    seeds = ", ".join(map(str, comparison.seeds))
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>cflat: {title}</title>
<style>
:root {{ color-scheme: light; }}
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #222; }}
img {{ width: 100%; height: auto; }}
table {{ border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }}
th, td {{ padding: .35rem .6rem; text-align: right; border-bottom: 1px solid #ddd; }}
th:first-child, td:first-child {{ text-align: left; }}
p {{ color: #555; }}
</style></head><body>
<h1>{title}</h1>
<img alt="Accuracy over the stream, evaluations per step and images per second" src="data:image/png;base64,{picture}">
<table><thead><tr><th>optimizer</th><th>Avg (%)</th><th>Last (%)</th><th>Forgetting (points)</th><th>Img/s</th>
<th>Evaluations/step</th></tr></thead><tbody>
{rows}
</tbody></table>
<p>Mean ± standard deviation over the seeds {seeds}. Avg: mean over stages of the accuracy on all test images seen so
far. Last: that accuracy after the last task. Forgetting: mean over earlier tasks of best minus final accuracy.
Evaluations: forward and backward passes.</p>
</body></html>
"""


def _cells(row: Row) -> str:
    def cell(name: str, scale: float, digits: int) -> str:
        value: Any = row.spreads[name]
        deviation = "" if value.std != value.std else f" ± {scale * value.std:.{digits}f}"
        return f"<td>{scale * value.mean:.{digits}f}{deviation}</td>"

    accuracies = "".join(cell(name, 100, 2) for name in ("avg", "last", "forgetting"))
    costs = cell("images_per_second", 1, 0) + cell("evaluations_per_step", 1, 2)
    return f"<tr><td>{html.escape(_title(row))}</td>{accuracies}{costs}</tr>"
