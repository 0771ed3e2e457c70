"""Drive a reference algorithm: evaluate a model at flat points, write the direction, call torch's own optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import Optimizer

from reference.space import Algorithm

Loss = Callable[[Callable[..., Tensor], Any], Tensor]


class ReferenceTrainer:
    """Take steps with an algorithm on a float64 model.

    Buffers (running statistics) end each step as the first evaluation of that step leaves them, which is what one
    plain forward pass does; every evaluation begins from the buffers of the step before.
    """

    def __init__(self, model: nn.Module, base: Optimizer, algorithm: Algorithm, loss: Loss) -> None:
        self.model, self.base, self.algorithm, self.loss = model, base, algorithm, loss
        self.params = dict(model.named_parameters())
        algorithm.params = list(self.params.values())
        decays = {param: group["weight_decay"] for group in base.param_groups for param in group["params"]}
        algorithm.weight_decay = torch.cat(
            [torch.full_like(p.detach().flatten(), decays[p]) for p in model.parameters()]
        )
        self.buffers = dict(model.named_buffers())
        self.losses: list[float] = []

    def step(self, batch: Any) -> int:
        """Take one step and return the evaluations that it took."""
        self.losses = []
        kept: dict[str, Tensor] = {}

        def gradient(theta: Tensor) -> Tensor:
            loss, flat, buffers = self._evaluate(theta, batch)
            if not self.losses:
                kept.update(buffers)
            self.losses.append(loss)
            return flat

        params = list(self.params.values())
        theta = torch.cat([param.detach().reshape(-1) for param in params])
        lr = self.base.param_groups[0]["lr"]
        direction = self.algorithm.next_direction(theta, gradient, lr)
        for param, part in zip(params, direction.split([param.numel() for param in params]), strict=True):
            param.grad = part.view_as(param).clone()
        self.base.step()
        with torch.no_grad():
            for name, buffer in self.buffers.items():
                buffer.copy_(kept[name])
        return len(self.losses)

    def _evaluate(self, theta: Tensor, batch: Any) -> tuple[float, Tensor, dict[str, Tensor]]:
        parts = theta.split([param.numel() for param in self.params.values()])
        leaves = {
            name: part.reshape(param.shape).clone().requires_grad_()
            for (name, param), part in zip(self.params.items(), parts, strict=True)
        }
        buffers = {name: buffer.clone() for name, buffer in self.buffers.items()}
        loss = self.loss(lambda inputs: functional_call(self.model, {**leaves, **buffers}, (inputs,)), batch)
        gradients = torch.autograd.grad(loss, list(leaves.values()))
        return loss.item(), torch.cat([gradient.reshape(-1) for gradient in gradients]), buffers
