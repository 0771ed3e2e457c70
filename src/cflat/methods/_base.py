"""The contract of a continual-learning method.

A method defines what is learned: which network, which loss, what happens at task boundaries. It never sees
optimizers, epochs, devices, loaders or checkpoints. One training step evaluates the same objective one to four
times at perturbed weights, hence the split:

- `Method.prepare` runs once per step, without gradients: everything that does not depend on the trained weights.
- `Method.loss` is pure: called again on the same batch at the same weights it gives the same gradient, and it
  changes nothing.

`Method.before_update` and `Method.after_step` run once per step, around the update of the base optimizer.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import add
from typing import Any, ClassVar, Protocol

import numpy as np
from torch import Tensor, nn

from cflat.data import Batch, ImageSet, Task
from cflat.data.stream import Scenario
from cflat.nn.surgery import train_unfrozen_


@dataclass(frozen=True)
class StreamInfo:
    """What a method may know about the stream before it starts."""

    scenario: Scenario
    num_classes: int
    """Outputs of the final head."""
    num_tasks: int | None = None
    label_modulus: int | None = None
    """Set when every domain has labels of its own; see `Stream`."""


@dataclass(frozen=True)
class Loss:
    """A loss as the sum of its named parts."""

    parts: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor] = field(default_factory=dict)
    """What `Method.after_step` wants to see of the step's first evaluation, detached, a row for each image."""

    @property
    def total(self) -> Tensor:
        """The sum that is back-propagated."""
        return reduce(add, self.parts.values())


@dataclass(frozen=True)
class Phase:
    """One stretch of training within a task; most methods have exactly one."""

    name: str = "train"
    epochs: int | None = None
    """Epochs of this phase; None takes the run's setting."""
    augment: bool = True
    """Whether images get the training transform; without it an image looks the same in every epoch."""


@dataclass(frozen=True)
class ParamGroup:
    """Parameters that are trained together, with their learning rate relative to the run's."""

    params: list[nn.Parameter]
    lr_scale: float = 1.0
    name: str = "all"
    weight_decay: float | None = None
    """None takes the run's setting."""
    rho: float | None = None
    """Radius of the perturbation; None takes the optimizer's, 0 trains without perturbing."""


@dataclass(frozen=True)
class Replay:
    """Stored images that a step is to see besides its batch."""

    images: ImageSet
    extras: Mapping[str, Tensor] = field(default_factory=dict)
    """What was stored with them, a row for each image; they are the extras of the loaded batch."""


@dataclass(frozen=True)
class Seen:
    """The batch of a step that is done: the images of all ranks, in order, the same on each rank."""

    rows: Tensor
    """Row of each image in its dataset split, int64, (B,)."""
    labels: Tensor
    """Labels of the stream, int64, (B,)."""
    outputs: Mapping[str, Tensor] = field(default_factory=dict)
    """`Loss.outputs` of the step's first evaluation."""


class Extract(Protocol):
    """Apply a function to a whole image set, in evaluation mode under the test transform; given by the trainer.

    ``extract(task.train, self.network.features)`` returns the features of all images, in order. With ``labels`` the
    function gets images and labels; with ``gradients`` it may differentiate. Several ranks divide the images.
    """

    def __call__(
        self, images: ImageSet, function: Callable[..., Tensor], *, labels: bool = False, gradients: bool = False
    ) -> Tensor:
        """Return the outputs, a row for each image."""

    def sum(
        self,
        images: ImageSet,
        function: Callable[..., Tensor],
        *,
        labels: bool = False,
        gradients: bool = False,
        batch_size: int | None = None,
    ) -> Tensor:
        """Return the sum of the outputs over all batches, for what is too large to keep for each image.

        ``batch_size`` is the trainer's by default; 1 gives each image to the function by itself.
        """


