"""One process at a time works in a folder; the lock ends with its owner."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import time
from pathlib import Path

import pytest

from cflat import DataError
from cflat.runs.lock import FolderInUse, owned, reject_if_owned
from processes import Command

LONG = (
    *("--method", "icarl", "--data", "digits", "--preset", "smoke"),
    *("train.epochs=100000", "train.checkpoint_minutes=0", "stream.initial=5", "stream.increment=5"),
)


def test_an_owner_is_named_and_goes_without_a_trace(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").touch()
    reject_if_owned(tmp_path)
    with owned(tmp_path):
        for attempt in (owned(tmp_path).__enter__, lambda: reject_if_owned(tmp_path)):
            with pytest.raises(FolderInUse, match=rf"is in use by process {os.getpid()} on .+ since 20.+ \(.+\)"):
                attempt()
    reject_if_owned(tmp_path)
    assert not (tmp_path / ".owner").exists()
    with owned(tmp_path, patience=60):
        pass


def test_a_folder_that_stays_empty_is_not_left_behind(tmp_path: Path) -> None:
    with owned(tmp_path / "new"):
        assert (tmp_path / "new").is_dir()
    assert list(tmp_path.iterdir()) == []
    with owned(tmp_path / "new"):
        (tmp_path / "new" / "result").touch()
    assert (tmp_path / "new" / "result").exists()


def test_a_lock_that_is_a_link_is_rejected_and_not_followed(tmp_path: Path) -> None:
    folder, target = tmp_path / "run", tmp_path / "target"
    folder.mkdir()
    target.write_text("precious")
    (folder / ".lock").symlink_to(target)
    for attempt in (owned(folder).__enter__, lambda: reject_if_owned(folder)):
        with pytest.raises(DataError, match="it is a link"):
            attempt()
    assert target.read_text() == "precious"


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="cannot be made"), owned(tmp_path / "file" / "run"):
        pass


def test_what_killed_writers_have_left_is_cleared_away(tmp_path: Path) -> None:
    dead = Command("--version", folder=tmp_path)
    dead.wait()
    own, alive, gone = os.getpid(), os.getppid(), dead.process.pid
    leftovers = [f".config.yaml.{gone}.tmp", f"000003.tmp-{gone}", f".sweep.json.{own}.tmp", f".x.{10**30}.tmp"]
    others = [f".report.html.{alive}.tmp", "notes.tmp", ".x.tmp", "tmp-5", dead.log.name]
    for name in (*leftovers, *others):
        (tmp_path / name).touch()
    with owned(tmp_path):
        assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*others, ".lock", ".owner"])


def test_a_file_system_without_locks_is_said_to_be_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(handle: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with owned(tmp_path):
        assert "has no locks (No locks available)" in caplog.text


def content(folder: Path) -> dict[str, bytes]:
    """What a second process could have touched; the first one is stopped meanwhile."""
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_a_second_run_is_refused_and_touches_nothing_until_the_first_is_dead(tmp_path: Path) -> None:
    run = tmp_path / "run"
    first = Command("run", *LONG, "--out", run, folder=tmp_path)
    assert first.wait_until(lambda: any((run / "checkpoints").glob("*.pt")))
    first.signal(signal.SIGSTOP)
    before = content(run)
    seconds = [
        Command("run", *LONG, "--out", run, folder=tmp_path),
        Command("run", "--resume", run, folder=tmp_path),
        Command("run", *LONG, "--out", run, "seed=1", folder=tmp_path),
    ]
    for second in seconds:
        code, output = second.wait()
        assert code == 2, output
        assert len(output.splitlines()) == 1
        assert f"is in use by process {first.process.pid} on " in output
        assert "(cflat run --method icarl" in output
    assert content(run) == before
    first.kill()
    third = Command("run", "--resume", run, folder=tmp_path)
    assert third.wait_until(lambda: content(run / "checkpoints") != {} and content(run) != before)
    third.signal(signal.SIGTERM)
    code, output = third.wait()
    assert code == 128 + signal.SIGTERM, output


@pytest.mark.parametrize("kind", ["sweep", "compare", "reproduce"])
def test_a_second_study_is_refused(kind: str, tmp_path: Path) -> None:
    (tmp_path / "sweep.yaml").write_text(
        "base: {method: icarl, data: digits, preset: smoke, train: {epochs: 100000}}\naxes: {optimizer.name: [none]}\n"
    )
    commands = {
        "sweep": ("sweep", "sweep.yaml", "--out", "out"),
        "compare": ("compare", *LONG, "--optimizers", "none", "--seeds", "0", "--out", "out"),
        "reproduce": ("reproduce", "table1", "--scale", "smoke", "--out", "out", "train.epochs=100000"),
    }
    first = Command(*commands[kind], folder=tmp_path)
    assert first.wait_until(lambda: any((tmp_path / "out").rglob("metrics.jsonl")))
    first.signal(signal.SIGSTOP)
    before = content(tmp_path / "out")
    code, output = Command(*commands[kind], folder=tmp_path).wait()
    assert code == 2, output
    assert len(output.splitlines()) == 1
    assert f"is in use by process {first.process.pid} on " in output
    assert content(tmp_path / "out") == before
    first.kill()


def test_only_one_of_those_that_start_at_once_gets_the_folder(tmp_path: Path) -> None:
    commands = [Command("run", *LONG, "--out", "run", f"seed={seed}", folder=tmp_path) for seed in range(4)]
    owner = None
    while owner is None or sum(command.is_alive for command in commands) > 1:
        file = tmp_path / "run" / ".owner"
        told = file.read_text() if file.exists() else ""
        owner = next((one for one in commands if f'"process": {one.process.pid},' in told), owner)
        time.sleep(0.005)
    owner.wait_until(lambda: (tmp_path / "run" / "metrics.jsonl").exists())
    owner.kill()
    for command in commands:
        code, output = command.wait()
        if command is not owner:
            assert code == 2, output
            assert "is in use by" in output or "is not empty" in output
