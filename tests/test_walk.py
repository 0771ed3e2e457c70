"""docs/architecture.md lists the modules that a run goes through, and they are few."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from cflat import __file__ as package

PAGE = Path(__file__).resolve().parents[1] / "docs" / "architecture.md"
MOST = 79
TRACED = """
import inspect, json, sys, threading
root, *words = sys.argv[1:]
seen = set()

def note(frame, event, argument):
    code = frame.f_code  # class bodies and modules, which imports run, have no fast locals
    if event == "call" and code.co_flags & inspect.CO_OPTIMIZED and code.co_filename.startswith(root):
        seen.add(code.co_filename[len(root):])

threading.setprofile(note)
from cflat.cli.main import run_app
sys.setprofile(note)
code = run_app(words)
sys.setprofile(None)
print(json.dumps([code, sorted(seen)]))
"""
COMMAND = (
    *("run", "--method", "ease", "--data", "digits", "--optimizer", "c_flat_turbo", "--preset", "smoke", "--quiet"),
    *("stream.max_tasks=2", "data.train_per_class=2", "data.test_per_class=2", "train.epochs=1"),
)


def test_the_walk_from_the_command_line_to_the_weights_is_the_documented_one(tmp_path: Path) -> None:
    root = f"{Path(package).resolve().parent}/"
    command = [sys.executable, "-c", TRACED, root, *COMMAND, "--out", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    code, walked = json.loads(done.stdout.splitlines()[-1])
    assert code == 0
    listed = PAGE.read_text().partition("<!-- walk -->")[2].partition("<!-- end of walk -->")[0]
    documented = {
        f"{folder}{name}.py"
        for folder, names in re.findall(r"^    (\S*?/|)\s+(.+)$", listed, re.MULTILINE)
        for name in names.split()
    }
    assert documented == set(walked), "correct the list in docs/architecture.md"
    assert len(walked) <= MOST
