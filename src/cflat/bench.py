"""The bench from Python: run, load, compare and predict.

>>> import cflat
>>> done = cflat.bench.run(method="simplecil", data="digits", preset="smoke")
>>> done.accuracy.shape  # after each of five tasks, on each of five tasks
(5, 5)

``cflat.bench`` is imported when it is first used, and needs ``pip install cflat[bench]``.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from cflat._errors import CFlatError, ConfigError
from cflat.config.documents import merge, nested
from cflat.config.presets import resolve_config
from cflat.config.run_config import RunConfig
from cflat.config.variants import parse_variant
from cflat.metrics import METRICS
from cflat.report.export import write_tables
from cflat.report.groups import differing_keys, flat_settings
from cflat.report.records import require_records
from cflat.runs.folder import COSTS, RunFolder, RunSummary
from cflat.runs.inference import Prediction, Predictor, load_predictor
from cflat.runs.run import run as run_config
from cflat.studies.compare import compare as run_comparison
from cflat.studies.compare import write_comparison
from cflat.studies.space import Sweep, parse_sweep, read_sweep
from cflat.studies.sweep import SweepResult, run_sweep, write_sweep
from cflat.studies.tune import tune as run_search
from cflat.studies.tuned import Tuning, require_tuned
from cflat.train import Observer

if TYPE_CHECKING:
    import pandas

__all__ = [
    "Prediction", "Predictor", "Run", "SweepResult", "Tuning", "compare", "load_predictor", "load_run", "run",
    "runs_frame", "sweep", "tune", "write_tables",
]  # fmt: skip

logger = logging.getLogger(__name__)

OPTIMIZERS = ("none", "c_flat", "c_flat_turbo")
"""Default of `compare` and `tune`; differences are to the first."""

Fractions = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Run:
    """A finished run: what it learned, what it cost, and where it is."""

    summary: RunSummary
    folder: Path | None = None
    """Its run directory; None if nothing was kept."""

    @property
    def config(self) -> RunConfig:
        """Everything that decided it."""
        return self.summary.config

    @property
    def accuracy(self) -> Fractions:
        """Accuracy of the headline score, (stages, tasks): on task i after task t; NaN where i was not seen yet."""
        return self.summary.headline.accuracy

    @property
    def accuracies(self) -> dict[str, Fractions]:
        """The same for each score of the method, by name."""
        return {name: matrix.accuracy for name, matrix in self.summary.accuracy.items()}

    @property
    def stage_accuracy(self) -> Fractions:
        """Accuracy on all test images seen so far, after each task."""
        return self.summary.headline.stage_accuracy

    @property
    def metrics(self) -> dict[str, float]:
        """Average accuracy, forgetting and so on, as fractions, and the costs."""
        return {name: self.summary.value(name) for name in (*METRICS, *COSTS)}

    def history(self) -> list[dict[str, Any]]:
        """Return the records of all epochs and tasks; empty if nothing was kept."""
        return [] if self.folder is None else RunFolder(self.folder).load_metrics()

    def predictor(self, device: str | None = None) -> Predictor:
        """Return the trained method, ready for new images.

        Raises:
            ConfigError: If the run kept nothing on disk.
        """
        if self.folder is None:
            raise ConfigError("This run kept no weights; give run() a folder with out=.")
        return load_predictor(self.folder, device=device)

    def __repr__(self) -> str:
        config = self.config
        what = f"{config.method.name} on {config.data.name} with {config.optimizer.name}, seed {config.seed}"
        return f"<Run {what}: avg {self.metrics['avg']:.4f}, last {self.metrics['last']:.4f}>"


def run(
    *,
    method: str | Mapping[str, Any],
    data: str | Mapping[str, Any],
    optimizer: str | Mapping[str, Any] = "none",
    out: str | Path | None = None,
    resume: bool = False,
    observers: Sequence[Observer] = (),
    **keys: Any,
) -> Run:
    """Train a method on a stream of tasks and evaluate it after each.

    Args:
        method: A name of ``cflat list methods``, or a mapping with ``name`` and settings.
        data: A dataset, ``folder:PATH``, ``npz:PATH`` or ``domains:PATH``, or a mapping with ``name``, ``root``, ...
        optimizer: A name of ``cflat list optimizers``, or a mapping with ``name``, ``rho``, ...
        out: The run directory, absent or empty; None keeps nothing on disk.
        resume: Continue the run in ``out``, if there is one of this configuration; a finished one is only read.
        observers: Notified of steps, epochs and tasks.
        **keys: Any key of a configuration, with two underscores for the dot or as a section: ``preset="smoke"``,
            ``seed=1``, ``train__epochs=5``, ``train={"epochs": 5}``.

    Raises:
        ConfigError: If a key is unknown or a value is wrong.
        DataError: If data, weights or the folder are not usable.
    """
    config = resolve_config(_layer(method=method, data=data, optimizer=optimizer, **keys))
    # Resuming is idempotent: a script runs the same line the first time and after a crash.
    folder = RunFolder(Path(out)) if resume and out is not None else None
    is_begun = folder is not None and folder.config_file.is_file()
    if folder is not None and is_begun and folder.load_config() != config:
        raise ConfigError(f"{str(out)!r} holds a run with another configuration; choose another out.")
    summary = run_config(config, out, resume=is_begun, observers=observers)
    return Run(summary, None if out is None else Path(out))


def compare(
    *,
    method: str | Mapping[str, Any],
    data: str | Mapping[str, Any],
    out: str | Path,
    optimizers: Sequence[str] = OPTIMIZERS,
    seeds: Sequence[int] = (0, 1, 2),
    tuned: Tuning | None = None,
    score: str | None = None,
    **keys: Any,
) -> SweepResult:
    """Run every optimizer with every seed; write ``comparison.json``, a figure and ``report.html`` into ``out``.

    Finished runs in ``out`` are read, interrupted ones resumed.

    Args:
        method: As in `run`.
        data: As in `run`.
        out: Folder of the run directories.
        optimizers: Names, with settings where wanted (``"c_flat_turbo:reading=calibrated"``); the first is the
            reference of all differences.
        seeds: Seeds.
        tuned: The result of `tune`, to run each optimizer with the settings that were found for it.
        score: What they are judged by, such as ``"nme"``; None takes that of ``tuned``, or the method's headline.
        **keys: As in `run`.
    """
    layer = _layer(method=method, data=data, **keys)
    if tuned is not None:
        tuned.check_seeds(seeds)
        require_tuned([parse_variant(name).text for name in optimizers], tuned)
        layer = tuned.final_layer(layer)
        score = score or tuned.score
    # Each optimizer with what was found for it; comparing all at one rate would favour one of them.
    settings = None if tuned is None else tuned.settings
    result = run_comparison(layer, optimizers, seeds, out, tuned=settings, score=score)
    write_comparison(Path(out), result)
    return result


def tune(
    *,
    method: str | Mapping[str, Any],
    data: str | Mapping[str, Any],
    out: str | Path,
    optimizers: Sequence[str] = OPTIMIZERS,
    trials: int = 8,
    seeds: Sequence[int] = (1000,),
    search_seed: int = 0,
    score: str | None = None,
    **keys: Any,
) -> Tuning:
    """Search learning rate and radius of every optimizer with the same budget, on validation images alone.

    Args:
        method: As in `run`.
        data: As in `run`.
        out: Folder of the search; a search that was begun there is resumed.
        optimizers: As in `compare`.
        trials: Trials for each optimizer.
        seeds: Seeds of each trial; final runs should use others.
        search_seed: Decides what is drawn.
        score: The score whose average accuracy is maximised; None takes the method's headline.
        **keys: As in `run`.
    """
    layer = _layer(method=method, data=data, **keys)
    return run_search(layer, optimizers, out, trials=trials, seeds=seeds, search_seed=search_seed, score=score)


def sweep(grid: str | Path | Mapping[str, Any], out: str | Path) -> SweepResult:
    """Run a grid of settings, given as a YAML file or as its content, and write its table and page into ``out``.

    Args:
        grid: A path, or a mapping with ``base``, ``axes`` and ``seeds``; see ``examples/sweep_radius.yaml``.
        out: Folder of the run directories; finished runs are read, interrupted ones resumed.
    """
    plan: Sweep = parse_sweep(_plain(grid)) if isinstance(grid, Mapping) else read_sweep(grid)
    result = run_sweep(plan, out)
    write_sweep(Path(out), result)
    return result


def load_run(path: str | Path) -> Run:
    """Read a finished run.

    Raises:
        DataError: If there is none at ``path``, or it is not finished.
    """
    return Run(RunFolder(Path(path)).load_summary(), Path(path))


def runs_frame(*folders: str | Path) -> pandas.DataFrame:
    """Return all runs at or below some folders as a pandas table, one row for each.

    Columns: where it is and whether it is finished, what was chosen, every metric as a fraction, every cost, the
    accuracy matrix as an array, and the configuration keys in which the runs differ. What an unfinished run does not
    have is NaN.

    Raises:
        CFlatError: If pandas is not installed.
        DataError: If there is no run that can be read; others that cannot are left out, with a warning in the log.
    """
    try:
        import pandas
    except ImportError:
        raise CFlatError("runs_frame needs pandas; run: pip install 'cflat[frames]'") from None
    records, problems = require_records(folders, "put into a table")
    for problem in problems:
        logger.warning("Left out: %s: %s", problem.where, problem.message)
    settings = [flat_settings(record.config) for record in records]
    named = ("method.name", "data.name", "optimizer.name", "preset", "stream.scenario")
    keys = [key for key in differing_keys(settings) if key not in named]
    rows = []
    for record, own in zip(records, settings, strict=True):
        config, summary = record.config, record.summary
        # NaN, not absent: a column must exist for every row.
        done = Run(summary).metrics if summary is not None else dict.fromkeys((*METRICS, *COSTS), float("nan"))
        rows.append(
            {
                "run": record.name,
                "is_finished": record.is_finished,
                "method": config.method.name,
                "data": config.data.name,
                "optimizer": config.optimizer.name,
                "preset": config.preset,
                "scenario": config.stream.scenario,
                "seed": config.seed,
                "score": record.score,
                **done,
                "stage_accuracy": np.array(record.stage_accuracy),
                "accuracy": None if summary is None else summary.headline.accuracy,
                **{key: own.get(key) for key in keys},
            }
        )
    return pandas.DataFrame(rows)


def _layer(**given: Any) -> dict[str, Any]:
    """Return keyword arguments as a layer of a configuration: ``train__epochs`` is ``train.epochs``."""
    return merge(*(nested(key.replace("__", "."), _plain(value)) for key, value in given.items()))


def _plain(value: Any) -> Any:
    """Return what a configuration file could hold: paths as text, NumPy's numbers as Python's."""
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if isinstance(value, Mapping):
        return {key: _plain(member) for key, member in value.items()}
    return [_plain(member) for member in value] if isinstance(value, list | tuple) else value
