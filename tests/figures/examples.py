"""One figure of every kind of mark, for both renderers."""

from __future__ import annotations

from cflat.figures import Bars, Curve, FigureData, Heatmap, Panel

NAN = float("nan")

CURVES = FigureData(
    "curves",
    "Curves",
    [
        Panel(
            "left",
            "step",
            "loss",
            [
                Curve("mean", [1, 2, 3], [3.0, 2.0, NAN], [2.5, 1.5, 1.0], [3.5, 2.5, 2.0], "line+points", group="a"),
                Curve("steps", [1, 2, 3], [1.0, 2.0, 3.0], style="steps"),
                Curve("dashed", [1, 2, 3], [2.0, 2.0, 2.0], style="dashed"),
            ],
        ),
        Panel(
            "right",
            "rho",
            "loss",
            [Curve("mean", [0.01, 0.1, 1.0], [1.0, 10.0, 100.0], group="a")],
            x_scale="log",
            y_scale="log",
            diagonal=True,
        ),
    ],
    "A caption.",
)
POINTS = FigureData(
    "points",
    "Points",
    [
        Panel(
            "points",
            "x",
            "y",
            [Curve(name, [i], [i], style="points", labels=[name]) for i, name in enumerate(("p", "q"))],
        )
    ],
)
BARS = FigureData(
    "bars",
    "Bars",
    [
        Panel(
            "bars",
            "",
            "accuracy",
            [
                Bars("one", ["k = 1", "k = 5"], [1.0, 2.0], [0.1, NAN]),
                Bars("two", ["k = 5", "k = 10"], [3.0, 4.0]),
            ],
        )
    ],
)
MAPS = FigureData(
    "maps",
    "Maps",
    [
        Panel("plain", "task", "stage", [Heatmap([[1.0, None], [2.0, 3.0]], ["1", "2"], ["1", "2"], "%", False, True)]),
        Panel("signed", "x", "y", [Heatmap([[-1.0, 0.0], [0.5, NAN]], [0.0, 1.0], [0.0, 1.0], "curvature", True)]),
    ],
)
HOSTILE = FigureData(
    "hostile",
    "<script>alert(1)</script> $\\frac{1}{$",
    [Panel("<b>&", "$x_", "%{y}", [Curve("</script><!--", [1.0], [2.0]), Curve("$_{", [1.0], [3.0])])],
)
ALL = [CURVES, POINTS, BARS, MAPS, HOSTILE]
