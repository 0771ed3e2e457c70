"""Numbers of a finished run by name, as tables ask for them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from cflat._registry import require_known
from cflat.config.documents import flatten
from cflat.config.run_config import RunConfig
from cflat.metrics import METRICS
from cflat.runs.folder import RunSummary

CONFIG, STAGE = "config.", "stage."


@dataclass(frozen=True)
class Measure:
    """What a number is called, and how it is shown."""

    title: str
    factor: float = 1.0
    digits: int = 2


_MEASURES: dict[str, Measure] = {
    **{name: Measure(metric.title, 100.0) for name, metric in METRICS.items()},
    "newest_task": Measure("newest task", 100.0),
    "images_per_second": Measure("Img/s", digits=1),
    "evaluations_per_step": Measure("eval/step"),
    "trainable_parameters": Measure("trained, M", 1e-6),
    "peak_memory_bytes": Measure("memory, GB", 1e-9),
}


def unit_of(name: str) -> Measure:
    """Return how a number is called and shown, or refuse its name."""
    stage = _stage(name)
    if stage:
        return Measure(f"after task {stage}", 100.0)
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
    stage, curve = _stage(name), summary.headline.stage_accuracy
    if stage:
        value = float(curve[stage - 1]) if stage <= len(curve) else math.nan
    else:
        value = float(summary.headline.per_task[-1]) if name == "newest_task" else summary.value(name)
    return unit_of(name).factor * value


def _stage(name: str) -> int:
    """Return N of ``stage.N``; 0 for other names."""
    number = name.removeprefix(STAGE)
    return int(number) if name != number and number.isdecimal() else 0
