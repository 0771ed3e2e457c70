"""What the documents show, runs."""

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SNIPPETS = [
    pytest.param(code, id=f"{path.name}-{number}")
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md")))
    if path.parent.name != "integrations"  # those run in the clients' environment: tests/integrations
    for number, code in enumerate(re.findall(r"^```python\n(.*?)^```", path.read_text(), flags=re.M | re.S))
]


@pytest.mark.parametrize("code", SNIPPETS)
def test_python_snippets_run(code, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "snippet", "exec"), {"__name__": "snippet"})


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.stem)
def test_examples_run(path, capsys):
    from cflat.methods._catalog import METHODS
    from cflat.optim._catalog import OPTIMIZERS

    tables = (METHODS, OPTIMIZERS)
    before = [dict(table._entries) for table in tables]
    try:
        runpy.run_path(str(path), run_name="__main__")
    finally:
        for table, entries in zip(tables, before, strict=True):
            table._entries = entries
    assert capsys.readouterr().out.strip()


def test_readme_names_both_commands_and_every_optimizer():
    import cflat

    text = (ROOT / "README.md").read_text()
    assert "make demo" in text
    assert "make test" in text
    for name in cflat.list_optimizers():
        assert f"`{name}`" in text
