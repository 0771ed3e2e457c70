"""Hooks of the documentation site: facts read from the sources, formulas as MathML, and the pages of integrations.

Nothing is imported from the package: its sources are read as text, so that the site is built without torch.
"""

from __future__ import annotations

import ast
import html
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert

ROOT = Path(__file__).resolve().parents[1]
SOURCES = {"optimizer": ROOT / "src/cflat/optim", "method": ROOT / "src/cflat/methods"}
MARKER = re.compile(r"^<!-- facts: (optimizer|method) (\w+) -->$", flags=re.M)
PRIME = re.compile(r"<msup>(<mi>[^<]*</mi>)<mi>&#x02032;</mi></msup>")
ACCENTS = {
    "<mo>&#x0005E;</mo></mover>": '<mo stretchy="false">&#x002C6;</mo></mover>',
    '<mo stretchy="true">&#x000AF;</mo></mover>': '<mo stretchy="false">&#x000AF;</mo></mover>',
    "<mo>&#x02016;</mo>": '<mo stretchy="false">&#x02016;</mo>',
}
"""Hats, bars and norms of latex2mathml, which Chromium stretches, or draws far above their letter."""
OUTSIDE = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+[^)#\s]+)\)")
INLINE = re.compile(r'<span class="arithmatex">\\\((.*?)\\\)</span>', flags=re.S)
DISPLAY = re.compile(r'<div class="arithmatex">\s*\\\[(.*?)\\\]\s*</div>', flags=re.S)
PLACES = {
    "integrations": "In your trainer",
    "optimizers": "Optimizers",
    "methods": "Methods",
    "reference": "API",
    "tutorials": "Start here",
    "results": "Results",
}
"""Where pages of a folder go that the navigation does not name."""


def on_config(config: Any) -> Any:
    """Give every page that the navigation does not name a place in it: by its folder, or among the guides."""
    docs = Path(config["docs_dir"])
    named, excluded = set(_pages(config["nav"])), config["exclude_docs"]
    for path in sorted(docs.rglob("*.md"), key=lambda path: (path.stem not in ("index", "README"), path)):
        page = path.relative_to(docs).as_posix()
        if page not in named and not excluded.match_file(page):
            title = PLACES.get(page.partition("/")[0], "How to")
            next(entry[title] for entry in config["nav"] if title in entry).append(page)
    return config


def _pages(nav: Any) -> Iterator[str]:
    """Yield the pages of a navigation, whatever the depth."""
    if isinstance(nav, str):
        yield nav
    else:
        for entry in nav.values() if isinstance(nav, dict) else nav:
            yield from _pages(entry)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Put tables in the place of markers; of files that the site does not hold, write the path instead of a link."""

    def outside(match: re.Match[str]) -> str:
        text, link = match.groups()
        target = (Path(page.file.abs_src_path).parent / link).resolve()
        is_ours = target.exists() and ROOT in target.parents and ROOT / "docs" not in target.parents
        return f"{text} (`{target.relative_to(ROOT)}`)" if is_ours else match[0]

    return OUTSIDE.sub(outside, MARKER.sub(lambda match: facts(*match.groups()), markdown))


def on_page_content(content: str, **_: Any) -> str:
    """Turn formulas into MathML, which browsers draw without a script and without a network."""
    content = DISPLAY.sub(lambda match: _mathml(match[1], "block"), content)
    return INLINE.sub(lambda match: _mathml(match[1], "inline"), content)


def _mathml(text: str, display: str) -> str:
    made = str(convert(html.unescape(text).strip(), display=display))
    for wide, accent in ACCENTS.items():
        made = made.replace(wide, accent)
    return PRIME.sub(r"<mrow>\1<mo>&#x02032;</mo></mrow>", made)  # as a superscript it would be too small to see


@cache
def registered(kind: str) -> dict[str, dict[str, Any]]:
    """Return what the decorators ``register_optimizer`` and ``register_method`` say, by name."""
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(SOURCES[kind].glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ClassDef):
                continue
            for call in node.decorator_list:
                if isinstance(call, ast.Call) and getattr(call.func, "id", "") == f"register_{kind}":
                    values = {word.arg: _literal(word.value) for word in call.keywords}
                    found[ast.literal_eval(call.args[0])] = {"class": node.name, **values}
    return found


def _literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return ast.unparse(node)


def facts(kind: str, name: str) -> str:
    """Return the table at the top of a page."""
    own = registered(kind)[name]
    rows = {"name": f"`{name}`", "class": f"`cflat.{'methods.' if kind == 'method' else ''}{own['class']}`"}
    if kind == "optimizer":
        rows["evaluations per step"] = own["evaluations"]
        kept = own.get("persistent_buffers", 0)
        rows["kept between steps"] = f"{kept or 'no'} gradient-sized buffer{'' if kept == 1 else 's'}"
    else:
        rows["streams"] = ", ".join(own.get("scenarios", ("class", "task")))
        rows["backbones"] = ", ".join(own.get("families", ("vit", "resnet", "other")))
        rows["exemplar memory"] = "yes" if own.get("needs_memory") else "no"
        rows["starts from a pretrained network"] = "yes" if own.get("is_pretrained") else "no"
    if own.get("paper"):
        rows["paper"] = own["paper"]
    first, *others = (f"| {key} | {value} |" for key, value in rows.items())
    return "\n".join([first, "|---|---|", *others])
