"""What a reproduction says: sentences, tables and a picture that set our numbers beside the paper's."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from cflat._files import plain_values, write_atomic
from cflat.experiments.commands import flatten
from cflat.experiments.documents import merge
from cflat.experiments.exhibits import Line
from cflat.experiments.measures import is_config, unit_of
from cflat.experiments.report import write_page, write_report
from cflat.experiments.reproduce import SPEED, Entry, Plan, Reproduction
from cflat.figures.model import Bars, Curve, FigureData, Panel
from cflat.figures.static import save
from cflat.metrics import paired_difference
from cflat.report.model import Cell, ReportData, Section, Table

__all__ = ["markdown", "picture", "remarks", "tables", "verdicts", "write_reproduction"]

ACCURACY = "avg"
HERE, PAPER = "here", "the paper"
MAX_BESIDE = 6
"""Numbers of a line up to which the paper's stand beside ours; more are set below."""


def write_reproduction(
    folder: Path, plan: Plan, found: Reproduction, figures: Sequence[FigureData] = ()
) -> dict[str, Path]:
    """Write table, picture and a page about all runs into a folder; return the files by kind."""
    folder.mkdir(parents=True, exist_ok=True)
    files: dict[str, Path] = {}
    drawn = picture(found)
    if drawn is not None:
        files["picture"] = save(drawn, folder / "picture.png")
    if found.exhibit.rows:
        files |= {"json": folder / "table.json", "markdown": folder / "table.md", "csv": folder / "table.csv"}
        write_atomic(files["json"], json.dumps(plain_values(found.to_dict()), indent=2, allow_nan=False) + "\n")
        write_atomic(files["markdown"], markdown(found))
        write_atomic(files["csv"], _csv(found))
    lead = Section(
        "paper",
        f"{found.exhibit.name}: {found.exhibit.title}",
        " ".join(remarks(found)),
        figures=(*([drawn] if drawn is not None else []), *figures),
        tables=tuple(tables(found)),
    )
    files["page"] = folder / "report.html"
    title = f"{found.exhibit.name} of the paper" + (f", scale {found.scale}" if found.num_seeds else "")
    if plan.all_jobs:
        roots = [job.out for job in plan.all_jobs]
        write_report(roots, files["page"], title, lead=lead, headlines=verdicts(found))
    else:
        write_page(ReportData(title, (), (lead,)), files["page"])
    return files


def tables(found: Reproduction) -> list[Table]:
    """Return one table for each column of the exhibit that was run, with the paper's numbers beside or below ours."""
    made = []
    for index, column in enumerate(found.exhibit.columns):
        if column.name in found.missing:
            continue
        cells = [cells[index] for cells in found.entries]
        has_groups = any(line.group for line in found.exhibit.rows)
        names = [[Cell(line.group), Cell(line.name)][0 if has_groups else 1 :] for line in found.exhibit.rows]
        titles = ("method", "line")[0 if has_groups else 1 :]
        arrange = _beside if len(cells[0]) <= MAX_BESIDE else _below
        added, rows = arrange(names, cells)
        num_text = len(titles) + (arrange is _below)
        made.append(
            Table(column.name or found.exhibit.name, (*titles, *added), tuple(map(tuple, rows)), num_text=num_text)
        )
    return made


def _beside(names: list[list[Cell]], cells: list[tuple[Entry, ...]]) -> tuple[list[str], list[list[Cell]]]:
    """Give every number that was published a column of its own."""
    titles: list[str] = []
    rows = [[*name] for name in names]
    for place, entry in enumerate(cells[0]):
        own = [cell[place] for cell in cells]
        titles.append(entry.title)
        for row, value in zip(rows, own, strict=True):
            row.append(_measured(value))
        if any(value.published is not None for value in own):
            titles.append(f"{entry.title}, paper")
            for row, value in zip(rows, own, strict=True):
                row.append(_published(value))
    return titles, rows


def _below(names: list[list[Cell]], cells: list[tuple[Entry, ...]]) -> tuple[list[str], list[list[Cell]]]:
    """Give the published numbers of every line a row of their own: for many columns."""
    rows = []
    for name, cell in zip(names, cells, strict=True):
        rows.append([*name, Cell(HERE), *map(_measured, cell)])
        if any(entry.published is not None for entry in cell):
            rows.append([*name, Cell(PAPER), *map(_published, cell)])
    return ["numbers", *(entry.title for entry in cells[0])], rows


def markdown(found: Reproduction) -> str:
    """Return everything as Markdown."""
    parts = [f"# {found.exhibit.name}: {found.exhibit.title}", *remarks(found)]
    parts += [f"- {sentence}" for sentence in verdicts(found)]
    for table in tables(found):
        header = f"| {' | '.join(table.columns)} |\n|{'|'.join(['---'] * len(table.columns))}|"
        body = "\n".join(f"| {' | '.join(cell.text for cell in row)} |" for row in table.rows)
        parts.append(f"## {table.name}\n\n{header}\n{body}")
    return "\n\n".join(parts) + "\n"


