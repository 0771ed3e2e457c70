"""What the pages on clients show, runs, and so do their examples; nothing is downloaded."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SNIPPETS = [
    pytest.param(code, id=f"{path.name}-{number}")
    for path in sorted((ROOT / "docs" / "integrations").glob("*.md"))
    for number, code in enumerate(re.findall(r"^```python\n(.*?)^```", path.read_text(), flags=re.M | re.S))
]


@pytest.mark.parametrize("code", SNIPPETS)
def test_python_snippets_run(code, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "snippet", "exec"), {"__name__": "snippet"})


@pytest.mark.parametrize("path", sorted((ROOT / "examples" / "integrations").glob("*.py")), ids=lambda path: path.stem)
def test_examples_run(path, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(path), run_name="__main__")
    assert "evaluations" in capsys.readouterr().out


def test_the_core_imports_no_client():
    code = (
        "import sys, cflat, cflat.integrations\n"
        "clients = {'lightning', 'pytorch_lightning', 'accelerate', 'transformers', 'avalanche', 'infty'}\n"
        "assert not clients & set(sys.modules), clients & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
