"""Send the numbers of a run to TensorBoard, Weights & Biases or MLflow; files remain the source of truth."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

from cflat._errors import ConfigError
from cflat._files import read_text, write_atomic
from cflat._registry import require_known
from cflat.config.documents import flatten
from cflat.config.run_config import RunConfig
from cflat.train import EpochRecord, Observer, TaskRecord


class Tracker(NamedTuple):
    """How numbers are sent."""

    log: Callable[[int, dict[str, float]], object]
    close: Callable[[], object]


def _tensorboard(config: RunConfig, folder: Path) -> Tracker:
    """Write event files into the run directory."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder / "tensorboard"))
    writer.add_text("config", f"```\n{config.to_yaml()}\n```")

    def log(step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    return Tracker(log, writer.close)


def _wandb(config: RunConfig, folder: Path) -> Tracker:
    """Open a run in the project ``cflat``; a resumed run continues under the same id."""
    import wandb

    # In the run directory, as a resumed run continues its own curves; the directory's name may be that of another run.
    id_file = folder / "wandb_id.txt"
    if not id_file.is_file():
        write_atomic(id_file, uuid4().hex)
    given = {"name": folder.name, "id": read_text(id_file), "dir": str(folder), "config": config.to_dict()}
    run = wandb.init(project="cflat", resume="allow", **given)
    return Tracker(lambda step, values: run.log(values, step=step), run.finish)


def _mlflow(config: RunConfig, folder: Path) -> Tracker:
    """Open a run in the experiment ``cflat``."""
    import mlflow

    mlflow.set_experiment("cflat")
    mlflow.start_run(run_name=folder.name)
    mlflow.log_params(flatten(config.to_dict()))
    return Tracker(lambda step, values: mlflow.log_metrics(values, step=step), mlflow.end_run)


TRACKERS: dict[str, Callable[[RunConfig, Path], Tracker]] = {
    "tensorboard": _tensorboard,
    "wandb": _wandb,
    "mlflow": _mlflow,
}


class TrackerObserver(Observer):
    """Pass the numbers of epochs and tasks on to a tracker, numbered by the epochs of the whole run.

    The tracker is made when the run begins: before that, the folder may belong to another process.
    """

    def __init__(self, make: Callable[[], Tracker]) -> None:
        self.make = make
        self.tracker: Tracker | None = None
        self.step = 0

    def on_run_start(self, num_tasks: int, first_task: int) -> None:
        """Make the tracker."""
        self.tracker = self.make()

    def on_epoch(self, record: EpochRecord) -> None:
        """Pass on loss, learning rate and counters."""
        self.step += 1  # epochs of the run: tasks and phases start at 0 again
        self._log("epoch", record)

    def on_task_end(self, record: TaskRecord) -> None:
        """Pass on accuracies and speed."""
        self._log("task", record)

    def state(self) -> dict[str, Any]:
        """Return the number of epochs so far."""
        return {"step": self.step}

    def load(self, state: dict[str, Any]) -> None:
        """Restore the number of epochs."""
        self.step = state.get("step", 0)

    def close(self) -> None:
        """Send what is left."""
        if self.tracker is not None:
            self.tracker.close()

    def _log(self, kind: str, record: EpochRecord | TaskRecord) -> None:
        found = flatten(asdict(record)).items()
        # Names and lists, such as those of tasks, are no curves.
        values = {f"{kind}/{key}": value for key, value in found if isinstance(value, int | float)}
        assert self.tracker is not None, "on_run_start makes the tracker"
        self.tracker.log(self.step, values)


def track_run(name: str, config: RunConfig, folder: Path) -> TrackerObserver:
    """Return the observer that sends the numbers of a run to a tracker; rejects one that is not installed at once."""
    require_known("tracker", name, TRACKERS)
    if find_spec(name) is None:
        raise ConfigError(f"The tracker {name!r} is not installed; run: pip install 'cflat[track]'")
    return TrackerObserver(partial(TRACKERS[name], config, folder))
