"""Gauss quadrature of the spectrum of a symmetric operator that is known by its products alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

Product: TypeAlias = Callable[[Tensor], Tensor]
"""Returns A v in float64 for a flat vector v."""


def quadrature(product: Product, start: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Return nodes and weights of the Gauss quadrature of the operator's spectrum as seen from ``start``.

    The weights add up to 1. Keeps the last two vectors only; stops early when the subspace is invariant.
    """
    previous = torch.zeros_like(start)
    row = start / start.norm()
    alphas: list[float] = []
    betas: list[float] = []
    for _ in range(steps):
        image = product(row)
        alphas.append(torch.dot(row, image).item())
        image -= alphas[-1] * row
        if betas:
            image -= betas[-1] * previous
        betas.append(image.norm().item())
        if betas[-1] <= 100 * torch.finfo(torch.float64).eps * max(abs(value) for value in (*alphas, *betas)):
            break
        previous, row = row, image / betas[-1]
    nodes, coordinates = _eigh(alphas, betas)
    return nodes, coordinates[0].square()


def _eigh(alphas: list[float], betas: list[float]) -> tuple[Tensor, Tensor]:
    """Decompose the tridiagonal matrix; its last beta couples to a vector that is not in the basis."""
    diagonal, couplings = (torch.tensor(values, dtype=torch.float64) for values in (alphas, betas[:-1]))
    matrix = torch.diag(diagonal) + torch.diag(couplings, -1)  # eigh reads the lower triangle alone
    values, vectors = torch.linalg.eigh(matrix)
    return values, vectors
