"""QHM: stochastic gradient descent with quasi-hyperbolic momentum (Ma and Yarats, 2019)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from cflat._ranges import Fraction, NotNegative, Share, check, checked
from cflat.optim._sharding import local_part

_Groups = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]


class QHM(Optimizer):
    """Descend along a mean of the gradient and its moving average.

        m     <- momentum * m + (1 - momentum) * g              m starts at 0
        theta <- theta - lr * [(1 - nu) * g + nu * m]

    ``nu=0`` is SGD without momentum, ``nu=1`` SGD with ``momentum`` at the rate ``(1 - momentum) * lr``, and
    ``nu=momentum`` Nesterov's momentum at that rate: the averaged gradient does not grow with the momentum, so a rate
    for torch's SGD is to be multiplied by ``1 / (1 - momentum)``.

    A base optimizer for every wrapper, or an optimizer of its own. Its state is one tensor per parameter, and a step
    reads nothing back from the device, so it can be captured in a graph when ``lr`` is a tensor.

    Args:
        params: Parameters, or groups of them with settings of their own.
        lr: Learning rate, at least 0; a number or a tensor with one element.
        momentum: Fraction of m that a step keeps, in [0, 1).
        nu: Weight of m against the gradient itself, in [0, 1].
        weight_decay: Multiple of the parameters that is added to the gradient, as in torch's SGD; at least 0.
        maximize: Ascend instead.

    >>> weight = torch.nn.Parameter(torch.zeros(1))
    >>> optimizer = QHM([weight], lr=1.0, momentum=0.9, nu=0.7)
    >>> weight.grad = torch.ones(1)
    >>> optimizer.step()
    >>> round(weight.item(), 6)  # -(0.3 * 1 + 0.7 * 0.1)
    -0.37
    """

    @checked
    def __init__(
        self,
        params: _Groups,
        lr: float | Tensor,
        momentum: Fraction = 0.9,
        nu: Share = 0.7,
        weight_decay: NotNegative = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "nu": nu, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters; what it does not set is as in the constructor."""
        # Torch's constructor adds its groups through this method, so settings of single groups are checked as well.
        settings = {**self.defaults, **param_group}
        lr = settings["lr"]
        if not isinstance(lr, Tensor):
            check("lr", lr, at_least=0)
        elif lr.numel() != 1:
            raise ValueError(f"lr must be a number or a tensor with one element, got one of shape {tuple(lr.shape)}.")
        check("momentum", settings["momentum"], at_least=0, below=1)
        check("nu", settings["nu"], at_least=0, at_most=1)
        check("weight_decay", settings["weight_decay"], at_least=0)
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Take one step; a closure is called first, and what it returns is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            if params:
                self._update(params, group)
        return loss

    def _update(self, params: list[Tensor], group: dict[str, Any]) -> None:
        # Everything is elementwise, so sharded parameters are updated shard by shard.
        thetas = [local_part(param, param) for param in params]
        averages = [local_part(self._average_of(param), param) for param in params]
        gradients = [_dense(local_part(param.grad, param)) for param in params if param.grad is not None]
        if group["maximize"]:
            gradients = list(torch._foreach_neg(gradients))
        if group["weight_decay"] != 0:
            gradients = list(torch._foreach_add(gradients, thetas, alpha=group["weight_decay"]))
        torch._foreach_mul_(averages, group["momentum"])
        torch._foreach_add_(averages, gradients, alpha=1 - group["momentum"])
        directions = torch._foreach_lerp(gradients, averages, group["nu"])
        if isinstance(group["lr"], Tensor):  # as ``alpha`` it would be read back from the device
            torch._foreach_mul_(directions, group["lr"])
            torch._foreach_sub_(thetas, directions)
        else:
            torch._foreach_add_(thetas, directions, alpha=-group["lr"])

    def _average_of(self, param: Tensor) -> Tensor:
        state = self.state[param]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(param, memory_format=torch.preserve_format)
        average: Tensor = state["momentum_buffer"]
        return average


def _dense(gradient: Tensor) -> Tensor:
    return gradient.to_dense() if gradient.is_sparse else gradient
