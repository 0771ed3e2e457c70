"""Tables and figures of the front, from what is finished."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from front_runs import read, rounded
from front_streams import ROWS, STREAMS
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox

from cflat._files import write_atomic, write_json
from cflat.figures.palette import OPTIMIZERS

LEDGER = "front.json"
"""Beside the tables: the accuracies of every final run by row and seed, from which all tables and claims follow."""
PARTS = ("first-task", "robustness", "ablations", "watched")
"""Of a row, besides its result: files of these names."""
FLAGSHIP, RIVALS = "turbo", ("none", "none-nesterov", "c_flat")
MARGIN = 1.0
"""Points of difference that count as none: of the claims, and of Turbo against the better of SGD and C-Flat."""
LINEAR = 10
"""Points of difference up to which the figures have a linear scale."""
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
    """Return everything that is finished below ``out``: results by stream, and the times of steps."""
    streams: dict[str, Any] = {}
    for stream, bench in STREAMS.items():
        parts = {
            part: {name: read(out / stream / name / f"{file}.json") for name in ROWS}
            for part, file in (("rows", "result"), *((part, part) for part in PARTS))
        }
        found = {part: {name: value for name, value in by_row.items() if value} for part, by_row in parts.items()}
        if any(found.values()):
            streams[stream] = {"title": bench.title, **{part: rows for part, rows in found.items() if rows}}
    speeds = {stream: read(out / stream / "speed.json") for stream in STREAMS}
    return {"streams": streams, "speed": {stream: values for stream, values in speeds.items() if values}}


def merged(published: Mapping[str, Any] | None, found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the published ledger with what was found; the newer result of a row takes the place of the older one."""
    old, new = published or {"streams": {}, "speed": {}}, found
    streams = {}
    for stream in (name for name in STREAMS if name in old["streams"] or name in new["streams"]):
        sides = [side["streams"].get(stream, {}) for side in (old, new)]
        parts = {part: {**sides[0].get(part, {}), **sides[1].get(part, {})} for part in ("rows", *PARTS)}
        ordered = {part: {name: rows[name] for name in ROWS if name in rows} for part, rows in parts.items() if rows}
        streams[stream] = {"title": STREAMS[stream].title, **ordered}
    speed = {
        stream: {**old["speed"].get(stream, {}), **new["speed"].get(stream, {})}
        for stream in STREAMS
        if stream in old["speed"] or stream in new["speed"]
    }
    return {"streams": streams, "speed": speed}


def published_streams(folder: Path) -> dict[str, Any]:
    """Return the streams of the ledger in a folder."""
    return (read(folder / LEDGER) or {"streams": {}})["streams"]


def differences(rows: Mapping[str, Any], name: str) -> dict[str, dict[str, tuple[float, float]]]:
    """Return the paired differences of a row to plain training and to C-Flat."""
    return {
        reference: {metric: interval(rows[name][metric], rows[reference][metric]) for metric in ("avg", "last")}
        for reference in ("none", "c_flat")
        if reference in rows and reference != name
    }


def write_tables(out: Path | None, folder: Path) -> None:
    """Add what is finished below ``out`` to the ledger ``front.json``; write ``front.md`` and a figure per stream."""
    folder.mkdir(parents=True, exist_ok=True)
    ledger = merged(read(folder / LEDGER), collect(out) if out else {"streams": {}, "speed": {}})
    write_json(folder / LEDGER, ledger)
    for stream, values in ledger["streams"].items():
        for name, row in values.get("rows", {}).items():  # after the ledger: these follow from it
            row["relative_speed"] = ledger["speed"].get(stream, {}).get(name, {}).get("relative")
            row["differences"] = differences(values["rows"], name)
    streams = {stream: values for stream, values in ledger["streams"].items() if len(values.get("rows", ())) > 1}
    write_atomic(folder / "front.md", markdown(streams) + "".join(f"{line}\n" for line in _speeds(ledger["speed"])))
    for stream, values in streams.items():
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
        *_summary(found),
    ]
    for stream, values in found.items():
        lines += ["", f"## {values['title']} (`{stream}`)", "", f"![front]({stream}.png)", ""]
        lines += ["| " + " | ".join(COLUMNS) + " |", "|---" * len(COLUMNS) + "|"]
        lines += [_table_row(row) for row in values["rows"].values()]
        lines += ["", *_trials(values["rows"])]
        if "first-task" in values:
            lines += ["", *_first_task(values["first-task"])]
        if "robustness" in values:
            lines += ["", *_robustness(values["robustness"])]
    return "\n".join(lines) + "\n"


