"""What the pages on clients show, runs, and so do their examples; nothing is downloaded."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

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


def _evaluations_by_batch(code, monkeypatch):
    """Run the code of a page; return how often each batch of labels was evaluated with gradients, in order."""
    seen = Counter()
    original = F.cross_entropy

    def recording(inputs, target, *args, **kwargs):
        if torch.is_grad_enabled():
            seen[tuple(target.flatten().tolist())] += 1
        return original(inputs, target, *args, **kwargs)

    monkeypatch.setattr(F, "cross_entropy", recording)
    torch.manual_seed(2)  # no two batches of these pages have the same labels
    exec(compile(code, "snippet", "exec"), {"__name__": "snippet"})
    return list(seen.values())


@pytest.mark.parametrize(
    ("page", "expected"),
    [
        ("accelerate.md-0", [4] * 8),  # C-Flat, two micro-batches a step
        ("loops.md-0", [12] * 4),  # C-Flat, the same four micro-batches in each of three steps
        ("infty.md-0", [8]),  # Turbo's first step and C-Flat's, on one batch
    ],
)
def test_every_evaluation_of_a_page_sees_the_same_batches(page, expected, tmp_path, monkeypatch, capsys):
    """A closure that binds late evaluates the newest micro-batch again, and drops the others."""
    monkeypatch.chdir(tmp_path)
    code = next(param.values[0] for param in SNIPPETS if param.id == page)
    assert _evaluations_by_batch(code, monkeypatch) == expected


@pytest.mark.parametrize(("page", "size"), [("lightning.md-0", 2), ("huggingface.md-0", 2), ("avalanche.md-0", 1)])
def test_the_micro_batches_of_a_step_are_seen_equally_often(page, size, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code = next(param.values[0] for param in SNIPPETS if param.id == page)
    counts = _evaluations_by_batch(code, monkeypatch)
    steps = [set(counts[start : start + size]) for start in range(0, len(counts), size)]
    assert len(steps) > 1
    assert all(len(step) == 1 for step in steps)


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
