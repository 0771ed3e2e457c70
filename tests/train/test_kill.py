"""SIGKILL at random moments of a real `cflat run`, and damaged files: the same bits or a refusal, never others."""

from __future__ import annotations

import json
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from processes import Command

PAIRS = (
    *(("icarl", "class"), ("memo", "class"), ("ease", "class"), ("ranpac", "class"), ("dualprompt", "class")),
    *(("replay", "task"), ("finetune", "task"), ("l2p", "task"), ("duct", "domain"), ("simplecil", "domain")),
)
NUM_KILLS = 5
"""For each pair."""
NUM_IN_A_ROW = 20


def arguments(method: str, scenario: str, out: Path) -> tuple[str | Path, ...]:
    is_domain = scenario == "domain"  # where every domain brings all classes
    size = ("data.train_per_class=5", "stream.max_tasks=3") if is_domain else ("data.train_per_class=16",)
    return (
        *("run", "--method", method, "--data", "rotated_digits" if is_domain else "digits", "--preset", "smoke"),
        *("--optimizer", "c_flat_turbo", "--out", out, "--quiet", f"stream.scenario={scenario}", *size),
        *("train.epochs=4", "train.checkpoint_minutes=0", "optimizer.threshold=0", "train.eval_batch_size=8"),
        *("train.batch_size=16", "runtime.threads=1"),
    )


def start(method: str, scenario: str, out: Path) -> Command:
    is_begun = (out / "config.yaml").exists()
    words = ("run", "--resume", out, "--quiet") if is_begun else arguments(method, scenario, out)
    return Command(*words, folder=out.parent)


def checkpoints(run: Path) -> list[Path]:
    return sorted(path for path in (run / "checkpoints").glob("*-*.pt") if path.is_file())


# -- damage -----------------------------------------------------------------------------------------------------------


def flip(file: Path, chooser: random.Random) -> None:
    content = bytearray(file.read_bytes())
    if content:
        content[chooser.randrange(len(content))] ^= 1 << chooser.randrange(8)
        file.write_bytes(content)


def cut(file: Path, chooser: random.Random) -> None:
    file.write_bytes(file.read_bytes()[: chooser.randrange(file.stat().st_size or 1)])


def newest(run: Path) -> list[Path]:
    return checkpoints(run)[-1:]


def flip_newest(run: Path, chooser: random.Random) -> None:
    for file in newest(run):
        flip(file, chooser)


def cut_newest(run: Path, chooser: random.Random) -> None:
    for file in newest(run):
        cut(file, chooser)


def remove_newest(run: Path, chooser: random.Random) -> None:
    for file in checkpoints(run)[1:]:
        file.unlink()


def flip_all(run: Path, chooser: random.Random) -> None:
    for file in checkpoints(run):
        flip(file, chooser)


def strew(run: Path, chooser: random.Random) -> None:
    folder = run / "checkpoints"
    if folder.is_dir():
        torch.save([1, 2, 3], folder / "999998.pt")
        (folder / "999999-0123456789abcdef.pt").mkdir(exist_ok=True)
        (folder / "notes.txt").touch()
        (folder / "999999.tmp-1").write_bytes(b"half")


def flip_metrics(run: Path, chooser: random.Random) -> None:
    if (run / "metrics.jsonl").exists():
        flip(run / "metrics.jsonl", chooser)


def cut_metrics(run: Path, chooser: random.Random) -> None:
    if (run / "metrics.jsonl").exists():
        cut(run / "metrics.jsonl", chooser)


def remove_environment(run: Path, chooser: random.Random) -> None:
    if checkpoints(run):
        (run / "env.json").unlink(missing_ok=True)


def edit_configuration(run: Path, chooser: random.Random) -> None:
    file = run / "config.yaml"
    if file.exists():
        before, after = chooser.choice(
            [("\nseed: 0", "\nseed: 1"), ("batch_size: ", "batch_size: 1"), ("lr: 0", "lr: 1")]
        )
        file.write_text(file.read_text().replace(before, after, 1))


def flip_configuration(run: Path, chooser: random.Random) -> None:
    if (run / "config.yaml").exists():
        flip(run / "config.yaml", chooser)


DAMAGES: tuple[Callable[[Path, random.Random], None], ...] = (
    *(flip_newest, cut_newest, remove_newest, flip_all, strew, flip_metrics, cut_metrics),
    *(remove_environment, edit_configuration, flip_configuration),
)


# -- kills ------------------------------------------------------------------------------------------------------------