def verdicts(found: Reproduction) -> list[str]:
    """Say for each kind of line what it gained over the first of its group, in the paper and here."""
    if found.exhibit.draw.x is not None or found.scale == "smoke":  # no reference, or numbers that mean nothing
        return []
    sentences = []
    contrasts = list(_contrasts(found))
    for name in dict.fromkeys(contrast.line for contrast in contrasts):
        own = [contrast for contrast in contrasts if contrast.line == name and contrast.measured is not None]
        if not own:
            continue
        here = [contrast.measured for contrast in own if contrast.measured is not None]
        text = f"{name} against {own[0].reference}, Avg: here {_mean(here):+.2f} points, above in {_wins(here)}"
        printed = [contrast.published for contrast in own if contrast.published is not None]
        if printed:
            text += f"; in the paper {_mean(printed):+.2f} points, above in {_wins(printed)}"
        sentences.append(text + f" ({_seeds(found)}).")
    return sentences


def picture(found: Reproduction) -> FigureData | None:
    """Draw the numbers: over a setting, over the tasks, or as gains over the first line of each group."""
    exhibit = found.exhibit
    if all(is_config(metric) for column in exhibit.columns for metric in column.metrics) or not exhibit.rows:
        return None
    if exhibit.draw.x is not None:
        panels = _over_setting(found, exhibit.draw.x, exhibit.draw.by)
    elif exhibit.draw.stages:
        panels = _over_tasks(found, exhibit.draw.stages)
    else:
        panels = _gains(found)
    caption = f"Scale {found.scale}, {_seeds(found)}. {_SCALE_WORDS[found.scale]}"
    return FigureData(exhibit.name, exhibit.title, panels, caption, num_columns=2) if panels else None


@dataclass(frozen=True)
class _Contrast:
    """A line against the first of its group, in one column."""

    group: str
    column: str
    line: str
    reference: str
    measured: float | None
    deviation: float
    published: float | None
    speed: float | None
    """Relative to the reference."""
    published_speed: float | None


_SCALE_WORDS = {
    "paper": "The paper's settings.",
    "cpu": "A small network and few images: compare signs and ratios with the paper, not values.",
    "smoke": "Tiny random networks on digits: this shows that everything runs, and nothing else.",
}


def remarks(found: Reproduction) -> list[str]:
    """Return what a reader must know: scale, seeds, open points, and what is left out."""
    seeds = f", {_seeds(found)}" if found.num_seeds else ""
    is_run = bool(found.num_seeds or found.exhibit.figures)
    texts = [f"Scale {found.scale}{seeds}. {_SCALE_WORDS[found.scale]}"] if is_run else []
    if found.exhibit.note:
        texts.append(found.exhibit.note)
    texts += [f"{name} is left out: {reason}" for name, reason in found.missing.items()]
    return texts


def _contrasts(found: Reproduction) -> Iterator[_Contrast]:
    for index, column in enumerate(found.exhibit.columns):
        firsts: dict[str, tuple[Line, dict[str, Entry]]] = {}
        for line, cells in zip(found.exhibit.rows, found.entries, strict=True):
            own = {entry.metric: entry for entry in cells[index]}
            reference, first = firsts.setdefault(line.group, (line, own))
            if reference is line or ACCURACY not in own:
                continue
            difference = _difference(own[ACCURACY], first[ACCURACY])
            yield _Contrast(
                line.group,
                column.name,
                line.name,
                reference.name,
                None if difference is None else difference[0],
                0.0 if difference is None or math.isnan(difference[1]) else difference[1],
                _published_difference(own[ACCURACY], first[ACCURACY]),
                _ratio(own, first, is_published=False),
                _ratio(own, first, is_published=True),
            )


def _difference(own: Entry, first: Entry) -> tuple[float, float] | None:
    if own.measured is None or first.measured is None:
        return None
    found = paired_difference(own.by_seed, first.by_seed)
    return found.mean, found.std


def _published_difference(own: Entry, first: Entry) -> float | None:
    if own.published is None or first.published is None:
        return None
    return own.published.mean - first.published.mean


def _ratio(own: dict[str, Entry], first: dict[str, Entry], *, is_published: bool) -> float | None:
    if SPEED not in own:
        return None
    values = [entry[SPEED].published if is_published else entry[SPEED].measured for entry in (own, first)]
    if values[0] is None or values[1] is None or not values[1].mean:
        return None
    return 100 * values[0].mean / values[1].mean


