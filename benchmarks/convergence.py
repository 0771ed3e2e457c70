"""Does the C-Flat gradient under Turbo vanish at the rate of the convergence theorem?

    python benchmarks/convergence.py && make figures

Theorem (appendix A.12 of the paper): with eta_t = eta_0 / sqrt(t) and rho_t = rho_0 / sqrt(t) the mean over t <= T of
|grad L_CFlat(theta_t)|^2 is O((1 + log T) / sqrt(T)), if the bias of the surrogates falls as 1 / sqrt(t); otherwise a
constant remains. The problem is smooth and not convex (a two-layer tanh network with logistic loss, minibatch noise).
The C-Flat gradient G_t = g_s + lam * g_f is evaluated exactly, on all samples, along the trajectory of the optimizer.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import torch
from torch import Tensor

import cflat

STEPS, BATCH, LAM, ETA_0, RHO_0 = 20_000, 16, 0.2, 1.0, 0.1
OPTIMIZERS = {
    "C-Flat": ("c_flat", {}),
    "Turbo": ("c_flat_turbo", {}),
    "Turbo, reuse only": ("c_flat_turbo", {"trigger": False}),
    "Turbo, calibrated, reuse only": ("c_flat_turbo", {"trigger": False, "reading": "calibrated"}),
    "Forecast": ("c_flat_forecast", {}),
}


class Problem:
    """A small smooth non-convex empirical risk with closed-form data."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.inputs = torch.randn(256, 8, generator=generator, dtype=torch.float64)
        teacher = torch.randn(8, generator=generator, dtype=torch.float64)
        flips = (torch.rand(256, generator=generator) < 0.2).double() * -2 + 1
        self.targets = torch.sign(self.inputs @ teacher + 0.5 * self.inputs[:, 0] * self.inputs[:, 1]) * flips
        self.first = torch.nn.Parameter(0.3 * torch.randn(8, 6, generator=generator, dtype=torch.float64))
        self.second = torch.nn.Parameter(0.3 * torch.randn(6, generator=generator, dtype=torch.float64))
        self.generator = generator

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        return [self.first, self.second]

    def loss(self, rows: Tensor | slice) -> Tensor:
        margin = self.targets[rows] * (torch.tanh(self.inputs[rows] @ self.first) @ self.second)
        return torch.nn.functional.softplus(-margin).mean()

    def gradient(self, theta: Tensor) -> Tensor:
        """Full gradient at a flat point."""
        first, second = theta[:48].view(8, 6), theta[48:]
        hidden = torch.tanh(self.inputs @ first)
        weight = -self.targets * torch.sigmoid(-self.targets * (hidden @ second)) / len(self.targets)
        inner = weight[:, None] * second * (1 - hidden**2)
        return torch.cat([(self.inputs.T @ inner).flatten(), hidden.T @ weight])

    def c_flat_gradient(self, rho: float) -> Tensor:
        """G = g_s + lam * (g_1 - g_0), exact, at the present weights."""
        theta = torch.cat([p.detach().flatten() for p in self.parameters])
        g = self.gradient(theta)
        g_s = self.gradient(theta + rho * g / (g.norm() + 1e-12))
        proxy = theta + rho * (g_s - g) / ((g_s - g).norm() + 1e-12)
        g_0 = self.gradient(proxy)
        g_1 = self.gradient(proxy + rho * g_0 / (g_0.norm() + 1e-12))
        return g_s + LAM * (g_1 - g_0)


def run(name: str, settings: dict, seed: int, steps: int) -> tuple[list[float], float]:
    """Return |G_t|^2 for t = 1..steps and the evaluations per step."""
    problem = Problem(seed)
    base = torch.optim.SGD(problem.parameters, lr=ETA_0)
    optimizer = cflat.create_optimizer(name, base, rho=cflat.InverseSqrt(RHO_0), lam=LAM, **settings)
    squares = []
    for t in range(1, steps + 1):
        base.param_groups[0]["lr"] = ETA_0 / math.sqrt(t)
        squares.append(float(problem.c_flat_gradient(RHO_0 / math.sqrt(t)).square().sum()))
        rows = torch.randint(0, 256, (BATCH,), generator=problem.generator)

        def closure(rows: Tensor = rows) -> Tensor:
            loss = problem.loss(rows)
            loss.backward()
            return loss

        optimizer.step(closure)
    return squares, optimizer.telemetry.evaluations_per_step


def running_means(squares: list[float], points: list[int]) -> list[float]:
    total = torch.tensor(squares, dtype=torch.float64).cumsum(0)
    return [float(total[t - 1] / t) for t in points]


def slope(points: list[int], values: list[float]) -> float:
    """Exponent of a power law through the points, by least squares in the logarithms."""
    x, y = torch.tensor(points).double().log(), torch.tensor(values).double().log()
    x, y = x - x.mean(), y - y.mean()
    return float((x @ y) / (x @ x))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/figures/data"), help="folder for convergence.json")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=STEPS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    points = sorted({round(100 * (arguments.steps / 100) ** (i / 24)) for i in range(25)})
    bound = [(1 + math.log(t)) / math.sqrt(t) for t in points]
    results: dict[str, dict] = {"theorem": {"points": points, "values": bound, "exponent": slope(points, bound)}}
    print(f"{'optimizer':<34} {'exponent (seeds)':<26} evaluations/step")
    print(f"{'(1 + log T) / sqrt(T)':<34} {results['theorem']['exponent']:.3f}")
    for label, (name, settings) in OPTIMIZERS.items():
        runs = [run(name, settings, seed, arguments.steps) for seed in range(arguments.seeds)]
        means = [running_means(squares, points) for squares, _ in runs]
        exponents = [slope(points, values) for values in means]
        cost = sum(evaluations for _, evaluations in runs) / len(runs)
        results[label] = {"points": points, "values": means, "exponents": exponents, "evaluations_per_step": cost}
        print(f"{label:<34} {', '.join(f'{e:.3f}' for e in exponents):<26} {cost:.2f}", flush=True)
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "convergence.json").write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
