"""The page of verified methods and optimizers; the comparisons themselves need checkouts of the originals."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

from cflat.methods import list_methods
from cflat.optim import list_optimizers

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "verified.md"


def lines(title: str) -> dict[str, list[str]]:
    """Return the cells of one table of the page, by name."""
    body = PAGE.read_text(encoding="utf-8").partition(f"<!-- begin: {title} -->")[2].partition("<!-- end")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in body.splitlines() if line.startswith("| `")]
    return {name.strip("`"): cells for name, *cells in rows}


@pytest.mark.parametrize(
    ("title", "names", "least"), [("methods", list_methods(), 9), ("optimizers", [*list_optimizers(), "qhm"], 12)]
)
def test_everything_has_a_line_and_what_was_compared_is_equal(title: str, names: list[str], least: int) -> None:
    found = lines(title)
    assert list(found) == names, "run: python benchmarks/parity.py ... --write docs/verified.md"
    compared = {name: cells for name, cells in found.items() if cells[0] != "-"}
    assert len(compared) >= least
    for name, (original, _, difference, same, _) in compared.items():
        assert re.search(r"\(\w{7,}, \d{4}-\d\d-\d\d\)|^torch ", original), name
        assert float(difference) < 1e-6, name
        assert same == "yes", name
    assert all(cells[-1] for cells in found.values())


def test_the_command_says_what_it_needs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    for arguments, words in (
        ([], "give a checkout: --pilot, --pycil"),
        (["--sam", str(tmp_path / "none")], "must be a checkout of davda54/sam"),
    ):
        monkeypatch.setattr(sys, "argv", ["parity.py", *arguments])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(ROOT / "benchmarks" / "parity.py"), run_name="__main__")
        assert ended.value.code == 2
        assert words in capsys.readouterr().err
