"""Draw the figures of README and docs: ``make figures``, or ``python tools/figures.py NAME ...`` for some.

Every figure is made from committed numbers (``docs/figures/data``) or by a quick run, in the colours of the package.
``docs/figures/sources.json`` keeps a hash of what each was drawn from; a test fails when that has changed since.
"""

from __future__ import annotations

import hashlib
import inspect
import io
import json
import sys
import tempfile
import tokenize
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import cflat
from cflat._files import write_atomic, write_json
from cflat.figures.figure import Curve, FigureData, Panel
from cflat.figures.palette import GRID, INK, OPTIMIZERS
from cflat.figures.probes import probe_figure
from cflat.figures.static import METADATA, STYLE, save

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "figures"
DATA = FOLDER / "data"
SOURCES = FOLDER / "sources.json"
LOOK = [ROOT / "src" / "cflat" / "figures" / name for name in ("palette.py", "static.py")]
"""Colours and style are part of every figure."""


# -- a loss with a sharp and a flat valley ------------------------------------------------------------------------

START = (-0.82, 0.38)
SHARP, FLAT = ((-0.8, 0.1), 0.15, 0.5), ((0.6, -0.15), 0.8, 1.3)
"""Centre, width and depth of the two valleys."""
STEPS, LR, RHO, NOISE = 300, 0.02, 0.25, 0.1
RADII = {"asam": 1.2, "msam": 0.35, "gam": 0.25, "random_sam": 0.4}
"""Optimizers whose radius is measured otherwise."""
GREY = OPTIMIZERS["none"][1]