def kill_somewhere(process: Command, run: Path, seconds: float, chooser: random.Random) -> bool:
    """Kill at any moment, or just behind a new checkpoint; False if the run was faster.

    A run that has its result counts as faster even if its process is still ending: it would be read, not resumed.
    """
    if chooser.random() < 0.5:
        seen = newest(run)
        process.wait_until(lambda: newest(run) != seen)
        time.sleep(chooser.uniform(0, 0.1))
    else:
        time.sleep(chooser.uniform(0, seconds))
    is_alive = process.is_alive
    process.kill()
    return is_alive and not (run / "summary.json").exists()


def is_same_or_refused(process: Command, run: Path, whole: Path) -> str:
    code, output = process.wait()
    if code in (0, -signal.SIGKILL):  # killed after it had its result
        assert_same_run(whole, run)
        return "same"
    assert code == 2, output
    assert output.splitlines()[-1].startswith("cflat: "), output
    assert "Traceback" not in output
    return "refused"


@pytest.mark.parametrize(
    ("method", "scenario", "num_kills"),
    [
        *(pytest.param(*pair, NUM_KILLS, marks=pytest.mark.slow) for pair in PAIRS),
        ("icarl", "class", 2),
    ],
)
def test_killed_and_damaged_it_is_the_same_or_refused(
    method: str, scenario: str, num_kills: int, tmp_path: Path
) -> None:
    whole, chooser = tmp_path / "whole", random.Random(f"{method}/{scenario}/{num_kills}")
    began = time.monotonic()
    code, output = start(method, scenario, whole).wait()
    assert code == 0, output
    seconds = time.monotonic() - began
    kills, rounds, outcomes = 0, 0, []
    while kills < num_kills or "same" not in outcomes:
        run = tmp_path / f"round{rounds}"
        process = start(method, scenario, run)
        if kills < num_kills and kill_somewhere(process, run, seconds, chooser):
            kills += 1
            if chooser.random() < 0.7:
                chooser.choice(DAMAGES)(run, chooser)
            continue
        outcomes.append(is_same_or_refused(process, run, whole))
        rounds += 1
    assert kills == num_kills


@pytest.mark.slow
@pytest.mark.parametrize("method", ["icarl", "memo"])
def test_twenty_kills_in_a_row_leave_no_trace(method: str, tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    longer = ("train.epochs=8",)
    assert Command(*arguments(method, "class", whole), *longer, folder=tmp_path).wait()[0] == 0
    chooser = random.Random(method)
    for kills in range(NUM_IN_A_ROW):
        seen = newest(broken)
        process = (
            start(method, "class", broken)
            if kills
            else Command(*arguments(method, "class", broken), *longer, folder=tmp_path)
        )
        process.wait_until(lambda seen=seen: newest(broken) != seen)  # progress, so that kills spread over the run
        time.sleep(chooser.uniform(0, 0.05))
        is_alive = process.is_alive
        process.kill()
        assert is_alive, f"the run ended after {kills} kills; make it longer"
    code, output = start(method, "class", broken).wait()
    assert code == 0, output
    assert_same_run(whole, broken)


def test_signals_and_kills_by_turns_leave_no_trace(tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert start("icarl", "class", whole).wait()[0] == 0
    for number in (signal.SIGTERM, signal.SIGKILL, signal.SIGINT):
        seen = newest(broken)
        process = start("icarl", "class", broken)
        assert process.wait_until(lambda seen=seen: newest(broken) != seen)
        process.signal(number)
        code, output = process.wait()
        assert code == (-number if number == signal.SIGKILL else 128 + number), output
    assert start("icarl", "class", broken).wait()[0] == 0
    assert_same_run(whole, broken)


def assert_same_run(whole: Path, broken: Path) -> None:
    expected, got = (json.loads((run / "summary.json").read_text()) for run in (whole, broken))
    for key in ("avg", "last", "forgetting", "accuracy_matrix", "stage_accuracy", "evaluations_per_step"):
        assert got[key] == expected[key], key
    states = [torch.load(newest(run)[0], weights_only=True)["method"] for run in (whole, broken)]
    assert states[0].keys() == states[1].keys()
    for key, value in states[0].items():
        assert torch.equal(value, states[1][key]), key
    records = [
        [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()] for run in (whole, broken)
    ]
    assert [(r["event"], r["task"], r.get("epoch"), r.get("loss")) for r in records[0]] == [
        (r["event"], r["task"], r.get("epoch"), r.get("loss")) for r in records[1]
    ]
