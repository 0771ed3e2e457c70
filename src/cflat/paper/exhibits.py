"""The paper's tables and figures as data: which runs they need, and the numbers that were published.

Each is one YAML file in ``paper/recipes/``; a file of one's own in the same format works as well (docs/reproduce.md).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import PlainValidator

from cflat._errors import ConfigError
from cflat._registry import require_known, suggest
from cflat._settings import CountOrZero, settings_class
from cflat.config.documents import flatten, merge, read_document
from cflat.config.validation import parse_section, quote, require_mapping
from cflat.figures.figure import is_number
from cflat.methods import get_method_spec
from cflat.metrics import Spread
from cflat.paper.measures import is_config, metric_title

_FOLDER = files("cflat.paper") / "recipes"
_NUMBER = re.compile(r"^\s*([-+.\deE]+)\s*(?:±\s*([-+.\deE]+))?\s*$")


@dataclass(frozen=True)
class Published(Spread):
    """A number as it was printed, accuracies in percent."""

    std: float = math.nan
    n: int = 0
    """The paper does not state it."""


def _parse_number(value: Any) -> Published | None:
    # `replace` validates a line again, with numbers that are parsed already.
    if value is None or isinstance(value, Published):
        return value
    with suppress(ValueError):
        if found := _NUMBER.match(str(value)):
            return Published(float(found[1]), math.nan if found[2] is None else float(found[2]))
    raise ConfigError(f"A published number must look like 59.13 or 59.13 ± 0.30, got {quote(value)}.")


@settings_class
class Column:
    """A group of numbers that come from the same runs, such as one dataset."""

    name: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    """What sets these runs apart from those of other columns."""
    metrics: tuple[str, ...] = ("avg", "last")
    titles: tuple[str, ...] = ()
    """What the metrics are called here; empty takes their own titles."""

    def title(self, index: int) -> str:
        """Return what a metric is called here."""
        return self.titles[index] if self.titles else metric_title(self.metrics[index])


@settings_class
class Line:
    """One line of a table."""

    name: str = ""
    group: str = ""
    """Lines of one group are compared with its first."""
    settings: dict[str, Any] = field(default_factory=dict)
    per_column: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Further settings in some columns, by their names."""
    scales: tuple[str, ...] = ()
    """Scales that have this line; empty for all. A line of our own is none of the paper's runs."""
    published: tuple[tuple[Annotated[Published | None, PlainValidator(_parse_number)], ...], ...] = ()
    """For each column its numbers, ``null`` where there is none, ``59.13 ± 0.30`` with a deviation."""

    def number(self, column: int, metric: int) -> Published | None:
        """Return what was published there."""
        return self.published[column][metric] if self.published else None

    def settings_in(self, column: Column) -> dict[str, Any]:
        """Return what sets the runs of this line and a column apart."""
        return merge(column.settings, self.settings, self.per_column.get(column.name, {}))


@settings_class
class Drawing:
    """How a table becomes a picture; by default the gains over the first line of each group."""

    x: str | None = None
    """Key of a setting: numbers are drawn over it."""
    by: str | None = None
    """Key of a setting with a curve for each of its values."""
    stages: CountOrZero = 0
    """How many of the first metrics are accuracies after one task more each: they are drawn as curves."""


@settings_class
class Exhibit:
    """A table or figure of the paper."""

    name: str = ""
    """By default that of its file."""
    title: str = ""
    note: str = ""
    """What a reader must know, for example where the paper leaves something open."""
    settings: dict[str, Any] = field(default_factory=dict)
    """What all runs share."""
    scales: dict[str, Any] = field(default_factory=dict)
    """Further settings at some scales."""
    scores: dict[str, str] = field(default_factory=dict)
    """The score that was published, by method; a method that is not here shows its headline."""
    # PILOT's seed, for torch and for the class order.
    seeds: tuple[CountOrZero, ...] = (1993,)
    repeat: Literal["seed", "order"] = "seed"
    """What a further seed changes: the random numbers of a run, or as in PILOT the class order as well."""
    columns: tuple[Column, ...] = ()
    rows: tuple[Line, ...] = ()
    draw: Drawing = Drawing()
    figures: tuple[str, ...] = ()
    """Figures of watched gradients, as `cflat analyze` draws them, of a run with these settings."""

    @property
    def needs_no_run(self) -> bool:
        """Whether all numbers are settings."""
        metrics = [metric for column in self.columns for metric in column.metrics]
        return bool(metrics) and all(map(is_config, metrics))

    def at(self, scale: str) -> Exhibit:
        """Return the lines that a scale has."""
        return replace(self, rows=tuple(line for line in self.rows if not line.scales or scale in line.scales))

    def select(self, rows: Sequence[str] = (), columns: Sequence[str] = ()) -> Exhibit:
        """Return the part with these lines and columns, named by group, name, method, optimizer or dataset."""
        lines = self._chosen(rows, [_words(line.settings, line.group, line.name) for line in self.rows])
        kept = self._chosen(columns, [_words(column.settings, column.name) for column in self.columns])
        chosen = tuple(
            replace(line, published=tuple(line.published[i] for i in kept if line.published))
            for line in (self.rows[i] for i in lines)
        )
        return replace(self, rows=chosen, columns=tuple(self.columns[i] for i in kept))

    def _chosen(self, names: Sequence[str], words: Sequence[Sequence[str]]) -> list[int]:
        """Return which lines or columns fit any of the names, by the words that each goes by; all without names."""
        wanted = [name.strip().lower() for name in names]
        known = list(dict.fromkeys(word for own in words for word in own))
        for name, word in zip(names, wanted, strict=True):
            if word not in known:
                raise ConfigError(f"{self.name} has no {quote(name)}.{suggest(name, known)} Known: {', '.join(known)}.")
        return [index for index, own in enumerate(words) if not names or set(own) & set(wanted)]


