"""The run directory: what a run writes, and how it is read back.

``config.yaml``, ``stream.json`` and ``env.json`` are there from the start, ``metrics.jsonl`` grows line by line,
``checkpoints/`` lets a run go on and its method answer, ``summary.json`` appears when it is done. Every file is written
in one step, so that what is there is whole.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from cflat._errors import CFlatError, DataError
from cflat._files import plain_values, read_text, write_atomic
from cflat.config.documents import read_document
from cflat.config.run_config import RunConfig, parse_config
from cflat.config.validation import parse_section
from cflat.data import Outline, Split
from cflat.metrics import METRICS, AccuracyMatrix
from cflat.runs.changes import identity
from cflat.train import Cost, EpochRecord, Observer, TaskRecord

_SPEEDS = ("images_per_second", "evaluations_per_step", "step_seconds", "data_seconds")
COSTS = (*_SPEEDS, "peak_memory_bytes", "trainable_parameters")
"""Costs that a summary has at its top level; all others are in its ``cost``."""


@dataclass(frozen=True)
class RunSummary:
    """What a finished run has learned, and what it cost."""

    config: RunConfig
    accuracy: dict[str, AccuracyMatrix]
    """On test images, by score, the headline first; without stages if no test image was looked at."""
    cost: Cost
    seconds: float
    """Wall time of the run, over all restarts."""
    num_classes: int
    validation: dict[str, AccuracyMatrix] = field(default_factory=dict)
    """On validation images, by score; empty if there are none."""

    @property
    def split(self) -> Split:
        """The images that `headline` speaks of: test images, unless the run never looked at them."""
        is_tested = next(iter(self.accuracy.values())).num_stages > 0 or not self.validation
        return "test" if is_tested else "validation"

    @property
    def headline(self) -> AccuracyMatrix:
        """The accuracies of the method's first score, on the images of `split`."""
        return self.on(self.split)

    def on(self, split: Split) -> AccuracyMatrix:
        """Return the accuracies of the method's first score on the images of a split."""
        matrices = self.accuracy if split == "test" else self.validation
        if not matrices:
            raise DataError("This run kept no validation images aside; set data.validation, for example to 0.2.")
        return next(iter(matrices.values()))

    def value(self, name: str, split: Split | None = None) -> float:
        """Return a number by name: one of the metrics of accuracy, on the images of a split, or a cost."""
        if name in METRICS:
            return float(getattr(self.headline if split is None else self.on(split), name))
        return float(getattr(self.cost, name))

    def to_dict(self) -> dict[str, Any]:
        """Return the content of ``summary.json``."""
        config, headline = self.config, self.on("test")
        return {
            "method": config.method.name,
            "data": config.data.name,
            "optimizer": config.optimizer.name,
            "preset": config.preset,
            "seed": config.seed,
            "scenario": config.stream.scenario,
            "score": next(iter(self.accuracy)),
            **_accuracies(self.accuracy),
            **{name: getattr(self.cost, name) for name in COSTS},
            "seconds": self.seconds,
            "num_tasks": headline.num_tasks,
            "num_classes": self.num_classes,
            **({"validation": _accuracies(self.validation)} if self.validation else {}),
            "cost": asdict(self.cost),
            "definitions": {name: metric.definition for name, metric in METRICS.items()},
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], config: RunConfig) -> RunSummary:
        """Take over what `to_dict` returned."""
        accuracy, validation = (
            {name: AccuracyMatrix.from_dict(counts) for name, counts in part.get("scores", {}).items()}
            for part in (values, values.get("validation", {}))
        )
        if not accuracy:
            raise KeyError("scores")
        cost: Cost = parse_section(Cost, values["cost"], "cost")
        seconds, num_classes = float(values["seconds"]), int(values["num_classes"])
        return cls(config, accuracy, cost, seconds, num_classes, validation)