def _summary(found: Mapping[str, Any]) -> list[str]:
    """Show Turbo against what it has to stand beside, on one page."""
    shown = {stream: values["rows"] for stream, values in found.items() if FLAGSHIP in values["rows"]}
    if not shown:
        return []
    lines = ["", "## C-Flat Turbo, stream by stream", ""]
    lines += [
        "Avg / Last in points over each reference; in brackets the seeds that both have. The last column says",
        f"whether the intervals exclude a loss of more than {MARGIN:g} point against the better of SGD and C-Flat, the",
        "one with the higher mean.",
        "",
    ]
    titles = (f"over {ROWS[name].title}" for name in RIVALS)
    lines += [f"| stream | evaluations | {' | '.join(titles)} | against the better |", "|---" * (len(RIVALS) + 3) + "|"]
    for stream, rows in shown.items():
        turbo = rows[FLAGSHIP]
        cells = [STREAMS[stream].title, f"{statistics.mean(turbo['evaluations_per_step']):.2f}"]
        cells += [versus(turbo, rows[name]) if name in rows else "-" for name in RIVALS]
        lines.append("| " + " | ".join([*cells, _verdict(rows)]) + " |")
    return lines


def versus(row: Mapping[str, Any], reference: Mapping[str, Any]) -> str:
    """Return the differences of a row to another, and over how many seeds."""
    both = (difference(interval(row[metric], reference[metric])) for metric in ("avg", "last"))
    return f"{' / '.join(both)} ({min(len(row['avg']), len(reference['avg']))})"


def _verdict(rows: Mapping[str, Any]) -> str:
    """Say whether Turbo is within the margin of the better of plain training and C-Flat, and where it is not."""
    failed = []
    for metric in ("avg", "last"):
        better = "none"
        if "c_flat" in rows and interval(rows["c_flat"][metric], rows["none"][metric])[0] > 0:
            better = "c_flat"
        mean, half = interval(rows[FLAGSHIP][metric], rows[better][metric])
        if not mean - half >= -MARGIN:
            failed.append(f"{metric.capitalize()} to {ROWS[better].title} down to {mean - half:+.1f}")
    return "not excluded: " + ", ".join(failed) if failed else "excluded" + ("" if "c_flat" in rows else " (SGD alone)")


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
        f"{statistics.mean(row['end_loss']):.3f}",
    ]
    return "| " + " | ".join(cells) + " |"


def _trials(rows: Mapping[str, Any]) -> list[str]:
    """Show validation accuracy over the rates that were tried: how wide the range is that works."""
    tried = {
        name: {rounded(t["rate"] / ROWS[name].rate): t["avg"] for t in row["trials"]} for name, row in rows.items()
    }
    rates = sorted({rate for by_rate in tried.values() for rate in by_rate})
    lines = ["Validation Avg (%) of all trials, by learning rate:", ""]
    lines += ["| row | " + " | ".join(f"{rate:g}" for rate in rates) + " |", "|---" * (len(rates) + 1) + "|"]
    for name, row in rows.items():
        cells = (f"{100 * tried[name][rate]:.1f}" if rate in tried[name] else "" for rate in rates)
        lines.append(f"| {row['title']} | " + " | ".join(cells) + " |")
    return lines