def _gains(found: Reproduction) -> list[Panel]:
    contrasts = [contrast for contrast in _contrasts(found) if contrast.measured is not None]
    by_group = len({contrast.group for contrast in contrasts}) > 1
    kinds: dict[str, dict[str, list[_Contrast]]] = {}
    for contrast in contrasts:
        category = contrast.group if by_group else contrast.column or contrast.group
        kinds.setdefault(contrast.line, {}).setdefault(category, []).append(contrast)
    panels = []
    reference = contrasts[0].reference if contrasts else ""
    for title, label, keys in (
        (f"Average accuracy against {reference}", "points", ("measured", "published")),
        (f"Speed against {reference}", "percent of its images per second", ("speed", "published_speed")),
    ):
        marks = []
        for line, categories in kinds.items():
            for key, where in zip(keys, (HERE, PAPER), strict=True):
                values = {
                    category: [value for member in members if (value := getattr(member, key)) is not None]
                    for category, members in categories.items()
                }
                known = {category: _mean(numbers) for category, numbers in values.items() if numbers}
                if known:
                    deviations = [_mean([member.deviation for member in categories[c]]) for c in known]
                    has_spread = key == "measured" and any(deviations)
                    marks.append(
                        Bars(f"{line}, {where}", list(known), list(known.values()), deviations if has_spread else None)
                    )
        if marks:
            panels.append(Panel(title, "", label, [*marks]))
    return panels


def _over_setting(found: Reproduction, x: str, by: str | None) -> list[Panel]:
    panels = []
    for metric in (ACCURACY, SPEED):
        for where in (HERE, PAPER):
            curves: dict[str, list[tuple[float, float]]] = {}
            for line, cells in zip(found.exhibit.rows, found.entries, strict=True):
                settings = flatten(merge(found.exhibit.settings, line.settings))
                name = "" if by is None else f"{by.rpartition('.')[2]} = {settings[by]}"
                for entry in cells[0]:
                    number = entry.measured if where == HERE else entry.published
                    if entry.metric == metric and number is not None:
                        curves.setdefault(name or entry.title, []).append((float(settings[x]), number.mean))
            marks = [_curve(name, points) for name, points in curves.items()]
            if marks:
                title = f"{unit_of(metric).title}, {where}"
                panels.append(Panel(title, x.rpartition(".")[2], unit_of(metric).title, [*marks]))
    return panels


def _over_tasks(found: Reproduction, stages: int) -> list[Panel]:
    panels = []
    for where in (HERE, PAPER):
        marks = []
        for line, cells in zip(found.exhibit.rows, found.entries, strict=True):
            numbers = [entry.measured if where == HERE else entry.published for entry in cells[0][:stages]]
            points = [(stage + 1.0, number.mean) for stage, number in enumerate(numbers) if number is not None]
            if points:
                marks.append(_curve(line.name, points))
        if marks:
            panels.append(Panel(f"Accuracy over the stream, {where}", "tasks learned", "accuracy (%)", [*marks]))
    return panels


def _curve(name: str, points: list[tuple[float, float]]) -> Curve:
    ordered = sorted(points)
    return Curve(name, [x for x, _ in ordered], [y for _, y in ordered], style="line+points")


def _measured(entry: Entry) -> Cell:
    if entry.measured is None:
        return Cell("-")
    digits = None if is_config(entry.metric) else unit_of(entry.metric).digits
    return _number(entry.measured.mean, entry.measured.std, digits)


def _published(entry: Entry) -> Cell:
    if entry.published is None:
        return Cell("-")
    digits = None if is_config(entry.metric) else unit_of(entry.metric).digits
    return _number(entry.published.mean, entry.published.std, digits)


def _number(mean: float, std: float, digits: int | None) -> Cell:
    if digits is None:
        return Cell(f"{mean:g}", mean)
    return Cell(f"{mean:.{digits}f}" + ("" if math.isnan(std) else f" ± {std:.{digits}f}"), mean)


def _csv(found: Reproduction) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(
        ["group", "line", "column", "metric", "measured", "measured_std", "published", "published_std", "n"]
    )
    for line, cells in zip(found.exhibit.rows, found.entries, strict=True):
        for column, cell in zip(found.exhibit.columns, cells, strict=True):
            for entry in cell:
                here, paper = entry.measured, entry.published
                numbers = [
                    *((here.mean, here.std) if here else ("", "")),
                    *((paper.mean, paper.std) if paper else ("", "")),
                ]
                shown = ["" if isinstance(v, float) and math.isnan(v) else v for v in numbers]
                writer.writerow([line.group, line.name, column.name, entry.metric, *shown, here.n if here else 0])
    return text.getvalue()


def _seeds(found: Reproduction) -> str:
    what = "class orders" if found.exhibit.repeat == "order" else "seeds"
    return f"one {what[:-1]}" if found.num_seeds == 1 else f"{found.num_seeds} {what}"


def _wins(values: Sequence[float]) -> str:
    return f"{sum(value > 0 for value in values)} of {len(values)}"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
