"""Ledger and tables of the front, from what is finished; `front_figures` draws it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from front_figures import comparable_rows, draw_front, draw_robustness
from front_runs import AS_TURBO, CONDITIONS, read, rounded
from front_streams import ROWS, STREAMS

from cflat._files import write_atomic, write_json

LEDGER = "front.json"
"""Beside the tables: the accuracies of every final run by row and seed, from which all tables and claims follow."""
PARTS = ("first-task", "robustness", "ablations", "watched")
"""Of a row, besides its result: files of these names."""
FLAGSHIP, RIVALS = "turbo", ("none", "none-nesterov", "c_flat")
MARGIN = 1.0
"""Points of difference that count as none: of the claims, and of Turbo against the better of SGD and C-Flat."""
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
        draw_front(values, folder / f"{stream}.png")
    if found := comparable_rows(streams):
        draw_robustness(found, folder / "robustness.png")


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
        *_overview(found),
    ]
    if comparable_rows(found):
        lines += [
            "",
            "## Away from the tuned settings",
            "",
            "Avg, mean over seeds; numbers and seeds are below, stream by",
        ]
        lines += ["stream. Each optimizer starts from its own rate and radius.", "", "![robustness](robustness.png)"]
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


def _overview(found: Mapping[str, Any]) -> list[str]:
    """Show what every row gains over plain training on every stream."""
    shown = {stream: values["rows"] for stream, values in found.items() if "none" in values["rows"]}
    names = [name for name in ROWS if name != "none" and any(name in rows for rows in shown.values())]
    if not names:
        return []
    lines = ["", "## Every row, stream by stream", ""]
    lines += ["Avg in points over tuned SGD, significant gains in bold; in brackets the seeds that both have.", ""]
    lines += [f"| row | evaluations | {' | '.join(shown)} |", "|---" * (len(shown) + 2) + "|"]
    for name in names:
        rows = [values.get(name) for values in shown.values()]
        evaluations = statistics.mean(e for row in rows if row for e in row["evaluations_per_step"])
        cells = [ROWS[name].title, f"{evaluations:.2f}"]
        for row, values in zip(rows, shown.values(), strict=True):
            cells.append(
                f"{gain(row, values['none'])} ({min(len(row['avg']), len(values['none']['avg']))})" if row else "-"
            )
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def gain(row: Mapping[str, Any], plain: Mapping[str, Any]) -> str:
    """Return the difference of Avg to plain training, in bold if it is a significant gain."""
    mean, half = interval(row["avg"], plain["avg"])
    text = difference((mean, half))
    return f"**{text}**" if mean - half > 0 else text


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
    tried = {condition for row in rows.values() for condition in row}
    conditions = [condition for condition in ("tuned", *CONDITIONS, *AS_TURBO) if condition in tried]
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
