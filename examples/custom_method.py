"""A continual-learning method of your own in one file; every optimizer, stream and the trainer work with it.

    python examples/custom_method.py

LwF: cross-entropy on the new task, distillation from the previous network, no exemplars.
"""

from dataclasses import dataclass

from torch.nn import functional

from cflat.data import build_stream, eval_transform, load_dataset, train_transform
from cflat.methods import Loss, Method, StreamInfo, create_method, register_method
from cflat.nn import Classifier, create_backbone, frozen_copy
from cflat.train import BaseSettings, Inputs, OptimizerChoice, Runtime, TrainSettings, run_stream


@dataclass(frozen=True, kw_only=True)
class LwFConfig:
    """Settings of LwF."""

    weight: float = 3.0
    """Weight of the distillation term."""


@register_method("lwf", config=LwFConfig, summary="distillation from the previous network, no exemplars")
class LwF(Method):
    """Learning without forgetting."""

    def __init__(self, config, backbone, info):
        super().__init__(info)
        self.config, self.network, self.teacher = config, Classifier(backbone), None

    def grow(self, task):
        """Keep the previous network and add outputs: structure only, so that a run can be restored."""
        if task.index > 0:
            self.teacher = frozen_copy(self.network)
        self.network.head.grow(task.num_classes)

    def prepare(self, batch):
        """Once per step: the teacher does not depend on the trained weights."""
        return batch if self.teacher is None else batch.with_(teacher=self.teacher(batch.images).softmax(dim=1))

    def loss(self, model, batch):
        """One to four times per step: must be pure."""
        logits = model(batch.images)
        num_old = batch.extras["teacher"].shape[1] if "teacher" in batch.extras else 0
        parts = {"classify": functional.cross_entropy(logits[:, num_old:], batch.labels - num_old)}
        if num_old:
            old = functional.cross_entropy(logits[:, :num_old], batch.extras["teacher"])
            parts["distil"] = self.config.weight * old
        return Loss(parts)

    def predict(self, batch):
        """Scores of all seen classes."""
        return {"logits": self.network(batch.images)}


stream = build_stream(load_dataset("digits"), "class", initial=5, increment=5)
info = StreamInfo(stream.scenario, stream.num_classes, stream.num_tasks)
for name in ("none", "c_flat_turbo"):
    result = run_stream(
        create_method("lwf", create_backbone("small_cnn", image_size=8), info),
        stream,
        base=BaseSettings(lr=0.05),
        train=TrainSettings(epochs=3, batch_size=32, check_purity=True),
        runtime=Runtime(),
        optimizer=OptimizerChoice(name),
        inputs=Inputs(train_transform("none", 8), eval_transform("none", 8)),
    )
    accuracy = result.accuracy["logits"]
    cost = result.cost.evaluations_per_step
    print(f"{name:<13} avg {accuracy.avg:.1%}  last {accuracy.last:.1%}  {cost:.2f} evaluations/step")