def _accuracies(matrices: Mapping[str, AccuracyMatrix]) -> dict[str, Any]:
    """Return the accuracies of the headline score, and the counts behind those of every score."""
    headline = next(iter(matrices.values()))
    return {
        **_numbers(headline),
        "stage_accuracy": headline.stage_accuracy.tolist(),
        "per_task": headline.per_task.tolist(),
        "accuracy_matrix": headline.accuracy.tolist(),
        "scores": {name: {**_numbers(matrix), **matrix.to_dict()} for name, matrix in matrices.items()},
    }


def _numbers(matrix: AccuracyMatrix) -> dict[str, float]:
    """Return all metrics; NaN if nothing was measured."""
    return matrix.summary() if matrix.num_stages else dict.fromkeys(METRICS, float("nan"))


@dataclass
class RunFolder:
    """A run directory."""

    path: Path

    def __post_init__(self) -> None:
        path = self.path
        self.config_file = path / "config.yaml"
        """The resolved configuration."""
        self.environment_file = path / "env.json"
        """Versions, machine and data."""
        self.stream_file = path / "stream.json"
        """Tasks and class names."""
        self.metrics_file = path / "metrics.jsonl"
        """One line per epoch and per task."""
        self.checkpoints = path / "checkpoints"
        """Folder of the states to go on from."""
        self.summary_file = path / "summary.json"
        """The result; absent until the run is done."""
        self.diverged_file = path / "diverged.json"
        """What is said about a training that has diverged, where that counts as a result."""

    @property
    def is_finished(self) -> bool:
        """Whether there is a result."""
        return self.summary_file.is_file()

    def load_config(self) -> RunConfig:
        """Read the configuration."""
        if not self.config_file.is_file():
            raise DataError(f"{str(self.path)!r} is not a run directory: it has no config.yaml.")
        try:
            return parse_config(read_document(self.config_file))
        except CFlatError as error:
            raise DataError(
                f"{str(self.config_file)!r} is not a configuration of this version of cflat. {error}"
            ) from error

    def load_environment(self) -> dict[str, Any]:
        """Read versions, machine and data."""
        return self._read(self.environment_file)

    def load_outline(self) -> Outline | None:
        """Read tasks and class names; None if the run was made before they were written."""
        if not self.stream_file.is_file():
            return None
        try:
            return Outline.from_dict(self._read(self.stream_file))
        except DataError as error:
            raise DataError(f"{str(self.stream_file)!r} cannot be used. {error}") from error

    def load_summary(self) -> RunSummary:
        """Read the result.

        Raises:
            DataError: If the run is not finished, the file is broken, or ``config.yaml`` is not what was run.
        """
        config = self.load_config()
        if not self.is_finished:
            raise DataError(f"The run in {str(self.path)!r} is not finished. Resume it: cflat run --resume {self.path}")
        self._require_unedited(config)
        values = self._read(self.summary_file)
        try:
            return RunSummary.from_dict(values, config)
        except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError, DataError) as error:
            raise DataError(f"{str(self.summary_file)!r} is not a summary of a run: {error}.") from error

    def _require_unedited(self, config: RunConfig) -> None:
        """Refuse to show a result under settings that it does not have."""
        begun: Any = None
        with suppress(DataError):  # absent or broken, it says nothing
            begun = self.load_environment().get("identity")
        now = plain_values(identity(config))
        for key in begun if isinstance(begun, dict) else ():
            if key in now and begun[key] != now[key]:  # other versions may have other keys
                raise DataError(
                    f"{str(self.config_file)!r} was edited: the run in this folder had {key} = {begun[key]!r:.200}, "
                    f"not {now[key]!r:.200}. Change it back."
                )

    def load_metrics(self) -> list[dict[str, Any]]:
        """Read the records of epochs and tasks; a half-written last line, left by a kill, is passed over."""
        try:
            return [json.loads(line) for line in read_text(self.metrics_file).split("\n")[:-1]]
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"{str(self.metrics_file)!r} cannot be read: {error}.") from error
        except (ValueError, RecursionError) as error:
            raise DataError(f"{str(self.metrics_file)!r} is broken: {error}.") from error

    def load_tasks(self) -> list[dict[str, Any]]:
        """Read the records of the tasks that are learned; none if the run has not come to write any."""
        records = self.load_metrics() if self.metrics_file.is_file() else []
        return [record for record in records if record.get("event") == "task"]

    def _read(self, file: Path) -> dict[str, Any]:
        try:
            values = json.loads(read_text(file))
        except (OSError, ValueError, RecursionError) as error:
            raise DataError(f"{str(file)!r} cannot be read: {error}.") from error
        if not isinstance(values, dict):
            raise DataError(f"{str(file)!r} must hold an object, got {type(values).__name__}.")
        return values


