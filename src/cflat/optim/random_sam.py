"""Random SAM: descend along the gradient at a random nearby point, as in Flat-LoRA (Li et al., 2025)."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from cflat.optim.engine import (
    Count,
    Direction,
    Radius,
    SharpnessAware,
    StepOptions,
    Vector,
    Weights,
    Whole,
    data_of,
    filter_norms,
    register_optimizer,
    shard_like,
)


@register_optimizer(
    "random_sam",
    title="Random SAM",
    has_own_radius=True,
    summary="gradient at a random point, scaled by filter norms",
    evaluations="1",
    peak_buffers=1,
    paper="Flat-LoRA: Low-Rank Adaptation over a Flat Loss Landscape (2025)",
)
class RandomSAM(SharpnessAware):
    """Descend along the gradient at theta + eps with eps_ij ~ N(0, rho^2 |W_i|^2 / n) for row W_i of a weight W.

    A row is an output's filter with its n weights, so that each filter moves by about rho times its own norm. Tensors
    without rows (biases, scales) are not perturbed. Expected flatness takes the place of the worst case: one evaluation
    per step, nothing kept. The noise of a step is a function of ``seed``, the task and the step number alone: all ranks
    perturb alike and a resumed run continues with the same noise. Weights are restored from a copy, bit for bit.
    The loss that a step returns is that of its only evaluation, at the perturbed weights.

    Args:
        base: Any torch optimizer; its groups and schedules stay in charge of the update.
        model: The module whose buffers extra evaluations must leave alone; optional.
        rho: Radius relative to the norm of each filter; above 0, or a schedule.
        total_steps: Let the radius grow from 0 to rho along half a cosine over so many steps of a task, as the authors
            do; None keeps it constant.
        seed: Chooses the sequence of perturbations.
        options: How steps are taken; see `StepOptions`.
    """

    def __init__(
        self,
        base: Optimizer,
        *,
        model: nn.Module | None = None,
        rho: Radius = 0.05,
        total_steps: Count | None = None,
        seed: Whole = 0,
        options: StepOptions | None = None,
    ) -> None:
        super().__init__(base, model=model, rho=rho, options=options)
        self.total_steps = total_steps
        self.seed = seed

    def direction(self, weights: Weights) -> Direction:
        """Return the gradient at the random point."""
        params = self._in_order(p for p in weights.candidates if p.requires_grad and data_of(p).ndim > 1)
        if params:
            weights.choose(params)
            weights.shift(self._displacement(params, weights), self._growth() * self.rho)
        g = yield "g_s" if params else "g"
        self.count("sharpness", "refreshed" if params else "skipped", g=g.norm)
        return g

    def _displacement(self, params: Sequence[Tensor], weights: Weights) -> Vector:
        """Return the noise; moves turn around where the base maximizes, but a random point is the same either way."""
        pairs = zip(self._noise(params), weights.scales, strict=True)
        return Vector([noise.neg_() if scale < 0 else noise for noise, scale in pairs])

    def _in_order(self, params: Iterable[Tensor]) -> list[Tensor]:
        """Sort as the model does, if there is one: how parameters are grouped then does not change their noise."""
        place: dict[Tensor, int] = {
            param: index for index, param in enumerate(self._model.parameters() if self._model else ())
        }
        return sorted(params, key=lambda param: place.get(param, len(place)))

    def _growth(self) -> float:
        if self.total_steps is None:
            return 1.0
        return 0.5 * (1 - math.cos(math.pi * min(1.0, self.task_step / self.total_steps)))

    def _noise(self, params: Sequence[Tensor]) -> Iterator[Tensor]:
        """Yield for each parameter noise of which a row has about the norm of the parameter's row."""
        # As text: Random hashes it with SHA-512, equally in every process.
        seed = random.Random(f"{self.seed}/{self.task_index}/{self.task_step}").getrandbits(63)
        generators: dict[torch.device, torch.Generator] = {}
        for param in params:
            norms = filter_norms(param)
            if param.device not in generators:
                generators[param.device] = torch.Generator(param.device).manual_seed(seed)
            shape = torch.view_as_real(param).shape if param.is_complex() else param.shape
            # Always in single precision: the numbers that a generator gives depend on the type.
            whole = torch.randn(shape, generator=generators[param.device], device=param.device)
            scale = norms / math.sqrt(math.prod(shape[1:]))
            yield shard_like(whole.to(scale.dtype).mul_(scale), param)
