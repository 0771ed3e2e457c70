"""A foreign run directory cannot make us change a file outside it."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path

import pytest

from cflat import DataError
from cflat._files import write_atomic
from cflat.cli.main import run_app
from cflat.runs.folder import require_writable
from cflat.runs.lock import owned

TINY = ["--preset", "smoke", "--quiet", "data.train_per_class=2", "data.test_per_class=1", "stream.max_tasks=2"]
TARGET = b"somebody else's"


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("begun") / "run"
    assert run_app(["run", "--method", "finetune", "--data", "digits", "--out", str(out), *TINY]) == 0
    (out / "summary.json").unlink()
    return out


@pytest.mark.parametrize(
    ("name", "is_hard"),
    [
        *((name, False) for name in (".lock", "metrics.jsonl", "env.json", "stream.json", "checkpoints")),
        *((name, True) for name in (".lock", "metrics.jsonl")),
    ],
)
def test_links_in_a_run_directory_are_rejected(
    name: str, is_hard: bool, begun: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, outside = tmp_path / "run", tmp_path / "outside"
    shutil.copytree(begun, run)
    if name == "checkpoints":
        shutil.move(run / name, outside)
        (outside / "000001.tmp-1").write_bytes(TARGET)
    else:
        (run / name).unlink()
        outside.write_bytes(TARGET)
    os.link(outside, run / name) if is_hard else (run / name).symlink_to(outside)
    assert run_app(["run", "--resume", str(run), "--quiet"]) == 2
    assert "link, which cflat did not make" in capsys.readouterr().err
    kept = outside / "000001.tmp-1" if name == "checkpoints" else outside
    assert kept.read_bytes() == TARGET


def test_a_linked_lock_is_rejected_in_every_folder(tmp_path: Path) -> None:
    (tmp_path / "outside").write_bytes(TARGET)
    (tmp_path / "study").mkdir()
    (tmp_path / "study" / ".lock").symlink_to(tmp_path / "outside")
    with pytest.raises(DataError, match="link"), owned(tmp_path / "study"):
        pass
    assert (tmp_path / "outside").read_bytes() == TARGET


def test_a_temporary_file_is_not_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "outside").write_bytes(TARGET)
    (tmp_path / f".a.{os.getpid()}.tmp").symlink_to(tmp_path / "outside")
    write_atomic(tmp_path / "a", b"new")
    assert (tmp_path / "outside").read_bytes() == TARGET
    assert (tmp_path / "a").read_bytes() == b"new"


def test_many_may_ask_at_once_whether_a_folder_can_be_written(tmp_path: Path) -> None:
    problems: list[Exception] = []

    def ask() -> None:
        try:
            for _ in range(100):
                require_writable(tmp_path)
        except Exception as error:
            problems.append(error)

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems
    assert not list(tmp_path.iterdir())


def test_a_pipe_is_no_file_of_features(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "f.npz")
    words = ["--data", "digits", "--backbone", "small_cnn", "--out", str(tmp_path / "f.npz"), "--quiet"]
    assert run_app(["features", *words]) == 2
    assert "is not a features file" in capsys.readouterr().err


def test_a_writer_that_fails_names_the_file(tmp_path: Path) -> None:
    def fail(file: object) -> None:
        raise RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed")

    with pytest.raises(DataError, match=r"m\.pt.*could not be written: PytorchStreamWriter"):
        write_atomic(tmp_path / "m.pt", fail)
