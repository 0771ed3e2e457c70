"""Executors: what is carried out, what is kept when a job fails or is lost, and that the place changes no result."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cflat import ConfigError, DataError
from cflat.config.presets import resolve_config
from cflat.runs.folder import RunFolder, RunSummary
from cflat.runs.jobs import Executor, Job, JobsFailed, SerialExecutor, run_jobs
from cflat.runs.ray_executor import RayExecutor
from cflat.train import StateNotSaved, TrainingInterrupted
from counting import Counting
from processes import processes_in

TINY = {
    "method": "icarl",
    "data": {"name": "digits", "train_per_class": 4, "test_per_class": 4},
    "preset": "smoke",
    "stream": {"initial": 5, "increment": 5},
    "runtime": {"threads": 1},
}
LONG = {**TINY, "train": {"epochs": 25, "checkpoint_minutes": 0}}


def job(out: Path, seed: int = 0, optimizer: str = "none", base: dict = TINY) -> Job:
    return Job(resolve_config({**base, "optimizer": optimizer, "seed": seed}), out)


def learned(summary: RunSummary) -> dict:
    """What a run gives apart from its speed."""
    counted = ("evaluations", "steps", "evaluations_per_step", "trainable_parameters", "evaluations_by_kind")
    matrices = {name: matrix.to_dict() for name, matrix in summary.accuracy.items()}
    return {"config": summary.config, "accuracy": matrices, **{name: getattr(summary.cost, name) for name in counted}}


def last_losses(out: Path) -> list[float]:
    return [record["loss"] for record in RunFolder(out).load_metrics() if record["event"] == "epoch"]


def has_checkpoint(out: Path) -> bool:
    return any((out / "checkpoints").glob("*.pt"))


# -- which jobs run -------------------------------------------------------------------------------------------------


def test_jobs_of_one_folder_run_once_and_results_keep_the_order(tmp_path: Path) -> None:
    first, second, twin = job(tmp_path / "a", 0), job(tmp_path / "b", 1), job(tmp_path / "c", 0)
    executor = Counting()
    summaries = run_jobs([second, first, twin, first], executor)
    assert [one.out.name for one in executor.jobs] == ["b", "a", "c"]
    assert [summary.config.seed for summary in summaries] == [1, 0, 0, 0]
    assert learned(summaries[1]) == learned(summaries[2])
    again = Counting()
    run_jobs([first, second], again)
    assert again.jobs == []


def test_a_folder_is_for_one_configuration(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Two different configurations"):
        run_jobs([job(tmp_path / "a", 0), job(tmp_path / "a", 1)])
    assert list(tmp_path.iterdir()) == []


def test_failures_are_named_up_to_a_limit(tmp_path: Path) -> None:
    one = job(tmp_path / "a")
    message = str(JobsFailed([(one, "It broke.")] * 7, 9))
    assert message.startswith("7 of 9 runs failed, the others are done and kept. ")
    assert message.count("It broke.") == 5
    assert message.endswith("2 more.")
    assert "none is done" in str(JobsFailed([(one, "It broke.")], 1))


# -- Ray, as far as it needs no cluster -----------------------------------------------------------------------------


@pytest.mark.slow
def test_ray_is_imported_only_when_jobs_run() -> None:
    code = "import sys, cflat.cli.main, cflat.runs.ray_executor as r; r.RayExecutor(); print('ray' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_without_ray_one_sentence_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'cflat\[sweep\]'"):
        run_jobs([job(tmp_path / "a")], RayExecutor())


@pytest.mark.parametrize("executor", [RayExecutor(), SerialExecutor()])
def test_a_run_with_several_processes_is_refused(executor: Executor, tmp_path: Path) -> None:
    several = job(tmp_path / "a", base={**TINY, "runtime": {"devices": 2}})
    with pytest.raises(ConfigError, match=r"runtime\.devices is 2"):
        run_jobs([several], executor)


def test_an_address_where_nobody_listens_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{free.getsockname()[1]}")
        with pytest.raises(DataError, match="No Ray cluster answers at RAY_ADDRESS=127"):
            run_jobs([job(tmp_path / "a")], RayExecutor())


@pytest.mark.parametrize("gpus", [0, 1.5, float("nan")])
def test_a_share_of_a_gpu_is_at_most_one(gpus: float) -> None:
    with pytest.raises(ConfigError, match="--gpus must be above 0 and at most 1"):
        RayExecutor(gpus)


# -- real Ray -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def _ray() -> Iterator[None]:
    """One Ray for all tests of this file; the executor uses the connection that it finds."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray = pytest.importorskip("ray")
    handler = signal.getsignal(signal.SIGTERM)
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    signal.signal(signal.SIGTERM, handler)
    yield
    ray.shutdown()


