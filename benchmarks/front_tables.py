"""Tables and figures of the front, from what is finished."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from front_runs import ABLATED, ROBUST_ROWS, read
from front_streams import ROWS, STREAMS

from cflat._files import write_atomic, write_json
from cflat.figures.palette import OPTIMIZERS

COLUMNS = (
    *("row", "rate", "radius", "Avg", "Last", "evaluations", "speed"),
    *("Avg to plain", "Last to plain", "Avg to C-Flat", "Last to C-Flat", "trials x seeds", "seeds", "e", "end loss"),
)


def interval(values: Sequence[float], reference: Sequence[float]) -> tuple[float, float]:
    """Return the mean paired difference in points and half of its 95 % interval; NaN for one pair."""
    from scipy.stats import t

    differences = [100 * (a - b) for a, b in zip(values, reference, strict=False)]
    n = len(differences)
    if n < 2:
        return (differences[0] if differences else math.nan), math.nan
    return statistics.mean(differences), float(t.ppf(0.975, n - 1)) * statistics.stdev(differences) / math.sqrt(n)


def collect(out: Path) -> dict[str, Any]:
    """Return everything that is finished, by stream and row."""
    found: dict[str, Any] = {}
    for stream, bench in STREAMS.items():
        rows = {name: read(out / stream / name / "result.json") for name in ROWS}
        rows = {name: row for name, row in rows.items() if row}
        speeds = read(out / stream / "speed.json") or {}
        for name, row in rows.items():
            row["relative_speed"] = speeds.get(name, {}).get("relative")
            row["differences"] = {
                reference: {metric: interval(row[metric], rows[reference][metric]) for metric in ("avg", "last")}
                for reference in ("none", "c_flat")
                if reference in rows and reference != name
            }
        ablations = read(out / stream / ABLATED / "ablations.json")
        robust = {name: read(out / stream / name / "robustness.json") for name in ROBUST_ROWS}
        if rows:
            found[stream] = {"title": bench.title, "rows": rows, "robustness": {k: v for k, v in robust.items() if v}}
            if ablations:
                found[stream]["ablations"] = ablations
    return found


def write_tables(out: Path, folder: Path) -> None:
    """Write ``front.json``, ``front.md`` and a figure for each stream."""
    found = collect(out)
    folder.mkdir(parents=True, exist_ok=True)
    speeds = {stream: read(out / stream / "speed.json") for stream in STREAMS}
    speeds = {stream: values for stream, values in speeds.items() if values}
    write_json(folder / "front.json", {"streams": found, "speed": speeds})
    write_atomic(folder / "front.md", markdown(found) + "".join(f"{line}\n" for line in _speeds(speeds)))
    for stream, values in found.items():
        draw(values, folder / f"{stream}.png")


def markdown(found: Mapping[str, Any]) -> str:
    lines = [
        "# The front",
        "",
        "Made by `benchmarks/front.py`. Each row has its own learning rate and radius, found with the same number of",
        "trials on validation images; then final runs with other seeds on test images. Differences are in points,",
        "seed by seed, with 95 % intervals. Speed is that of a step relative to plain, all rows in one process, step",
        "by step in turn. e is the surrogate error of Turbo, measured at its refreshes (1 is plain training). A",
        "setting marked with * is the best at the end of the range that was searched; the end loss is that of the last",
        "epoch of each task.",
    ]
    for stream, values in found.items():
        lines += ["", f"## {values['title']} (`{stream}`)", "", f"![front]({stream}.png)", ""]
        lines += ["| " + " | ".join(COLUMNS) + " |", "|---" * len(COLUMNS) + "|"]
        lines += [_table_row(row) for row in values["rows"].values()]
        lines += ["", *_trials(values["rows"])]
        if values["robustness"]:
            lines += ["", *_robustness(values["robustness"])]
    return "\n".join(lines) + "\n"


def _table_row(row: Mapping[str, Any]) -> str:
    edge = " ".join(row["edge"])
    rate = f"{row['settings']['base']['lr']:g}" + ("*" if "rate" in edge else "")
    radius = row["settings"]["optimizer"].get("rho")
    cells = [
        row["title"],
        rate,
        "-" if radius is None else f"{radius:g}" + ("*" if "radius" in edge else ""),
        percent(row["avg"]),
        percent(row["last"]),
        f"{statistics.mean(row['evaluations_per_step']):.2f}",
        "-" if row["relative_speed"] is None else f"{row['relative_speed']:.2f}",
        *(
            difference(row["differences"].get(reference, {}).get(metric))
            for reference in ("none", "c_flat")
            for metric in ("avg", "last")
        ),
        " x ".join(map(str, row.get("tuning", ["?", "?"]))),
        str(len(row["avg"])),
        f"{statistics.mean(row['surrogate_error']):.2f}" if row.get("surrogate_error") else "-",
        f"{row['end_loss']:.3f}",
    ]
    return "| " + " | ".join(cells) + " |"


def _trials(rows: Mapping[str, Any]) -> list[str]:
    """Show validation accuracy over the rates that were tried: how wide the range is that works."""
    rates = sorted({trial["rate"] for row in rows.values() for trial in row["trials"]})
    lines = ["Validation Avg (%) of all trials, by learning rate:", ""]
    lines += ["| row | " + " | ".join(f"{rate:g}" for rate in rates) + " |", "|---" * (len(rates) + 1) + "|"]
    for row in rows.values():
        by_rate = {trial["rate"]: f"{100 * trial['avg']:.1f}" for trial in row["trials"]}
        lines.append(f"| {row['title']} | " + " | ".join(by_rate.get(rate, "") for rate in rates) + " |")
    return lines


def _speeds(speeds: Mapping[str, Any]) -> list[str]:
    """Show the time of a step in every stream, also in those that have no results yet."""
    if not speeds:
        return []
    lines = ["", "## Speed of a step relative to plain", ""]
    lines += [
        "One thread, CPU time, without loading data, all rows in turn on the same batches; evaluations in brackets.",
        "",
    ]
    lines += ["| row | " + " | ".join(speeds) + " |", "|---" * (len(speeds) + 1) + "|"]
    for name in (name for name in ROWS if any(name in values for values in speeds.values())):
        cells = (
            f"{values[name]['relative']:.2f} ({values[name]['evaluations']:.2f})" if name in values else "-"
            for values in speeds.values()
        )
        lines.append(f"| {ROWS[name].title} | " + " | ".join(cells) + " |")
    return lines


def _robustness(rows: Mapping[str, Any]) -> list[str]:
    conditions = list(dict.fromkeys(condition for row in rows.values() for condition in row))
    lines = ["Avg / Last (%) away from the tuned settings:", ""]
    lines += ["| condition | " + " | ".join(ROWS[name].title for name in rows) + " |", "|---" * (len(rows) + 1) + "|"]
    for condition in conditions:
        cells = (
            f"{percent(row[condition]['avg'])} / {percent(row[condition]['last'])}" if condition in row else "-"
            for row in rows.values()
        )
        lines.append(f"| {condition} | " + " | ".join(cells) + " |")
    return lines


def percent(values: Sequence[float]) -> str:
    return f"{100 * statistics.mean(values):.1f}"


def difference(value: Sequence[float] | None) -> str:
    if value is None:
        return "-"
    return f"{value[0]:+.1f}" + ("" if value[1] != value[1] else f" ± {value[1]:.1f}")


def draw(values: Mapping[str, Any], path: Path) -> None:
    """Draw differences of Avg to plain and to C-Flat over evaluations per step and over relative time."""
    from matplotlib.figure import Figure

    rows = values["rows"]
    figure = Figure(figsize=(12, 8), layout="constrained")
    figure.suptitle(f"{values['title']}: difference of Avg in points, 95 % paired intervals")
    panels = figure.subplots(2, 2, sharex="col")
    for line, reference in enumerate(("none", "c_flat")):
        for column, label in enumerate(("evaluations per step", "time of a step relative to plain")):
            axes = panels[line][column]
            axes.axhline(0, color="#999999", linewidth=0.8)
            for name, row in rows.items():
                x = statistics.mean(row["evaluations_per_step"]) if column == 0 else inverse(row["relative_speed"])
                found = row["differences"].get(reference, {}).get("avg", (0.0, 0.0) if name == reference else None)
                if x is None or found is None:
                    continue
                color = OPTIMIZERS[ROWS[name].optimizer["name"]][1]
                axes.errorbar(
                    x, found[0], yerr=0 if found[1] != found[1] else found[1], fmt="o", color=color, capsize=2
                )
                axes.annotate(row["title"], (x, found[0]), (4, 4), textcoords="offset points", fontsize=7, color=color)
            axes.margins(x=0.15)
            axes.set_ylabel(f"to {ROWS[reference].title}")
            if line:
                axes.set_xlabel(label)
    figure.savefig(path, dpi=110)


def inverse(value: float | None) -> float | None:
    return None if not value else 1 / value