def list_exhibits() -> list[Exhibit]:
    """Return the paper's tables and figures, tables first."""
    names = [Path(entry.name).stem for entry in _FOLDER.iterdir() if entry.name.endswith(".yaml")]
    # By number: table10 comes after table9.
    order = sorted(names, key=lambda name: (not name.startswith("table"), int(re.sub(r"\D", "", name))))
    return [load_exhibit(name) for name in order]


def load_exhibit(name: str) -> Exhibit:
    """Read a table or figure by its name, such as ``table1``, or from a file of one's own."""
    if name.endswith((".yaml", ".yml", ".json")):
        return _parse(Path(name).stem, read_document(name))
    own = _FOLDER / f"{name}.yaml"
    if not own.is_file():
        if name in ("fig1", "fig2"):
            raise ConfigError(
                f"{name} of the paper is a drawing of the idea; there is nothing to run. See cflat list recipes."
            )
        require_known("recipe", name, [exhibit.name for exhibit in list_exhibits()], "or a YAML file")
    return _parse(name, read_document(Path(str(own))))


def _parse(name: str, values: Mapping[str, Any]) -> Exhibit:
    exhibit: Exhibit = parse_section(Exhibit, values, name)
    exhibit = replace(exhibit, name=exhibit.name or name)
    # What fields say about each other, which their types cannot.
    if not exhibit.figures and not (exhibit.rows and exhibit.columns):
        raise ConfigError(f"{name} must have rows and columns, or figures.")
    for column in exhibit.columns:
        if column.titles and len(column.titles) != len(column.metrics):
            raise ConfigError(f"{name}: the column {column.name!r} needs one title for each of its metrics.")
        for metric in column.metrics:
            metric_title(metric)  # rejects a name that is not known
    if len({column.name for column in exhibit.columns}) < len(exhibit.columns):
        raise ConfigError(f"{name}: every column must have a name of its own.")
    if not exhibit.seeds or len(set(exhibit.seeds)) < len(exhibit.seeds):
        raise ConfigError(f"{name}: seeds must list different seeds, got {quote(list(exhibit.seeds))}.")
    for method, score in exhibit.scores.items():
        require_known(f"score of {method}", score, get_method_spec(method).scores)
    for scale, settings in exhibit.scales.items():
        require_mapping(settings, f"{name}: scales.{scale}")
    _check_drawing(exhibit)
    shape = [len(column.metrics) for column in exhibit.columns]
    for line in exhibit.rows:
        if line.published and [len(numbers) for numbers in line.published] != shape:
            raise ConfigError(f"{name}: published of {line.name!r} must have {shape} numbers for the columns.")
    return exhibit


def _check_drawing(exhibit: Exhibit) -> None:
    """Reject a picture over settings that some line does not have, before anything is run."""
    for key in filter(None, (exhibit.draw.x, exhibit.draw.by)):
        for line in exhibit.rows:
            value = flatten(merge(exhibit.settings, line.settings)).get(key)
            if value is None or (key == exhibit.draw.x and not is_number(value)):
                what = "a number" if key == exhibit.draw.x else "a value"
                raise ConfigError(f"{exhibit.name}: draw needs {what} at {key} in every row; {line.name!r} has none.")


def _words(settings: Mapping[str, Any], *names: str) -> list[str]:
    """Return the names by which a line or column can be selected."""
    chosen = [settings.get(key) for key in ("method", "optimizer", "data", "backbone")]
    words = [*names, *(value.get("name", "") if isinstance(value, dict) else value for value in chosen if value)]
    return [str(word).lower() for word in words if word]
