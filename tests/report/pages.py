"""What tests look for in a page, and run directories to make pages of."""

from __future__ import annotations

import json
import re
import zlib
from dataclasses import asdict, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np

from cflat._files import write_json
from cflat.config.presets import resolve_config
from cflat.config.run_config import RunConfig
from cflat.metrics import AccuracyMatrix
from cflat.runs.folder import RunFolder, RunSummary
from runs import A_COST

NUM_TASKS = 5


class Page(HTMLParser):
    """The elements and texts of a page, scripts apart."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.scripts: list[str] = []
        self.figures: list[dict[str, Any]] = []
        self._open: tuple[str, dict[str, str | None]] = ("", {})
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._open = (tag, dict(attrs))
        self.elements.append(self._open)

    def handle_endtag(self, tag: str) -> None:
        self._open = ("", {})

    def handle_data(self, data: str) -> None:
        tag, attributes = self._open
        if tag == "script" and attributes.get("type") == "application/json":
            values = json.loads(data)
            if "data-figure" in attributes:
                self.figures.append(values)
        elif tag in ("script", "style"):
            self.scripts.append(data)
        elif data.strip():
            self.texts.append(data.strip())

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.elements)

    def outside(self) -> list[str]:
        """Return what the page would load from elsewhere."""
        loading = ("src", "href", "srcset", "data", "action", "poster")
        named = [v or "" for _, attributes in self.elements for key, v in attributes.items() if key in loading]
        styles = [url for text in self.scripts[:1] for url in re.findall(r"url\(([^)]*)\)|@import\s+(\S+)", text)]
        return [value for value in named if not value.startswith(("#", "data:"))] + [str(url) for url in styles]


def config_of(**chosen: Any) -> RunConfig:
    return resolve_config({"method": "icarl", "data": "digits", **chosen})


def write_run(
    folder: Path, config: RunConfig, *, num_epochs: int = 4, is_finished: bool = True, num_tasks: int = NUM_TASKS
) -> None:
    """Write the directory of a run that never took place; its numbers follow from seed and optimizer."""
    numbers = np.random.default_rng([config.seed, zlib.crc32(repr(config.optimizer).encode())])
    folder.mkdir(parents=True)
    run = RunFolder(folder)
    run.config_file.write_text(config.to_yaml())
    write_json(run.environment_file, {"cflat": "0.1.0", "packages": {"torch": "2"}, "cpus": 2})
    matrix = AccuracyMatrix.start([50] * num_tasks)
    lines = []
    for task in range(num_tasks):
        lines += [_epoch(task, epoch, numbers) for epoch in range(num_epochs)]
        matrix = matrix.with_stage(numbers.integers(30, 50, task + 1))
        score = {"stage_accuracy": float(matrix.stage_accuracy[-1]), "per_task": matrix.per_task.tolist()}
        scores = {"cnn": score}
        lines.append({"event": "task", "task": task, "name": f"task {task}", "scores": scores, "cost": asdict(A_COST)})
    run.metrics_file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    if is_finished:
        cost = replace(
            A_COST,
            steps=100,
            evaluations=250,
            evaluations_per_step=2.5,
            images_per_second=float(numbers.integers(100, 900)),
            evaluations_by_kind={"sharpness.refreshed": 20, "sharpness.reused": 80},
            peak_memory_bytes=1 << 30,
        )
        write_json(run.summary_file, RunSummary(config, {"cnn": matrix}, cost, 12.0, 10).to_dict())


def _epoch(task: int, epoch: int, numbers: np.random.Generator) -> dict[str, Any]:
    steps = 10 * (epoch + 1)
    return {
        "event": "epoch",
        "task": task,
        "phase": "train",
        "epoch": epoch,
        "loss": float(numbers.random()),
        "telemetry": {
            "steps": steps,
            "evaluations": 2 * steps,
            "sharpness": {"refreshed": epoch + 1, "reused": 6 * (epoch + 1), "skipped": 3 * (epoch + 1)},
            "cache_age": {"sharpness": int(numbers.integers(0, 9))},
        },
    }