class Method(nn.Module):
    """A continual-learning method; subclass it in one file and register it.

    Everything that must survive a restart is a parameter, a buffer, a submodule, or in `extra_state`. Structure is
    built by `grow` alone: a restored run rebuilds it before it loads the values.

    Attributes:
        network: The module that is trained; `loss` receives it back, possibly wrapped for several devices.
        scores: Names of what `predict` returns, the headline first: the one that the method's paper reports.
    """

    scores: ClassVar[tuple[str, ...]] = ("logits",)
    network: nn.Module

    def __init__(self, info: StreamInfo) -> None:
        super().__init__()
        self.info = info

    @abstractmethod
    def grow(self, task: Task) -> None:
        """Extend the structure for ``task`` (heads, blocks, teachers); needs no data, also called on restore."""
        # Nothing else enforces the abstract methods, as nn.Module is no ABC.
        raise NotImplementedError

    def phases(self, task: Task) -> tuple[Phase, ...]:
        """Return the training phases of ``task``; none for a method that only collects statistics."""
        return (Phase(),)

    def param_groups(self, task: Task, phase: Phase) -> list[ParamGroup]:
        """Return what ``phase`` trains; by default every parameter of the network that asks for a gradient."""
        return [ParamGroup([p for p in self.network.parameters() if p.requires_grad])]

    def enter_phase(self, task: Task, phase: Phase) -> None:
        """Freeze and unfreeze what ``phase`` asks for; called whenever a phase begins or is resumed."""

    def set_train_mode(self) -> None:
        """Switch the network to training mode; parts that are frozen stay in evaluation mode."""
        train_unfrozen_(self.network)

    def start_task(self, task: Task, extract: Extract) -> None:
        """Do what must happen before training, once."""

    def start_phase(self, task: Task, phase: Phase, extract: Extract) -> None:
        """Do what must happen before one phase, once."""

    def train_images(self, task: Task) -> ImageSet:
        """Return the images that ``task`` is trained on; methods with a memory add their exemplars."""
        return task.train

    def replay(self, num_images: int, rng: np.random.Generator) -> Sequence[Replay]:
        """Return stored images to load for a step, in any number of sets with ``num_images`` each; by default none.

        ``prepare`` and ``loss`` find them, augmented, in ``batch.replay``. ``rng`` depends on seed and step alone.
        """
        return ()

    def prepare(self, batch: Batch) -> Batch:
        """Add what `loss` needs and the trained weights do not change; called once per step, without gradients."""
        return batch

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        """Return the loss of a prepared batch; called several times per step, must be pure."""
        # Only when it is called: a method without phases needs no loss.
        raise NotImplementedError

    def before_update(self, batch: Batch) -> None:
        """Edit the direction in ``.grad`` before the base optimizer applies it: the place of gradient surgery.

        Called once per step, after all evaluations: the weights are the unperturbed ones, and gradients may be taken.
        ``batch`` is the prepared one of this rank; all ranks must edit alike (`cflat.nn.ranks.sum_over_batch`).
        """

    def after_step(self, seen: Seen) -> None:
        """Follow the weights or the images from step to step: importance, averaged teachers, reservoirs.

        Called once per step, without gradients, after the update; ``.grad`` still holds the direction. Not called after
        a step that was discarded because it met Inf or NaN. What it changes must be in parameters, buffers or
        `extra_state`, which every checkpoint holds.
        """

    def finish_task(self, task: Task, extract: Extract) -> None:
        """Do what must happen after training, once: exemplars, class means, merging."""

    def skip_task(self, task: Task) -> None:
        """Be as large as ``task`` would leave the method, with made-up values; `grow` was called.

        For predictions of what later tasks cost. Whatever makes these slower and is not structure belongs here, such as
        exemplars; the weights may be on the device ``meta``, where they have no values.
        """

    def predict(self, batch: Batch) -> dict[str, Tensor]:
        """Return scores over all classes seen so far, one tensor (B, classes) for each name in ``scores``.

        By default the network's outputs. The labels of the batch are hidden; its rows are keys for per-image caches.
        """
        return {"logits": self.network(batch.images)}

    def extra_state(self) -> dict[str, Any]:
        """Return what a checkpoint must hold besides the module's state: plain numbers, strings and tensors."""
        return {}

    def load_extra_state(self, state: dict[str, Any], train: ImageSet) -> None:
        """Take over what `extra_state` returned; ``train`` holds all training images of the stream."""

    def load_answers(self, state: dict[str, Any]) -> None:
        """Take over what `predict` needs of `extra_state`, where there is no training image; by default nothing."""
