"""`probe_run`: probe a method on a dataset as it is about to be trained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from torch import nn

from cflat._errors import ConfigError
from cflat.analysis.probe import Probe, ProbeResult
from cflat.config.choices import parse_optimizer
from cflat.config.run_config import RunConfig
from cflat.data import Batch
from cflat.optim import SharpnessAware
from cflat.runs.run import run
from cflat.studies.recording import check_watchable
from cflat.train import Observer, TrainingInterrupted
from cflat.train.objective import Objective


@dataclass
class ProbeObserver(Observer):
    """Probe the first steps of one task; its other fields are the arguments of `probe_run`."""

    make: Callable[..., Probe]
    """Makes the probe of some parameters in a network."""
    steps: int
    warmup: int
    task: int
    tell: Callable[[int], None]

    def __post_init__(self) -> None:
        self.probe: Probe | None = None
        self._optimizer: SharpnessAware | None = None

    @property
    def num_probed(self) -> int:
        """Steps that were probed so far."""
        return 0 if self.probe is None else self.probe.steps

    @property
    def is_done(self) -> bool:
        """Whether enough steps were probed, or the task is over."""
        is_past = self._optimizer is not None and self._optimizer.task_index > self.task
        return is_past or self.num_probed >= self.steps

    def on_phase_start(self, optimizer: SharpnessAware, network: nn.Module) -> None:
        """Set up the shadows when the task's first phase begins."""
        self._optimizer = optimizer
        if optimizer.task_index == self.task and self.probe is None:
            self.probe = self.make(optimizer.all_params(), network)

    def on_step_start(self, epoch: int, objective: Objective, batch: Batch) -> None:
        """Look at this step."""
        optimizer = self._optimizer
        if self.probe is None or optimizer is None or optimizer.task_index != self.task or self.is_done:
            return
        if optimizer.task_step >= self.warmup:
            self.probe.look(objective.closure(batch))  # before the step, at the weights that it starts from
            self.tell(self.probe.steps)


def probe_run(
    config: RunConfig,
    radii: tuple[float, ...],
    *,
    steps: int = 24,
    warmup: int = 10,
    task: int = 0,
    tell: Callable[[int], None] = lambda done: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> ProbeResult:
    """Train plainly up to a task (from 0), let ``warmup`` of its steps pass, and probe the next ones.

    The optimizer of ``config`` gives lam, beta and k, and does not train. The verdict is about the first of the radii.
    ``tell`` is called with the number of probed steps after each; a true ``should_stop()`` ends the probe early.

    Raises:
        TrainingInterrupted: If ``should_stop()`` was true before the first probed step.
    """
    check_watchable(config.runtime)
    own = config.optimizer.keywords()
    weights = {key: own[key] for key in ("lam", "beta") if key in own}
    make = partial(Probe, radii=radii, k=own.get("k", 5), **weights)
    observer = ProbeObserver(make, steps, warmup, task, tell)
    plain = replace(config, optimizer=parse_optimizer({"name": "none"}))
    try:
        run(plain, observers=[observer], should_stop=lambda: observer.is_done or should_stop())
    except TrainingInterrupted:  # how a run ends that should stop; nothing of it is kept
        if should_stop() and not observer.num_probed:
            raise
    if observer.probe is None or not observer.num_probed:
        raise ConfigError(
            f"There was no step to probe in task {task} after a warm-up of {warmup}: choose a task below the number of "
            "tasks that is trained by gradients, a smaller --warmup, or more epochs."
        )
    return observer.probe.result()
