"""Optimizers, methods and datasets from outside the package, on the command line and in workers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PLUGIN = """
from cflat.data import DatasetSpec, load_dataset, register_dataset
from cflat.methods import register_method
from cflat.methods.finetune import Finetune, FinetuneConfig
from cflat.optim.engine import Direction, SharpnessAware, Weights, register_optimizer


@register_optimizer("half_step", summary="half of the gradient", evaluations="1")
class HalfStep(SharpnessAware):
    _has_radius = False

    def __init__(self, base, *, model=None, share: float = 0.5, options=None):
        super().__init__(base, model=model, options=options)
        self.share = share

    def direction(self, weights: Weights) -> Direction:
        g = yield "g"
        return g.scale_(self.share)


@register_method("finetune_again", config=FinetuneConfig, summary="finetune under another name")
class FinetuneAgain(Finetune):
    pass


@register_dataset(DatasetSpec(name="digits_again", title="Digits", layout="none", licence="none", split=(2, 2)))
def load(source):
    return load_dataset("digits")
"""
UNTYPED = PLUGIN.replace("share: float = 0.5", "share=0.5").replace("half_step", "untyped")
CHOSEN = ["--method", "finetune_again", "--data", "digits_again", "--preset", "smoke", "stream.max_tasks=1"]


def cflat(folder: Path, *arguments: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "CFLAT_PLUGINS": ""}
    if path is not None:
        environment["PYTHONPATH"] = os.pathsep.join([str(path), environment.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "cflat", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


@pytest.fixture
def plugin(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(PLUGIN)
    return path


def test_a_file_brings_an_optimizer_a_method_and_a_dataset(plugin: Path) -> None:
    done = cflat(
        plugin.parent, "run", *CHOSEN, "--optimizer", "half-step", "--plugin", "mine.py", "--json", "--out", "r"
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["method"], found["data"], found["optimizer"]) == ("finetune_again", "digits_again", "half_step")
    assert "share: 0.5" in (plugin.parent / "r" / "config.yaml").read_text()


def test_an_installed_package_is_found_by_its_entry_point(plugin: Path) -> None:
    info = plugin.parent / "mine-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[cflat.plugins]\nmine = mine\nbroken = no_such_module\n")
    done = cflat(plugin.parent, "run", *CHOSEN, "--optimizer", "half_step", "--dry-run", path=plugin.parent)
    assert done.returncode == 0, done.stderr
    assert "half_step" in done.stdout
    assert "no_such_module" in done.stderr


@pytest.mark.parametrize(
    ("text", "arguments", "message"),
    [
        (UNTYPED, ["list", "keys", "untyped"], "HalfStep cannot be configured: its keyword 'share' has no type hint"),
        ("import nothing_of_this_name", ["list", "methods"], "cannot be loaded: ModuleNotFoundError"),
        (PLUGIN.replace("half_step", "sam"), ["list", "optimizers"], "'sam' is registered already"),
    ],
)
def test_a_wrong_plugin_gets_one_sentence(text: str, arguments: list[str], message: str, tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text(text)
    done = cflat(tmp_path, *arguments, "--plugin=wrong.py")
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_plugin_that_is_absent_or_not_named_is_refused(tmp_path: Path) -> None:
    assert "'absent.py' cannot be loaded" in cflat(tmp_path, "--plugin", "absent.py", "list", "methods").stderr
    assert "--plugin needs" in cflat(tmp_path, "list", "methods", "--plugin").stderr
    assert "of a module, not the option --help." in cflat(tmp_path, "--plugin", "--help").stderr


@pytest.mark.slow
def test_workers_of_ray_know_the_plugin(plugin: Path) -> None:
    pytest.importorskip("ray")
    options = ["--optimizers", "none,half_step", "--seeds", "0", "--executor", "ray", "--out", "c", "--quiet", "--json"]
    done = cflat(plugin.parent, "compare", "--plugin", "mine.py", *CHOSEN, *options)
    assert done.returncode == 0, done.stderr
    assert [row["optimizer"] for row in json.loads(done.stdout)["rows"]] == ["none", "half_step"]
