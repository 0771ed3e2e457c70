"""The run directory: what a run writes, and how it is read back.

``config.yaml``, ``stream.json`` and ``env.json`` are there from the start, ``metrics.jsonl`` grows line by line,
``checkpoints/`` has what resume and `load_predictor` need, ``summary.json`` appears when the run is done. Every file is
written in one step: what is there is whole.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, BinaryIO

from cflat._errors import CFlatError, DataError
from cflat._files import open_in_place, plain_values, read_text, translate_read_errors
from cflat._plugins import require_recorded
from cflat._registry import require_known
from cflat.config.documents import read_document
from cflat.config.run_config import RunConfig, parse_config
from cflat.config.validation import parse_section
from cflat.data import Outline, Split
from cflat.metrics import METRICS, AccuracyMatrix
from cflat.train import Cost, EpochRecord, Observer, TaskRecord

_SPEEDS = ("images_per_second", "evaluations_per_step", "step_seconds", "data_seconds")
COSTS = (*_SPEEDS, "peak_memory_bytes", "trainable_parameters")
"""Costs that a summary has at its top level; all others are in its ``cost``."""
FLATNESS = ("sharpness", "eigenvalue")
"""How flat the training loss is at the end; see `cflat.analysis.flatness`."""


@dataclass(frozen=True)
class RunSummary:
    """What a finished run has learned, and what it cost."""

    config: RunConfig
    accuracy: dict[str, AccuracyMatrix]
    """On test images, by score; without stages if they were not evaluated."""
    cost: Cost
    seconds: float
    """Wall time of the run, over all restarts."""
    num_classes: int
    validation: dict[str, AccuracyMatrix] = field(default_factory=dict)
    """On validation images, by score; empty if there are none."""
    score: str = ""
    """The score of `headline`; by default the first, which is the one that the method's paper reports."""
    flatness: dict[str, float] = field(default_factory=dict)
    """Sharpness and largest eigenvalue of the training loss after the last trained task; empty unless requested."""

    def __post_init__(self) -> None:
        if not self.score:
            # Frozen, but the default depends on another field.
            object.__setattr__(self, "score", next(iter(self.accuracy)))
        require_known(f"score of {self.config.method.name}", self.score, self.accuracy)

    def judged_by(self, score: str | None) -> RunSummary:
        """Return the same run with another score as its headline; None changes nothing."""
        return self if score is None else replace(self, score=score)

    @property
    def further(self) -> tuple[str, ...]:
        """Names for `value` that not every run has: Avg and Last of other scores, metrics of certain streams."""
        others = [score for score in self.accuracy if score != self.score]
        own = [name for name in ("forward_transfer", "anytime") if not math.isnan(self.value(name))]
        return (*own, *(f"{metric}@{score}" for score in others for metric in ("avg", "last")))

    @property
    def split(self) -> Split:
        """The images of `headline`: test images, unless the run did not evaluate them."""
        is_tested = next(iter(self.accuracy.values())).num_stages > 0 or not self.validation
        return "test" if is_tested else "validation"

    @property
    def headline(self) -> AccuracyMatrix:
        """The accuracies of `score`, on the images of `split`."""
        return self.on(self.split)

    def on(self, split: Split) -> AccuracyMatrix:
        """Return the accuracies of `score` on the images of a split."""
        matrices = self.accuracy if split == "test" else self.validation
        if not matrices:
            raise DataError("This run kept no validation images aside; set data.validation, for example to 0.2.")
        return matrices[self.score]

    def value(self, name: str, split: Split | None = None) -> float:
        """Return a number by name: one of the metrics of accuracy, on the images of a split, or a cost.

        ``avg@nme`` is a metric of a certain score; NaN if the method has no such score.
        """
        name, _, score = name.partition("@")
        if score and score not in self.accuracy:
            return math.nan
        if name in METRICS:
            judged = self.judged_by(score or None)
            return float(getattr(judged.headline if split is None else judged.on(split), name))
        if name in FLATNESS:
            return self.flatness.get(name, float("nan"))
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
            "score": self.score,
            **_accuracies(self.accuracy, self.score),
            **{name: getattr(self.cost, name) for name in COSTS},
            "seconds": self.seconds,
            "num_tasks": headline.num_tasks,
            "num_classes": self.num_classes,
            **({"validation": _accuracies(self.validation, self.score)} if self.validation else {}),
            "flatness": self.flatness,
            "cost": asdict(self.cost),
            "definitions": {name: metric.definition for name, metric in METRICS.items()},
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], config: RunConfig) -> RunSummary:
        """Return the summary that `to_dict` has written."""
        accuracy, validation = (
            {name: AccuracyMatrix.from_dict(counts) for name, counts in part.get("scores", {}).items()}
            for part in (values, values.get("validation", {}))
        )
        if not accuracy:
            raise KeyError("scores")
        cost: Cost = parse_section(Cost, values["cost"], "cost")
        seconds, num_classes = float(values["seconds"]), int(values["num_classes"])
        flatness = {str(name): float(value) for name, value in values["flatness"].items()}
        return cls(config, accuracy, cost, seconds, num_classes, validation, str(values["score"]), flatness)


