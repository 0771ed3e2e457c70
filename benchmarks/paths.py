"""Where each optimizer goes on a loss with a sharp and a flat valley: the pictures of the documentation.

python benchmarks/paths.py docs/figures/optimizers
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure

import cflat
from cflat._files import write_atomic
from cflat.figures.palette import GRID, INK, OPTIMIZERS
from cflat.figures.static import METADATA, STYLE

START = (-0.82, 0.38)
SHARP, FLAT = ((-0.8, 0.1), 0.15, 0.5), ((0.6, -0.15), 0.8, 1.3)
"""Centre, width and depth of the two valleys."""
STEPS, LR, RHO = 300, 0.02, 0.25
NOISE = 0.1
RADII = {"asam": 1.2, "msam": 0.35, "gam": 0.25}
"""Optimizers whose radius is measured otherwise."""


def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    value = 1 + 0.06 * (x**2 + y**2)
    for (cx, cy), width, depth in (SHARP, FLAT):
        value = value - depth * torch.exp(-((x - cx) ** 2 + (y - cy) ** 2) / (2 * width**2))
    return value


def path(name: str) -> tuple[np.ndarray, float]:
    """Return the places of an optimizer, and its evaluations per step."""
    torch.manual_seed(0)
    place = torch.tensor(START, dtype=torch.float64, requires_grad=True)
    base = torch.optim.SGD([place], lr=LR, momentum=0.5)
    settings = {} if name == "none" else {"rho": RADII.get(name, RHO)}
    if name == "ss_sam":
        settings["p"] = 0.5
    optimizer = cflat.create_optimizer(name, base, **settings)
    optimizer.start_task(0, num_tasks=1)
    places = [place.detach().numpy().copy()]

    noise = NOISE * torch.randn(STEPS, 2, dtype=torch.float64)  # every batch sees the valleys a little elsewhere
    for shift in noise:

        def closure(shift: torch.Tensor = shift) -> torch.Tensor:
            value = loss(*(place + shift))
            value.backward()
            return value

        optimizer.step(closure)
        places.append(place.detach().numpy().copy())
    return np.array(places), optimizer.telemetry.evaluations_per_step


def draw(name: str, out: Path) -> None:
    import matplotlib as mpl

    plain, _ = path("none")
    own, evaluations = path(name)
    x, y = np.meshgrid(np.linspace(-1.5, 1.7, 65), np.linspace(-1.1, 1.3, 49))
    heights = loss(torch.from_numpy(x), torch.from_numpy(y)).numpy()
    title, color, _ = OPTIMIZERS[name]
    with mpl.rc_context({**STYLE, "axes.grid": False}):
        figure = Figure(figsize=(5.2, 3.7), layout="constrained")
        axes = figure.subplots()
        axes.contour(x, y, heights, levels=11, colors=GRID, linewidths=0.9)
        axes.plot(*plain.T, color=OPTIMIZERS["none"][1], linewidth=1.4, linestyle="--" if name != "none" else "-")
        axes.annotate("sharp", SHARP[0], (0, -22), textcoords="offset points", ha="center", color=INK, fontsize=8)
        axes.annotate("flat", FLAT[0], (0, -22), textcoords="offset points", ha="center", color=INK, fontsize=8)
        if name != "none":
            axes.plot(*own.T, color=color, linewidth=1.8)
        for places, shade in ((plain, OPTIMIZERS["none"][1]), (own, color)):
            axes.plot(*places[-1], marker="o", color=shade, markersize=6)
        axes.plot(*START, marker="o", color=INK, markersize=4)
        axes.set(xticks=[], yticks=[])
        end = "sharp" if np.linalg.norm(own[-1] - SHARP[0]) < np.linalg.norm(own[-1] - FLAT[0]) else "flat"
        beside = "" if name == "none" else ", plain dashed"
        axes.set_title(f"{title}: {evaluations:.2f} evaluations per step, ends in the {end} valley{beside}", fontsize=9)
        write_atomic(out / f"{name}.svg", lambda file: figure.savefig(file, format="svg", metadata=METADATA["svg"]))
    print(f"{name:14} ends at {own[-1].round(3)}, {evaluations:.2f} evaluations per step: {end}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    for name in cflat.list_optimizers():
        draw(name, out)


if __name__ == "__main__":
    main()
