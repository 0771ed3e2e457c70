"""Jobs as Ray tasks: side by side on the cores and GPUs of this machine, or on a cluster.

Ray is imported when jobs run. Tasks get plain values and leave their results in the run directories, which the driver
reads: on a cluster these must be on a file system that all nodes share.
"""

from __future__ import annotations

import logging
import os
import platform
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from cflat._errors import CFlatError, ConfigError, DataError
from cflat._ranges import check
from cflat.config.documents import Layer
from cflat.config.run_config import RunConfig, parse_config
from cflat.runs.interrupts import StopRequest
from cflat.runs.jobs import Job, JobsFailed, require_one_process, run_job
from cflat.train import StateNotSaved, TrainingInterrupted

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.5
"""How often the driver asks whether to stop."""
GRACE_SECONDS = 60.0
"""How long running jobs may take to finish their step and save."""
MAX_RETRIES = 3
"""How often a job is begun again, from its checkpoint, after its worker was lost."""
LOCK_SECONDS = 60.0
"""How long a job waits for the lock of the worker that it replaces, which may have died on another host."""
ANSWER_SECONDS = 10.0
STORE_BYTES = 128 << 20
"""Shared memory of a Ray that is started here: jobs exchange nothing but their configurations."""
ADDRESS = "RAY_ADDRESS"
PASSED_ON = ("CFLAT_DATA", "CFLAT_PLUGINS")
"""Variables of the environment that a job needs on another host."""


@dataclass(frozen=True)
class RayExecutor:
    """One Ray task for each job, as many at a time as the cluster has room for.

    A job requests as many CPUs as it has threads (one by default) and a fraction of a GPU where it uses one. Uses the
    connection of this process if there is one, else the cluster at ``$RAY_ADDRESS``, else starts Ray for these jobs.
    """

    gpus_per_job: float = 1.0
    """In (0, 1]; 0.5 lets two jobs share a GPU."""
    should_stop: Callable[[], bool] = lambda: False
    """Asked twice a second; True lets the running jobs save and raises `TrainingInterrupted`, or `StateNotSaved`."""

    def __post_init__(self) -> None:
        try:
            check("--gpus", self.gpus_per_job, above=0, at_most=1)
        except ValueError as error:
            raise ConfigError(str(error)) from None

    def __call__(self, jobs: Sequence[Job]) -> Iterator[Job]:
        """Run the jobs in parallel; one that was lost or interrupted resumes from its checkpoint.

        If some fail, `JobsFailed` is raised after all others are done.
        """
        for job in jobs:
            require_one_process(job)
        with ray_session() as (ray, is_own):
            pending = self._submit(ray, jobs, is_own)
            failures: list[tuple[Job, str]] = []
            try:
                while pending:
                    # Polled: a signal handler could interrupt Ray in the middle of a call.
                    if self.should_stop():
                        _stop(ray, pending)
                    done, _ = ray.wait(list(pending), timeout=POLL_SECONDS)
                    for task in done:
                        job = pending.pop(task)
                        reason = _outcome(ray, task, job)
                        if reason is None:
                            yield job
                        else:
                            failures.append((job, reason))
            finally:
                _cancel(ray, list(pending))
        if failures:
            raise JobsFailed(failures, len(jobs))

    def _submit(self, ray: ModuleType, jobs: Sequence[Job], is_own: bool) -> dict[Any, Job]:
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        cpus, gpus = (max((node.get(kind, 0) for node in nodes), default=0) for kind in ("CPU", "GPU"))
        # A worker that is terminated raises TrainingInterrupted; its job is begun again.
        work = ray.remote(max_retries=MAX_RETRIES, retry_exceptions=[TrainingInterrupted])(_work)
        environment = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
        tasks = {}
        for job in jobs:
            # More than any node has would wait for ever; threads may well outnumber cores.
            resources = {
                "num_cpus": min(job.config.runtime.threads or 1, max(1, int(cpus))),
                "num_gpus": self.gpus_per_job if _uses_gpu(job.config, gpus > 0, is_own) else 0,
            }
            values = (job.config.to_dict(), str(job.out), job.num_tasks, job.may_diverge)
            task = work.options(**resources).remote(*values, os.getcwd(), environment)
            tasks[task] = job
        return tasks


