"""A probe as a picture: what flatness changes at each radius, what reuse gets wrong, and what it costs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cflat.figures.model import Curve, FigureData, Panel


def probe_figure(result: Mapping[str, Any], title: str) -> FigureData:
    """Return the figure of `cflat.analysis.probe.ProbeResult.to_dict`."""
    names = list(dict.fromkeys(row["optimizer"] for row in result["rows"]))
    panels = [
        Panel(
            "Agreement with the plain gradient", "radius rho", "cosine", _curves(result, names, "cosine_plain"), "log"
        ),
        Panel(
            "Surrogate error (plain training has 1)",
            "radius rho",
            "|added - C-Flat's| / |C-Flat's|",
            _curves(result, [name for name in names if name != "C-Flat"], "surrogate_error"),
            "log",
            empty="Nothing was reused in so few steps; probe more of them with --steps.",
        ),
        Panel(
            "Do cached directions last?",
            "radius rho",
            _lag(result),
            _stability(result),
            "log",
            empty=f"The probe is shorter than two intervals of {_interval(result)} steps; probe more with --steps.",
        ),
        Panel("Cost", "radius rho", "evaluations per step", _curves(result, names, "evaluations_per_step"), "log"),
    ]
    return FigureData("probe", title, panels, str(result["verdict"]), num_columns=2)


def _curves(result: Mapping[str, Any], names: list[str], key: str) -> list[Any]:
    curves = []
    for name in names:
        rows = sorted((row for row in result["rows"] if row["optimizer"] == name), key=lambda row: float(row["rho"]))
        known = [row for row in rows if row[key] is not None and row[key] == row[key]]
        curves.append(Curve(name, [row["rho"] for row in known], [row[key] for row in known], style="line+points"))
    return curves


def _stability(result: Mapping[str, Any]) -> list[Any]:
    entries = sorted(result["stability"], key=lambda entry: float(entry["rho"]))
    names = list(entries[0]["cosines"]) if entries else []
    curves = []
    for name in names:
        known = [(e["rho"], e["cosines"][name]) for e in entries if e["cosines"][name] == e["cosines"][name]]
        x, y = [rho for rho, _ in known], [value for _, value in known]
        curves.append(Curve(name, x, y, style="line+points", group=f"vector {name}"))
    return curves


def _lag(result: Mapping[str, Any]) -> str:
    return f"cosine with {_interval(result)} steps earlier"


def _interval(result: Mapping[str, Any]) -> int:
    return int(result["stability"][0]["interval"]) if result["stability"] else 5
