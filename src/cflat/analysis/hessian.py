"""Curvature of a loss from Hessian-vector products: top eigenvalues, trace and spectral density.

The gradient's graph is built once and kept while products are taken, so a product costs one backward pass through it
and all of them see the same weights, buffers and dropout masks. Everything random is a function of ``seed`` and drawn
on the CPU, so that it is the same on every device.

Throughout, ``loss`` returns the scalar loss of the present weights and does not call backward; ``params`` are the
weights, all requiring a gradient; and buffers of ``model``, if it is given, are left alone.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from cflat._lazy import LazyModule
from cflat._ranges import Count, Positive, Range, check, checked
from cflat.analysis._point import Loss, Point
from cflat.optim.engine import NonFiniteError, as_real

__all__ = [
    "Density", "Eigen", "Estimate", "Hessian", "hessian_vector_product", "quadrature", "spectrum_density",
    "top_eigenvalues", "trace",
]  # fmt: skip

scipy_linalg = LazyModule("scipy.sparse.linalg")

DENSE = 20
"""Fewer weights are decomposed densely; ARPACK's usual number of vectors."""
_ENDS = {"largest": "LA", "smallest": "SA", "magnitude": "LM"}
_Several = Annotated[int, Range(at_least=2, integer=True)]


class Hessian:
    """The Hessian of a loss at the present weights, as a linear operator on lists of tensors or on flat vectors.

    Made by `hessian_vector_product`. Holds the graph of the gradient, and so the activations of one evaluation.
    """

    def __init__(self, point: Point) -> None:
        self._params = point.params
        with sdpa_kernel(SDPBackend.MATH):  # the fused attention kernels cannot be differentiated twice
            value = point.evaluate()
        gradients = torch.autograd.grad(
            value, self._params, create_graph=True, allow_unused=True, materialize_grads=True
        )
        self.gradient = [gradient.detach() for gradient in gradients]
        # A gradient without a graph is constant: the loss is linear in that weight or does not reach it.
        self._curved = [(i, gradient) for i, gradient in enumerate(gradients) if gradient.requires_grad]
        self._shapes = [as_real(param).shape for param in self._params]
        self.size = sum(shape.numel() for shape in self._shapes)
        self.device = self._params[0].device

    def __call__(self, vector: Sequence[Tensor]) -> list[Tensor]:
        """Return H v for ``vector`` shaped like the parameters."""
        if not self._curved:
            return [torch.zeros_like(param) for param in self._params]
        outputs = torch.autograd.grad(
            [gradient for _, gradient in self._curved],
            self._params,
            grad_outputs=[vector[index] for index, _ in self._curved],
            retain_graph=True,
            allow_unused=True,
            materialize_grads=True,
        )
        return [output.detach() for output in outputs]

    def product(self, flat: Tensor) -> Tensor:
        """Return H v for a flat vector, in float64; raises `NonFiniteError` if it is Inf or NaN."""
        outputs = self(self.unflattened(flat))
        image = torch.cat([as_real(output).reshape(-1).to(self.device, torch.float64) for output in outputs])
        if not image.isfinite().all():
            raise NonFiniteError("A Hessian-vector product is Inf or NaN; the loss has no finite curvature here.")
        return image

    def random_vector(self, seed: int) -> Tensor:
        """Draw a flat Gaussian vector, on the CPU first: the same on every device."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(self.size, generator=generator, dtype=torch.float64).to(self.device)

    def unflattened(self, flat: Tensor) -> list[Tensor]:
        """Cut a flat vector into tensors like the parameters; complex ones are read as pairs of numbers."""
        parts = flat.split([shape.numel() for shape in self._shapes])
        shaped = [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]
        return [
            # cloned, since a pair must start at an even address
            (torch.view_as_complex(part.clone()) if param.is_complex() else part).to(param)
            for part, param in zip(shaped, self._params, strict=True)
        ]


@dataclass(frozen=True)
class Eigen:
    """Eigenvalues at one end of the spectrum, the wanted ones first."""

    values: list[float]
    residuals: list[float]
    """|H v - value * v| of each pair with |v| = 1, measured: an eigenvalue lies within this distance of the value."""
    num_products: int
    is_converged: bool
    """Whether all of them reached the tolerance (by ARPACK's own estimate) before the limit of products."""
    vectors: list[list[Tensor]] | None = None
    """Unit eigenvectors shaped like the parameters, for slices along them; None unless asked for."""


@dataclass(frozen=True)
class Estimate:
    """A mean over random probes with its standard error."""

    mean: float
    error: float
    samples: list[float]


@dataclass(frozen=True)
class Density:
    """The distribution of the eigenvalues: a smooth curve that integrates to 1, and the points it was made of."""

    grid: list[float]
    density: list[float]
    sigma: float
    """Standard deviation of the Gaussian that stands for each point."""
    nodes: list[float]
    weights: list[float]

    def moment(self, order: int) -> float:
        """Return the estimate of tr(H^order) / size, before smoothing."""
        return math.fsum(weight * node**order for node, weight in zip(self.nodes, self.weights, strict=True))


def hessian_vector_product(loss: Loss, params: Sequence[Tensor]) -> Hessian:
    """Return an operator ``v -> H v`` for the Hessian of ``loss`` at the present weights.

    Evaluates the loss once, so buffers of the model (BatchNorm) see one forward pass. The weights must not change while
    the operator is in use; those that the loss does not reach have zero curvature.
    """
    with Point(loss, params) as point:
        return Hessian(point)


@checked
def top_eigenvalues(
    loss: Loss,
    params: Sequence[Tensor],
    k: Count = 5,
    *,
    which: Literal["largest", "smallest", "magnitude"] = "largest",
    tolerance: Positive = 1e-6,
    max_products: int = 100,
    with_vectors: bool = False,
    seed: int = 0,
    model: nn.Module | None = None,
) -> Eigen:
    """Return the ``k`` eigenvalues at one end of the Hessian's spectrum, by scipy's ``eigsh``.

    That is implicitly restarted Lanczos iteration, with max(2 k + 1, 20) vectors in float64 on the host. Exact copies
    of a repeated eigenvalue may be missing. A Hessian of no more than 20 weights is decomposed densely. If the limit of
    products is reached first, the pairs that have converged come back, and ``is_converged`` is False.

    Args:
        loss: Returns the scalar loss of the present weights; no backward.
        params: The weights, all requiring a gradient.
        k: How many eigenvalues; fewer come back when there are fewer weights, or some have not converged.
        which: Algebraically largest, algebraically smallest, or largest in magnitude.
        tolerance: Residual at which a pair is done, relative to its eigenvalue; above 0.
        max_products: Limit of the iteration, kept up to one restart; at least ``k``.
        with_vectors: Whether to return the eigenvectors, too.
        seed: Seed of the starting vector.
        model: The module whose buffers the evaluation must leave alone; optional.
    """
    check("max_products", max_products, at_least=k, integer=True)
    with Point(loss, params, model) as point:
        hessian = Hessian(point)
        k = min(k, hessian.size)
        # scipy's own choice of ncv, with fewer vectors where fewer products are allowed.
        width = min(hessian.size, max(2 * k + 1, min(DENSE, max_products)))  # vectors that the iteration holds
        if width == hessian.size:
            values, vectors = _dense(hessian, k, which)
            products, is_converged = hessian.size, True
        else:
            values, vectors, products, is_converged = _sparse(hessian, k, which, width, tolerance, max_products, seed)
        residuals = [
            (hessian.product(vector) - value * vector).norm().item()
            for value, vector in zip(values, vectors, strict=True)
        ]
        return Eigen(
            values=values,
            residuals=residuals,
            # Each residual takes one more.
            num_products=products + len(values),
            is_converged=is_converged,
            vectors=[hessian.unflattened(vector) for vector in vectors] if with_vectors else None,
        )


def _dense(hessian: Hessian, k: int, which: str) -> tuple[list[float], list[Tensor]]:
    units = torch.eye(hessian.size, dtype=torch.float64, device=hessian.device)
    matrix = torch.stack([hessian.product(unit) for unit in units])
    values, vectors = torch.linalg.eigh((matrix + matrix.T) / 2)  # symmetric up to rounding
    order = _order(values, which)[:k]
    return values[order].tolist(), list(vectors[:, order].T)


def _sparse(
    hessian: Hessian, k: int, which: str, width: int, tolerance: float, max_products: int, seed: int
) -> tuple[list[float], list[Tensor], int, bool]:
    """Return what ``eigsh`` finds, the wanted ones first, the products that it took, and whether it has found all."""
    products = 0

    def product(vector: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        nonlocal products
        products += 1
        return hessian.product(torch.tensor(vector, device=hessian.device)).cpu().numpy()

    operator = scipy_linalg.LinearOperator((hessian.size, hessian.size), matvec=product, dtype=np.float64)
    # ARPACK counts restarts, each of width - k products, after the first width.
    restarts = max(1, (max_products - width) // (width - k))
    # Without a starting vector ARPACK draws one that does not follow from `seed`.
    start = hessian.random_vector(seed).cpu().numpy()
    options = {"v0": start, "ncv": width, "maxiter": restarts, "tol": tolerance}
    try:
        values, vectors = scipy_linalg.eigsh(operator, k, which=_ENDS[which], **options)
    except scipy_linalg.ArpackNoConvergence as error:
        values, vectors = error.eigenvalues, error.eigenvectors  # those that have converged
    order = _order(torch.from_numpy(values), which)
    found = torch.from_numpy(vectors).to(hessian.device)[:, order]
    return [float(values[index]) for index in order], list(found.T), products, len(values) == k


def _order(values: Tensor, which: str) -> Tensor:
    keys = {"largest": values, "smallest": -values, "magnitude": values.abs()}[which]
    return keys.argsort(descending=True, stable=True)


@checked
def trace(
    loss: Loss, params: Sequence[Tensor], samples: _Several = 32, *, seed: int = 0, model: nn.Module | None = None
) -> Estimate:
    """Estimate the trace of the Hessian by Hutchinson's method with random signs.

    The mean of v.Hv over ``samples`` sign vectors is unbiased; its variance comes from off-diagonal entries alone, so a
    diagonal Hessian gives the exact trace with error 0. Costs one product per sample and holds two vectors. At least 2
    samples are needed, so that the error can be stated.
    """
    generator = torch.Generator().manual_seed(seed)
    with Point(loss, params, model) as point:
        hessian = Hessian(point)
        signs = (_signs(hessian, generator) for _ in range(samples))
        drawn = [torch.dot(sign, hessian.product(sign)).item() for sign in signs]
    return Estimate(statistics.fmean(drawn), statistics.stdev(drawn) / math.sqrt(samples), drawn)


@checked
def spectrum_density(
    loss: Loss,
    params: Sequence[Tensor],
    *,
    probes: Count = 8,
    steps: Count = 64,
    sigma: Positive | None = None,
    points: _Several = 1001,
    seed: int = 0,
    model: nn.Module | None = None,
) -> Density:
    """Estimate the density of the Hessian's eigenvalues by stochastic Lanczos quadrature.

    Each probe gives a Gauss quadrature of the spectrum, exact for v.p(H)v with polynomials p of degree below twice
    ``steps``; the average over probes is smoothed by Gaussians. Costs ``probes * steps`` products. No basis is kept:
    without reorthogonalisation a converged node comes back as several whose weights add up to its own, which leaves the
    density as it is, so that four vectors of memory are enough.

    Args:
        loss: Returns the scalar loss of the present weights; no backward.
        params: The weights, all requiring a gradient.
        probes: Number of random sign vectors; the noise falls with its square root.
        steps: Lanczos steps per probe; more resolve finer structure.
        sigma: Width of the Gaussians; None means 1 % of the range of the nodes.
        points: Number of points of the grid, which reaches 6 sigma beyond the outermost nodes.
        seed: Seed of the probes.
        model: The module whose buffers the evaluation must leave alone; optional.
    """
    generator = torch.Generator().manual_seed(seed)
    with Point(loss, params, model) as point:
        hessian = Hessian(point)
        rules = [quadrature(hessian, _signs(hessian, generator), steps) for _ in range(probes)]
    nodes, weights = (torch.cat(parts) for parts in zip(*rules, strict=True))
    weights /= probes
    low, high = nodes.min().item(), nodes.max().item()
    if sigma is None:
        # When all nodes are rounding errors of one value, their range is no scale.
        sigma = 0.01 * (high - low) if high - low > 1e-9 * abs(high) else 0.01 * (abs(high) or 1.0)
    # Beyond 6 sigma lies 1e-9 of a Gaussian, so the curve integrates to 1.
    grid = torch.linspace(low - 6 * sigma, high + 6 * sigma, points, dtype=torch.float64)
    if (grid[1] - grid[0]).item() > sigma:
        raise ValueError(f"sigma={sigma:g} is finer than the grid of {points} points; raise points or sigma.")
    bells = torch.exp(-0.5 * ((grid[:, None] - nodes[None, :]) / sigma).square()) / (sigma * math.sqrt(2 * math.pi))
    return Density(grid.tolist(), (bells @ weights).tolist(), sigma, nodes.tolist(), weights.tolist())


def quadrature(hessian: Hessian, start: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Return nodes and weights of the Gauss quadrature of the Hessian's spectrum as seen from ``start``.

    The weights add up to 1. Keeps the last two Lanczos vectors only; stops early when the subspace is invariant.
    """
    previous = torch.zeros_like(start)
    row = start / start.norm()
    alphas: list[float] = []
    betas: list[float] = []
    for _ in range(min(steps, hessian.size)):
        image = hessian.product(row)
        alphas.append(torch.dot(row, image).item())
        image -= alphas[-1] * row
        if betas:
            image -= betas[-1] * previous
        betas.append(image.norm().item())
        # The subspace is invariant: what is left is rounding, and normalized it would be a direction of noise.
        if betas[-1] <= 100 * torch.finfo(torch.float64).eps * max(abs(value) for value in (*alphas, *betas)):
            break
        previous, row = row, image / betas[-1]
    # The last beta couples to a vector outside of the basis; eigh reads the lower triangle alone.
    diagonal, couplings = (torch.tensor(values, dtype=torch.float64) for values in (alphas, betas[:-1]))
    nodes, vectors = torch.linalg.eigh(torch.diag(diagonal) + torch.diag(couplings, -1))
    # Golub and Welsch: the weights are the squares of the eigenvectors' first components.
    return nodes, vectors[0].square()


def _signs(hessian: Hessian, generator: torch.Generator) -> Tensor:
    bits = torch.randint(0, 2, (hessian.size,), generator=generator, dtype=torch.int8)
    return (2 * bits - 1).to(hessian.device, torch.float64)