def _accuracies(matrices: Mapping[str, AccuracyMatrix], score: str) -> dict[str, Any]:
    """Return the accuracies of the headline score, and the counts behind those of every score."""
    headline = matrices[score]
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
        """Folder of the states to resume from."""
        self.summary_file = path / "summary.json"
        """The result; absent until the run is done."""
        self.diverged_file = path / "diverged.json"
        """Why the training diverged, where that counts as a result."""

    @property
    def is_finished(self) -> bool:
        """Whether there is a result."""
        return self.summary_file.is_file()

    def load_config(self, *, is_past: bool = False) -> RunConfig:
        """Read the configuration, and load the plug-ins of the run; to see what was run, it is read without them."""
        if not self.config_file.is_file():
            raise DataError(f"{str(self.path)!r} is not a run directory: it has no config.yaml.")
        plugins: Any = None
        with suppress(DataError):  # without a record there are none
            plugins = self.load_environment().get("plugins")
        # Only what trains or predicts needs the code of plug-ins.
        if not is_past:
            require_recorded(plugins, self.path)
        try:
            # Settings of a plug-in that is not here are shown as they were written.
            return parse_config(read_document(self.config_file), is_past=is_past and bool(plugins))
        except CFlatError as error:
            raise DataError(
                f"{str(self.config_file)!r} is not a configuration of this version of cflat. {error}"
            ) from error

    def load_environment(self) -> dict[str, Any]:
        """Read versions, machine and data."""
        return self._read(self.environment_file)

    def load_outline(self) -> Outline:
        """Read tasks and class names."""
        try:
            return Outline.from_dict(self._read(self.stream_file))
        except DataError as error:
            raise DataError(f"{str(self.stream_file)!r} cannot be used. {error}") from error

    def load_summary(self) -> RunSummary:
        """Read the result.

        Raises:
            DataError: If the run is not finished, the file is broken, or ``config.yaml`` is not what was run.
        """
        config = self.load_config(is_past=True)
        if not self.is_finished:
            raise DataError(f"The run in {str(self.path)!r} is not finished. Resume it: cflat run --resume {self.path}")
        self._require_unedited(config)
        values = self._read(self.summary_file)
        with translate_read_errors(self.summary_file, "a summary of a run"):
            return RunSummary.from_dict(values, config)

    def _require_unedited(self, config: RunConfig) -> None:
        """Reject a configuration that was edited after the run: its result has other settings."""
        begun: Any = None
        with suppress(DataError):  # without a record there is nothing to compare with
            begun = self.load_environment().get("identity")
        now = config.identity()
        # By identity, not by text: neutral keys may differ after a resume.
        for key in begun if isinstance(begun, dict) else ():
            if key in now and begun[key] != now[key]:  # other versions may have other keys
                raise DataError(
                    f"{str(self.config_file)!r} was edited: the run in this folder had {key} = {begun[key]!r:.200}, "
                    f"not {now[key]!r:.200}. Change it back."
                )

    def load_metrics(self) -> list[dict[str, Any]]:
        """Read the records of epochs and tasks; a half-written last line, left by a kill, is ignored."""
        try:
            return [json.loads(line) for line in read_text(self.metrics_file).split("\n")[:-1]]
        except (OSError, ValueError, RecursionError) as error:
            raise DataError(f"{str(self.metrics_file)!r} cannot be read: {error}.") from error

    def load_tasks(self) -> list[dict[str, Any]]:
        """Read the records of the tasks that are learned; none if the run has not written any yet."""
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

    The file stays open and is hashed as it grows. A checkpoint holds its length and hash: a file that was changed
    since is rejected, and lines after the last checkpoint are cut off at the start.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: BinaryIO | None = None
        self._offset = 0
        self._digest = hashlib.blake2b(digest_size=16)
        self._expected: str | None = None  # of a checkpoint; None if there is none
        self._seconds_before = 0.0
        self._started = time.monotonic()

    @property
    def seconds(self) -> float:
        """Wall time of the run so far, over all restarts."""
        return self._seconds_before + time.monotonic() - self._started

    def on_run_start(self, num_tasks: int, first_task: int) -> None:
        """Cut the file back to where the run is."""
        try:
            self._file = file = os.fdopen(open_in_place(self.path), "r+b")
            self._digest.update(file.read(self._offset))
            if self._expected not in (None, self._digest.hexdigest()):
                raise DataError(f"{str(self.path)!r} is not what this run has written; restart the run from scratch.")
            file.truncate(self._offset)
            file.seek(self._offset)
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
            os.fsync(file.fileno())  # a checkpoint must not vouch for lines that a power cut takes
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
        """Restore length, hash and time."""
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
        raise DataError(f"{str(self.path)!r} was removed or changed by another process while the run wrote to it.")


def require_writable(folder: Path) -> None:
    """Write a file and remove it, to fail before anything is computed."""
    try:
        with TemporaryFile(dir=folder) as file:  # under a name of its own: other processes may check, too
            file.write(b"\n")
    except OSError as error:
        raise DataError(f"The folder {str(folder)!r} cannot be written: {error.strerror}.") from error


def has_content(folder: Path) -> bool:
    """Whether a folder holds more than what a run leaves that was killed while it made its folder."""
    return any(not entry.name.startswith(".") for entry in folder.iterdir())


def find_runs(root: Path) -> Iterator[RunFolder]:
    """Yield the run directories at or below a folder, in order of their names; those inside a run belong to it."""
    found = {path.parent for path in root.rglob("config.yaml")} if root.is_dir() else set()
    if not found:
        raise DataError(f"There is no run directory at or below {str(root)!r}.")
    for path in sorted(found):
        # An analysis keeps runs of its own below the run that it is about.
        if not any(parent in found for parent in path.parents):
            yield RunFolder(path)
