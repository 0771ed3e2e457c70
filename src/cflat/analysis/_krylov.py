"""Lanczos iteration on a symmetric operator that is known by its products alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, TypeAlias

import torch
from torch import Tensor

Product: TypeAlias = Callable[[Tensor], Tensor]
"""Returns A v in float64 for a flat vector v."""
Which: TypeAlias = Literal["largest", "smallest", "magnitude"]

# Inner products are summed in the vectors' precision over this many elements, and in float64 beyond.
_STRETCH = 2**17
_MAX_SWEEPS = 3


class Krylov:
    """A growing orthonormal basis in which the operator is tridiagonal.

    Basis vectors are held in the precision of the random vectors that ``draw`` returns, the tridiagonal matrix in
    float64. Each new vector is made orthogonal to all others. When nothing is left of it, the basis spans an invariant
    subspace, and the iteration restarts from a random vector outside: a new block of the tridiagonal matrix, with
    coupling 0.
    """

    def __init__(self, product: Product, draw: Callable[[], Tensor], tolerance: float) -> None:
        self._product = product
        self._draw = draw
        self._tolerance = tolerance
        self._rows: list[Tensor] = []
        self._alphas: list[float] = []
        self._betas: list[float] = []
        self._block_start = 0
        self._following: Tensor | None = None

    @property
    def num_products(self) -> int:
        """Products taken so far, which is also the number of basis vectors."""
        return len(self._rows)

    def extend(self) -> None:
        """Add one basis vector, at the cost of one product."""
        if self._following is None:
            self._block_start = len(self._rows)
            self._following = self._draw()
            self._make_orthogonal_(self._following)
            self._following.div_(math.sqrt(_dot(self._following, self._following)))
        row = self._following
        self._rows.append(row)
        image = self._product(row).to(row.dtype)
        self._alphas.append(_dot(row, image))
        image.add_(row, alpha=-self._alphas[-1])  # the bulk goes first, so that one sweep over the basis is enough
        self._make_orthogonal_(image)
        beta = math.sqrt(_dot(image, image))
        scale = max(abs(value) for value in (*self._alphas, *self._betas))
        # A coupling that small is a residual within the tolerance, or what rounding leaves of a vector in the span.
        is_closed = beta <= scale * max(self._tolerance, 100 * torch.finfo(row.dtype).eps)
        self._betas.append(0.0 if is_closed else beta)
        self._following = None if is_closed else image.div_(beta)

    def ritz(self, start: int = 0) -> tuple[Tensor, Tensor]:
        """Return approximate eigenvalues, ascending, and their coordinates in the basis from row ``start`` on."""
        return _eigh(self._alphas[start:], self._betas[start:])

    def combine(self, coordinates: Tensor) -> Tensor:
        """Return the unit vector with these coordinates, in float64."""
        vector = torch.zeros_like(self._rows[0], dtype=torch.float64)
        for row, coordinate in zip(self._rows, coordinates.tolist(), strict=True):
            vector.add_(row, alpha=coordinate)
        return vector.div_(vector.norm())

    def is_settled(self, k: int, which: Which) -> bool:
        """Return whether the first ``k`` pairs are known to the tolerance and no further copies can be missing."""
        if len(self._rows) < k:
            return False
        if len(self._rows) == len(self._rows[0]):
            return True
        values, coordinates = self.ritz()
        limit = self._tolerance * values.abs().max()
        chosen = rank(values, which)[:k]
        if (self._betas[-1] * coordinates[-1, chosen].abs() > limit).any():
            return False
        if self._block_start == 0:
            # A closed first block holds each eigenvalue once: only a second one can show repeated ones.
            return self._following is not None
        # The newest block must have nothing to offer: a copy as good as the last wanted value would be missing.
        newest, coordinates = self.ritz(self._block_start)
        lead = rank(newest, which)[:1]
        keys = _keys(newest[lead], which), _keys(values[chosen[-1:]], which)
        is_known = self._betas[-1] * coordinates[-1, lead].abs() <= limit
        return bool(is_known & (keys[0] <= keys[1] + limit))

    def _make_orthogonal_(self, vector: Tensor) -> None:
        """Remove the basis from a vector; again while most of it vanishes, since rounding errors then dominate."""
        for _ in range(_MAX_SWEEPS):
            before = _dot(vector, vector)
            for row in reversed(self._rows):
                vector.add_(row, alpha=-_dot(row, vector))
            if _dot(vector, vector) > 0.25 * before:
                break


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


def rank(values: Tensor, which: Which) -> Tensor:
    """Return the indices of the values, the wanted ones first."""
    return _keys(values, which).argsort(descending=True, stable=True)


def _keys(values: Tensor, which: Which) -> Tensor:
    return {"largest": values, "smallest": -values, "magnitude": values.abs()}[which]


def _dot(left: Tensor, right: Tensor) -> float:
    parts = [torch.dot(a, b) for a, b in zip(left.split(_STRETCH), right.split(_STRETCH), strict=True)]
    return torch.stack(parts).sum(dtype=torch.float64).item()


def _eigh(alphas: list[float], betas: list[float]) -> tuple[Tensor, Tensor]:
    """Decompose the tridiagonal matrix; its last beta couples to a vector that is not in the basis."""
    diagonal, couplings = (torch.tensor(values, dtype=torch.float64) for values in (alphas, betas[:-1]))
    matrix = torch.diag(diagonal) + torch.diag(couplings, -1)  # eigh reads the lower triangle alone
    values, vectors = torch.linalg.eigh(matrix)
    return values, vectors
