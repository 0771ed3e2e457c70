"""The configuration of a run of the study, from its key and its settings. Frozen."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from benchmarks.study.definition import (
    BLOCK_OF,
    BLOCKS,
    PAPER_LINES,
    ROWS,
    VALIDATION,
    Layer,
    Row,
    Stream,
    replicate_layer,
)
from benchmarks.study.tuning import Settings

from cflat.config.documents import merge
from cflat.config.presets import resolve_config
from cflat.config.run_config import RunConfig
from cflat.paper.exhibits import load_exhibit
from cflat.paper.reproduce import Plan, Request, plan_exhibit

Stage = Literal["tune", "final"]


class Key(NamedTuple):
    """What is run once (on a kind of machine)."""

    stream: str
    row: str
    replicate: int
    stage: Stage
    trial: int = -1
    """Of tuning; -1 in final runs."""


@dataclass(frozen=True)
class Places:
    """Where features, images and weights lie on this machine."""

    features: Path | None = None
    data_root: Path | None = None
    weights: Path | None = None

    def missing(self, stream: Stream) -> str | None:
        """Return what a stream needs and is not there, or None."""
        folders = {"images": self.data_root, "weights": self.weights}
        for need in stream.needs:
            path = folders[need] if need in folders else self.features and self.features / need
            if path is None or not path.exists():
                return need
        return None


@dataclass(frozen=True)
class Run:
    """What is to be run."""

    key: Key
    settings: Settings | None
    """None takes the paper's."""

    @property
    def row(self) -> Row:
        return ROWS[self.key.row]


def config_of(run: Run, places: Places) -> RunConfig:
    """Return the configuration of a run; nothing but the key and the settings decides it, besides the places."""
    block = BLOCKS[BLOCK_OF[run.key.stream]]
    stream = block.streams[run.key.stream]
    if stream.exhibit is not None:
        return _paper_config(run, stream, places)
    is_trial = run.key.stage == "tune"
    held_out = VALIDATION if is_trial else block.final_validation
    layer = merge(
        stream.layer,
        replicate_layer(run.key.replicate, stream.scenario),
        {"data": {"validation": held_out, "evaluate": "validation" if is_trial else "test"}},
        _row_layer(run, stream),
        _place_layer(stream, places),
    )
    if is_trial and stream.tuned_tasks is not None:
        layer = merge(layer, {"stream": {"max_tasks": stream.tuned_tasks}})
    if held_out == 0:
        layer["data"].pop("validation_per_class", None)
    return resolve_config(layer)


def _row_layer(run: Run, stream: Stream) -> dict[str, Any]:
    row, settings = run.row, run.settings
    if settings is None:
        raise ValueError(f"{run.key} has no settings.")
    radius = {} if settings.rho is None else {"rho": settings.rho}
    return {
        "base": {**row.base, "lr": settings.lr},
        "optimizer": {**row.optimizer, **radius},
        "train": {"epochs": round(stream.layer["train"]["epochs"] * row.epochs)},
    }


def _place_layer(stream: Stream, places: Places) -> dict[str, Any]:
    layer: dict[str, Any] = {}
    if "images" in stream.needs:
        layer["data"] = {"root": str(places.data_root)}
    if "weights" in stream.needs:
        layer["backbone"] = {"weights": str(places.weights)}
    kind, _, name = stream.layer["data"]["name"].partition(":")
    if kind == "features":
        layer["data"] = {"name": f"features:{places.features}/{name}.npz"}
    return layer


def _paper_plan(run: Run, stream: Stream, places: Places, rate: Layer) -> Plan:
    table, _ = stream.exhibit or ("", "")
    order = {"stream": {"task_order_seed": 10_000 + run.key.replicate}} if stream.scenario == "domain" else {}
    chosen = merge(stream.layer, {"data": {"root": str(places.data_root)}}, order, rate)
    request = Request("cpu", str(places.weights), chosen, (run.key.replicate,))
    return plan_exhibit(load_exhibit(table), request, Path("unused"))


def _paper_config(run: Run, stream: Stream, places: Places) -> RunConfig:
    """Return what `cflat reproduce` runs for this line of the table, at another rate where the row has one."""

    def config(rate: Layer) -> RunConfig:
        plan = _paper_plan(run, stream, places, rate)
        column = [one.name for one in plan.exhibit.columns].index((stream.exhibit or ("", ""))[1])
        line = [one.name for one in plan.exhibit.rows].index(PAPER_LINES[run.key.row])
        return plan.jobs[line][column][0].config

    papers = config({})
    return papers if run.row.rate == 1 else config({"base": {"lr": papers.base.lr * run.row.rate}})


def published_score(run: Run, places: Places) -> str | None:
    """Return the score that the paper's table reports of the method; None is its headline."""
    stream = BLOCKS[BLOCK_OF[run.key.stream]].streams[run.key.stream]
    if stream.exhibit is None:
        return None
    return _paper_plan(run, stream, places, {}).score_of(config_of(run, places).method.name)