def _first_task(rows: Mapping[str, Any]) -> list[str]:
    """Show final runs at the settings that the first task alone would have chosen."""
    lines = ["Tuned on validation images of the first task alone, as a continual learner must be:", ""]
    lines += ["| row | rate | radius | Avg | Last | Avg to plain | Last to plain | seeds |", "|---" * 8 + "|"]
    for name, row in rows.items():
        radius = row["settings"]["optimizer"].get("rho")
        found = differences(rows, name).get("none", {})
        cells = [f"{row['settings']['base']['lr']:g}", "-" if radius is None else f"{radius:g}"]
        cells += [
            percent(row["avg"]),
            percent(row["last"]),
            difference(found.get("avg")),
            difference(found.get("last")),
        ]
        lines.append(f"| {row['title']} | " + " | ".join([*cells, str(len(row["avg"]))]) + " |")
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
    titles = (f"{ROWS[name].title} ({len(row['tuned']['avg'])} seeds)" for name, row in rows.items())
    lines += ["| condition | " + " | ".join(titles) + " |", "|---" * (len(rows) + 1) + "|"]
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
    rows = values["rows"]
    costs = {
        "evaluations per step": {name: statistics.mean(row["evaluations_per_step"]) for name, row in rows.items()},
        "time of a step relative to plain": {
            name: 1 / row["relative_speed"] for name, row in rows.items() if row["relative_speed"]
        },
    }
    costs = {label: by_row for label, by_row in costs.items() if len(by_row) > 1}
    references = [name for name in ("none", "c_flat") if name in rows]
    figure = Figure(figsize=(6 * len(costs), 0.6 + 3.8 * len(references)), dpi=110, layout="constrained")
    figure.suptitle(f"{values['title']}:\ndifference of Avg in points, 95 % paired intervals", fontsize=10)
    panels = figure.subplots(len(references), len(costs), sharex="col", squeeze=False)
    named: list[tuple[Any, list[tuple[float, float, str, str]]]] = []
    for line, reference in enumerate(references):
        for column, (label, by_row) in enumerate(costs.items()):
            axes = panels[line][column]
            axes.axhline(0, color="#999999", linewidth=0.8)
            points = []
            for name, x in by_row.items():
                mean, half = (0.0, 0.0) if name == reference else rows[name]["differences"][reference]["avg"]
                color = OPTIMIZERS[ROWS[name].optimizer["name"]][1]
                axes.errorbar(x, mean, yerr=0 if math.isnan(half) else half, fmt="o", color=color, capsize=2)
                points.append((x, mean, rows[name]["title"], color))
            axes.margins(x=0.2)
            if min(point[1] for point in points) < -LINEAR:
                axes.set_yscale("symlog", linthresh=LINEAR)  # what collapses must not squeeze the rest together
                low, high = axes.get_ylim()
                axes.set_yticks([tick for tick in (-60, -40, -20, -10, -5, 0, 5, 10, 20) if low <= tick <= high])
                axes.yaxis.set_major_formatter("{x:g}")
            axes.set_ylabel(f"to {ROWS[reference].title}")
            if reference == references[-1]:
                axes.set_xlabel(label)
            named.append((axes, points))
    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # names have to fit into the panels, not the panels around the names
    for axes, points in named:
        name_points(axes, points)
    figure.savefig(path)  # as it was drawn: names are placed by the pixel


def name_points(axes: Any, points: Sequence[tuple[float, float, str, str]]) -> None:
    """Write names near their points, each at the nearest place inside the panel that is still free."""
    panel = axes.get_window_extent()
    taken: list[Any] = [Bbox.from_bounds(*(axes.transData.transform((x, y)) - 4), 8, 8) for x, y, _, _ in points]
    places = sorted(
        ((right, up) for up in range(-150, 151, 9) for right in range(-120, 121, 6) if abs(right) > 4 or abs(up) > 8),
        key=lambda place: math.hypot(place[0], 2 * place[1]),
    )
    for x, y, text, color in sorted(points, key=lambda point: -point[1]):
        note = axes.annotate(text, (x, y), (0, 0), textcoords="offset points", fontsize=7, color=color, va="center")
        for place in places:
            note.set_position(place)
            note.set_horizontalalignment("left" if place[0] > 0 else "right")
            box = note.get_window_extent()
            is_inside = panel.x0 < box.x0 and box.x1 < panel.x1 and panel.y0 < box.y0 and box.y1 < panel.y1
            if is_inside and not any(box.overlaps(other) for other in taken):
                break
        if math.hypot(*note.get_position()) > 20:
            line = {"arrowstyle": "-", "color": color, "linewidth": 0.5, "alpha": 0.6}
            axes.annotate("", (x, y), note.get_position(), textcoords="offset points", arrowprops=line)
        taken.append(box)
