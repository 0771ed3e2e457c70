"""Ray on two nodes, both on this machine: a worker and then a node are lost, and nothing else is."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cflat.runs.folder import RunFolder, RunSummary
from cflat.runs.ray_executor import RayExecutor
from cflat.studies.space import parse_sweep
from cflat.studies.sweep import run_sweep
from cflat.studies.tune import tune
from processes import processes_in

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/cwd").exists(), reason="finds workers through /proc"),
]

BASE = {
    "data": {"name": "digits", "train_per_class": 4, "test_per_class": 4},
    "preset": "smoke",
    "stream": {"initial": 5, "increment": 5},
    "train": {"epochs": 10, "checkpoint_minutes": 0},
    "runtime": {"threads": 1},
}
SWEEP = parse_sweep(
    {
        "name": "grid",
        "base": BASE,
        "axes": {"method.name": ["finetune", "icarl"], "optimizer.name": ["none", "sam", "c_flat"]},
        "seeds": [0, 1],
    }
)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A head node and a second one; each has a CPU and says that it has a GPU."""
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_worker_niceness", "0")  # else a busy machine lets workers starve
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    handler = signal.getsignal(signal.SIGTERM)
    node = {"num_cpus": 1, "num_gpus": 1, "object_store_memory": 80 << 20, "include_dashboard": False}
    made = Cluster(initialize_head=True, head_node_args=node)
    try:
        made.add_node(**node)
        ray.init(address=made.address, log_to_driver=False, logging_level="ERROR")
        signal.signal(signal.SIGTERM, handler)
        yield made
    finally:
        ray.shutdown()
        made.shutdown()


def learned(summary: RunSummary) -> tuple:
    matrices = {name: matrix.to_dict() for name, matrix in summary.accuracy.items()}
    return summary.config.fingerprint(), matrices, summary.cost.evaluations


def losses(out: Path) -> list[float]:
    return [record["loss"] for record in RunFolder(out).load_metrics() if record["event"] == "epoch"]


class Trouble:
    """Asked twice a second whether to stop, it never does, but kills a worker, then the second node."""

    def __init__(self, cluster: Any, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder
        self.killed: list[str] = []
        self.free_gpus: set[float] = set()

    def __call__(self) -> bool:
        import ray

        self.free_gpus.add(ray.available_resources().get("GPU", 0.0))
        runs = [path.parent for path in self.folder.glob("out/*/checkpoints")]
        if not self.killed and runs:
            for worker in processes_in(self.folder)[:1]:
                os.kill(worker, signal.SIGKILL)
                self.killed.append("worker")
        elif self.killed == ["worker"] and any((run / "summary.json").is_file() for run in runs):
            self.cluster.remove_node(self.cluster.list_all_nodes()[-1], allow_graceful=False)
            self.killed.append("node")
        return False


def test_a_sweep_on_two_nodes_survives_the_loss_of_a_worker_and_of_a_node(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = (tmp_path / "here").resolve()
    folder.mkdir()
    monkeypatch.chdir(folder)
    trouble = Trouble(cluster, folder)
    found = run_sweep(SWEEP, folder / "out", RayExecutor(gpus_per_job=0.25, should_stop=trouble))
    assert trouble.killed == ["worker", "node"]
    assert {free % 1 for free in trouble.free_gpus} & {0.5, 0.75}  # one or two runs held a quarter of a GPU each
    expected = run_sweep(SWEEP, tmp_path / "serial")
    assert sum(len(row.folders) for row in found.rows) == 12
    for ours, theirs in zip(found.rows, expected.rows, strict=True):
        assert [learned(one) for one in ours.summaries] == [learned(one) for one in theirs.summaries]
        assert [losses(run) for run in ours.folders] == [losses(run) for run in theirs.folders]


def test_trials_are_pruned_through_ray_as_they_are_here(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    layer = {**BASE, "method": "finetune", "train": {"epochs": 4}, "data": {"name": "digits", "train_per_class": 20}}
    options: dict[str, Any] = {"trials": 4, "sampler": "random", "ranges": {"base.lr": (0.02, 1e-9)}}
    here, there = (
        tune(layer, ["none", "sam"], tmp_path / name, executor=executor, **options)
        for name, executor in (("here", None), ("there", RayExecutor(gpus_per_job=0.5)))
    )
    for name, tuned in here.optimizers.items():
        trials = [(trial.settings, trial.state, trial.num_tasks, trial.score) for trial in tuned.trials]
        assert [
            (trial.settings, trial.state, trial.num_tasks, trial.score) for trial in there.optimizers[name].trials
        ] == trials
    assert any(trial.state == "pruned" for tuned in there.optimizers.values() for trial in tuned.trials)