@pytest.mark.usefixtures("_ray")
def test_ray_gives_the_bits_of_the_serial_executor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    grid = [(0, "none"), (1, "c_flat_turbo")]
    serial = run_jobs([job(Path("serial") / f"{o}{s}", s, o) for s, o in grid])
    jobs = [job(Path("ray") / f"{o}{s}", s, o) for s, o in grid]
    side_by_side = run_jobs(jobs, RayExecutor())
    assert [learned(one) for one in side_by_side] == [learned(one) for one in serial]
    for one in jobs:
        assert last_losses(one.out) == last_losses(Path("serial") / one.out.name)


@pytest.mark.usefixtures("_ray")
def test_a_failed_job_does_not_lose_the_others(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    good, bad = [job(tmp_path / f"good{seed}", seed) for seed in (0, 1)], job(tmp_path / "file" / "run")
    with pytest.raises(JobsFailed, match="1 of 3 runs failed, the others are done and kept") as failed:
        run_jobs([good[0], bad, good[1]], RayExecutor())
    assert all(one.is_finished for one in good)
    assert [one for one, _ in failed.value.failures] == [bad]
    assert f"{bad.out}: " in str(failed.value)
    assert "cannot be made" in str(failed.value)


@pytest.mark.usefixtures("_ray")
def test_an_unforeseen_error_keeps_its_traceback(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(JobsFailed, match="ValueError: embedded null byte"):
        run_jobs([job(tmp_path / "no\0folder")], RayExecutor())
    assert "in run_job" in caplog.text


@pytest.mark.usefixtures("_ray")
def test_a_stop_saves_what_runs(tmp_path: Path) -> None:
    endless = {**TINY, "train": {"epochs": 100_000, "checkpoint_minutes": 60}}
    jobs = [job(tmp_path / f"run{seed}", seed, base=endless) for seed in range(3)]
    executor = RayExecutor(should_stop=lambda: all((one.out / "metrics.jsonl").is_file() for one in jobs[:2]))
    with pytest.raises(TrainingInterrupted):
        run_jobs(jobs, executor)
    # No checkpoint is due before an hour: they were asked to save. The third never had a place to run.
    assert [has_checkpoint(one.out) for one in jobs] == [True, True, False]
    assert not jobs[2].out.exists()


@pytest.mark.usefixtures("_ray")
def test_a_stop_that_cannot_save_is_not_said_to_have_saved(tmp_path: Path) -> None:
    endless = {**TINY, "train": {"epochs": 100_000, "checkpoint_minutes": 60}}
    jobs = [job(tmp_path / f"run{seed}", seed, base=endless) for seed in range(2)]

    def is_time() -> bool:
        if not all((one.out / "metrics.jsonl").is_file() for one in jobs):
            return False
        (jobs[1].out / "checkpoints").touch()  # a file where the folder should be
        return True

    with pytest.raises(StateNotSaved, match=r"not all could save .+run1: .+checkpoints' cannot be written") as raised:
        run_jobs(jobs, RayExecutor(should_stop=is_time))
    assert "run0" not in str(raised.value)
    assert has_checkpoint(jobs[0].out)


def kill_when(is_time: Callable[[], bool], folder: Path, number: signal.Signals, killed: list[int]) -> None:
    while not killed:
        for worker in processes_in(folder) if is_time() else []:
            os.kill(worker, number)
            killed.append(worker)
        time.sleep(0.02)


@pytest.mark.skipif(not Path("/proc/self/cwd").exists(), reason="finds the worker through /proc")
@pytest.mark.usefixtures("_ray")
@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_lost_worker_is_replaced_and_goes_on_to_the_same_bits(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = (tmp_path / "here").resolve()
    folder.mkdir()
    monkeypatch.chdir(folder)
    undisturbed = job(tmp_path / "undisturbed", base=LONG)
    lost = job(tmp_path / "lost", base=LONG)
    killed: list[int] = []
    watch = threading.Thread(target=kill_when, args=(lambda: has_checkpoint(lost.out), folder, number, killed))
    watch.start()
    (found,) = run_jobs([lost], RayExecutor())
    killed.append(0)  # ends the watch if the job was too fast for it
    watch.join()
    assert killed[0] != 0
    (expected,) = run_jobs([undisturbed])
    assert learned(found) == learned(expected)
    assert last_losses(lost.out) == last_losses(undisturbed.out)
