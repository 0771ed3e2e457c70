"""A method of your own in one file: EWC, in the smallest form.

    cflat run --method my_ewc --data digits --plugin examples/ewc_method.py --optimizer c_flat stream.scenario=task
    python examples/ewc_method.py

After each task the squared gradients of its images say how much each weight matters; later tasks pay for moving it.
"""

from dataclasses import dataclass

import torch
from torch.nn import functional

import cflat
from cflat.methods import Loss, Method, register_method
from cflat.nn import Classifier, WeightAnchor


@dataclass(frozen=True, kw_only=True)
class MyEWCConfig:
    """Settings: each is a key of the command line, ``method.weight=100``."""

    weight: float = 1000.0
    """Weight of the penalty."""


@register_method("my_ewc", config=MyEWCConfig, summary="EWC as a plug-in", scenarios=("class", "task", "domain"))
class MyEWC(Method):
    """Cross-entropy among the classes of the task, and a penalty on weights that matter."""

    def __init__(self, config, backbone, info):
        super().__init__(info)
        self.config, self.network, self.anchor = config, Classifier(backbone), WeightAnchor()
        self.classes = range(0)

    def grow(self, task):
        """Structure only: a restored run comes here for every task before it loads the values."""
        self.classes = task.classes
        self.network.head.grow(task.classes.stop - self.network.head.num_classes)
        self.anchor.resize_(self.network)

    def classify(self, logits, labels):
        """Return the cross-entropy among the classes of the task."""
        own = logits[:, self.classes.start : self.classes.stop]
        return functional.cross_entropy(own, labels - self.classes.start)

    def loss(self, model, batch):
        """One to four times per step, at perturbed weights: it must be pure, and the penalty belongs here."""
        penalty = self.config.weight / 2 * self.anchor(self.network)
        return Loss({"classify": self.classify(model(batch.images), batch.labels), "penalty": penalty})

    def squared_gradient(self, images, labels):
        """Return the squared gradient of one image, as one vector."""
        gradients = torch.autograd.grad(self.classify(self.network(images), labels), list(self.network.parameters()))
        return torch.cat([gradient.flatten() for gradient in gradients]).square()

    def finish_task(self, task, extract):
        """Once per task: the Fisher information, an image at a time, with labels and gradients."""
        total = extract.sum(task.train, self.squared_gradient, labels=True, gradients=True, batch_size=1)
        params = dict(self.network.named_parameters())
        parts = (total / len(task.train)).split([param.numel() for param in params.values()])
        importance = {name: part.view_as(params[name]) for name, part in zip(params, parts, strict=True)}
        self.anchor.add_(self.network, importance)


if __name__ == "__main__":
    for name in ("none", "c_flat_turbo"):
        done = cflat.bench.run(
            method="my_ewc", data="digits", optimizer=name, preset="smoke", stream__scenario="task", train__epochs=3
        )
        print(f"{name:<13} avg {done.metrics['avg']:.1%}  {done.metrics['evaluations_per_step']:.2f} evaluations/step")
