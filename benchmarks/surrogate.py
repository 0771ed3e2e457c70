"""The surrogate error of every rule on the streams of the front, against exact C-Flat on every step.

    cflat features --data cifar100 --data-root DATA --backbone vit_tiny --weights WEIGHTS --image-size 112 --out F.npz
    python benchmarks/surrogate.py --out /tmp/surrogate --features F.npz --data-root DATA --weights WEIGHTS

Runs ``cflat probe`` for each stream at the weights, and for all but the ViT, which takes minutes, ahead of them as well
(finished probes are reused); writes docs/results/surrogate.md. The probed run is trained plainly; all rules look at the
same weights and batches, and each keeps its caches as in training.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from cflat._files import write_atomic

RADIUS = 0.05
AHEAD = 5
"""Steps that default Turbo looks ahead."""
STREAMS: dict[str, tuple[str, list[str]]] = {
    "digits-task": (
        "digits, small CNN, task-incremental finetune",
        ["--method", "finetune", "--data", "digits", "stream.scenario=task", "base.lr=0.005", "train.epochs=8"],
    ),
    "digits-class": (
        "digits, small CNN, class-incremental replay, 5 exemplars per class",
        ["--method", "replay", "--data", "digits", "method.memory_per_class=5", "base.lr=0.02", "train.epochs=8"],
    ),
    "features-task": (
        "ViT-Tiny features of CIFAR-100, MLP, task-incremental finetune",
        ["--method", "finetune", "--data", "features:{features}", "stream.scenario=task", "{mlp}"],
    ),
    "features-class": (
        "ViT-Tiny features of CIFAR-100, MLP, class-incremental replay, 5 exemplars per class",
        ["--method", "replay", "--data", "features:{features}", "method.memory_per_class=5", "{mlp}"],
    ),
    "ranpac": (
        "CIFAR-100, ViT-Tiny at 112 px, RanPAC; EASE trains its first task in the same way and gives the same numbers",
        ["--method", "ranpac", "{vit}"],
    ),
}
MLP = (
    "stream.initial=10 stream.increment=10 data.train_per_class=40 backbone.name=mlp base.lr=0.005 train.epochs=5 "
    "train.batch_size=16"
)
VIT = (
    "--data cifar100 --preset cpu --data-root {data_root} --weights {weights} train.batch_size=16 stream.max_tasks=1 "
    "train.epochs=10"
)
TURBO = ("Turbo", "Turbo measured", "Turbo steady", "Turbo paper", "reuse only, steady", "reuse only, paper")
ORDER = ("SAM", "LookSAM", *TURBO)
TITLES = {"Turbo": "**Turbo (default)**"}


def probe(arguments: argparse.Namespace, name: str, ahead: int = 0) -> dict:
    """Return a probe, run now if it is not there."""
    folder = arguments.out / (f"{name}-ahead" if ahead else name)
    if not (folder / "probe.json").is_file():
        is_vit = "{vit}" in STREAMS[name][1]
        words = " ".join(STREAMS[name][1]).replace("{mlp}", MLP).replace("{vit}", VIT)
        words = words.format(features=arguments.features, data_root=arguments.data_root, weights=arguments.weights)
        looks = ["--task", "0"] if is_vit else ["--task", "1"]
        steps = ["--warmup", "0", "--steps", "60" if is_vit else "100"]
        rest = ["--radii", str(RADIUS), "--out", str(folder), "--quiet", "--ahead", str(ahead)]
        subprocess.run([sys.executable, "-m", "cflat", "probe", *words.split(), *looks, *steps, *rest], check=True)
    return json.loads((folder / "probe.json").read_text())


def page(found: dict[str, dict], ahead: dict[str, dict]) -> str:
    """Return the page as markdown, from the probes at the weights and those ahead of them."""
    lines = [
        "# The surrogate error of every rule",
        "",
        "Written by `python benchmarks/surrogate.py`. e = |d^ - d| / |d|: d is what exact C-Flat (rho 0.05) adds to",
        "the gradient, computed on every step, d^ what a rule adds; mean over all steps of the probe, refreshes",
        "included; in brackets the part orthogonal to the gradient. **Plain training has e = 1**: a rule at 1 or above",
        "is farther from C-Flat than doing nothing. All rules look at the same plainly trained weights and batches.",
        f"One seed each. In training, default Turbo takes its gradients {AHEAD} steps ahead along the momentum: the",
        "second table has all rules, and exact C-Flat, at those weights (RanPAC was probed at the weights only).",
        "",
        "## At the weights",
        "",
        *_table(found),
        "",
        f"## {AHEAD} steps ahead",
        "",
        *_table(ahead),
        "",
        *[f"- `{name}`: {STREAMS[name][0]}, {f['steps']} steps" for name, f in found.items()],
        "",
    ]
    return "\n".join(lines)


def _table(found: dict[str, dict]) -> list[str]:
    lines = [
        "| rule | " + " | ".join(f"{name}" for name in found) + " | evaluations per step |",
        "|---" * (len(found) + 2) + "|",
    ]
    for rule in ORDER:
        rows = [next(r for r in f["rows"] if r["rho"] == RADIUS and r["optimizer"] == rule) for f in found.values()]
        costs = sorted({f"{row['evaluations_per_step']:.2f}" for row in rows})
        cost = costs[0] if len(costs) == 1 else f"{costs[0]} to {costs[-1]}"
        cells = [f"{row['surrogate_error']:.2f} ({row['surrogate_error_orthogonal']:.2f})" for row in rows]
        lines.append(f"| {TITLES.get(rule, rule)} | " + " | ".join(cells) + f" | {cost} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the probes, outside the repository")
    parser.add_argument("--streams", nargs="+", choices=list(STREAMS), default=list(STREAMS))
    parser.add_argument("--features", type=Path)
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--page", type=Path, default=Path(__file__).parents[1] / "docs" / "results" / "surrogate.md")
    arguments = parser.parse_args()
    arguments.page.parent.mkdir(parents=True, exist_ok=True)
    here = {name: probe(arguments, name) for name in arguments.streams}
    quick = [name for name in arguments.streams if "{vit}" not in STREAMS[name][1]]
    ahead = {name: probe(arguments, name, AHEAD) for name in quick}
    write_atomic(arguments.page, page(here, ahead))
    print(arguments.page)


if __name__ == "__main__":
    main()
