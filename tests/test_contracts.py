"""What the import contracts of pyproject.toml cannot say without a list: files of one kind do not know each other."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import cflat

ROOT = Path(cflat.__file__).parent
SHARED = ("engine",)
"""What optimizers build on; itself it may know none of them."""
MODULES = [
    pytest.param(path, id=f"{room}-{path.stem}")
    for room in ("optim", "methods")
    for path in sorted((ROOT / room).glob("[!_]*.py"))
]
BASES = ("qhm",)
"""Base optimizers: they are wrapped, and not in the table of wrappers."""
FILES = [param for param in MODULES if param.values[0].stem not in (*SHARED, *BASES)]


def imported(path: Path) -> set[str]:
    """Return the modules that a file imports from its own folder."""
    package = ".".join(["cflat", *path.relative_to(ROOT).parts[:-1]])
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
    return {
        str(node.module).removeprefix(f"{package}.") for node in nodes if str(node.module).startswith(f"{package}.")
    }


@pytest.mark.parametrize("path", MODULES)
def test_optimizers_and_methods_know_nothing_of_each_other(path: Path) -> None:
    allowed = set() if path.stem in SHARED else {*SHARED, *BASES}
    assert {name for name in imported(path) if not name.startswith("_")} <= allowed


@pytest.mark.parametrize("path", FILES)
def test_every_file_registers_what_it_is_named_after(path: Path) -> None:
    from cflat.methods import list_methods

    assert {"plain": "none"}.get(path.stem, path.stem) in [*cflat.list_optimizers(), *list_methods()]


def test_a_name_of_a_module_means_one_thing() -> None:
    """A command is called like what it runs, and two packages have a base and a catalog; all other names are unique."""
    commands, alike = ROOT / "cli" / "commands", {"__init__", "_base", "_catalog"}
    names = [path.stem for path in ROOT.rglob("*.py") if path.parent != commands and path.stem not in alike]
    assert sorted({name for name in names if names.count(name) > 1}) == []
