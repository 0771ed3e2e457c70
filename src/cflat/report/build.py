"""Build the page: one HTML file with everything in it, which loads nothing from the network."""

from __future__ import annotations

import json
from importlib.resources import files
from itertools import count
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from cflat.figures.figure import FigureData
from cflat.figures.interactive import plot
from cflat.figures.palette import DARK
from cflat.report.page import ReportData

USUAL_COLUMNS, MAX_COLUMNS = 3, 5
"""Panels in a row: by default, and at most."""


def build_page(report: ReportData, version: str) -> str:
    """Return the report as the text of an HTML file; all its texts are shown as they are, whatever markup they hold."""
    # Imported here: it takes a while, and only a page needs it.
    from plotly.offline import get_plotlyjs

    def embed(figure: FigureData) -> Markup:
        """Return the data of a chart with a layout for wide and one for narrow screens."""
        # The data is the same in both layouts, so it is embedded once.
        wide = plot(figure, report.colors, num_columns=min(figure.num_columns or USUAL_COLUMNS, MAX_COLUMNS))
        narrow = plot(figure, report.colors, num_columns=1)
        return embed_json({"data": wide["data"], "wide": wide["layout"], "narrow": narrow["layout"]})

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(_resource("template.html"))
    return template.render(
        report=report,
        version=version,
        # Charts are numbered by an iterator: a Jinja macro cannot change a variable outside of it.
        numbers=count(1),
        next=next,
        embed=embed,
        style=Markup(_resource("page.css")),
        script=Markup(_resource("page.js")),
        plotly=Markup(get_plotlyjs()),
        dark=embed_json(DARK),
    )


def embed_json(values: Any) -> Markup:
    r"""Return JSON that can stand inside a script element, whatever texts it holds.

    >>> embed_json({"name": "</script>"})
    Markup('{"name":"\\u003c/script\\u003e"}')
    """
    text = json.dumps(values, separators=(",", ":"), allow_nan=False)  # ASCII: U+2028 and its like are escaped
    for character in "<>&":  # "</script>" or "<!--" in a name would end the element
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def _resource(name: str) -> str:
    return files("cflat.report").joinpath(name).read_text(encoding="utf-8")