def _work(
    config: Layer, out: str, num_tasks: int | None, may_diverge: bool, folder: str, environment: dict[str, str]
) -> str | None:
    """Run a job on a worker; return why it failed, or None. Cancelling asks it to save and stop."""
    os.environ.update(environment)  # a worker may have been started before this driver
    try:
        os.chdir(folder)  # paths in the configuration are relative to the driver's
    except OSError as error:
        return f"The folder {folder!r} cannot be entered on {platform.node()}: {error.strerror}."
    with StopRequest() as stop:
        try:
            job = Job(parse_config(config), Path(out), num_tasks, may_diverge)
            run_job(job, should_stop=stop, patience=LOCK_SECONDS)
        except TrainingInterrupted:
            raise
        except CFlatError as error:
            return str(error)
    return None


def _outcome(ray: ModuleType, task: Any, job: Job) -> str | None:
    """Return why a task failed, or None if its result is there."""
    try:
        reason: str | None = ray.get(task)
    except ray.exceptions.RayError as error:
        logger.error("The job in %s failed.", job.out, exc_info=error)
        cause = getattr(error, "cause", None) or error
        return f"{type(cause).__name__}: {' '.join(str(cause).split())[:300]}"
    if reason is None and not job.is_finished:
        return "It ran, but its result is not here; run directories must be on a file system that all nodes share."
    return reason


def _stop(ray: ModuleType, pending: dict[Any, Job]) -> NoReturn:
    """Let all jobs save and stop; those that cannot save are named."""
    tasks = list(pending)
    late = _cancel(ray, tasks)
    lost = [f"{pending[task].out}: It does not answer." for task in late]
    for task in set(tasks) - set(late):
        with suppress(ray.exceptions.RayError):  # it was cancelled, or stopped as it should
            reason = ray.get(task)
            if reason is not None:
                lost.append(f"{pending.pop(task).out}: {reason}")
    pending.clear()
    if lost:
        raise StateNotSaved(f"The jobs were stopped, but not all could save their state. {' '.join(lost)}")
    raise TrainingInterrupted("The jobs were stopped; their state is saved.")


def _cancel(ray: ModuleType, tasks: list[Any]) -> list[Any]:
    """Cancel what waits, ask what runs to save and stop, and wait for it; return those that did not end."""
    for task in reversed(tasks):  # the last first: what waits must not begin when others end
        ray.cancel(task)
    late: list[Any] = ray.wait(tasks, num_returns=len(tasks), timeout=GRACE_SECONDS)[1] if tasks else []
    return late


@contextmanager
def ray_session() -> Iterator[tuple[ModuleType, bool]]:
    """Give Ray, connected, and whether this call started it; batches of jobs inside share the connection."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # read when Ray is imported; a bench does not report home
    try:
        ray = import_module("ray")
    except ModuleNotFoundError:
        raise ConfigError("The executor 'ray' needs the package ray; run: pip install 'cflat[sweep]'") from None
    if ray.is_initialized():
        yield ray, False
        return
    address = os.environ.get(ADDRESS)
    _connect(ray, address)
    try:
        yield ray, address is None
    finally:
        ray.shutdown()


def _require_answer(address: str) -> None:
    """Reject an address without a listener at once: Ray itself tries for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        return  # "auto" and the like
    try:
        socket.create_connection((host, int(port)), timeout=ANSWER_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise DataError(f"No Ray cluster answers at {ADDRESS}={address}: {error}.") from error


def _connect(ray: ModuleType, address: str | None) -> None:
    if address:
        _require_answer(address)
    is_main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM)
    own: dict[str, Any] = {} if address else {"include_dashboard": False, "object_store_memory": STORE_BYTES}
    try:
        ray.init(address=address or "local", log_to_driver=False, logging_level=logging.ERROR, **own)
    except (ConnectionError, RuntimeError, ValueError) as error:
        where = f"cannot be joined at {ADDRESS}={address}" if address else "cannot be started here"
        raise DataError(f"Ray {where}: {' '.join(str(error).split())[:300]}") from error
    finally:
        if is_main:  # Ray replaces the handler, and with it our way to stop
            signal.signal(signal.SIGTERM, handler)


def _uses_gpu(config: RunConfig, has_gpus: bool, is_own: bool) -> bool:
    """Whether to request a GPU; a cluster may have none yet and add one on request."""
    accelerator = config.runtime.accelerator
    return accelerator in ("auto", "cuda") if has_gpus else accelerator == "cuda" and not is_own
