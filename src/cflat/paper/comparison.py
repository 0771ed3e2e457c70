"""A reproduction in words, tables and files: our numbers beside the paper's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean as mean
from typing import Any

from cflat._files import csv_text, plain_values, write_atomic, write_json
from cflat.figures.figure import FigureData
from cflat.figures.static import save
from cflat.paper.figures import contrasts, picture
from cflat.paper.measures import is_config, unit_of
from cflat.paper.reproduce import HERE, PAPER, Entry, Plan, Reproduction
from cflat.report.export import latex_text
from cflat.report.page import Cell, Choices, ReportData, Section, Table
from cflat.report.write import write_page, write_report

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
    if found.exhibit.rows:  # an exhibit of figures alone has no table
        endings = {"json": "json", "markdown": "md", "csv": "csv", "latex": "tex"}
        files |= {kind: folder / f"table.{ending}" for kind, ending in endings.items()}
        write_json(files["json"], found.to_dict())
        write_atomic(files["markdown"], markdown(found))
        write_atomic(files["csv"], _csv(found))
        write_atomic(files["latex"], "\n\n".join(map(latex_text, tables(found))) + "\n")
    lead = Section(
        "paper",
        f"{found.exhibit.name}: {found.exhibit.title}",
        " ".join(remarks(found)),
        charts=tuple(map(Choices.only, figures if drawn is None else (drawn, *figures))),
        tables=tuple(tables(found)),
    )
    files["page"] = folder / "report.html"
    title = f"{found.exhibit.name}, scale {found.scale}"
    if plan.all_jobs:
        roots = [job.out for job in plan.all_jobs]
        write_report(roots, files["page"], title, lead=lead, sentences=verdicts(found))
    else:
        # A table of settings, or figures alone: there are no runs to report on.
        write_page(ReportData(title, (), (lead,)), files["page"])
    return files


def tables(found: Reproduction) -> list[Table]:
    """Return one table for each column of the exhibit that was run, with the paper's numbers beside or below ours."""
    lines = found.exhibit.rows
    has_groups = any(line.group for line in lines)
    names = [[Cell(line.group), Cell(line.name)] if has_groups else [Cell(line.name)] for line in lines]
    titles = ("method", "line") if has_groups else ("line",)
    made = []
    for index, column in enumerate(found.exhibit.columns):
        if column.name not in found.missing:
            cells = [cells[index] for cells in found.entries]
            # Lines of one column may be judged by different scores: a method's headline is its own.
            scores = [next((entry.score for entry in cell if entry.score), "") for cell in cells]
            own, first = names, titles
            if any(scores):
                first = (*titles, "score")
                own = [[*name, Cell(score)] for name, score in zip(names, scores, strict=True)]
            arrange = _beside if len(cells[0]) <= MAX_BESIDE else _below
            added, rows = arrange(own, cells)
            name, num_text = column.name or found.exhibit.name, len(first) + (arrange is _below)
            made.append(Table(name, (*first, *added), tuple(map(tuple, rows)), num_text=num_text))
    return made


def _beside(names: list[list[Cell]], cells: list[tuple[Entry, ...]]) -> tuple[list[str], list[list[Cell]]]:
    """Give every number that was published a column of its own."""
    titles: list[str] = []
    rows = [[*name] for name in names]
    for place, entry in enumerate(cells[0]):
        own = [cell[place] for cell in cells]
        is_published = any(value.published is not None for value in own)
        titles += [entry.title, f"{entry.title}, paper"] if is_published else [entry.title]
        for row, value in zip(rows, own, strict=True):
            row += [_cell(value, where) for where in ((HERE, PAPER) if is_published else (HERE,))]
    return titles, rows


def _below(names: list[list[Cell]], cells: list[tuple[Entry, ...]]) -> tuple[list[str], list[list[Cell]]]:
    """Give the published numbers of every line a row of their own: for many columns."""
    rows = []
    for name, cell in zip(names, cells, strict=True):
        is_published = any(entry.published is not None for entry in cell)
        places = (HERE, PAPER) if is_published else (HERE,)
        rows += [[*name, Cell(where), *(_cell(entry, where) for entry in cell)] for where in places]
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
    """Return for each kind of line what it gained over the first of its group, in the paper and here."""
    if found.exhibit.draw.x is not None or found.scale == "smoke":  # no reference, or numbers without a meaning
        return []
    sentences = []
    every = list(contrasts(found))
    for name in dict.fromkeys(contrast.line for contrast in every):
        own = [contrast for contrast in every if contrast.line == name and contrast.measured is not None]
        here = [contrast.measured for contrast in own if contrast.measured is not None]
        printed = [contrast.published for contrast in own if contrast.published is not None]
        paper = f"; in the paper {_gain(printed)}" if printed else ""
        if here:
            sentences.append(f"{name} against {own[0].reference}, Avg: here {_gain(here)}{paper} ({found.repeats}).")
    return sentences


def remarks(found: Reproduction) -> list[str]:
    """Return sentences on scale, seeds, open points of the paper, and what is left out."""
    seeds = f", {found.repeats}" if found.num_seeds else ""
    is_run = bool(found.num_seeds or found.exhibit.figures)
    texts = [f"Scale {found.scale}{seeds}. {found.meaning}".strip()] if is_run else []
    if found.exhibit.note:
        texts.append(found.exhibit.note)
    texts += [f"{name} is left out: {reason}" for name, reason in found.missing.items()]
    return texts


def _cell(entry: Entry, where: str) -> Cell:
    number = entry.number(where)
    if number is None:
        return Cell("-")
    # A setting keeps its digits: a rate of 0.0025 must not be shown as 0.00.
    text = f"{number.mean:g}" if is_config(entry.metric) else number.text(unit_of(entry.metric).digits)
    return Cell(text, number.mean)


def _csv(found: Reproduction) -> str:
    columns = ("metric", "score", "measured", "measured_std", "published", "published_std")
    rows: list[list[Any]] = [["group", "line", "column", *columns, "n"]]
    for line, cells in zip(found.exhibit.rows, found.entries, strict=True):
        for column, cell in zip(found.exhibit.columns, cells, strict=True):
            for entry in cell:
                values = plain_values(entry.to_dict())  # without NaN
                count = entry.measured.n if entry.measured else 0
                rows.append([line.group, line.name, column.name, *(values[key] for key in columns), count])
    return csv_text(rows)


def _gain(differences: Sequence[float]) -> str:
    """Return the mean of differences, and how many of several are gains."""
    wins = f", above in {sum(value > 0 for value in differences)} of {len(differences)}"
    return f"{mean(differences):+.2f} points" + (wins if len(differences) > 1 else "")
