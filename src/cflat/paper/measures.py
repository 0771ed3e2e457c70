"""Numbers of a finished run by name, as tables ask for them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from cflat._registry import require_known
from cflat.config.documents import flatten
from cflat.config.run_config import RunConfig
from cflat.metrics import METRICS
from cflat.runs.folder import RunSummary

CONFIG, STAGE = "config.", "stage."


@dataclass(frozen=True)
class Measure:
    """What a number is called, how it is read from a result, and by which factor it is shown."""

    title: str
    of: Callable[[RunSummary], float]
    factor: float = 1.0
    digits: int = 2


_MEASURES: dict[str, Measure] = {
    **{
        name: Measure(metric.title, lambda summary, name=name: summary.value(name), 100.0)  # type: ignore[misc]
        for name, metric in METRICS.items()
    },
    "newest_task": Measure("newest task", lambda summary: float(summary.headline.per_task[-1]), 100.0),
    "images_per_second": Measure("Img/s", lambda summary: summary.value("images_per_second"), digits=1),
    "evaluations_per_step": Measure("eval/step", lambda summary: summary.value("evaluations_per_step")),
    "trainable_parameters": Measure("trained, M", lambda summary: summary.value("trainable_parameters"), 1e-6),
    "peak_memory_bytes": Measure("memory, GB", lambda summary: summary.value("peak_memory_bytes"), 1e-9),
}


def unit_of(name: str) -> Measure:
    """Return how a number is read and shown.

    Raises:
        ConfigError: If there is no such number.
    """
    if name.startswith(STAGE) and name.removeprefix(STAGE).isdecimal() and int(name.removeprefix(STAGE)) > 0:
        stage = int(name.removeprefix(STAGE)) - 1
        return Measure(f"after task {stage + 1}", lambda summary: _at(summary, stage), 100.0)
    require_known("metric", name, _MEASURES, "stage.N", "config.KEY")
    return _MEASURES[name]


def metric_title(name: str) -> str:
    """Return what a number is called in a table."""
    return name.removeprefix(CONFIG) if is_config(name) else unit_of(name).title


def is_config(name: str) -> bool:
    """Whether a number is a setting, for which nothing has to be run."""
    return name.startswith(CONFIG)


def config_value(config: RunConfig, name: str) -> float:
    """Return a setting that is a number; NaN where it is absent or none."""
    value = flatten(config.to_dict()).get(name.removeprefix(CONFIG))
    return float(value) if isinstance(value, int | float) else math.nan


def measure(summary: RunSummary, name: str) -> float:
    """Return a number of a finished run, as it is shown: accuracies in percent."""
    unit = unit_of(name)
    return unit.factor * unit.of(summary)


def _at(summary: RunSummary, stage: int) -> float:
    curve = summary.headline.stage_accuracy
    return float(curve[stage]) if stage < len(curve) else math.nan
