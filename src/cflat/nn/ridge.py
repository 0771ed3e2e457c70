"""RanPAC's head (McDonnell et al., 2023): ridge regression on random features, summed over tasks.

Features are projected to ``relu(features @ projection)``; the head keeps the Gram matrix and the class sums of all
projected features ever seen: tasks in any order give the solution of all data at once.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from cflat._ranges import Count, CountOrZero, check, checked
from cflat.nn.heads import GrowingModule, full_precision

logger = logging.getLogger(__name__)

RIDGES: tuple[float, ...] = tuple(10.0**exponent for exponent in range(-8, 9))
USUAL = 1.0
"""The middle of `RIDGES`."""
VALIDATION_SHARE = 0.2
_NUM_CHUNK_ROWS = 2048  # projected features in memory at a time: 80 MB at 10,000 projections


class RidgeHead(GrowingModule):
    """Score classes by ridge regression to one-hot labels on random ReLU features.

    Args:
        feature_dim: Width of the features.
        num_projections: Random features, M. The Gram matrix takes M * M numbers once the first task is in.
        seed: Of the projection, drawn once from a normal distribution.
        scoring: ``"linear"`` as the authors do, or ``"cosine"`` between projected features and rows as PILOT does.
        dtype: Of the accumulated sums and the solution; ``torch.float64`` where conditioning needs it.

    >>> head = RidgeHead(4, 32, seed=0)
    >>> head.fit(torch.randn(20, 4), torch.arange(20) % 3, seed=0)
    >>> head(torch.randn(2, 4)).shape
    torch.Size([2, 3])
    """

    growing = ("weight", "class_sums", "gram")
    projection: Tensor
    gram: Tensor
    class_sums: Tensor
    weight: Tensor
    ridge: Tensor

    @checked
    def __init__(
        self,
        feature_dim: int,
        num_projections: Count = 10_000,
        *,
        seed: int,
        scoring: Literal["linear", "cosine"] = "linear",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.scoring = scoring
        generator = torch.Generator().manual_seed(seed)
        # In single precision for either dtype: `double` changes the arithmetic, not the projection.
        projection = torch.randn(feature_dim, num_projections, generator=generator, dtype=torch.float32)
        self.register_buffer("projection", projection.to(dtype))
        # Empty until the first features: training before that neither keeps nor saves M * M zeros.
        self.register_buffer("gram", torch.empty(0, 0, dtype=dtype))
        self.register_buffer("class_sums", torch.empty(0, num_projections, dtype=dtype))
        self.register_buffer("weight", torch.empty(0, num_projections, dtype=dtype))
        self.register_buffer("ridge", torch.zeros((), dtype=torch.float64))

    @property
    def feature_dim(self) -> int:
        """Width of the features."""
        return self.projection.shape[0]

    @property
    def num_projections(self) -> int:
        """Number of random features."""
        return self.projection.shape[1]

    @checked
    def grow(self, num_new: CountOrZero) -> None:
        """Add classes without features; their rows are zero until `solve`."""
        rows = self.weight.new_zeros(num_new, self.num_projections)
        self.class_sums = torch.cat([self.class_sums, rows])
        self.weight = torch.cat([self.weight, rows])

    def project(self, features: Tensor) -> Tensor:
        """Return the random features (B, M)."""
        return torch.relu(features.to(self.projection.dtype) @ self.projection)

    @torch.no_grad()
    def accumulate(self, features: Tensor, labels: Tensor) -> None:
        """Add features (n, feature_dim) with labels (n,) to the sums; unknown labels grow the head."""
        if not len(labels):
            return
        self.grow_to(int(labels.max()) + 1)
        if not self.gram.numel():
            self.gram = self.gram.new_zeros(self.num_projections, self.num_projections)
        for rows, part in zip(features.split(_NUM_CHUNK_ROWS), labels.split(_NUM_CHUNK_ROWS), strict=True):
            projected, targets = self.project(rows), functional.one_hot(part, self.num_classes).to(self.gram.dtype)
            self.gram.addmm_(projected.T, projected)
            self.class_sums.addmm_(targets.T, projected)

    @torch.no_grad()
    def select_ridge(self, features: Tensor, labels: Tensor, *, seed: int) -> float:
        """Return which of `RIDGES` has the least squared error on a random fifth of one task's features.

        ``features`` (n, feature_dim), at least two, with ``labels`` (n,); ``seed`` shuffles them before the split.
        """
        check("len(features)", len(features), at_least=2)
        # On the CPU: the split does not depend on the device.
        order = torch.randperm(len(features), generator=torch.Generator().manual_seed(seed)).to(features.device)
        num_fit = min(max(1, int(len(features) * (1 - VALIDATION_SHARE))), len(features) - 1)
        projected = self.project(features[order])
        targets = functional.one_hot(labels[order]).to(projected.dtype)
        errors = ridge_errors(projected[:num_fit], targets[:num_fit], projected[num_fit:], targets[num_fit:], RIDGES)
        return RIDGES[int(errors.argmin())]

    @torch.no_grad()
    def solve(self, ridge: float) -> None:
        """Set the rows to ``(gram + ridge * identity)^-1 class_sums`` of everything accumulated so far."""
        solution, used = ridge_solution(self.gram, self.class_sums.T, ridge)
        self.weight = solution.T.contiguous()
        self.ridge.fill_(used)

    def fit(self, features: Tensor, labels: Tensor, *, seed: int) -> None:
        """Take in one task: choose the ridge on its features, accumulate them, solve for all classes.

        A task with a single image has nothing to validate on; it keeps the ridge of the task before, or has `USUAL`.
        """
        ridge = self.select_ridge(features, labels, seed=seed) if len(features) > 1 else float(self.ridge) or USUAL
        self.accumulate(features, labels)
        self.solve(ridge)

    def forward(self, features: Tensor) -> Tensor:
        """Return regression scores, or cosines."""
        with full_precision(features):
            projected, rows = self.project(features), self.weight
            if self.scoring == "cosine":
                projected, rows = functional.normalize(projected, dim=1), functional.normalize(rows, dim=1)
            return functional.linear(projected, rows).to(torch.promote_types(features.dtype, torch.float32))


def ridge_errors(
    inputs: Tensor, targets: Tensor, held_out: Tensor, held_out_targets: Tensor, ridges: Sequence[float]
) -> Tensor:
    """Return the mean squared error on held-out rows for each ridge, all from one eigendecomposition.

    With ``n`` rows of ``M`` inputs, decomposes the smaller of the n x n and M x M Gram matrices. In its basis a
    ridge only changes the diagonal: each costs one small product instead of an M x M solve. In float32 this stays
    close to float64 for all ridges, where dense solves of the M x M system return noise for small ones.
    """
    is_wide = inputs.shape[0] < inputs.shape[1]
    # (X'X + r)^-1 X'Y = X'(XX' + r)^-1 Y
    gram = inputs @ inputs.T if is_wide else inputs.T @ inputs
    left = held_out @ inputs.T if is_wide else held_out
    right = targets if is_wide else inputs.T @ targets
    values, vectors = torch.linalg.eigh(gram)
    left, right = left @ vectors, vectors.T @ right
    values = values.clamp(min=0)  # a Gram matrix has no negative eigenvalues but by rounding
    predictions = ((left / (values + ridge)) @ right for ridge in ridges)
    return torch.stack([(found - held_out_targets).square().mean() for found in predictions])


def ridge_solution(gram: Tensor, sums: Tensor, ridge: float) -> tuple[Tensor, float]:
    """Return ``(gram + ridge * identity)^-1 sums`` by Cholesky, and the ridge that was used.

    A ridge below the rounding errors of ``gram`` leaves no positive definite matrix (a plain solve would return
    noise): it is raised tenfold until there is one. Features that are not finite, or whose sums are not, raise a
    `ValueError`.
    """
    largest = float(gram.abs().sum(dim=1).max())
    if not math.isfinite(largest) or not sums.isfinite().all():
        raise ValueError("The features contain NaN or infinity, or are too large to be summed.")
    # By Gershgorin's theorem no eigenvalue is below -largest: a ridge of that size always suffices.
    numbers, enough = torch.finfo(gram.dtype), max(largest, 1.0)
    used = ridge
    while True:
        damped = gram.clone()
        damped.diagonal().add_(used)
        factor, info = torch.linalg.cholesky_ex(damped)
        if not info:
            break
        if used > 10 * enough:
            raise ValueError("The features are too large, or contain NaN; no ridge makes their sums definite.")
        # The first ridge above 0 is what rounding in the sums can amount to.
        used = 10 * used if used > numbers.tiny else enough * numbers.eps
    if used != ridge:
        logger.warning("Ridge %g is below the rounding errors of the Gram matrix; used %g.", ridge, used)
    return torch.cholesky_solve(sums, factor), used