def surface(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the loss at some places."""
    value = 1 + 0.06 * (x**2 + y**2)
    for (cx, cy), width, depth in (SHARP, FLAT):
        value = value - depth * torch.exp(-((x - cx) ** 2 + (y - cy) ** 2) / (2 * width**2))
    return value


def path_of(name: str) -> tuple[np.ndarray, float]:
    """Return the places that an optimizer visits, and its evaluations per step."""
    torch.manual_seed(0)
    place = torch.tensor([START], dtype=torch.float64, requires_grad=True)  # a filter of two weights
    base = torch.optim.SGD([place], lr=LR, momentum=0.5)
    known = cflat.optimizer_settings(name)
    optimizer = cflat.create_optimizer(name, base, **({"rho": RADII.get(name, RHO)} if "rho" in known else {}))
    optimizer.start_task(0, num_tasks=1)
    places = [place[0].detach().numpy().copy()]

    noise = NOISE * torch.randn(STEPS, 2, dtype=torch.float64)  # every batch sees the valleys a little elsewhere
    for shift in noise:

        def closure(shift: torch.Tensor = shift) -> torch.Tensor:
            value = surface(*(place[0] + shift))
            value.backward()
            return value

        optimizer.step(closure)
        places.append(place[0].detach().numpy().copy())
    return np.array(places), optimizer.telemetry.evaluations_per_step


def draw_map(axes: Axes, paths: dict[str, np.ndarray]) -> None:
    """Draw the valleys from above, and the ways of some optimizers; SGD is dashed."""
    x, y = np.meshgrid(np.linspace(-1.5, 1.7, 65), np.linspace(-1.1, 1.3, 49))
    axes.contour(
        x, y, surface(torch.from_numpy(x), torch.from_numpy(y)).numpy(), levels=11, colors=GRID, linewidths=0.9
    )
    for name, places in paths.items():
        title, color, _ = OPTIMIZERS.get(name, (name, INK, INK))
        look: Any = {"color": color, "linewidth": 1.6, "linestyle": "--" if name == "none" else "-"}
        axes.plot(*places.T, label="SGD" if name == "none" else title, **look)
        axes.plot(*places[-1], marker="o", color=color, markersize=6)
    for word, ((cx, cy), _, _) in (("sharp", SHARP), ("flat", FLAT)):
        axes.annotate(word, (cx, cy), (0, -22), textcoords="offset points", ha="center", fontsize=8)
    axes.plot(*START, marker="o", color=INK, markersize=4)
    axes.set(xticks=[], yticks=[])


def optimizer_page(out: Path, name: str) -> None:
    """Draw where one optimizer goes, beside SGD."""
    own, evaluations = path_of(name)
    with mpl.rc_context({**STYLE, "axes.grid": False}):
        figure = Figure(figsize=(5.2, 3.7), layout="constrained")
        axes = figure.subplots()
        draw_map(axes, {"none": path_of("none")[0], **({name: own} if name != "none" else {})})
        title = "SGD" if name == "none" else OPTIMIZERS.get(name, (cflat.get_optimizer_spec(name).title,))[0]
        axes.set_title(
            f"{title}: {evaluations:.2f} evaluations per step, ends in the {_valley(own[-1])} valley", fontsize=9
        )
        _write(figure, out)


def valley(out: Path, _: str) -> None:
    """Draw what flat means, and what it is sought for: the picture of the README."""
    with mpl.rc_context({**STYLE, "axes.grid": False}):
        figure = Figure(figsize=(7.4, 3.1), layout="constrained")
        left, right = figure.subplots(1, 2, width_ratios=(1.15, 1))
        _draw_profile(left)
        draw_map(right, {name: path_of(name)[0] for name in ("none", "c_flat")})
        right.legend(loc="upper right", fontsize=8)
        right.set_title("where SGD and C-Flat end from one start")
        _write(figure, out)


def _draw_profile(axes: Axes) -> None:
    """Draw a loss with a sharp and a flat minimum, and the same loss after the data has changed a little."""
    x = np.linspace(-3.3, 4.0, 600)

    def loss(at: np.ndarray | float) -> Any:
        return 1.3 - 1.1 * np.exp(-((at + 1.7) ** 2) / 0.07) - 1.05 * np.exp(-((at - 1.4) ** 2) / 2.6) + 0.02 * at**2

    shift = 0.28
    color = OPTIMIZERS["c_flat"][1]
    axes.plot(x, loss(x), color=INK, linewidth=1.8, label="loss of this task")
    axes.plot(
        x,
        loss(x - shift),
        color=INK,
        linewidth=1.1,
        linestyle=(0, (4, 3)),
        label="after the next task, or on test images",
    )
    for place, name, shade, side in ((-1.7, "sharp", GREY, "right"), (1.4, "flat", color, "left")):
        low, high = float(loss(place)), float(loss(place - shift))
        axes.plot(place, low, marker="o", color=shade, markersize=7)
        axes.annotate("", (place, high), (place, low), arrowprops={"arrowstyle": "->", "color": shade, "linewidth": 2})
        text = {"textcoords": "offset points", "ha": side, "color": shade}
        axes.annotate(f"{name}: +{high - low:.2f}", (place, low), (-14 if side == "right" else 4, -14), **text)
    axes.set(xticks=[], yticks=[], xlabel="weights", ylabel="loss", xlim=(-4.3, 4.2), ylim=(0.02, 1.75))
    axes.set_title("the same small change costs a sharp minimum more")
    axes.legend(loc="upper center", fontsize=8)


def _valley(end: np.ndarray) -> str:
    return "sharp" if np.linalg.norm(end - SHARP[0]) < np.linalg.norm(end - FLAT[0]) else "flat"


def _write(figure: Figure, out: Path) -> None:
    write_atomic(out, lambda file: figure.savefig(file, format="svg", metadata=METADATA["svg"]))


# -- from committed numbers ---------------------------------------------------------------------------------------


def stored(out: Path, _: str) -> None:
    """Draw a figure that ``cflat analyze`` has stored as data."""
    save(FigureData.from_dict(_read(out.stem)), out)


def probe(out: Path, _: str) -> None:
    """Draw what ``cflat probe`` has found."""
    save(probe_figure(_read(out.stem), "iCaRL on digits, task 1"), out)


def convergence(out: Path, _: str) -> None:
    """Draw what ``benchmarks/convergence.py`` has measured."""
    found = _read(out.stem)
    theorem = found.pop("theorem")
    points = [float(point) for point in theorem["points"]]
    curves = []
    for name, entry in found.items():
        values, exponent = np.array(entry["values"]), np.mean(entry["exponents"])
        band = values.min(0).tolist(), values.max(0).tolist()
        curves.append(Curve(f"{name}: T^{exponent:.2f}", points, values.mean(0).tolist(), *band, group=name))
    scale = curves[0].y[0] / theorem["values"][0]
    bound = [scale * value for value in theorem["values"]]
    curves.append(
        Curve(f"(1 + log T) / √T: T^{theorem['exponent']:.2f}", points, bound, style="dashed", group="theorem")
    )
    panel = Panel("", "T (steps)", "mean of |∇L|² over t ≤ T", curves, x_scale="log", y_scale="log")
    save(FigureData("convergence", "C-Flat gradient along the trajectory, the theorem's schedules", [panel]), out)


def _read(name: str) -> Any:
    return json.loads((DATA / f"{name}.json").read_text())


# -- screenshots --------------------------------------------------------------------------------------------------


def report(out: Path, theme: str) -> None:
    """Take a picture of the page that a small comparison writes; needs Debian's chromium and chromium-driver."""
    sys.path.insert(0, str(ROOT / "tests"))
    from report.browser import open_browser

    shared: dict[str, Any] = {"method": "finetune", "data": "digits", "preset": "cpu", "stream__scenario": "task"}
    with tempfile.TemporaryDirectory() as folder, open_browser(Path(folder)) as page:
        names = ["none", "sam", "c_flat", "c_flat_turbo"]
        cflat.bench.compare(**shared, optimizers=names, seeds=[0, 1, 2], out=f"{folder}/runs", runtime__threads=1)
        page.emulate(1100, 1500, scale=1, dark=theme == "dark")
        page.open(Path(folder) / "runs" / "report.html")
        page.wait_for("return document.querySelectorAll('.js-plotly-plot .main-svg').length > 1")
        page.screenshot(out)


# -- what there is ------------------------------------------------------------------------------------------------

Maker = Callable[[Path, str], None]
FIGURES: dict[str, tuple[Maker, str]] = {
    "valley.svg": (valley, ""),
    **{f"optimizers/{name}.svg": (optimizer_page, name) for name in cflat.list_optimizers()},
    "convergence.svg": (convergence, ""),
    "probe.svg": (probe, ""),
    "gradient_drift.svg": (stored, ""),
    "evolution.svg": (stored, ""),
    "report-light.png": (report, "light"),
    "report-dark.png": (report, "dark"),
}


def source_hash(name: str) -> str:
    """Return a hash of all that a figure is drawn from: its numbers, the code that draws it, and the look."""
    make, argument = FIGURES[name]
    files = [*LOOK]
    if make in (stored, probe, convergence):
        files.append(DATA / f"{Path(name).stem}.json")
    if make is optimizer_page:
        files.append(Path(inspect.getfile(cflat.get_optimizer_spec(argument).cls)))
        parts = [inspect.getsource(one) for one in (surface, path_of, draw_map)]
    else:
        parts = [inspect.getsource(_draw_profile)] if make is valley else []
    if make is report:
        files = [ROOT / "src" / "cflat" / "report" / one for one in ("template.html", "page.css")]
    parts += [inspect.getsource(make), *map(_content, files)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _content(file: Path) -> str:
    """Return what a file says: of Python, all but comments, which change no picture."""
    text = file.read_text()
    if file.suffix != ".py":
        return text
    lines = text.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    return "\n".join(line.rstrip() for line in lines if line.strip())


def main() -> None:
    """Draw the figures whose sources have changed, or those that are named."""
    known = json.loads(SOURCES.read_text()) if SOURCES.is_file() else {}
    for name in sys.argv[1:] or [name for name in FIGURES if known.get(name) != source_hash(name)]:
        make, argument = FIGURES[name]
        (FOLDER / name).parent.mkdir(parents=True, exist_ok=True)
        make(FOLDER / name, argument)
        known[name] = source_hash(name)
        print(f"docs/figures/{name}", flush=True)
        write_json(SOURCES, {one: known[one] for one in FIGURES if one in known})


if __name__ == "__main__":
    main()
