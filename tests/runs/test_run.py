"""Runs from a configuration: results, restarts, folders, signals."""

from __future__ import annotations

import itertools
import json
import math
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning_fabric.accelerators import MPSAccelerator
from PIL import Image
from safetensors.torch import save_file

from cflat import ConfigError, DataError
from cflat._files import write_json
from cflat.cli.main import run_app
from cflat.config.documents import parse_overrides
from cflat.config.presets import resolve_config
from cflat.config.run_config import RunConfig
from cflat.data import Task
from cflat.nn.backbone import create_backbone
from cflat.optim import get_optimizer_spec
from cflat.runs import run as run_module
from cflat.runs.folder import RunFolder
from cflat.runs.interrupts import StopRequest
from cflat.runs.plan import plan_run
from cflat.runs.run import assemble, run
from cflat.train import Observer, Runtime, RuntimeSettings, TrainingInterrupted
from cflat.train.checkpoint import CheckpointStore
from runs import resume

SMALL = [
    "method=icarl",
    "data=digits",
    "preset=smoke",
    "optimizer=c_flat_turbo",
    "stream.initial=5",
    "stream.increment=5",
    "train.batch_size=16",
]


def config(*overrides: str) -> RunConfig:
    return resolve_config(parse_overrides([*SMALL, *overrides]))


def without_time(summary: Any) -> dict[str, Any]:
    return json.loads(json.dumps({name: matrix.to_dict() for name, matrix in summary.accuracy.items()}))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    folder = RunFolder(tmp_path_factory.mktemp("runs") / "done")
    run(config(), folder.path)
    return folder


def test_a_run_leaves_everything_that_describes_it(finished: RunFolder) -> None:
    assert finished.load_config() == config()
    environment = finished.load_environment()
    assert environment["stream"] == plan_run(config()).stream
    assert {"cflat", "python", "packages", "torch_threads"} <= set(environment)
    events = [record["event"] for record in finished.load_metrics()]
    assert events == ["epoch", "task"] * 2
    assert finished.load_summary().headline.num_stages == 2


def test_a_finished_run_is_read_not_repeated(finished: RunFolder) -> None:
    before = finished.summary_file.stat().st_mtime_ns
    assert without_time(resume(finished.path)) == without_time(finished.load_summary())
    assert finished.summary_file.stat().st_mtime_ns == before


def test_a_finished_run_is_not_the_result_of_another_configuration(finished: RunFolder) -> None:
    assert run(config("runtime.threads=1"), finished.path, resume=True).config == config()
    with pytest.raises(DataError, match=r"begun with seed = 0, but now it is 1"):
        run(config("seed=1"), finished.path, resume=True)


def test_a_stopped_run_goes_on_to_the_same_result(finished: RunFolder, tmp_path: Path) -> None:
    asked = []

    def stop_at_third() -> bool:
        asked.append(None)
        return len(asked) == 3

    with pytest.raises(TrainingInterrupted):
        run(config(), tmp_path / "run", should_stop=stop_at_third)
    assert not RunFolder(tmp_path / "run").is_finished
    again = resume(tmp_path / "run")
    assert without_time(again) == without_time(finished.load_summary())
    assert [r["event"] for r in RunFolder(tmp_path / "run").load_metrics()] == ["epoch", "task"] * 2


