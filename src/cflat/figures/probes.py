"""A probe as a picture: what flatness changes at each radius, what reuse gets wrong, and what it costs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from cflat.figures.figure import Curve, FigureData, Panel, curve_through


def probe_figure(result: Mapping[str, Any], title: str) -> FigureData:
    """Return the figure of `cflat.analysis.probe.ProbeResult.to_dict`."""
    known = dict.fromkeys(row["optimizer"] for row in result["rows"])
    # Three more variants of Turbo would be shades of one colour; the numbers are in the table.
    names = [name for name in known if not name.startswith("reuse only")]
    stability = result["stability"]
    interval = int(stability[0]["interval"]) if stability else 5

    def curves(key: str, chosen: Iterable[str] = names) -> list[Curve]:
        rows = {name: [row for row in result["rows"] if row["optimizer"] == name] for name in chosen}
        points = {name: sorted((row["rho"], row[key]) for row in own) for name, own in rows.items()}
        return [curve_through(name, own, style="line+points") for name, own in points.items()]

    directions = []
    for name in stability[0]["cosines"] if stability else ():
        points = sorted((entry["rho"], entry["cosines"][name]) for entry in stability)
        directions.append(curve_through(name, points, style="line+points", group=f"vector {name}"))
    panels = [
        Panel("Agreement with the plain gradient", "radius rho", "cosine", curves("cosine_plain"), "log"),
        Panel(
            "Surrogate error (plain training has 1)",
            "radius rho",
            "|added - C-Flat's| / |C-Flat's|",
            curves("surrogate_error", [name for name in names if name != "C-Flat"]),
            "log",
            empty="Nothing was reused in so few steps; probe more of them with --steps.",
        ),
        Panel(
            "Do cached directions last?",
            "radius rho",
            f"cosine with {interval} steps earlier",
            directions,
            "log",
            empty=f"The probe is shorter than two intervals of {interval} steps; probe more with --steps.",
        ),
        Panel("Cost", "radius rho", "evaluations per step", curves("evaluations_per_step"), "log"),
    ]
    return FigureData("probe", title, panels, " ".join([result["verdict"], *result["remarks"]]), num_columns=2)
