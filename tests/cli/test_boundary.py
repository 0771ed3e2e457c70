"""Wrong input of every kind ends in one sentence with exit code 2; a bug in one with exit code 1 and --debug."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from safetensors.torch import save_file

import cflat
from cflat.cli.main import run_app
from cflat.cli.output import Screen
from cflat.config.documents import MAX_VALUES, dump_yaml, load_yaml, read_document

SMOKE = ["run", "--quiet", "--data", "digits", "--preset", "smoke", "stream.max_tasks=1"]
LONG = "x" * 300
BOMB = "a: &a [1, 1, 1, 1]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CFLAT_DATA", raising=False)


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return the one sentence that a command is refused with."""
    assert run_app(arguments) == 2
    text = capsys.readouterr().err
    assert "Traceback" not in text
    assert len(text) < 4000
    return text


@pytest.mark.parametrize("text", ["a: &a [*a]", "a: &a {b: *a}", "&a [[*a]]", BOMB, "[" + "1," * MAX_VALUES + "1]"])
def test_documents_that_mean_more_than_they_hold_are_no_yaml(text: str) -> None:
    with pytest.raises(yaml.YAMLError, match=r"contains itself|more than 50,000"):
        load_yaml(text)


def test_scalars_are_those_of_yaml_1_2() -> None:
    text = "[1:2:3, 190:20:30.15, on, off, yes, no, 010, 0o17, 0x1f, 1e-3, .5, 2020-01-01, 1_000, ~, true, .inf]"
    values = ["1:2:3", "190:20:30.15", "on", "off", "yes", "no", 10, 15, 31, 1e-3, 0.5, "2020-01-01", "1_000"]
    assert load_yaml(text) == [*values, None, True, float("inf")]
    assert load_yaml(dump_yaml({"texts": [str(value) for value in values]})) == {"texts": [str(v) for v in values]}


def test_words_for_yes_and_no_are_truth_values_where_those_are_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app([*SMOKE, "--method", "memo", "method.align=off", "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["config"]["method"]["align"] is False


def test_a_time_of_day_is_no_number_of_epochs(capsys: pytest.CaptureFixture[str]) -> None:
    assert "train.epochs" in refusal(capsys, *SMOKE, "--method", "finetune", "train.epochs=1:2:3")


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "-c", "in.yaml", "--method", "finetune", "--data", "digits"],
        ["sweep", "in.yaml"],
        ["reproduce", "./in.yaml"],
    ],
)
@pytest.mark.parametrize("content", [BOMB, "a: &a [*a]", "a: " + "x" * (2 << 20), None])
def test_a_hostile_document_is_refused(
    arguments: list[str], content: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is None:
        os.mkfifo(tmp_path / "in.yaml")  # opening it would wait for a writer that never comes
    else:
        (tmp_path / "in.yaml").write_text(content)
    assert "in.yaml" in refusal(capsys, *arguments)


def test_a_name_of_a_megabyte_is_not_echoed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "c.yaml").write_text(f"method: {'m' * 900_000}\ndata: digits\n")
    assert "mmm ... mmm" in refusal(capsys, "run", "-c", "c.yaml")
    refusal(capsys, "run", f"--{LONG * 400}")
    refusal(capsys, LONG * 400)


@pytest.mark.parametrize(
    "arguments",
    [
        [*SMOKE, "--method", "finetune", "--out", LONG],
        [*SMOKE, "--method", "finetune", "--out", "/proc/x"],
        [*SMOKE, "--method", "finetune", "--weights", LONG],
        ["run", "--method", "finetune", "--data", f"npz:{LONG}", "--preset", "smoke"],
        ["run", "--method", "finetune", "--data", "npz:~nosuchuser/x", "--preset", "smoke"],
        ["run", "--method", "finetune", "--data", "cub200", "--data-root", "~nosuchuser", "--preset", "smoke"],
        ["run", "--resume", LONG],
        ["check-data", f"folder:{LONG}"],
        ["check-data", "npz:~nosuchuser/x"],
        ["report", LONG],
        ["sweep", LONG],
    ],
)
def test_impossible_paths_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    refusal(capsys, *arguments)


