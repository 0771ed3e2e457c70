"""The objective of one step as a closure that an optimizer may call as often as it likes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from cflat._errors import CFlatError
from cflat.data import Batch
from cflat.methods import Method, Seen
from cflat.nn.surgery import has_batchnorm
from cflat.optim.engine import BufferGuard
from cflat.train.runtime import Runtime, seed_everything


class ImpureLossError(CFlatError):
    """A method's loss changes when it is evaluated twice; flatness-aware optimizers would measure noise."""


@dataclass
class Objective:
    """Turn a method's loss into closures.

    What must not be evaluated again happens in `prepare`; the optimizer guards buffers and random numbers while it
    calls the closure.
    """

    method: Method
    model: nn.Module
    """The method's network, possibly wrapped for several devices."""
    runtime: Runtime
    scaler: torch.amp.GradScaler | None = None
    """For float16."""
    accumulate: int = 1
    """Micro-batches in which a batch is evaluated, one graph at a time; their gradients add up."""

    def __post_init__(self) -> None:
        # BatchNorm cannot be trained on one image, so no micro-batch of a rank may have fewer than two.
        self._fewest = 2 if has_batchnorm(self.method.network) else 1
        self.outputs: Mapping[str, Tensor] = {}
        """`Loss.outputs` of the first evaluation of the latest closure."""

    @torch.no_grad()
    def prepare(self, batch: Batch) -> Batch:
        """Compute, once per step, what the trained weights do not change."""
        with self.runtime.sharing(batch), self.runtime.autocast():
            return self.method.prepare(batch)

    def closure(self, batch: Batch) -> Callable[[], Tensor]:
        """Return the closure of a prepared batch: forward, backward, loss, for one micro-batch after the other.

        Losses are means over images, and ranks are averaged. Weighting each rank by its fraction of the images makes
        that average the loss of the whole batch, however it is divided.
        """
        parts, num_ranks = self.micro_batches(batch), self.runtime.world_size
        self.outputs = {}

        def evaluate() -> Tensor:
            losses, outputs = [], []
            for part in parts:
                # Gradients are reduced with the last micro-batch: one all-reduce per evaluation.
                with self.runtime.sharing(part), self.runtime.gradient_sync(self.model, enabled=part is parts[-1]):
                    loss = self._backward(part, batch.share * num_ranks * len(part) / len(batch))
                losses.append(loss[0])
                outputs.append(loss[1])
            if not self.outputs:  # later evaluations are at perturbed weights
                self.outputs = {name: torch.cat([part[name] for part in outputs]) for name in outputs[0]}
            return sum(losses[1:], start=losses[0])

        return evaluate

    @torch.no_grad()
    def forward(self, batch: Batch) -> None:
        """Run the network on a prepared batch, for what that does to running statistics."""
        for part in self.micro_batches(batch):
            with self.runtime.sharing(part):
                self.loss(part)

    def _backward(self, part: Batch, weight: float) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Add the gradient of a micro-batch with this weight; return its part of the loss, and the outputs."""
        with self.runtime.autocast():
            result = self.method.loss(self.model, part)
        loss = result.total if weight == 1 else weight * result.total
        # Outside of autocast, as torch recommends: backward operations run in the dtypes of their forward ones.
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()  # type: ignore[no-untyped-call]
        return loss.detach(), result.outputs

    def seen(self, batch: Batch) -> Seen:
        """Return what all ranks have seen in the step of the latest closure, image r + W * i being rank r's i-th."""
        own = {"rows": batch.rows, "labels": batch.labels, **self.outputs}
        if self.runtime.world_size > 1:
            own = {name: self._of_all_ranks(value, batch.num_images) for name, value in own.items()}
        return Seen(own.pop("rows"), own.pop("labels"), own)

    def _of_all_ranks(self, own: Tensor, total: int) -> Tensor:
        rows = -(-total // self.runtime.world_size)
        # `gather` needs equal shapes. The row of a filler ends up behind `total` and is cut off.
        padded = own.new_zeros(rows, *own.shape[1:])
        padded[: len(own)] = own
        return self.runtime.gather(padded).transpose(0, 1).flatten(0, 1)[:total]

    def micro_batches(self, batch: Batch) -> list[Batch]:
        """Return the micro-batches of a step: as many as asked for, if there are images for them on every rank."""
        num_ranks, total = self.runtime.world_size, batch.num_images
        num_parts = min(self.accumulate, max(1, total // num_ranks // self._fewest))
        if num_parts == 1:
            return [batch]
        # Rank r has the images r, r + W, ... of the step; of each rank's, part p has one more if p is small enough.
        on_ranks = [len(range(rank, total, num_ranks)) for rank in range(num_ranks)]
        return [
            replace(part, total=sum(number // num_parts + (index < number % num_parts) for number in on_ranks))
            for index, part in enumerate(batch.split(num_parts))
        ]

    def loss(self, batch: Batch) -> Tensor:
        """Return the loss of a prepared batch at the present weights, with its graph."""
        with self.runtime.autocast():
            return self.method.loss(self.model, batch).total

    def check_purity(self, batch: Batch) -> None:
        """Evaluate twice under the same random numbers and reject a loss whose gradient or prepared batch changes."""
        contents = {name: value.clone() for name, value in batch.extras.items()}
        first, second = self._gradients(batch), self._gradients(batch)
        name = type(self.method).__name__
        for parameter, gradient in first.items():
            if not torch.equal(gradient, second[parameter]):
                raise ImpureLossError(
                    f"The loss of {name} is not pure: the gradient of {parameter} differs between two evaluations of "
                    "the same batch. Move everything that changes from call to call into prepare()."
                )
        for key, value in contents.items():
            if not torch.equal(value, batch.extras[key]):
                raise ImpureLossError(f"The loss of {name} changed the prepared tensor {key!r}; it must only read it.")

    def _gradients(self, batch: Batch) -> dict[str, Tensor]:
        """Return all gradients of one evaluation and leave buffers and gradients as they were."""
        network = self.method.network
        guard = BufferGuard(network)
        guard.start()
        seed_everything(0)
        network.zero_grad()
        self.closure(batch)()
        gradients = {name: p.grad.clone() for name, p in network.named_parameters() if p.grad is not None}
        network.zero_grad()
        guard.undo()
        return gradients
