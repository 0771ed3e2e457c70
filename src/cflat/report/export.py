"""The tables of a report for papers and spreadsheets: LaTeX and CSV."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from cflat._files import csv_text, make_folder, write_atomic
from cflat.report.groups import group_records
from cflat.report.page import Cell, Table
from cflat.report.records import RunRecord, require_records
from cflat.report.tables import accuracy_table, cost_table, runs_table

_NUMBER = re.compile(r"(?P<value>[+-]?\d[\d.]*)(?: ± (?P<std>[\d.]+))?(?: \(p (?P<p>[\d.e+-]+)\))?")
"""What a cell can hold besides text: a number, its deviation, and the p-value of a difference.

Read from the text of the cell, so that LaTeX, CSV and the page cannot show different digits.
"""
# For one pass over the text: the braces of a replacement must not be escaped again.
_ESCAPES = str.maketrans(
    {
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "±": r"$\pm$",
        "\u00a0": "~",  # a space that does not break
        **{character: f"\\{character}" for character in "&%$#_{}"},
    }
)


def latex_text(table: Table) -> str:
    r"""Return a table as LaTeX for the package booktabs, the best of a column in bold.

    >>> print(latex_text(Table("Accuracy", ("runs", "Avg"), ((Cell("C-Flat"), Cell("61.20 ± 0.31", 61.2, True)),))))
    \begin{table}
      \caption{Accuracy.}
      \begin{tabular}{lr}
        \toprule
        runs & Avg \\
        \midrule
        C-Flat & \textbf{61.20 $\pm$ 0.31} \\
        \bottomrule
      \end{tabular}
    \end{table}
    """
    shape = "l" * table.num_text + "r" * (len(table.columns) - table.num_text)
    caption = f"{table.name}. {table.note}".strip()
    lines = [
        r"\begin{table}",
        rf"  \caption{{{_latex(caption)}}}",
        rf"  \begin{{tabular}}{{{shape}}}",
        r"    \toprule",
        f"    {' & '.join(map(_latex, table.columns))} \\\\",
        r"    \midrule",
        *(f"    {' & '.join(map(_latex_cell, row))} \\\\" for row in table.rows),
        r"    \bottomrule",
        r"  \end{tabular}",
        r"\end{table}",
    ]
    return "\n".join(lines)


def table_csv(table: Table) -> str:
    """Return a table as CSV: deviations and p-values get columns of their own.

    >>> print(table_csv(Table("Accuracy", ("runs", "Avg"), ((Cell("C-Flat"), Cell("+1.4 ± 0.3 (p 0.02)")),))), end="")
    runs,Avg,Avg std,Avg p
    C-Flat,+1.4,0.3,0.02
    """
    columns: list[list[str]] = []
    for index, title in enumerate(table.columns):
        cells = [row[index].text for row in table.rows]  # the digits that the page shows
        found = [None if index < table.num_text else _NUMBER.fullmatch(cell) for cell in cells]
        columns.append([title, *(match["value"] if match else cell for match, cell in zip(found, cells, strict=True))])
        columns += [
            [f"{title} {part}", *((match[part] or "") if match else "" for match in found)]
            for part in ("std", "p")
            if any(match and match[part] for match in found)
        ]
    return csv_text(zip(*columns, strict=True))


def write_tables(folders: Sequence[str | Path], out: str | Path, score: str | None = None) -> list[Path]:
    """Write tables of accuracy, cost and single runs as ``accuracy.tex``, ``accuracy.csv`` and so on; return the files.

    Args:
        folders: Run directories, or folders that contain them.
        out: The folder to write to.
        score: What runs are judged by where their method has it; None takes the headline of each.

    Raises:
        DataError: If there is no run that can be read, or a file cannot be written.
    """
    records, _ = require_records(folders, "make tables of", score)
    return tables_of(records, out)


def tables_of(records: Sequence[RunRecord], out: str | Path) -> list[Path]:
    """Write what `write_tables` writes, of runs that are read already; return the files."""
    folder = Path(out)
    make_folder(folder)
    groups = group_records(records)
    done = [group for group in groups if group.finished]
    tables = {"accuracy": accuracy_table(groups), "cost": cost_table(done)} if done else {}
    tables["runs"] = runs_table(records)
    files = []
    for name, table in tables.items():
        for ending, text in (("tex", latex_text(table) + "\n"), ("csv", table_csv(table))):
            # As in `write_page`: names of folders need not be valid text.
            write_atomic(folder / f"{name}.{ending}", text.encode("utf-8", errors="replace"))
            files.append(folder / f"{name}.{ending}")
    return files


def _latex_cell(cell: Cell) -> str:
    text = _latex(cell.text)
    return rf"\textbf{{{text}}}" if cell.is_best else text


def _latex(text: str) -> str:
    return text.translate(_ESCAPES)
