"""The paper's figures of gradient dynamics, from what a recorder has kept.

Every function takes plain numbers (`cflat.analysis.recorder.GradientRecorder.to_dict`) and returns a figure as data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt

from cflat.figures.figure import Curve, FigureData, Panel, curve_through, downsampled

# Names from `cflat.analysis.recorder`, repeated here because importing it imports torch.
DRIFTING = ("g", "g_0", "g_vs", "g_vf")
MAX_EPOCHS = 6
"""Epochs shown as curves of their own; of more, these many are picked evenly."""
MAX_TASKS = 10
MIN_QUANTILES = 3
"""Records that a quantile plot needs."""
WINDOW = 5
"""Records of a moving mean, where a caption names one."""
_PAIRS = {"g_s - g, g": "sharpness: (g_s - g) / g", "g_f, g_s": "flatness: g_f / g_s"}


@dataclass(frozen=True)
class GradientHistory:
    """What was recorded along one run."""

    label: str
    lag: int
    records: Sequence[Mapping[str, Any]]
    ratios: Sequence[Mapping[str, Any]]
    ratio_edges: Sequence[float]

    @classmethod
    def from_dict(cls, label: str, values: Mapping[str, Any]) -> GradientHistory:
        """Read what a recorder returned."""
        return cls(label, values["lag"], values["records"], values["ratios"], values["ratio_edges"])

    @property
    def tasks(self) -> list[int]:
        """The tasks with records, in order."""
        return sorted({record["task"] for record in self.records})

    def of_task(self, task: int) -> list[Mapping[str, Any]]:
        """Return the records of one task."""
        return [record for record in self.records if record["task"] == task]


def correction_ratios(history: GradientHistory) -> FigureData:
    """Distribution of log |m / n| over the coordinates, by epoch of the first task (the paper's Figure 3, left)."""
    task = history.tasks[0] if history.tasks else 0
    edges = np.asarray(history.ratio_edges)
    centres, width = (edges[1:] + edges[:-1]) / 2, edges[1] - edges[0]
    panels = []
    for pair, title in _PAIRS.items():
        entries = [entry for entry in history.ratios if entry["task"] == task and entry["pair"] == pair]
        curves = []
        for entry in _spread_out(sorted(entries, key=lambda entry: int(entry["epoch"])), MAX_EPOCHS):
            counts = np.asarray(entry["counts"], dtype=float)
            density = counts / max(1.0, counts.sum()) / width  # an epoch without corrections is a flat line
            curves.append(Curve(f"epoch {entry['epoch'] + 1}", centres.tolist(), density.tolist()))
        empty = f"No step of task {task + 1} was recorded with all four evaluations."
        panels.append(Panel(title, "log |ratio|", "density", curves, empty=empty))
    return FigureData(
        "correction_ratios",
        f"Gradient correction ratios, task {task + 1} ({history.label})",
        panels,
        "How large the corrections are beside the gradients that they correct, coordinate by coordinate: 0 means as "
        "large, -7 a thousandth. The ends of the axis collect what lies beyond.",
    )


def drift(history: GradientHistory) -> FigureData:
    """Distance and cosine to ``lag`` steps earlier for g, g_0, g_vs, g_vf, task by task (Figures 3 right and 7)."""
    tasks = _spread_out(history.tasks, MAX_TASKS)
    turns = {name: [r["turns"][name] for r in history.records if name in r["turns"]] for name in DRIFTING}
    panels = []
    for key, words in (("distances", "L2 distance"), ("turns", "cosine")):
        for task in tasks:
            records = history.of_task(task)
            panels.append(
                Panel(
                    f"task {task + 1}: {words}",
                    "step",
                    f"{words} to {history.lag} steps earlier",
                    [curve_through(name, ((r["step"], r[key].get(name)) for r in records)) for name in DRIFTING],
                    y_scale="log" if key == "distances" else "linear",
                    empty=f"Task {task + 1} has no record {history.lag} steps after another; train it for more steps.",
                )
            )
    return FigureData(
        "gradient_drift",
        f"How far gradients move within {history.lag} steps ({history.label})",
        panels,
        "A small distance alone says little, because g_vs and g_vf are short vectors: look at the cosine, which is 1 "
        "where a direction is kept and 0 where it is a new one.",
        num_columns=len(tasks) if tasks else 1,
        meta={"mean_cosine": {name: float(np.mean(own)) if own else None for name, own in turns.items()}},
    )


def terms_over_tasks(history: GradientHistory) -> FigureData:
    """Sharpness and flatness along each task (Figure 4, left)."""
    panels = []
    for key, title in (("sharpness", "Sharpness: L(theta + eps_0) - L(theta)"), ("flatness", "Flatness: rho |g_0|")):
        curves = [
            curve_through(f"task {task + 1}", ((record["step"], record[key]) for record in history.of_task(task)))
            for task in _spread_out(history.tasks, MAX_TASKS)
        ]
        panels.append(Panel(title, "step of the task", key, curves, empty=f"No step was recorded with its {key}."))
    return FigureData(
        "terms_over_tasks", f"Sharpness and flatness over tasks ({history.label})", panels, "To first order in rho."
    )


def normality(history: GradientHistory) -> FigureData:
    """Q-Q plots of |g|^2 and |g_0|^2 against the normal distribution, by task (Figure 4, right)."""
    panels = []
    for name, title in (("g", "|g|²"), ("g_0", "|g₀|²")):
        curves = []
        for task in _spread_out(history.tasks, 4):
            values = [record["norms"][name] ** 2 for record in history.of_task(task) if name in record["norms"]]
            if len(values) >= MIN_QUANTILES:
                points = downsampled(*_quantiles(np.asarray(values)))
                curves.append(Curve(f"task {task + 1}", *points, style="points"))
        empty = f"No task has the {MIN_QUANTILES} records that a distribution needs; record more steps."
        panels.append(Panel(title, "normal quantile", "standardized value", curves, diagonal=True, empty=empty))
    return FigureData(
        "normality",
        f"Are the trigger's statistics normal? ({history.label})",
        panels,
        "Points on the line follow a normal distribution; points above it at the right are a heavy tail of large "
        "gradients.",
    )


def evolution(histories: Sequence[GradientHistory]) -> FigureData:
    """Loss, sharpness and flatness along whole runs, one curve for each (Figure 5 b to d)."""
    panels = []
    for key in ("loss", "sharpness", "flatness"):
        curves = []
        for history in histories:
            values = [float(record[key]) for record in history.records if record[key] is not None]
            means = [float(np.mean(values[max(0, i - WINDOW + 1) : i + 1])) for i in range(len(values))]
            curves.append(curve_through(history.label, enumerate(means)))
        empty = f"No step was recorded with its {key}."
        panels.append(Panel(key.capitalize(), "recorded step of the whole stream", key, curves, empty=empty))
    return FigureData(
        "evolution",
        "Loss, sharpness and flatness during training",
        panels,
        f"Moving means over {WINDOW} records, measured on training batches with the same radius for all.",
    )


def _quantiles(values: npt.NDArray[np.float64]) -> tuple[list[float], list[float]]:
    """Return normal quantiles and the sorted, standardized values."""
    normal = NormalDist()
    # In the middle of each step of the distribution, since 0 and 1 have no quantile.
    places = [normal.inv_cdf((index + 0.5) / len(values)) for index in range(len(values))]
    deviation = values.std(ddof=1)
    scaled = (np.sort(values) - values.mean()) / (deviation if deviation > 0 else 1.0)  # equal values have no deviation
    return places, scaled.tolist()


def _spread_out(items: Sequence[Any], number: int) -> list[Any]:
    """Return at most ``number`` of the items, evenly, the first and the last among them."""
    if len(items) <= number:
        return list(items)
    return [items[round(i * (len(items) - 1) / (number - 1))] for i in range(number)]
