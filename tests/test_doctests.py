"""The examples in docstrings are true."""

from __future__ import annotations

import doctest
from importlib import import_module
from pathlib import Path

import pytest

import cflat

ROOT = Path(cflat.__file__).parent
MODULES = [
    ".".join(["cflat", *path.relative_to(ROOT).with_suffix("").parts])
    for path in sorted(ROOT.rglob("*.py"))
    if ">>> " in path.read_text()
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_are_true(name: str) -> None:
    module = import_module(name)
    result = doctest.testmod(module, extraglobs={"torch": __import__("torch"), "cflat": cflat})
    assert result.attempted > 0
    assert result.failed == 0
