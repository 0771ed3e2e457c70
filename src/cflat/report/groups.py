"""Runs that differ in their seed alone, named by what sets them apart from the others."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from cflat._errors import UnknownName
from cflat.config.documents import flatten
from cflat.config.run_config import RunConfig, neutral_keys
from cflat.data import Split
from cflat.figures.runs import RunGroup, Timeline
from cflat.metrics import Spread, spread
from cflat.optim import get_optimizer_spec
from cflat.report.records import RunRecord
from cflat.runs.folder import RunSummary
from cflat.train.settings import base_class

MAX_NAMED_KEYS = 3

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True)
class SeedRuns:
    """Finished runs that differ in their seed alone."""

    summaries: tuple[RunSummary, ...]

    @property
    def validation(self) -> Spread | None:
        """Avg on validation images; None if there are none to choose by."""
        if not self.summaries or not all(summary.validation for summary in self.summaries):
            return None
        return spread([summary.value("avg", "validation") for summary in self.summaries])

    @property
    def score(self) -> str:
        """The score that its accuracies are of."""
        return self.summaries[0].score

    @property
    def further(self) -> tuple[str, ...]:
        """Metrics of the other scores that tables also show."""
        return self.summaries[0].further if self.summaries else ()

    def values(self, name: str) -> list[float]:
        """Return a metric or cost of each run; ``avg@nme`` is a metric of a certain score."""
        return [summary.value(name) for summary in self.summaries]

    def spread(self, name: str) -> Spread:
        """Return the spread of a metric or cost over the runs."""
        return spread(self.values(name))


@dataclass(frozen=True)
class Group(SeedRuns):
    """Runs with one configuration and several seeds, also those that are not finished."""

    subject: str
    """Method and dataset."""
    variant: str
    """What sets it apart from the other groups of its subject."""
    name: str
    """Both, as far as the report needs them."""
    records: tuple[RunRecord, ...]
    settings: dict[str, Any]
    """The configuration without the seed, under dotted keys."""

    @property
    def config(self) -> RunConfig:
        """The configuration of the first run."""
        return self.records[0].config

    @property
    def circumstances(self) -> str:
        """Everything that can change a result but optimizer and seed; groups that share it can be compared."""
        # Each optimizer has its own tuned values; they compare if one search with one budget has chosen them.
        first = self.records[0]
        same = {
            key: value
            for key, value in self.settings.items()
            if not _is_apart(key) and not key.startswith("optimizer.") and key not in first.tuned
        }
        return json.dumps({**same, "tuned by": first.tuned_by}, sort_keys=True)

    @property
    def split(self) -> Split:
        """The images that its accuracies speak of."""
        if self.summaries:
            return self.summaries[0].split
        return "validation" if self.config.data.evaluate == "validation" else "test"

    @property
    def finished(self) -> tuple[RunRecord, ...]:
        """The runs that have a result."""
        return tuple(record for record in self.records if record.is_finished)

    def by_seed(self, name: str) -> dict[int, float]:
        """Return a metric or cost by seed; of a seed that was run twice, the last."""
        return dict(zip((record.config.seed for record in self.finished), self.values(name), strict=True))

    def numbers(self) -> RunGroup:
        """Return what figures need; of finished runs, unless there are none."""
        matrices = [summary.headline.accuracy for summary in self.summaries]
        return RunGroup(
            self.variant,
            [record.stage_accuracy for record in self.finished or self.records if record.stage_accuracy],
            self.values("images_per_second"),
            self.values("evaluations_per_step"),
            [matrix.tolist() for matrix in matrices if matrix.shape == matrices[0].shape],
            is_finished=bool(self.finished),
        )

    def timeline(self) -> Timeline | None:
        """Return the mean history of the runs that took the same steps as the first."""
        lines = [record.timeline for record in self.finished or self.records if record.timeline is not None]
        # Seeds may differ in their steps, where memory or batches depend on them; their epochs do not line up then.
        alike = [line for line in lines if list(line.steps) == list(lines[0].steps)]
        if not alike:
            return None
        first = alike[0]
        return Timeline(
            self.variant,
            first.steps,
            _mean([line.loss for line in alike]),
            _mean([line.evaluations_per_step for line in alike]),
            {key: _mean([line.shares[key] for line in alike if key in line.shares]) for key in first.shares},
            {key: _mean([line.cache_age[key] for line in alike if key in line.cache_age]) for key in first.cache_age},
            _mean([line.surrogate_error for line in alike]) if all(line.surrogate_error for line in alike) else (),
        )


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Return the items by their keys, in order of appearance."""
    found: dict[K, list[T]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found


def group_records(records: Sequence[RunRecord]) -> list[Group]:
    """Group runs by everything but the seed: subject by subject, the base optimizer alone first."""
    members = grouped(records, lambda record: json.dumps(flat_settings(record.config), sort_keys=True))
    subjects = list(dict.fromkeys(subject_of(record.config) for record in records))
    ordered = sorted(
        members.values(),
        key=lambda runs: (subjects.index(subject_of(runs[0].config)), runs[0].config.optimizer.name != "none"),
    )
    settings = [flat_settings(runs[0].config) for runs in ordered]
    groups: list[Group] = []
    taken: Counter[str] = Counter()
    for own, runs in zip(settings, ordered, strict=True):
        subject = subject_of(runs[0].config)
        variant = _variant(runs[0].config, own, settings)
        # Only the first few differing keys are named, so two groups may get one name.
        taken[subject + variant] += 1
        if taken[subject + variant] > 1:
            variant = f"{variant} #{taken[subject + variant]}"
        name = variant if len(subjects) == 1 else f"{variant}, {subject}"
        by_seed = sorted(runs, key=lambda record: record.config.seed)  # folders are found in any order
        summaries = tuple(record.summary for record in by_seed if record.summary is not None)
        groups.append(Group(summaries, subject, variant, name, tuple(by_seed), own))
    return groups


def families(groups: Iterable[Group]) -> list[list[Group]]:
    """Return the finished groups in families that differ in the optimizer alone; the first of each is its reference.

    Groups are ordered with the plain optimizer first, so that is the reference wherever it was run.
    """
    finished = (group for group in groups if group.finished)
    return list(grouped(finished, lambda group: group.circumstances).values())


def differing_keys(settings: Sequence[dict[str, Any]]) -> list[str]:
    """Return the keys that do not have one value everywhere, in order of appearance."""
    keys = dict.fromkeys(key for values in settings for key in values)
    absent = object()  # a key that is missing differs from one that is null
    return [key for key in keys if any(own.get(key, absent) != settings[0].get(key, absent) for own in settings)]


def title_of(optimizer: str, base: str = "sgd") -> str:
    """Return an optimizer's name as papers write it, with the settings that it may carry; ``none`` is its base.

    >>> title_of("c_flat_turbo:reading=calibrated"), title_of("none", base="adamw")
    ('C-Flat Turbo, reading=calibrated', 'AdamW')
    """
    name, *settings = optimizer.split(":")
    with suppress(UnknownName):  # of a plug-in that is not installed here
        name = base_class(base).__name__ if name == "none" else get_optimizer_spec(name).title
    return ", ".join([name, *settings])


def plain_text(value: Any) -> str:
    """Return a setting as a person would write it."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def flat_settings(config: RunConfig) -> dict[str, Any]:
    """Return a configuration without its seed, under dotted keys."""
    return {key: value for key, value in flatten(config.to_dict()).items() if key != "seed"}


def _is_apart(key: str) -> bool:
    """Whether a key is about where and how a run is made, but not about its result."""
    return key == "preset" or key in neutral_keys()  # a preset is a name for other keys


def subject_of(config: RunConfig) -> str:
    """Return method and dataset of a run."""
    return f"{config.method.name} on {config.data.name}"


def _variant(config: RunConfig, own: dict[str, Any], settings: Sequence[dict[str, Any]]) -> str:
    """Name the optimizer, its settings where rivals have others, and all other keys in which the groups differ."""
    kin = [other for other in settings if all(other[key] == own[key] for key in ("method.name", "data.name"))]
    rivals = [other for other in kin if other["optimizer.name"] == own["optimizer.name"]]
    keys = [key for key in differing_keys(rivals) if key.startswith("optimizer.")]
    keys += [key for key in differing_keys(kin) if not (_is_apart(key) or key.startswith("optimizer."))]
    if own["optimizer.name"] == "none" and "base.name" in keys:  # its title already
        keys.remove("base.name")
    if len(rivals) > 1 and not keys:  # they differ in keys that change no result, and still need different names
        keys = differing_keys(rivals)
    shown = [f"{key.removeprefix('optimizer.')}={plain_text(own.get(key))}" for key in keys[:MAX_NAMED_KEYS]]
    return ", ".join([title_of(config.optimizer.name, config.base.name), *shown])


def _mean(rows: list[Sequence[float]]) -> list[float]:
    """Return the mean of each column over the rows that have a number there; NaN where none has."""
    stack = np.array(rows, dtype=float)
    # Not nanmean: it warns about columns without a number, and warnings are errors here.
    return np.ma.array(stack, mask=np.isnan(stack)).mean(axis=0).filled(np.nan).tolist()  # type: ignore[no-any-return]
