"""Write the tables of the README and of docs/data.md anew, from the registries and the results: ``make tables``.

A table stands between ``<!-- begin: NAME -->`` and ``<!-- end: NAME -->``; a test says when one is out of date.
"""

from __future__ import annotations

import re
import statistics
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from cflat.data import list_datasets
from cflat.methods import get_method_spec, list_methods
from cflat.optim import get_optimizer_spec, list_optimizers

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

from front_streams import ROWS as FRONT
from front_tables import gain, percent, published_streams

sys.path.pop(0)  # benchmarks/data.py must hide no other module of this name

ROOT = Path(__file__).resolve().parents[1]
LEDGER = ROOT / "docs" / "results" / "front"
SHOWN_STREAMS = {
    "digits-class": "digits, replay",
    "digits-task": "digits, by task",
    "features-class": "features, replay",
    "features-task": "features, by task",
    "icarl": "iCaRL",
    "memo": "MEMO",
    "ease": "EASE",
    "ranpac": "RanPAC",
}
SHOWN_ROWS = (
    *("none", "none-nesterov", "turbo", "c_flat", "msam", "sam", "ss_sam", "ae_sam", "friendly_sam"),
    *("looksam", "gsam", "gam", "asam", "c_flat_plus", "turbo-measured", "turbo-steady", "turbo-paper"),
)
FILES = ("README.md", "docs/data.md")
Rows = list[list[object]]
MARKED = re.compile(r"(<!-- begin: (\w+) -->\n).*?(<!-- end: \2 -->)", flags=re.S)


def optimizers() -> Rows:
    """Return what each optimizer costs, the cheapest first."""
    specs = [get_optimizer_spec(name) for name in list_optimizers()]
    specs.sort(key=lambda spec: (spec.held, spec.name))
    rows = [[f"`{s.name}`", f"`{s.cls.__name__}`", s.evaluations, s.held, s.kept] for s in specs]
    return [["name", "class", "evaluations per step", "buffers in a pass", "kept"], *rows]


def methods() -> Rows:
    """Return what each method is for."""
    rows: Rows = [["method", "what it does", "streams", "exemplars", "backbones"]]
    for spec in map(get_method_spec, list_methods()):
        memory = "yes" if spec.needs_memory else "no"
        rows.append([f"`{spec.name}`", spec.summary, ", ".join(spec.scenarios), memory, _backbones(spec.families)])
    return rows


def datasets() -> Rows:
    """Return where each dataset is expected, and how large it is."""
    rows: Rows = [["name", "expected below the root", "classes", "train / test", "usual split", "licence"]]
    for spec in list_datasets():
        if spec.takes_path:
            continue
        domains = f" x {len(spec.domains)} domains" if spec.domains else ""
        size = f"{spec.num_train:,} / {spec.num_test:,}" if spec.num_train and spec.num_test else "no official split"
        split = "by domain" if spec.split is None or spec.domains else f"{spec.split[0]} + {spec.split[1]}"
        rows.append([f"`{spec.name}`", spec.layout, f"{spec.num_classes}{domains}", size, split, spec.licence])
    return rows


def gains() -> Rows:
    """Return what optimizers have gained over SGD on the streams of the front; in bold what is significant."""
    streams = published_streams(LEDGER)
    rows: Rows = [["optimizer", "evaluations", *SHOWN_STREAMS.values()]]
    for name in SHOWN_ROWS:
        runs = {stream: streams[stream]["rows"].get(name) for stream in SHOWN_STREAMS}
        evaluations = statistics.mean(e for run in runs.values() if run for e in run["evaluations_per_step"])
        cells = [_cell(run, streams[stream]["rows"]["none"]) for stream, run in runs.items()]
        rows.append([FRONT[name].title, f"{evaluations:.1f}", *cells])
    return rows


def _cell(run: dict[str, Any] | None, plain: dict[str, Any]) -> str:
    if run is None:
        return "-"
    return f"{percent(run['avg'])} %" if run is plain else gain(run, plain)


TABLES: dict[str, Callable[[], Rows]] = {
    "optimizers": optimizers,
    "methods": methods,
    "datasets": datasets,
    "gains": gains,
}


def rewritten(text: str) -> str:
    """Return a document with its tables as registries and results have them now."""
    return MARKED.sub(lambda match: f"{match[1]}{_markdown(TABLES[match[2]]())}{match[3]}", text)


def _markdown(rows: Rows) -> str:
    lines = [f"| {' | '.join(str(cell).replace('<', '&lt;') for cell in row)} |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]]) + "\n"


def _backbones(families: Iterable[str]) -> str:
    names = {"vit": "ViT", "resnet": "ResNet", "other": "small networks"}
    return ", ".join(names.get(family, family) for family in families)


if __name__ == "__main__":
    for name in FILES:
        path = ROOT / name
        path.write_text(rewritten(path.read_text(encoding="utf-8")), encoding="utf-8")
