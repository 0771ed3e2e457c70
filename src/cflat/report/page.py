"""The content of a report as plain texts, tables and figures; `cflat.report.build` turns it into a page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from cflat.figures.figure import FigureData


@dataclass(frozen=True)
class Cell:
    """One entry of a table."""

    text: str
    value: float | None = None
    """What the column is sorted by; None and NaN sort by the text, after all numbers."""
    is_best: bool = False
    """Whether to set it apart as the best of its column."""


@dataclass(frozen=True)
class Table:
    """Rows of cells; every column can be sorted by a click."""

    name: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""
    num_text: int = 1
    """Columns, from the left, that hold text."""
    is_filtered: bool = False
    """Whether the filter box of the page hides rows."""


@dataclass(frozen=True)
class Choices:
    """One chart with a list to choose its figure from."""

    title: str
    options: tuple[tuple[str, FigureData], ...]
    """Figures by the name in the list; at least one."""

    @classmethod
    def only(cls, figure: FigureData) -> Choices:
        """Return a chart that leaves no choice."""
        return cls(figure.title, (("", figure),))


@dataclass(frozen=True)
class Section:
    """A part of the page: a sentence, then facts, figures, tables, commands and folded texts, in this order."""

    name: str
    title: str
    text: str = ""
    facts: tuple[tuple[str, str], ...] = ()
    """Names with their values."""
    charts: tuple[Choices, ...] = ()
    tables: tuple[Table, ...] = ()
    commands: tuple[tuple[str, str], ...] = ()
    """Names of runs with commands that a reader may want to copy."""
    folded: tuple[tuple[str, str], ...] = ()
    """Titles with the long texts that they open."""


@dataclass(frozen=True)
class Problem:
    """Something that could not be read."""

    where: str
    message: str


@dataclass(frozen=True)
class ReportData:
    """A whole report."""

    title: str
    headlines: tuple[str, ...]
    """Sentences on what was gained and what it cost."""
    sections: tuple[Section, ...]
    facts: tuple[tuple[str, str], ...] = ()
    """Numbers with their names, at the top of the page."""
    problems: tuple[Problem, ...] = ()
    colors: Mapping[str, str] = field(default_factory=dict)
    """Colours of groups that all figures share."""