class MetricsLog(Observer):
    """Append one line per epoch and per task; a resumed run cuts off what its checkpoint does not know of.

    The file stays open and is hashed as it grows: nobody else may write to it or change what it holds, and a checkpoint
    that vouches for it is worth nothing beside another file. What no checkpoint vouches for is cut off at the start.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: BinaryIO | None = None
        self._offset = 0
        self._digest = hashlib.blake2b(digest_size=16)
        self._expected: str | None = None
        self._seconds_before = 0.0
        self._started = time.monotonic()

    @property
    def seconds(self) -> float:
        """Wall time of the run so far, over all restarts."""
        return self._seconds_before + time.monotonic() - self._started

    def on_run_start(self, num_tasks: int, first_task: int) -> None:
        """Cut the file back to where the run is."""
        try:
            self._file = file = self.path.open("a+b")
            file.seek(0)
            content = file.read(self._offset)
            if len(content) < self._offset:
                raise DataError(
                    f"{str(self.path)!r} is shorter than its checkpoint says; restart the run from scratch."
                )
            self._digest.update(content)
            if self._expected not in (None, self._digest.hexdigest()):
                raise DataError(f"{str(self.path)!r} is not what this run has written; restart the run from scratch.")
            file.truncate(self._offset)
        except OSError as error:
            raise DataError(f"{str(self.path)!r} could not be written: {error.strerror}.") from error

    def on_epoch(self, record: EpochRecord | TaskRecord) -> None:
        """Append the record."""
        values = plain_values({**asdict(record), "seconds": round(self.seconds, 3)})
        line = (json.dumps(values, allow_nan=False) + "\n").encode()
        file = self._require_own_file()
        try:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
        except OSError as error:
            raise DataError(f"{str(self.path)!r} could not be written: {error.strerror}.") from error
        self._offset += len(line)
        self._digest.update(line)

    on_task_end = on_epoch

    def state(self) -> dict[str, Any]:
        """Return length and hash of the file, which must still be our own, and the time spent."""
        self._require_own_file()
        return {"offset": self._offset, "digest": self._digest.hexdigest(), "seconds": self.seconds}

    def load(self, state: dict[str, Any]) -> None:
        """Take over length, hash and time."""
        self._offset, self._expected, self._seconds_before = state["offset"], state["digest"], state["seconds"]
        self._started = time.monotonic()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def _require_own_file(self) -> BinaryIO:
        assert self._file is not None, "on_run_start opens the file"
        with suppress(OSError):
            found = self.path.stat()
            if os.path.samestat(found, os.fstat(self._file.fileno())) and found.st_size == self._offset:
                return self._file
        raise DataError(f"{str(self.path)!r} was removed or changed by somebody else while the run wrote to it.")


def require_writable(folder: Path) -> None:
    """Write a file and remove it: what cannot be written is to be known before anything is computed."""
    probe = folder / ".probe"
    write_atomic(probe, b"")
    probe.unlink()


def find_runs(root: Path) -> Iterator[RunFolder]:
    """Yield the run directories at or below a folder, in order of their names; those inside a run belong to it."""
    found = sorted(path.parent for path in root.rglob("config.yaml")) if root.is_dir() else []
    if not found:
        raise DataError(f"There is no run directory at or below {str(root)!r}.")
    for path in found:
        if not any(parent in found for parent in path.parents):
            yield RunFolder(path)