def test_a_folder_in_use_is_refused(finished: RunFolder, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is not empty"):
        run(config(), finished.path)
    (tmp_path / "file").write_text("x")
    with pytest.raises(DataError, match="is not empty"):
        run(config(), tmp_path / "file")
    with pytest.raises(DataError, match="holds no run to resume"):
        run(config(), tmp_path / "absent", resume=True)
    with pytest.raises(DataError, match="cannot be made"):
        run(config(), tmp_path / "file" / "run")


def test_what_a_kill_leaves_in_a_new_folder_does_not_block_it(finished: RunFolder, tmp_path: Path) -> None:
    for name in (".probe", ".config.yaml.4711.tmp"):
        (tmp_path / name).touch()
    assert without_time(run(config(), tmp_path)) == without_time(finished.load_summary())


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_an_unwritable_folder_is_said_before_training(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(DataError, match="cannot be made"):
        run(config(), tmp_path / "run")


def test_a_full_disk_is_said_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = shutil.disk_usage(tmp_path)._replace(free=1 << 20)
    monkeypatch.setattr(run_module.shutil, "disk_usage", lambda path: full)
    with pytest.raises(DataError, match=r"has 1 MiB left, checkpoints need at least \d+ MiB"):
        run(config(), tmp_path / "run")


def after_steps(number: int) -> Callable[[], bool]:
    """Return a question that is answered with yes from the n-th time on."""
    asked = itertools.count(1)
    return lambda: next(asked) >= number


@pytest.fixture
def stopped(tmp_path: Path) -> RunFolder:
    """A run that was stopped in its first task, with a checkpoint."""
    with pytest.raises(TrainingInterrupted):
        run(config(), tmp_path / "run", should_stop=after_steps(4))
    assert any((tmp_path / "run" / "checkpoints").iterdir())
    return RunFolder(tmp_path / "run")


@pytest.mark.parametrize(
    "edit",
    [
        ("batch_size: 16", "batch_size: 8"),
        ("\nseed: 0", "\nseed: 1"),
        ("subsample_seed: 0", "subsample_seed: 1"),
        ("lr: 0.02", "lr: 0.03"),
        ("rho: 0.1", "rho: 0.2"),
    ],
)
@pytest.mark.parametrize("is_noted", [True, False])
def test_an_edited_configuration_is_refused_by_name(stopped: RunFolder, edit: tuple[str, str], is_noted: bool) -> None:
    """The checkpoint knows, too, should env.json be lost."""
    if not is_noted:
        stopped.environment_file.unlink()
    text = stopped.config_file.read_text()
    before, after = edit
    assert before in text
    stopped.config_file.write_text(text.replace(before, after, 1))
    key = before.strip().partition(":")[0]
    with pytest.raises(DataError, match=rf"begun with \S*{key} = .+, but now it is .+: going on would mix two runs"):
        resume(stopped.path)


def test_a_result_is_not_shown_under_settings_that_it_does_not_have(finished: RunFolder, tmp_path: Path) -> None:
    shutil.copytree(finished.path, tmp_path / "copy")
    copy = RunFolder(tmp_path / "copy")
    copy.config_file.write_text(finished.config_file.read_text().replace("lr: 0.02", "lr: 0.03"))
    for look in (copy.load_summary, lambda: resume(copy.path)):
        with pytest.raises(DataError, match=r"was edited: the run in this folder had base\.lr = 0\.02, not 0\.03"):
            look()


def test_a_configuration_of_another_run_is_refused_by_name(stopped: RunFolder) -> None:
    with pytest.raises(DataError, match=r"begun with data\.subsample_seed = 0, but now it is 1"):
        run(config("data.subsample_seed=1"), stopped.path, resume=True)


def test_what_does_not_decide_the_result_may_change(stopped: RunFolder, finished: RunFolder, tmp_path: Path) -> None:
    changed = stopped.load_config().changed(
        parse_overrides([f"data.root={tmp_path}", "runtime.threads=1", "train.checkpoint_minutes=0"])
    )
    again = run(changed, stopped.path, resume=True)
    assert without_time(again) == without_time(finished.load_summary())
    assert stopped.load_config() == config()  # what the run is stays as it was; what it was resumed with is beside it
    assert stopped.load_environment()["resumed_with"] == [
        {"data.root": str(tmp_path), "runtime.threads": 1, "train.checkpoint_minutes": 0.0}
    ]


@pytest.mark.parametrize(
    "override", ["train.epochs=9", "seed=1", "method=memo", "runtime.precision=bf16", "preset=cpu"]
)
def test_what_decides_the_result_may_not_change(override: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{override.partition('=')[0]}.* cannot be changed from .+ on resume"):
        config().changed(parse_overrides([override]))


def test_the_command_takes_what_may_change_and_nothing_else(
    stopped: RunFolder, finished: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(stopped.path)
    assert run_app(["run", "--resume", out, "--seed", "1"]) == 2
    assert "seed cannot be changed from 0 to 1 on resume" in capsys.readouterr().err
    assert run_app(["run", "--resume", out, "train.batch_size=8", "runtime.threads=1"]) == 2
    assert "train.batch_size cannot be changed from 16 to 8 on resume" in capsys.readouterr().err
    assert (
        run_app(["run", "--resume", out, "--data-root", str(tmp_path), "runtime.threads=1", "--seed", "0", "-q"]) == 0
    )
    assert without_time(stopped.load_summary()) == without_time(finished.load_summary())


@pytest.mark.parametrize("method", ["simplecil", "duct"])
def test_weights_come_from_the_checkpoint(method: str, tmp_path: Path) -> None:
    """So that their file may lie elsewhere, or be gone."""
    torch.manual_seed(5)
    file = tmp_path / "weights.safetensors"
    save_file(create_backbone("vit_smoke", image_size=8).state_dict(), file)
    whole = config(f"method={method}", "backbone.name=vit_smoke", f"backbone.weights={file}")
    expected = run(whole, tmp_path / "whole")
    with pytest.raises(TrainingInterrupted):
        run(whole, tmp_path / "run", observers=[later := Later()], should_stop=later)
    file.unlink()
    elsewhere = whole.changed(parse_overrides(["backbone.weights=random"]))
    assert without_time(run(elsewhere, tmp_path / "run", resume=True)) == without_time(expected)


class Later(Observer):
    """Ask to stop in the second task."""

    is_time = False

    def on_task_start(self, task: Task) -> None:
        self.is_time = task.index == 1

    def __call__(self) -> bool:
        return self.is_time


def write_images(root: Path) -> None:
    for split, count in (("train", 4), ("test", 2)):
        for label in range(4):
            folder = root / split / f"class{label}"
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = np.full((8, 8, 3), 60 * label + number, np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.png")


FOLDER = ["stream.initial=2", "stream.increment=2", "method.memory_per_class=1", "method.memory_total=null"]


def test_changed_images_are_noticed_on_resume_and_moved_ones_are_not_changed(tmp_path: Path) -> None:
    root = tmp_path / "images"
    write_images(root)
    with pytest.raises(TrainingInterrupted):
        run(config(f"data=folder:{root}", *FOLDER), tmp_path / "run", should_stop=after_steps(3))
    image = root / "train" / "class3" / "2.png"
    before, times = image.read_bytes(), image.stat()
    Image.fromarray(np.full((8, 8, 3), 1, np.uint8)).save(image)
    with pytest.raises(DataError, match="has changed since it started: other images"):
        resume(tmp_path / "run")
    RunFolder(tmp_path / "run").environment_file.unlink()
    with pytest.raises(DataError, match="begun with images"):
        resume(tmp_path / "run")
    image.write_bytes(before)
    os.utime(image, ns=(times.st_atime_ns + 10**12, times.st_mtime_ns + 10**12))  # touched, not changed
    shutil.move(root, tmp_path / "moved")
    moved = RunFolder(tmp_path / "run").load_config().changed(parse_overrides([f"data=folder:{tmp_path / 'moved'}"]))
    resumed = run(moved, tmp_path / "run", resume=True)
    whole = run(config(f"data=folder:{tmp_path / 'moved'}", *FOLDER), tmp_path / "whole")
    assert without_time(resumed) == without_time(whole)


def test_a_checkpoint_holds_what_makes_the_run_itself(stopped: RunFolder) -> None:
    state = torch.load(next(stopped.checkpoints.iterdir()), weights_only=True)
    assert state["version"] == 3
    assert state["identity"]["train.batch_size"] == config().train.batch_size
    assert state["identity"]["seed"] == 0
    assert state["identity"]["images (their hash)"] == plan_run(config()).stream
    assert not [key for key in state["identity"] if key.startswith(("runtime.threads", "data.root"))]


def rewrite(folder: RunFolder, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the newest checkpoint and give it the right name: its hash does not give it away."""
    newest = max(folder.checkpoints.iterdir())
    state = torch.load(newest, weights_only=True)
    change(state)
    del state["version"]
    shutil.rmtree(folder.checkpoints)
    CheckpointStore(folder.checkpoints).save(state)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.update(position=[5, 0, 0, 0]), "task 5 of 2"),
        (lambda state: state.update(position=[-1, 0, 0, 0]), "task -1 of 2"),
        (lambda state: state.update(position=[0, 0, 99, 1]), "no phase 0, epoch 99, step 1"),
        (lambda state: state.update(position=[0, 0, 0, 99]), "no phase 0, epoch 0, step 99"),
        (lambda state: state.update(position=[0, 7, 0, 1]), "no phase 7"),
        (lambda state: state.update(position=[0, 0, 0, 0]), "no phase 0, epoch 0, step 0"),
        (lambda state: state.update(phase={}), "no phase 0, epoch 0"),
        (lambda state: state.update(is_grown=False), "does not fit this run"),
        (lambda state: state.update(position=[0, 0]), "does not fit this run"),
        (lambda state: state.update(position="here"), "does not fit this run"),
        (lambda state: state.pop("method"), "does not fit this run"),
        (lambda state: state.pop("identity"), "does not fit this run"),
        (lambda state: state["method"].popitem(), "does not fit this run"),
        (lambda state: state["identity"].update({"train.epochs": 4}), "begun with train.epochs = 4"),
        (lambda state: next(iter(state["method"].values())).view(-1)[:1].fill_(math.nan), "NaN or infinity in network"),
        (lambda state: next(iter(state["method"].values())).view(-1)[:1].fill_(math.inf), "NaN or infinity in network"),
    ],
)
def test_a_state_that_no_run_can_have_is_refused(
    stopped: RunFolder, change: Callable[[dict[str, Any]], None], message: str
) -> None:
    rewrite(stopped, change)
    with pytest.raises(DataError, match=message):
        resume(stopped.path)


def test_a_run_that_is_older_than_a_setting_is_another_run(stopped: RunFolder) -> None:
    environment = stopped.load_environment()
    del environment["identity"]["train.accumulate"]
    write_json(stopped.environment_file, environment)
    with pytest.raises(DataError, match=r"begun with train\.accumulate = None, but now it is 1"):
        resume(stopped.path)


def test_a_run_of_another_version_is_rejected(stopped: RunFolder) -> None:
    environment = stopped.load_environment()
    del environment["format"]
    write_json(stopped.environment_file, environment)
    with pytest.raises(DataError, match="was started by another version of cflat"):
        resume(stopped.path)


def test_strays_in_a_run_directory_do_no_harm(stopped: RunFolder, finished: RunFolder) -> None:
    leftover = stopped.checkpoints / "000004.tmp-1"  # of a living process, which does not own the folder
    leftover.touch()
    (stopped.path / "notes.txt").touch()
    (stopped.checkpoints / "best.pt").write_bytes(b"mine")
    (stopped.checkpoints / "000009-0123456789abcdef.pt").mkdir()
    assert without_time(resume(stopped.path)) == without_time(finished.load_summary())
    assert not leftover.exists()
    shutil.rmtree(stopped.checkpoints)
    stopped.checkpoints.touch()
    stopped.summary_file.unlink()
    with pytest.raises(DataError, match="must be the folder of checkpoints"):
        resume(stopped.path)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("runtime.precision=16", "needs a CUDA device"),
        ("backbone={name: 'timm:no_such_model', weights: random}", "no model 'no_such_model'"),
        ("backbone.weights=timm", "no published weights"),
    ],
)
def test_what_only_the_machine_can_tell_is_one_message_too(override: str, message: str, tmp_path: Path) -> None:
    with pytest.raises((ConfigError, DataError), match=message):
        run(config(override), tmp_path / "run")


def test_apple_gpus_are_not_chosen_automatically(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have no float64; Fabric's own choice would be one."""
    monkeypatch.setattr(MPSAccelerator, "is_available", staticmethod(lambda: True))
    assert Runtime(RuntimeSettings()).device.type == ("cuda" if torch.cuda.is_available() else "cpu")


def test_runs_use_deterministic_convolutions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", False)
    Runtime(RuntimeSettings(accelerator="cpu"))
    assert torch.backends.cudnn.deterministic
    assert not torch.backends.cudnn.benchmark


def test_missing_data_is_one_message(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        run(config(f"data=npz:{tmp_path}/none.npz"), tmp_path / "run")


def test_the_seed_decides_the_first_weights() -> None:
    first, again, other = (assemble(config(f"seed={seed}")).method.state_dict() for seed in (1, 1, 2))
    assert all(first[name].equal(again[name]) for name in first)
    assert any(not first[name].equal(other[name]) for name in first)


def test_a_plan_counts_without_training() -> None:
    plan = plan_run(config("train.epochs=3", "train.first_epochs=2", "train.batch_size=16"))
    assert [task.train_images for task in plan.tasks] == [40, 40]
    assert [task.steps for task in plan.tasks] == [6, 9]
    assert (plan.steps, plan.evaluations) == (15, get_optimizer_spec("c_flat_turbo").evaluations)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_first_signal_is_remembered_a_second_one_is_not_caught(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with StopRequest() as stop:
        assert not stop()
        signal.raise_signal(number)
        assert stop()
        assert stop.exit_code == 128 + number
        assert signal.getsignal(number) is before
    assert signal.getsignal(number) is before
