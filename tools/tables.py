"""Write the tables of the README and of some pages in docs/ anew, from the registries and the study: ``make tables``.

A table stands between ``<!-- begin: NAME -->`` and ``<!-- end: NAME -->``; a test says when one is out of date.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from cflat.config.describe import describe_keys
from cflat.config.presets import resolve_config
from cflat.data import list_datasets
from cflat.methods import get_method_spec, list_methods
from cflat.optim import get_optimizer_spec, list_optimizers

ROOT = Path(__file__).resolve().parents[1]
STUDY = ROOT / "docs" / "results" / "study" / "fragment.md"
"""Written by ``python -m benchmarks.study pages``."""
FILES = (
    "README.md",
    "docs/data.md",
    "docs/deviations.md",
    "docs/methods/index.md",
    "docs/optimizers/index.md",
    "docs/results/README.md",
)
Rows = list[list[object]]
MARKED = re.compile(r"(<!-- begin: (\w+) -->\n).*?(<!-- end: \2 -->)", flags=re.S)


def optimizers() -> Rows:
    """Return what each optimizer costs, the cheapest first."""
    specs = [get_optimizer_spec(name) for name in list_optimizers()]
    specs.sort(key=lambda spec: (spec.peak_buffers, spec.name))
    rows = [
        [_link(s.name), f"`{s.cls.__name__}`", s.summary, s.evaluations, s.peak_buffers, s.persistent_buffers]
        for s in specs
    ]
    return [["name", "class", "what it does", "evaluations per step", "peak", "persistent"], *rows]


def methods() -> Rows:
    """Return what each method is for."""
    rows: Rows = [["method", "what it does", "streams", "exemplars", "backbones"]]
    for spec in map(get_method_spec, list_methods()):
        memory = "yes" if spec.needs_memory else "no"
        rows.append([_link(spec.name), spec.summary, ", ".join(spec.scenarios), memory, _backbones(spec.families)])
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


def choices() -> Rows:
    """Return where the presets of the sources set a method otherwise than its default."""
    rows: Rows = [["setting", "meaning", "default", "`paper`", "`pilot`"]]
    for method, data in (*((name, "cifar100") for name in list_methods()), ("duct", "domainnet")):
        usual = get_method_spec(method).config()
        chosen = [_method_settings(method, data, preset) for preset in ("paper", "pilot")]
        for key in describe_keys(method):
            name = key.path.removeprefix("method.")
            own, *others = (getattr(settings, name) for settings in (usual, *chosen))
            if any(value != own for value in others):
                cells = [f"`{json.dumps(value)}`" for value in (own, *others)]
                rows.append([f"{method} on {data}: `{key.path}`", key.meaning.replace("``", "`"), *cells])
    return rows


def _method_settings(method: str, data: str, preset: str) -> Any:
    chosen = {"method": method, "data": data, "preset": preset, "backbone": {"weights": "random"}}
    return resolve_config(chosen).method.settings


TABLES: dict[str, Callable[[], Rows]] = {
    "optimizers": optimizers,
    "methods": methods,
    "datasets": datasets,
    "choices": choices,
}


def rewritten(text: str) -> str:
    """Return a document with its tables as registries and study have them now."""
    return MARKED.sub(lambda match: f"{match[1]}{_content(match[2])}{match[3]}", text)


def _content(name: str) -> str:
    return STUDY.read_text(encoding="utf-8") if name == "study" else _markdown(TABLES[name]())


def _markdown(rows: Rows) -> str:
    lines = [f"| {' | '.join(_cell(value) for value in row)} |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]]) + "\n"


def _cell(value: object) -> str:
    return str(value).replace("<", "&lt;").replace("|", r"\|")


def _link(name: str) -> str:
    return f"[`{name}`]({name}.md)"


def _backbones(families: Iterable[str]) -> str:
    names = {"vit": "ViT", "resnet": "ResNet", "other": "small networks"}
    return ", ".join(names.get(family, family) for family in families)


if __name__ == "__main__":
    for name in FILES:
        path = ROOT / name
        path.write_text(rewritten(path.read_text(encoding="utf-8")), encoding="utf-8")
