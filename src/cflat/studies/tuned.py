"""What a search over settings found, and its file ``tuned.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any, Literal, TypeAlias

from pydantic import TypeAdapter

from cflat._errors import ConfigError, DataError, shortened
from cflat._files import read_text
from cflat._registry import suggest
from cflat.config.documents import Layer, merge
from cflat.config.presets import resolve_config
from cflat.runs.folder import RunFolder
from cflat.studies.space import Settings

Protocol: TypeAlias = Literal["stream", "first-task"]
PROTOCOLS: dict[str, str] = {
    "stream": "validation images of the whole stream: an upper bound, since nobody has seen it when it begins",
    "first-task": "validation images of the first task alone: what a continual learner can do",
}
"""What a trial is judged by."""
Metric: TypeAlias = Literal["avg", "last"]
METRICS: dict[str, str] = {
    "avg": "mean over stages of the accuracy on all validation images seen so far",
    "last": "accuracy on all validation images after the last task",
}
"""Numbers that can be maximised."""
COSTS = ("steps", "images", "evaluations", "seconds")


@dataclass(frozen=True)
class Trial:
    """Settings that were tried."""

    number: int
    settings: Settings
    """By dotted key."""
    state: Literal["complete", "pruned", "diverged"]
    score: float
    """Accuracy on validation images over the tasks that it came to, mean over the seeds; 0 if one has diverged."""
    num_tasks: int
    """Tasks that it came to."""
    steps: int
    """Of all seeds together, like the other costs."""
    images: int
    evaluations: int
    seconds: float
    runs: list[str]
    """Run directories, one for each seed."""


@dataclass(frozen=True)
class Tuned:
    """One optimizer: everything that was tried, and what is best."""

    optimizer: str
    """Its name, with the settings that it may carry."""
    trials: tuple[Trial, ...]

    @property
    def best(self) -> Trial | None:
        """The finished trial with the best validation accuracy, the first of several; None if all have diverged."""
        complete = [trial for trial in self.trials if trial.state == "complete"]
        return max(complete, key=lambda trial: trial.score, default=None)  # the first of equals

    @property
    def budget(self) -> dict[str, float]:
        """What the search has cost."""
        spent = {name: sum(getattr(trial, name) for trial in self.trials) for name in COSTS}
        ended = {state: sum(trial.state == state for trial in self.trials) for state in ("pruned", "diverged")}
        return {"trials": len(self.trials), **ended, **spent}


@dataclass(frozen=True)
class ValidationStudy:
    """Runs of several optimizers that are judged by validation images."""

    method: str
    data: str
    protocol: Protocol
    metric: Metric
    """Number that counts, on validation images."""
    score: str
    """The method's score that it is of."""
    seeds: tuple[int, ...]
    """Final runs must have others."""

    def to_dict(self) -> dict[str, Any]:
        """Return how its file begins."""
        chosen_by = {
            "images": "validation",
            "metric": self.metric,
            "score": self.score,
            "meaning": PROTOCOLS[self.protocol],
        }
        subject = {"method": self.method, "data": self.data, "protocol": self.protocol}
        return {**subject, "chosen_by": chosen_by, "seeds": list(self.seeds)}