@pytest.mark.parametrize(
    ("method", "setting"),
    [
        ("l2p", "method.pool_size=2147483647"),
        ("dualprompt", "method.length=2147483647"),
        ("ranpac", "method.num_projections=2147483647"),
        ("ease", "method.bottleneck=2147483647"),
        ("finetune", "backbone.image_size=8192"),
    ],
)
def test_what_no_machine_can_hold_is_refused_before_it_is_allocated(
    method: str, setting: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = refusal(capsys, *SMOKE, "--method", method, setting)
    assert re.search(r"needs at least [\d.]+ GiB of memory", text)
    assert "error.log" not in text  # it did not come as far as the training


def test_files_that_a_container_has_read_leave_their_memory_free(tmp_path: Path) -> None:
    from cflat._machine import free_in_container

    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("900\n")
    (tmp_path / "memory.stat").write_text("anon 100\nfile 800\ninactive_file 700\nactive_file 100\n")
    assert free_in_container(tmp_path) == 800
    (tmp_path / "memory.max").write_text("max\n")
    with pytest.raises(ValueError, match="max"):
        free_in_container(tmp_path)


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("ranpac", ["base.lr=1e10"]),  # the eigenvalues of features that are NaN
        ("finetune", ["base.name=adam", "base.lr=1e300"]),  # no float
    ],
)
def test_divergence_names_the_learning_rate_and_the_log(
    method: str, settings: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = refusal(capsys, *SMOKE, "--method", method, "--out", "out", *settings)
    assert f"Lower base.lr, now {float(settings[-1].split('=')[1]):g}" in text
    assert "Details: out/error.log" in text
    assert "Traceback" in (tmp_path / "out" / "error.log").read_text()


def test_steps_that_were_given_up_are_told(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert run_app([*SMOKE, "--method", "finetune", "base.lr=1e30", "train.epochs=6"]) == 0
    assert any("Lower base.lr" in record.getMessage() for record in caplog.records)


def test_debug_shows_where_an_error_comes_from(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app([*SMOKE, "--method", "finetune", "--weights", "absent", "--debug"]) == 2
    text = capsys.readouterr().err
    assert "Traceback" in text
    assert "No weights file at absent" in text.splitlines()[-1]


def test_text_files_are_regular_and_of_bounded_size(tmp_path: Path) -> None:
    from cflat._files import read_text

    (tmp_path / "text").write_text("abc")
    assert read_text(tmp_path / "text", 3) == "abc"
    with pytest.raises(OSError, match="larger"):
        read_text(tmp_path / "text", 2)
    with pytest.raises(OSError, match="not a regular file"):
        read_text(tmp_path)
    assert read_document(_written(tmp_path / "c.yaml", "seed: 3")) == {"seed": 3}


def _written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


NAME = "caf\u00e9\x1b]0;owned\x07\x1b[2J\u202e\r\n\udcff"
"""A class that would set the title of the terminal, clear it, and write backwards; not ASCII, and no Unicode at all."""


def test_names_of_classes_and_files_cannot_command_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in (NAME.replace("\udcff", ""), "plain"):
        for split, seeds in (("train", (0, 1)), ("test", (2,))):
            folder = tmp_path / "data" / split / name
            folder.mkdir(parents=True)
            for seed in seeds:
                pixels = np.random.default_rng(seed + len(name)).integers(0, 256, (8, 8, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{seed}\x1b[31m.png")
    chosen = ["--method", "finetune", "--data", "folder:data", "--preset", "smoke"]
    for words in (
        ["check-data", "folder:data"],
        ["run", *chosen, "--dry-run"],
        ["run", *chosen, "--out", "out"],
        ["predict", "out", "data/test"],
        ["predict", "out", "data/test", "--csv"],
        ["predict", "out", "data/none\x1b[31m"],
        ["report", "out"],
    ):
        assert run_app(words) in (0, 2)
        written = "".join(capsys.readouterr())
        assert not set("\x1b\x07\u202e") & set(written), words
    assert run_app(["predict", "out", "data/test"]) == 0
    assert r"caf\xe9\x1b]0;owned\x07" in capsys.readouterr().out.encode("ascii", "backslashreplace").decode()


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_every_encoding_can_show_every_name(encoding: str) -> None:
    raw = io.BytesIO()
    screen = Screen(io.TextIOWrapper(raw, encoding), "standard output")
    print(NAME, file=screen, flush=True)
    assert b"\\x1b]0;owned\\x07" in raw.getvalue()
    assert b"\\udcff" in raw.getvalue()


class Gone(io.StringIO):
    """A pipe whose reader has gone."""

    def write(self, text: str) -> int:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")


def test_a_command_goes_on_when_nobody_reads_any_more(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "stdout", Gone())
    assert run_app([*SMOKE, "--method", "finetune", "--out", "out"]) == 0
    assert (tmp_path / "out" / "summary.json").is_file()
    monkeypatch.setattr(sys, "stdout", None)  # as Python starts where it is closed
    assert run_app(["list", "methods"]) == 0


def started(words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = f"exec {shlex.quote(sys.executable)} -m cflat {words}"
    return subprocess.run(["sh", "-c", command], env={**os.environ, **environment}, capture_output=True, text=True)


def test_standard_output_may_be_closed_or_full() -> None:
    done = started("--version >&-")
    assert (done.returncode, done.stderr) == (0, "")
    done = started("--version > /dev/full")
    assert (done.returncode, done.stderr) == (2, "cflat: 'standard output': No space left on device.\n")


# Background jobs of a shell ignore the signal, and so would what they start.
INTERRUPT = """
import os, signal
signal.signal(signal.SIGINT, signal.default_int_handler)
os.kill(os.getpid(), signal.SIGINT)
"""


def test_an_interrupt_while_the_command_starts_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text(INTERRUPT)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = started("list methods", PYTHONPATH=path)
    assert (done.returncode, done.stderr) == (130, "cflat: Interrupted.\n")


def test_the_version_needs_no_torch(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise RuntimeError('torch is imported')\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = started("--version", PYTHONPATH=path)
    assert (done.returncode, done.stdout) == (0, f"cflat {cflat.__version__}\n"), done.stderr


def test_a_number_of_ranks_that_is_none_counts_as_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "abc")
    assert run_app(["list", "methods"]) == 0
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "only 'cflat run' can be started by torchrun" in refusal(capsys, "list", "methods")


def test_an_interrupted_command_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("cflat.data.check_dataset", interrupt)
    assert run_app(["check-data", "digits"]) == 130
    assert capsys.readouterr().err.strip().splitlines()[-1] == "cflat: Interrupted."


def test_weights_that_do_not_fit_fail_in_the_dry_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_file({"cls_token": torch.zeros(1, 1, 192), "norm.weight": torch.ones(192)}, tmp_path / "tiny.safetensors")
    words = ["--method", "simplecil", "--data", "digits", "--preset", "smoke", "--weights", "tiny.safetensors"]
    text = refusal(capsys, "run", *words, "--dry-run")
    assert "do not fit this backbone" in text
    assert "perhaps backbone.name=vit_tiny" in text


def test_the_doctor_lists_datasets_and_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "root"
    for split in ("train", "test"):
        (root / "cub200" / split).mkdir(parents=True)
    (root / "weights").mkdir()
    (root / "weights" / "vit.safetensors").write_bytes(b"")
    (tmp_path / "hf" / "hub" / "models--timm--vit_tiny").mkdir(parents=True)
    monkeypatch.setenv("CFLAT_DATA", str(root))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    assert run_app(["doctor", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert {"digits", "cub200"} <= set(facts["datasets"])
    assert "imagenet_r" not in facts["datasets"]
    assert facts["weights"] == [str(root / "weights" / "vit.safetensors"), "timm (vit_tiny)"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["train.epochs=0x" + "f" * 5000], "more than 1,000 digits"),
        (["seed=0o" + "7" * 5000], "more than 1,000 digits"),
        (["backbone.name=timm:vit_tiny_patch16_224.nope"], "timm"),
        (["backbone.name=timm:hf-hub:someone/model"], "has no model"),
        (["backbone.name=timm:local-dir:/tmp"], "has no model"),
    ],
)
def test_what_no_range_foresees_is_refused(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert sentence in refusal(capsys, *SMOKE, "--method", "finetune", *words)


def test_memory_that_runs_out_anywhere_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr("cflat.runs.run.create_method", fail)
    assert "not enough memory" in refusal(capsys, *SMOKE, "--method", "finetune")
