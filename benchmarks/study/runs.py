"""One run of the study: from a key and its settings to a line of the ledger."""

from __future__ import annotations

import math
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from typing import Any

import torch
from benchmarks.study.configs import Key, Places, Run, config_of, published_score
from benchmarks.study.definition import BLOCK_OF
from benchmarks.study.ledger import ROOT, Line, definition_hash, machine_kind
from torch import Tensor, nn

from cflat.optim import SharpnessAware
from cflat.runs.run import run as train
from cflat.train import Observer
from cflat.train.observer import EpochRecord, StepEvent


def perform(
    run: Run, places: Places, scratch: Path | None = None, should_stop: Callable[[], bool] = lambda: False
) -> Line:
    """Carry out a run; with a scratch folder, one that was stopped goes on from its checkpoint."""
    block = BLOCK_OF[run.key.stream]
    config = config_of(run, places)
    recorder = Recorder(has_norms=block == "P")
    folder = None if scratch is None else scratch_folder(scratch, run.key)
    if folder is not None and (folder / "summary.json").is_file():
        shutil.rmtree(folder)  # killed before its line was written: what the recorder saw is lost
    is_begun = folder is not None and (folder / "config.yaml").is_file()
    start = time.process_time()
    summary = train(config, folder, resume=is_begun, observers=[recorder], should_stop=should_stop)
    seconds = time.process_time() - start + recorder.seconds_before
    summary = summary.judged_by(published_score(run, places))
    return Line(
        block=block,
        **run.key._asdict(),
        lr=config.base.lr,
        rho=config.optimizer.keywords().get("rho"),
        definition=definition_hash(),
        commit=_git("rev-parse", "HEAD"),
        code=_git("rev-parse", "HEAD:src/cflat")[:16],
        machine=machine_kind(),
        finished=datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        avg=summary.value("avg"),
        last=summary.value("last"),
        forgetting=summary.value("forgetting"),
        stages=[round(float(value), 6) for value in summary.headline.stage_accuracy],
        end_loss=recorder.loss_after(1.0),
        late_loss=recorder.loss_after(0.75),
        steps=summary.cost.steps,
        evaluations=summary.cost.evaluations,
        nonfinite_steps=summary.cost.nonfinite_steps,
        seconds=round(seconds, 2),
        update_norm=recorder.update_norm(),
        first_update_norm=recorder.update_norm(first_only=True),
    )


def scratch_folder(scratch: Path, key: Key) -> Path:
    """Return the run directory of a run that can be stopped."""
    return scratch / "-".join(map(str, key)).replace(".", "_")


class Recorder(Observer):
    """Keeps the losses of epochs and, if asked for, the norms of updates; goes on after a resume."""

    def __init__(self, has_norms: bool = False) -> None:
        self.has_norms = has_norms
        self.losses: dict[str, list[float]] = {}
        self.norms: dict[str, list[float]] = {}
        """Sum and count by task."""
        self.seconds_before = 0.0
        self._start = time.process_time()
        self._params: list[Tensor] = []
        self._before: list[Tensor] = []

    def on_phase_start(self, optimizer: SharpnessAware, network: nn.Module) -> None:
        if self.has_norms:
            self._params = [param for group in optimizer.param_groups for param in group["params"]]
            self._before = [param.detach().clone() for param in self._params]

    def on_step(self, event: StepEvent) -> None:
        if not self.has_norms:
            return
        changes = torch._foreach_sub([param.detach() for param in self._params], self._before)
        norm = float(torch.linalg.vector_norm(torch.stack(torch._foreach_norm(changes))))
        total = self.norms.setdefault(str(event.task), [0.0, 0])
        total[0] += norm
        total[1] += 1
        torch._foreach_add_(self._before, changes)

    def on_epoch(self, record: EpochRecord) -> None:
        self.losses.setdefault(f"{record.task} {record.phase}", []).append(record.loss)

    def loss_after(self, fraction: float) -> float:
        """Return the mean loss of the epoch at this fraction of a task, over the tasks that were trained."""
        found = [losses[max(1, math.ceil(fraction * len(losses))) - 1] for losses in self.losses.values()]
        return round(statistics.fmean(found), 6) if found else math.nan

    def update_norm(self, first_only: bool = False) -> float | None:
        """Return the mean norm of an update, of all tasks or of the first one."""
        totals = [total for task, total in self.norms.items() if task == "0" or not first_only]
        steps = sum(count for _, count in totals)
        return sum(total for total, _ in totals) / steps if steps else None

    def state(self) -> dict[str, Any]:
        seconds = self.seconds_before + time.process_time() - self._start
        return {"losses": self.losses, "norms": self.norms, "seconds": seconds}

    def load(self, state: Mapping[str, Any]) -> None:
        self.losses = {name: list(losses) for name, losses in state["losses"].items()}
        self.norms = {task: list(total) for task, total in state["norms"].items()}
        self.seconds_before, self._start = state["seconds"], time.process_time()


@cache
def _git(*arguments: str) -> str:
    return subprocess.run(
        ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True
    ).stdout.strip()


def is_clean() -> bool:
    """Whether the sources are those of the commit."""
    return not _git("status", "--porcelain", "--", "src", "benchmarks/study")
