"""Numbers of a finished run by name, as tables ask for them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from cflat._registry import require_known
from cflat.config.documents import flatten
from cflat.config.run_config import RunConfig
from cflat.data import dataset_spec
from cflat.data.stream import task_sizes
from cflat.metrics import METRICS
from cflat.runs.folder import RunSummary

CONFIG, STAGE, SCORED = "config.", "stage.", "@"


@dataclass(frozen=True)
class Measure:
    """What a number is called, and how it is shown."""

    title: str
    factor: float = 1.0
    digits: int = 2


_MEASURES: dict[str, Measure] = {
    **{name: Measure(metric.title, 100.0) for name, metric in METRICS.items()},
    # The paper's Table 10 is read as showing this one (docs/deviations.md).
    "newest_task": Measure("newest task", 100.0),
    "images_per_second": Measure("Img/s", digits=1),
    "evaluations_per_step": Measure("eval/step"),
    "trainable_parameters": Measure("trained, M", 1e-6),
    "total_parameters": Measure("all, M", 1e-6),
    "peak_memory_bytes": Measure("memory, GB", 1e-9),
}


def unit_of(name: str) -> Measure:
    """Return how a number is called and shown, or reject its name."""
    name, _, score = name.partition(SCORED)
    if score:
        return replace(unit_of(name), title=f"{unit_of(name).title}, {score}")
    stage = _stage(name)
    if stage:
        return Measure(f"after task {stage}", 100.0)
    require_known("metric", name, _MEASURES, "stage.N", "config.KEY", "METRIC@SCORE")
    return _MEASURES[name]


def metric_title(name: str) -> str:
    """Return what a number is called in a table."""
    return name.removeprefix(CONFIG) if is_config(name) else unit_of(name).title


def is_config(name: str) -> bool:
    """Whether a number is a setting, for which nothing has to be run."""
    return name.startswith(CONFIG)


def is_accuracy(name: str) -> bool:
    """Whether a number depends on the score."""
    name = name.partition(SCORED)[0]
    return name in METRICS or name == "newest_task" or bool(_stage(name))


def config_value(config: RunConfig, name: str) -> float:
    """Return a setting that is a number, or follows from some; NaN where it is absent or none."""
    key = name.removeprefix(CONFIG)
    value = _DERIVED[key](config) if key in _DERIVED else flatten(config.to_dict()).get(key)
    return float(value) if isinstance(value, int | float) else math.nan


def measure(summary: RunSummary, name: str) -> float:
    """Return a number of a finished run, as it is shown: accuracies in percent; NaN if it has no such score."""
    name, _, score = name.partition(SCORED)
    if score and score not in summary.accuracy:
        return math.nan
    summary = summary.judged_by(score or None)
    # A stream that was cut short (max_tasks) has fewer stages than the paper's table.
    stage, curve = _stage(name), summary.headline.stage_accuracy
    if stage:
        value = float(curve[stage - 1]) if stage <= len(curve) else math.nan
    else:
        value = float(summary.headline.per_task[-1]) if name == "newest_task" else summary.value(name)
    return unit_of(name).factor * value


def _num_tasks(config: RunConfig) -> int | None:
    spec, stream = dataset_spec(config.data.name), config.stream
    if stream.scenario == "domain":
        return len(spec.domains) or None
    if spec.num_classes is None or stream.initial is None or stream.increment is None:
        return None
    return len(task_sizes(spec.num_classes, stream.initial, stream.increment))


def _exemplars(config: RunConfig) -> float | None:
    """Return the exemplars of a class after the last task."""
    settings, num_classes = config.method.settings, dataset_spec(config.data.name).num_classes
    # The paper's "Exemplar 20" is read as 2000 in total, over 100 classes (docs/deviations.md).
    total: int | None = getattr(settings, "memory_total", None)
    each: int | None = getattr(settings, "memory_per_class", None)
    return each if total is None or num_classes is None else total / num_classes


_DERIVED: dict[str, Callable[[RunConfig], float | None]] = {"tasks": _num_tasks, "exemplars": _exemplars}
"""What follows from several settings: number of tasks, exemplars of a class at the end."""


def _stage(name: str) -> int:
    """Return N of ``stage.N``; 0 for other names."""
    number = name.removeprefix(STAGE)
    return int(number) if name != number and number.isdecimal() else 0
