"""Synaptic intelligence (Zenke et al., 2017): a method that follows the weights from step to step, by `after_step`.

    cflat run --method si --data digits --plugin examples/si_method.py --optimizer c_flat stream.scenario=task
    python examples/si_method.py

Each step adds to a weight's importance what its move has lowered the loss by: minus gradient times move.
"""

from dataclasses import dataclass

import torch
from torch.nn import functional

import cflat
from cflat.methods import Loss, Method, register_method
from cflat.nn import Classifier, WeightAnchor


@dataclass(frozen=True, kw_only=True)
class SIConfig:
    """Settings of SI."""

    weight: float = 1.0
    """Weight of the penalty, c in the paper."""
    damping: float = 0.1
    """Keeps the importance of weights that hardly moved finite, xi in the paper."""


@register_method("si", config=SIConfig, summary="importance along the path of the weights", scenarios=("class", "task"))
class SI(Method):
    """Cross-entropy among the classes of the task, and a penalty on weights that have lowered the loss."""

    def __init__(self, config, backbone, info):
        super().__init__(info)
        self.config, self.network, self.anchor = config, Classifier(backbone), WeightAnchor()
        self.classes, self.start, self.last, self.gain = range(0), {}, {}, {}

    def grow(self, task):
        """Add outputs."""
        self.classes = task.classes
        self.network.head.grow(task.classes.stop - self.network.head.num_classes)
        self.anchor.resize_(self.network)

    def start_task(self, task, extract):
        """Begin the path of the task."""
        self.start = {name: weight.detach().clone() for name, weight in self.network.named_parameters()}
        self.last = {name: weight.clone() for name, weight in self.start.items()}
        self.gain = {name: torch.zeros_like(weight) for name, weight in self.start.items()}

    def loss(self, model, batch):
        """Classify, and hold the weights."""
        own = model(batch.images)[:, self.classes.start : self.classes.stop]
        classify = functional.cross_entropy(own, batch.labels - self.classes.start)
        return Loss({"classify": classify, "penalty": self.config.weight * self.anchor(self.network)})

    def after_step(self, seen):
        """Once per step, whatever the optimizer evaluates: ``.grad`` is the direction that it has taken."""
        for name, weight in self.network.named_parameters():
            if weight.grad is not None:
                self.gain[name] -= weight.grad * (weight - self.last[name])
            self.last[name] = weight.detach().clone()

    def finish_task(self, task, extract):
        """Hold each weight where it is, by what it has gained over how far it went."""
        importance = {
            name: self.gain[name].clamp(min=0) / ((weight - self.start[name]).square() + self.config.damping)
            for name, weight in self.network.named_parameters()
        }
        self.anchor.replace_(self.network, importance, decay=1.0)

    def extra_state(self):
        """Return what is neither parameter nor buffer: it is in every checkpoint, also within a task."""
        return {"start": self.start, "last": self.last, "gain": self.gain}

    def load_extra_state(self, state, train):
        """Take it over."""
        self.start, self.last, self.gain = state["start"], state["last"], state["gain"]


if __name__ == "__main__":
    for name in ("none", "c_flat_turbo"):
        done = cflat.bench.run(
            method="si", data="digits", optimizer=name, preset="smoke", stream__scenario="task", train__epochs=3
        )
        print(f"{name:<13} avg {done.metrics['avg']:.1%}  {done.metrics['evaluations_per_step']:.2f} evaluations/step")
