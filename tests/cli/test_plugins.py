"""Optimizers, methods and datasets from outside the package, on the command line and in workers."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from cflat import DataError, _plugins
from cflat._plugins import load_plugins, loaded_plugins, require_recorded
from cflat.bench import runs_frame
from cflat.cli.main import run_app
from cflat.optim import list_optimizers
from processes import finished as finished_command

ROOT = Path(__file__).parents[2]

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


def settings_of(folder: Path) -> dict[str, str]:
    return {"CFLAT_PLUGINS": "", "XDG_CACHE_HOME": str(folder / "cache")}


def cflat(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a process of its own: what a plug-in registers stays registered."""
    return finished_command(*arguments, folder=folder, environment=settings_of(folder))


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
    command = [sys.executable, "-m", "cflat", "run", *CHOSEN, "--optimizer", "half_step", "--dry-run"]
    path = os.pathsep.join([str(plugin.parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, **settings_of(plugin.parent), "PYTHONPATH": path}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "half_step" in done.stdout
    assert "no_such_module" in done.stderr


@pytest.mark.parametrize(
    ("text", "arguments", "message"),
    [
        (UNTYPED, ["list", "keys", "untyped"], "HalfStep cannot be configured: its keyword 'share' has no type hint"),
        ("import nothing_of_this_name", ["list", "methods"], "wrong.py, line 1): ModuleNotFoundError"),
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


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a plug-in, a finished run that needs it for everything, one that is broken, and an image."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "mine.py").write_text(PLUGIN)
    words = [*CHOSEN, "--optimizer", "half_step", "--plugin", "mine.py", "--quiet"]
    done = cflat(folder, "run", *words, "--out", "runs/good")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].endswith(f"--plugin {folder / 'mine.py'}")
    shutil.copytree(folder / "runs" / "good", folder / "runs" / "broken")
    (folder / "runs" / "broken" / "config.yaml").write_text("method: [")
    Image.new("RGB", (8, 8), "white").save(folder / "a.png")
    return folder


def copied(finished: Path, tmp_path: Path) -> Path:
    """Return a copy of the folder in which the run can be resumed; the plug-in stays where it is."""
    shutil.copytree(finished, tmp_path / "copy")
    (tmp_path / "copy" / "runs" / "good" / "summary.json").unlink()
    return tmp_path / "copy"


def test_finished_runs_are_read_without_their_plugin(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "half_step" not in list_optimizers()
    frame = runs_frame(finished / "runs").set_index("run")
    assert frame.loc["good", "optimizer"] == "half_step"
    assert frame.loc["good", "avg"] > 0
    assert run_app(["report", str(finished / "runs"), "-o", str(finished / "page.html")]) == 0
    told = capsys.readouterr()
    assert told.err.count("Left out: broken") == 1
    assert "1 run, 1 configuration" in told.out
    assert "half_step" in (finished / "page.html").read_text()


def test_a_run_and_its_export_find_the_plugin_of_the_same_user(finished: Path, tmp_path: Path) -> None:
    done = cflat(finished, "predict", "runs/good", "a.png", "--csv")
    assert done.returncode == 0, done.stderr
    saved = "import cflat.bench as b; b.load_predictor('runs/good').save('m.pt')"
    environment = {**os.environ, **settings_of(finished)}
    subprocess.run([sys.executable, "-c", saved], cwd=finished, env=environment, check=True)
    assert cflat(finished, "predict", "m.pt", "a.png", "--csv").stdout == done.stdout
    folder = copied(finished, tmp_path)
    done = cflat(folder, "run", "--resume", "runs/good", "--quiet")
    assert done.returncode == 0, done.stderr
    assert (folder / "runs" / "good" / "summary.json").is_file()


@pytest.mark.parametrize("words", [["run", "--resume", "runs/good"], ["predict", "runs/good", "a.png"]])
@pytest.mark.parametrize(
    ("change", "message"),
    [("missing", "does not exist"), ("changed", "has changed since"), ("foreign", "was never named on this account")],
)
def test_a_recorded_plugin_runs_only_as_the_user_knows_it(
    words: list[str],
    change: str,
    message: str,
    finished: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = copied(finished, tmp_path)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / ("cache" if change != "foreign" else "none")))
    named = tmp_path / "mine.py"
    named.write_text(PLUGIN + ("# changed" if change == "changed" else ""))
    if change == "missing":
        named.unlink()
    file = folder / "runs" / "good" / "env.json"
    record = json.loads(file.read_text())
    record["plugins"][0]["name"] = str(named)
    file.write_text(json.dumps(record))
    assert run_app(words) == 2
    told = capsys.readouterr().err
    assert f"made with the plug-in '{named}', which {message}" in told
    assert "half_step" not in list_optimizers()  # no line of it was carried out


@pytest.mark.parametrize("change", ["none", "changed", "missing"])
def test_a_recorded_module_runs_only_as_the_user_knows_it(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CFLAT_PLUGINS", "")
    monkeypatch.syspath_prepend(tmp_path)
    package = tmp_path / f"package_{change}"
    package.mkdir()
    (package / "__init__.py").touch()
    module, name = package / "module.py", f"{package.name}.module"
    module.write_text("NUMBER = 1\n")
    monkeypatch.setattr(_plugins, "_loaded", {})
    load_plugins([name])
    records = loaded_plugins()
    # As in a later process.
    monkeypatch.setattr(_plugins, "_loaded", {})
    del sys.modules[name]
    if change == "none":
        require_recorded(records, "runs/a")
        assert sys.modules[name].NUMBER == 1
        return
    if change == "changed":
        module.write_text("NUMBER = 2 + 0\n")
    else:
        module.unlink()
    importlib.invalidate_caches()
    message = {"changed": "has changed since", "missing": "does not exist"}[change]
    with pytest.raises(DataError, match=f"made with the plug-in '{name}', which {message}"):
        require_recorded(records, "runs/a")
    assert name not in sys.modules


@pytest.mark.parametrize(
    ("file", "method"), [("ewc_method.py", "my_ewc"), ("si_method.py", "si"), ("agem_method.py", "agem")]
)
def test_the_examples_are_plugins(file: str, method: str, tmp_path: Path) -> None:
    names = (file, "custom_optimizer.py")
    plugins = [word for name in names for word in ("--plugin", str(ROOT / "examples" / name))]
    words = ["--method", method, "--optimizer", "extra_sam", "--data", "digits", "--preset", "smoke", "--quiet"]
    done = cflat(tmp_path, "run", *plugins, *words, "stream.max_tasks=2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{method} on digits with extra_sam")  # nothing else was trained on the way


FAILING = """
import torch
from cflat.methods import register_method
from cflat.methods.finetune import Finetune, FinetuneConfig


@register_method("fails", config=FinetuneConfig, summary="raises")
class Fails(Finetune):
    def loss(self, model, batch):
        model(batch.images)
        raise ERROR


@register_method("impure", config=FinetuneConfig, summary="draws numbers that nobody seeds")
class Impure(Finetune):
    calls = 0

    def loss(self, model, batch):
        Impure.calls += 1
        found = super().loss(model, batch)
        return type(found)({name: value * Impure.calls for name, value in found.parts.items()})
"""


@pytest.mark.parametrize("error", ["KeyError('x')", "ValueError('a number')", "ZeroDivisionError('division by zero')"])
def test_an_error_inside_a_plugin_names_file_and_line(error: str, tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text(FAILING.replace("ERROR", error))
    chosen = ["--data", "digits", "--preset", "smoke", "--plugin", "wrong.py", "--quiet"]
    done = cflat(tmp_path, "run", "--method", "fails", *chosen)
    assert done.returncode == 2
    assert f"{error.split('(')[0]} in the plug-in {tmp_path / 'wrong.py'}, line 11" in done.stderr
    assert "should not happen" not in done.stderr


def test_the_loss_of_a_plugin_is_checked_for_purity(tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text(FAILING)
    done = cflat(tmp_path, "run", "--method", "impure", "--data", "digits", "--preset", "smoke", "--plugin", "wrong.py")
    assert done.returncode == 2
    assert "The loss of Impure is not pure" in done.stderr


@pytest.mark.slow
def test_workers_of_ray_know_the_plugin(plugin: Path) -> None:
    pytest.importorskip("ray")
    options = ["--optimizers", "none,half_step", "--seeds", "0", "--executor", "ray", "--out", "c", "--quiet", "--json"]
    done = cflat(plugin.parent, "compare", "--plugin", "mine.py", *CHOSEN, *options)
    assert done.returncode == 0, done.stderr
    assert [row["optimizer"] for row in json.loads(done.stdout)["rows"]] == ["none", "half_step"]
