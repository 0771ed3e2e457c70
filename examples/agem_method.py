"""A-GEM (Chaudhry et al., 2019): a method that edits the update, by `before_update`, and replays from a reservoir.

    cflat run --method agem --data digits --plugin examples/agem_method.py --optimizer c_flat stream.scenario=task
    python examples/agem_method.py

If the direction of the step would raise the loss of stored images, the part of it that does so is taken out.
"""

from dataclasses import dataclass

import torch
from torch.nn import functional

import cflat
from cflat.data import ReservoirMemory
from cflat.methods import Loss, Method, Replay, register_method
from cflat.nn import Classifier
from cflat.nn.ranks import sum_over_batch


@dataclass(frozen=True, kw_only=True)
class AGEMConfig:
    """Settings of A-GEM."""

    memory_per_class: int = 20
    """Stored images of each class."""


@register_method("agem", config=AGEMConfig, summary="project the update on stored images", needs_memory=True)
class AGEM(Method):
    """Cross-entropy on the task; its update may not raise the loss of stored images."""

    def __init__(self, config, backbone, info):
        super().__init__(info)
        self.network, self.memory = Classifier(backbone), ReservoirMemory(per_class=config.memory_per_class)
        self.task = None

    def grow(self, task):
        """Add outputs."""
        self.task = task
        self.network.head.grow(task.classes.stop - self.network.head.num_classes)

    def replay(self, num_images, rng):
        """Ask for a batch of stored images beside that of the step; it is loaded and augmented like any other."""
        if self.task.index == 0:
            return []
        return [Replay(*self.memory.draw(num_images, rng, like=self.task.train))]

    def loss(self, model, batch):
        """Classify the new images; what the optimizer perturbs and measures is this loss alone."""
        return Loss({"classify": functional.cross_entropy(model(batch.images), batch.labels)})

    def before_update(self, batch):
        """Once per step, at the unperturbed weights: ``.grad`` is what the base optimizer is about to apply."""
        for stored in batch.replay:
            params = [param for param in self.network.parameters() if param.grad is not None]
            loss = functional.cross_entropy(self.network(stored.images), stored.labels)
            # Ranks have their own part of the stored images; their mean is what one rank would have.
            wanted = [sum_over_batch(batch.share * gradient) for gradient in torch.autograd.grad(loss, params)]
            along = sum((param.grad * gradient).sum() for param, gradient in zip(params, wanted, strict=True))
            if along < 0:
                scale = along / sum(gradient.square().sum() for gradient in wanted)
                for param, gradient in zip(params, wanted, strict=True):
                    param.grad -= scale * gradient

    def after_step(self, seen):
        """Let the batch into the memory."""
        self.memory.observe(seen.rows, seen.labels)

    def extra_state(self):
        """Return the memory: rows and labels, no pixels."""
        return {"memory": self.memory.state()}

    def load_extra_state(self, state, train):
        """Find the stored images again."""
        self.memory.load_state(state["memory"], train)


if __name__ == "__main__":
    for name in ("none", "c_flat_turbo"):
        done = cflat.bench.run(
            method="agem", data="digits", optimizer=name, preset="smoke", stream__scenario="task", train__epochs=3
        )
        print(f"{name:<13} avg {done.metrics['avg']:.1%}  {done.metrics['evaluations_per_step']:.2f} evaluations/step")
