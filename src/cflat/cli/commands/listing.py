"""``cflat list``: what there is to choose from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer

from cflat._errors import ConfigError
from cflat._registry import require_known
from cflat.cli.options import Json
from cflat.cli.output import console, emit_json, next_command, table

EXAMPLES = """\
  cflat list                         what can be listed
  cflat list optimizers
  cflat list recipes                 the tables and figures of the paper
  cflat list keys                    every key of a configuration
  cflat list keys c_flat_turbo       the keys of one method, optimizer or base optimizer
"""

Rows = list[dict[str, Any]]


def command(
    what: Annotated[str | None, typer.Argument(help="optimizers, methods, datasets, ...; default: all lists")] = None,
    of: Annotated[
        str | None, typer.Argument(metavar="NAME", help="For keys: a method, an optimizer or a base optimizer")
    ] = None,
    json: Json = False,
) -> None:
    """List optimizers, bases, methods, datasets, backbones, presets, recipes (tables and figures), inputs or keys."""
    if what is None:
        _show([{"list": name, "what": text} for name, (_, text) in LISTS.items()], json, "cflat list optimizers")
        return
    require_known("list", what, LISTS)
    if of is not None and what != "keys":
        raise ConfigError(f"A name goes with keys only: cflat list keys {of}")
    _show(_keys(of) if what == "keys" else LISTS[what][0](), json, NEXT[what])


def _show(rows: Rows, as_json: bool, following: str) -> None:
    if as_json:
        emit_json(rows)
        return
    columns = list(rows[0]) if rows else []
    cells = [[_text(row[column]) for column in columns] for row in rows]
    console().print(table("", columns, cells, num_text=len(columns)))
    next_command(following)


def _optimizers() -> Rows:
    from cflat.optim import get_optimizer_spec, list_optimizers, optimizer_settings

    rows = []
    for spec in map(get_optimizer_spec, list_optimizers()):
        keys = [key for key in optimizer_settings(spec.name) if key != "options"]
        about = {"name": spec.name, "summary": spec.summary, "evaluations": spec.evaluations}
        rows.append({**about, "keys": keys, "paper": spec.paper})
    return rows


def _bases() -> Rows:
    from cflat.train.settings import base_class, base_keywords, list_bases

    return [
        {"name": name, "class": base_class(name).__name__, "keys": list(base_keywords(name))} for name in list_bases()
    ]


def _methods() -> Rows:
    from cflat.methods import get_method_spec, list_methods

    rows = []
    for spec in map(get_method_spec, list_methods()):
        about = {"name": spec.name, "summary": spec.summary, "scenarios": spec.scenarios, "backbones": spec.families}
        rows.append({**about, "memory": spec.needs_memory, "pretrained": spec.is_pretrained})
    return rows


def _datasets() -> Rows:
    from cflat.data import list_datasets

    rows = []
    for spec in list_datasets():
        counts = {"classes": spec.num_classes, "train": spec.num_train, "test": spec.num_test}
        name = f"{spec.name}:PATH" if spec.takes_path else spec.name
        rows.append({"name": name, "title": spec.title, **counts, "layout": spec.layout})
    return rows


def _backbones() -> Rows:
    from cflat.nn.backbone import list_backbones

    return [{"name": name, "description": text} for name, text in list_backbones().items()]


def _presets() -> Rows:
    from cflat.config.presets import PRESETS

    return [{"name": name, "description": text} for name, text in PRESETS.items()]


def _inputs() -> Rows:
    from cflat.data import INPUTS

    return [{"name": name, "description": INPUTS[name].description} for name in INPUTS]


def _recipes() -> Rows:
    from cflat.paper.exhibits import list_exhibits

    return [{"name": exhibit.name, "shows": exhibit.title} for exhibit in list_exhibits()]


def _keys(of: str | None = None) -> Rows:
    from cflat.config.describe import describe_keys

    rows = []
    for key in describe_keys(of):
        meaning = key.meaning.replace("`", "")  # docstrings quote names for the documentation's sake
        rows.append({"key": key.path, "default": key.default, "type": key.type, "meaning": meaning})
    return rows


LISTS: dict[str, tuple[Callable[[], Rows], str]] = {
    "optimizers": (_optimizers, "sharpness- and flatness-aware optimizers, with their cost"),
    "bases": (_bases, "base optimizers, which apply what these compute: torch's own and QHM"),
    "methods": (_methods, "continual-learning methods"),
    "datasets": (_datasets, "datasets, and where their files are expected"),
    "backbones": (_backbones, "networks"),
    "presets": (_presets, "complete sets of settings for a method and dataset"),
    "recipes": (_recipes, "tables and figures of the paper"),
    "inputs": (_inputs, "kinds of inputs: crops, augmentation and normalization"),
    "keys": (_keys, "every key of a configuration; with a name: those of a method, optimizer or base optimizer"),
}
NEXT = {
    "optimizers": "cflat list keys c_flat_turbo",
    "bases": "cflat list keys qhm",
    "methods": "cflat list keys icarl",
    "datasets": "cflat check-data digits",
    "backbones": "cflat run --method icarl --data digits backbone=small_cnn",
    "presets": "cflat run --method icarl --data digits --preset smoke --dry-run",
    "recipes": "cflat reproduce table1 --scale smoke",
    "inputs": "cflat run --method icarl --data digits backbone.inputs=none",
    "keys": "cflat run --method icarl --data digits train.epochs=2",
}


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