@dataclass(frozen=True)
class Tuning(ValidationStudy):
    """Settings for several optimizers, found with the same number of trials on images that are not test images."""

    num_trials: int
    shared: Layer
    """What all runs share, as for `resolve_config`."""
    ranges: Mapping[str, Mapping[str, Any]]
    """By optimizer and key: what was searched."""
    optimizers: Mapping[str, Tuned]

    @property
    def base(self) -> str:
        """The base optimizer that all of them wrap."""
        # Settings under ``optimizer`` are for those that have them; the base alone would reject them.
        return resolve_config({key: value for key, value in self.shared.items() if key != "optimizer"}).base.name

    @property
    def settings(self) -> dict[str, Settings]:
        """The chosen settings by optimizer, under dotted keys; an optimizer whose trials all diverged has none."""
        return {name: tuned.best.settings for name, tuned in self.optimizers.items() if tuned.best is not None}

    @property
    def diverged(self) -> str:
        """A sentence on the optimizers whose trials all diverged; empty if there are none."""
        names = [name for name in self.optimizers if name not in self.settings]
        if not names:
            return ""
        return f"Every trial of {', '.join(names)} has diverged; search lower learning rates: --range base.lr=LOW:HIGH."

    def final_layer(self, chosen: Mapping[str, Any]) -> Layer:
        """Return what final runs share: as in the trials, but measured on test images, with the user's changes."""
        for key in dict.fromkeys(key for settings in self.settings.values() for key in settings):
            section, _, name = key.partition(".")
            if name in (chosen.get(section) or {}):
                raise ConfigError(f"{key} was tuned for each optimizer; leave it out, or compare without --tuned.")
        return merge(self.shared, {"data": {"evaluate": "test"}}, chosen)

    def check_seeds(self, seeds: Sequence[int]) -> None:
        """Reject seeds that settings were chosen by."""
        used = sorted(set(seeds) & set(self.seeds))
        if used:
            raise ConfigError(
                f"The settings were tuned with seed{'s' * (len(used) > 1)} {', '.join(map(str, used))}; "
                "choose other seeds for the final runs."
            )

    def to_dict(self) -> dict[str, Any]:
        """Return the content of ``tuned.json``."""
        found = {}
        for name, tuned in self.optimizers.items():
            best, trials = tuned.best, [asdict(trial) for trial in tuned.trials]
            chosen: dict[str, Any] = {"settings": None, "validation": None, "trial": None}
            if best is not None:
                chosen = {"settings": best.settings, "validation": best.score, "trial": best.number}
            found[name] = {**chosen, "budget": tuned.budget, "ranges": self.ranges[name], "trials": trials}
        return {**super().to_dict(), "num_trials": self.num_trials, "shared": self.shared, "optimizers": found}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Tuning:
        """Read what `to_dict` returned; the types of all values are checked."""
        # Settings, budget and best trial follow from the trials, so only those are read.
        entries, chosen_by = values["optimizers"].items(), values["chosen_by"]
        same = {key: values[key] for key in ("method", "data", "protocol", "seeds", "num_trials", "shared")}
        counted = {key: chosen_by[key] for key in ("metric", "score")}
        ranges = {name: entry["ranges"] for name, entry in entries}
        found = {name: {"optimizer": name, "trials": entry["trials"]} for name, entry in entries}
        return TypeAdapter(cls).validate_python({**same, **counted, "ranges": ranges, "optimizers": found})


def require_tuned(names: Sequence[str], tuning: Tuning) -> None:
    """Reject optimizers that no settings were found for."""
    known = list(tuning.settings)
    for name in names:
        if name in tuning.optimizers and name not in known:
            raise ConfigError(f"{name!r} has no tuned settings: every trial of it has diverged.")
        if name not in known:
            raise ConfigError(f"{name!r} was not tuned.{suggest(name, known)} Tuned: {', '.join(known)}.")


def validation_score(folder: RunFolder, metric: Metric, score: str, num_tasks: int | None = None) -> float:
    """Return the validation accuracy of a run over its first tasks, or all that it learned; 0 if it diverged there."""
    tasks = folder.load_tasks()[:num_tasks]
    if folder.diverged_file.is_file() and len(tasks) != num_tasks:  # it may have diverged in a later task
        return 0.0
    accuracies = [float(task["validation"][score]["stage_accuracy"]) for task in tasks]
    return mean(accuracies) if metric == "avg" else accuracies[-1]


def read_tuning(path: str | Path) -> Tuning:
    """Read ``tuned.json``."""
    try:
        return Tuning.from_dict(json.loads(read_text(Path(path))))
    except OSError as error:
        raise DataError(f"The settings {str(path)!r} cannot be read: {error.strerror}.") from error
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:  # any JSON may be in there
        reason = shortened(f"{type(error).__name__}: {' '.join(str(error).split())}", 300)
        raise DataError(f"{str(path)!r} was not written by cflat tune ({reason}).") from error
