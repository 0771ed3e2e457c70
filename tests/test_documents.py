"""What the documents show, runs."""

import re
import runpy
import sys
import types
from pathlib import Path

import pytest

import cflat
from cflat.data import list_datasets
from cflat.data.catalog import DATASETS
from cflat.methods import get_method_spec, list_methods
from cflat.methods._catalog import METHODS
from cflat.optim._catalog import OPTIMIZERS

ROOT = Path(__file__).resolve().parents[1]
SNIPPETS = [
    pytest.param(code, id=f"{path.name}-{number}")
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md")))
    if path.parent.name != "integrations"  # those run in the clients' environment: tests/integrations
    for number, code in enumerate(re.findall(r"^```python\n(.*?)^```", path.read_text(), flags=re.M | re.S))
    if not code.startswith("--8<--")  # a whole example, which runs by itself
]


@pytest.fixture(autouse=True)
def _registries():
    """What documents register is gone after them."""
    tables = (METHODS, OPTIMIZERS, DATASETS)
    before = [dict(table._entries) for table in tables]
    yield
    for table, entries in zip(tables, before, strict=True):
        table._entries = entries


@pytest.mark.parametrize("code", SNIPPETS)
def test_python_snippets_run(code, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "snippet", "exec"), {"__name__": "snippet"})


# Those of examples/integrations need other people's libraries; tests/integrations runs them.
EXAMPLES = [path for folder in ("examples", "examples/tutorials") for path in sorted((ROOT / folder).glob("*.py"))]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_run(path, capsys):
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize(
    ("folder", "names"), [("optimizers", cflat.list_optimizers()), ("methods", list_methods())], ids=("opt", "met")
)
def test_everything_that_is_registered_has_a_page_with_its_facts(folder, names):
    for name in names:
        text = (ROOT / "docs" / folder / f"{name}.md").read_text()
        assert f"<!-- facts: {folder[:-1]} {name} -->" in text


def test_every_kind_of_path_is_described():
    text = (ROOT / "docs" / "data.md").read_text()
    for spec in list_datasets():
        assert not spec.takes_path or f"`{spec.name}:PATH`" in text, spec.name


def test_the_site_reads_from_the_sources_what_the_registries_say(monkeypatch):
    monkeypatch.setitem(sys.modules, "latex2mathml", types.ModuleType("latex2mathml"))
    converter = types.ModuleType("latex2mathml.converter")
    converter.convert = str
    monkeypatch.setitem(sys.modules, "latex2mathml.converter", converter)
    site = runpy.run_path(str(ROOT / "tools" / "site.py"))
    found = {kind: site["registered"](kind) for kind in ("optimizer", "method")}
    assert list(found["optimizer"]) == cflat.list_optimizers()
    assert set(found["method"]) == set(list_methods())
    for name, own in found["optimizer"].items():
        spec = cflat.optim.get_optimizer_spec(name)
        assert (own["class"], own["evaluations"], own.get("persistent_buffers", 0)) == (
            spec.cls.__name__,
            spec.evaluations,
            spec.persistent_buffers,
        )
    for name in found["method"]:
        text = site["facts"]("method", name)
        assert f"| streams | {', '.join(get_method_spec(name).scenarios)} |" in text
        assert f"| backbones | {', '.join(get_method_spec(name).families)} |" in text


def test_lightning_is_one_click_from_the_first_page():
    assert "[PyTorch Lightning](integrations/lightning.md)" in (ROOT / "docs" / "index.md").read_text()
    assert (ROOT / "docs" / "integrations" / "lightning.md").is_file()


def test_the_makefile_installs_what_the_extra_names():
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["docs"]
    assert f"DOCS := {' '.join(repr(name) for name in extra)}\n" in (ROOT / "Makefile").read_text()


@pytest.fixture(scope="module")
def tools():
    return runpy.run_path(str(ROOT / "tools" / "tables.py"))


@pytest.mark.parametrize(
    "name", ["README.md", "docs/data.md", "docs/results/README.md", "docs/optimizers/index.md", "docs/methods/index.md"]
)
def test_tables_are_those_of_the_registries_and_results(name, tools):
    text = (ROOT / name).read_text()
    assert set(re.findall(r"<!-- begin: (\w+) -->", text)) & {*tools["TABLES"], "study"}
    assert tools["rewritten"](text) == text, "run: make tables"
    tables = re.findall(r"<!-- begin: \w+ -->\n(.*?)<!-- end", text, flags=re.S)
    rows = [[line for line in table.splitlines() if line.startswith("|")] for table in tables]
    assert all(len(set(lines)) == len(lines) for lines in rows), "a row twice"


def test_readme_names_both_commands():
    text = (ROOT / "README.md").read_text()
    assert "make demo" in text
    assert "make test" in text


def test_readme_fits_on_two_screens():
    text = re.sub(r"^```.*?^```", "", (ROOT / "README.md").read_text(), flags=re.M | re.S)
    assert len(text.split()) <= 1300


def test_readme_names_everything_that_is_registered():
    text = (ROOT / "README.md").read_text()
    missing = [name for name in (*cflat.list_optimizers(), *list_methods()) if f"`{name}`" not in text]
    assert not missing


def test_the_loop_of_the_readme_prints_what_it_shows(capsys):
    code, shown = re.search(
        r"^```python\n(.*?)^# (loss .*?)$\n^```", (ROOT / "README.md").read_text(), re.M | re.S
    ).groups()
    exec(compile(code, "README.md", "exec"), {"__name__": "readme"})
    ours, theirs = (list(map(float, re.findall(r"[\d.]+", line))) for line in (capsys.readouterr().out, shown))
    assert ours == pytest.approx(theirs, rel=0.2)  # builds of torch draw and sum differently


FIGURES = runpy.run_path(str(ROOT / "tools" / "figures.py"))


@pytest.mark.parametrize("name", FIGURES["FIGURES"])
def test_figures_are_drawn_from_what_is_there_now(name):
    import json

    assert (FIGURES["FOLDER"] / name).is_file(), "run: make figures"
    assert json.loads(FIGURES["SOURCES"].read_text()).get(name) == FIGURES["source_hash"](name), "run: make figures"


def test_every_picture_of_the_documents_is_made_by_a_command():
    pages = [ROOT / "README.md", *(path for path in (ROOT / "docs").rglob("*.md") if "results" not in path.parts)]
    shown = {
        Path(name).as_posix()
        for page in pages
        for name in re.findall(r"figures/([\w/.-]+\.(?:svg|png))", page.read_text())
    }
    assert shown <= set(FIGURES["FIGURES"])
    stored = {path.relative_to(FIGURES["FOLDER"]).as_posix() for path in FIGURES["FOLDER"].rglob("*.[sp][vn]g")}
    assert stored == set(FIGURES["FIGURES"])
