"""Zeroth-order sharpness and first-order flatness of a loss, the two terms that C-Flat adds to it.

With the neighbourhood |eps| <= rho, following "A Faster Path to Continual Learning" (2026), Equations 2 and 3:

    R^0(theta) = max L(theta + eps) - L(theta)
    R^1(theta) = rho * max |grad L(theta + eps)|

The adaptive forms scale the neighbourhood with the weights as ASAM does, |eps / T| <= rho with T = |theta| + eta, and
measure gradients in the norm that belongs to it, |T g|. So R^0 <= R^1 holds for both forms. T is that of theta in the
whole neighbourhood; ``eta`` is its floor, at least 0.

Throughout, ``loss`` returns the scalar loss of the present weights and does not call backward (put the model into eval
mode first if that is what is to be measured); ``params`` are the weights, all requiring a gradient; ``rho`` is above 0;
and buffers of ``model``, if it is given, are left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from cflat._ranges import Count, NotNegative, Positive, checked
from cflat.analysis._point import Loss, Point
from cflat.analysis.hessian import Hessian
from cflat.optim.engine import EPS, Vector, as_real

__all__ = ["Terms", "ascend_terms", "measure_terms"]


@dataclass(frozen=True)
class Terms:
    """The parts of the C-Flat objective at one point."""

    loss: float
    sharpness: float
    """R^0, zeroth order."""
    flatness: float
    """R^1, first order."""
    gradient_norm: float
    """|g|, or |T g| in the adaptive form: what both terms divided by rho tend to as rho goes to 0."""


@checked
def measure_terms(
    loss: Loss,
    params: Sequence[Tensor],
    rho: Positive,
    *,
    adaptive: bool = False,
    eta: NotNegative = 0.01,
    model: nn.Module | None = None,
) -> Terms:
    """Estimate both terms with one step each, as the optimizers do.

    Sharpness is L(theta + eps_0) - L(theta) with eps_0 = rho * g / |g|, flatness rho * |grad L(theta + eps_1)| with
    eps_1 = rho * (g_s - g) / |g_s - g|. Both are first-order estimates and lower bounds: the maxima lie elsewhere in
    general, and where the gradient is zero (or the loss falls again within rho) sharpness may be 0 or below although
    the maximum is not. `ascend_terms` searches on from here. Costs 3 evaluations and holds five vectors.
    """
    with Point(loss, params, model) as point:
        ball = _Ball(point, rho, eta if adaptive else None)
        return Terms(
            loss=ball.loss,
            sharpness=ball.loss_s - ball.loss,
            flatness=rho * ball.loss_and_ascent(ball.eps_1)[1].norm,
            gradient_norm=ball.gradient_norm,
        )


@checked
def ascend_terms(
    loss: Loss,
    params: Sequence[Tensor],
    rho: Positive,
    *,
    steps: Count = 20,
    starts: Count = 4,
    adaptive: bool = False,
    eta: NotNegative = 0.01,
    seed: int = 0,
    model: nn.Module | None = None,
) -> Terms:
    """Search the maxima of both terms by projected gradient ascent inside the ball.

    Starts from the point of `measure_terms`, from the opposite one, and from random ones on the sphere; returns the
    best value met anywhere, so it never lies below `measure_terms` or 0. Still a lower bound of the true maximum,
    which it reaches when one of the starts lies in its basin. The gradient of the gradient norm is exact (one
    Hessian-vector product). Costs about ``starts * steps`` evaluations for sharpness and as many of twice the cost for
    flatness, and holds eight vectors. ``seed`` is that of the random starts.
    """
    with Point(loss, params, model) as point:
        ball = _Ball(point, rho, eta if adaptive else None)
        highest = ball.climb(ball.loss_and_ascent, ball.eps_0, steps, starts, seed)
        steepest = ball.climb(ball.norm_and_ascent, ball.eps_1, steps, starts, seed)
        return Terms(
            loss=ball.loss,
            # Theta itself lies in the ball.
            sharpness=max(0.0, highest - ball.loss),
            flatness=rho * max(ball.gradient_norm, steepest),
            gradient_norm=ball.gradient_norm,
        )


class _Ball:
    """The neighbourhood in coordinates in which it is round: theta + T u with |u| <= rho.

    Gradients with respect to u are T g, so the plain form is the case T = 1 and needs no code of its own. Two of them,
    at theta and at eps_0, give the losses there and the first-order guesses of both maximisers.
    """

    def __init__(self, point: Point, rho: float, eta: float | None) -> None:
        self._point = point
        self._rho = rho
        self._scale = None if eta is None else point.magnitudes(plus=eta)  # T
        self.loss, g = self._gradient()
        self.gradient_norm = g.norm
        self.eps_0 = _with_norm(g, rho)
        self.loss_s, g_s = self.loss_and_ascent(self.eps_0)
        self.eps_1 = _with_norm(g_s.minus(g), rho)

    def loss_and_ascent(self, u: Vector) -> tuple[float, Vector]:
        """Return L and the direction in which it grows."""
        self._move(u)
        return self._gradient()

    def norm_and_ascent(self, u: Vector) -> tuple[float, Vector]:
        """Return |T g| and the direction in which it grows: that of its square's half, T H T (T g)."""
        self._move(u)
        hessian = Hessian(self._point)
        # A copy, since `_scaled` works in place; the norm is read before g is scaled once more below.
        g = self._scaled(Vector([as_real(gradient) for gradient in hessian.gradient]).clone())
        norm = g.norm
        image = hessian(self._point.tensors(self._scaled(g)))
        return norm, self._scaled(Vector([as_real(tensor) for tensor in image]))

    def climb(
        self, evaluate: Callable[[Vector], tuple[float, Vector]], guess: Vector, steps: int, starts: int, seed: int
    ) -> float:
        """Return the highest value that is met from the guess, its opposite, and random points."""
        generator = torch.Generator().manual_seed(seed)
        best = self._climb_from(evaluate, guess, steps)
        for index in range(1, starts):
            # The loss need not be symmetric, so the opposite point is a start of its own.
            start = guess.scaled(-1.0) if index == 1 else _with_norm(_random_like(guess, generator), self._rho)
            best = max(best, self._climb_from(evaluate, start, steps))
        return best

    def _climb_from(self, evaluate: Callable[[Vector], tuple[float, Vector]], u: Vector, steps: int) -> float:
        """Ascend with a step length that doubles after success and halves after failure."""
        length = self._rho
        best, ascent = evaluate(u)
        for _ in range(steps - 1):
            if ascent.norm == 0.0:  # a stationary point
                break
            trial = u.clone().add_(ascent, length / ascent.norm)
            if trial.norm > self._rho:
                trial.scale_(self._rho / trial.norm)
            value, ahead = evaluate(trial)
            if value > best:
                u, best, ascent, length = trial, value, ahead, min(2 * length, 2 * self._rho)
            else:
                length /= 2
        return best

    def _gradient(self) -> tuple[float, Vector]:
        value, g = self._point.value_and_gradient()
        return value, self._scaled(g)

    def _move(self, u: Vector) -> None:
        self._point.move((u if self._scale is None else u.clone().mul_(self._scale), 1.0))

    def _scaled(self, vector: Vector) -> Vector:
        """Multiply by T, in place where there is one."""
        return vector if self._scale is None else vector.mul_(self._scale)


def _with_norm(vector: Vector, norm: float) -> Vector:
    """Return the vector with another norm; zero stays zero."""
    return vector.scaled(norm / (vector.norm + EPS))


def _random_like(vector: Vector, generator: torch.Generator) -> Vector:
    """Draw a Gaussian vector; on the CPU, so that it is the same on every device."""
    return Vector([torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t) for t in vector.tensors])
