"""Train a method of ours and a learner of another toolbox in lockstep: same weights, same batches, task by task.

Written for the learners of PILOT and PyCIL, which share an interface. The original runs as it is, on tiny images in
double precision: its loaders are recorded, and ours is trained on the batches that it drew. What both start a task
with is copied from the original, and what both end a task with is compared.
"""

from __future__ import annotations

import importlib
import random
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from cflat.data import Batch, ImageSet, Task
from cflat.data.pixels import ArrayPixels
from cflat.methods import StreamInfo, create_method, get_method_spec
from cflat.nn import Backbone, create_backbone

CLASSES, TASKS, SIZE, SEED = 6, 3, 8, 1993
PER_CLASS = {"train": 8, "test": 5}
BATCH, EPOCHS, RATE = 8, 2, 0.02
EACH = CLASSES // TASKS
Pairs = list[tuple[Tensor, Tensor]]
"""Tensors of ours, each with the one of the original that it must equal."""


@dataclass(frozen=True)
class Checkout:
    """The working copy of an original."""

    name: str
    """Owner and repository."""
    path: Path

    @property
    def version(self) -> str:
        """Name, commit and date."""
        if self.path == Path():  # what is installed
            return self.name
        command = ["git", "-C", str(self.path), "log", "-1", "--format=%h, %cs"]
        found = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
        return f"{self.name} ({found or 'no commit'})"

    @contextmanager
    def imported(self, *names: str) -> Iterator[list[ModuleType]]:
        """Give modules of the checkout, which is no package; they are forgotten afterwards."""
        sys.path.insert(0, str(self.path))
        try:
            yield [importlib.import_module(name) for name in names]
        finally:
            sys.path.remove(str(self.path))
            root = str(self.path.resolve())
            for name, module in list(sys.modules.items()):
                if str(getattr(module, "__file__", None) or "").startswith(root):
                    del sys.modules[name]


@dataclass(frozen=True)
class Verified:
    """One line of the page: something of ours beside its original."""

    name: str
    original: str
    on: str
    difference: float
    """Largest absolute difference of a weight after training."""
    same_answers: bool | None
    """Whether all test images got the same class; None where there are none."""
    on_purpose: str = ""
    """What differs by decision, and is therefore switched to the original's way or left out here."""


@dataclass
class Recorder:
    """Stands in for torch's DataLoader: plain batches in memory, with what was drawn for training kept."""

    drawn: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    order: Callable[[int], Tensor] = torch.randperm
    """How images that are shuffled, but not trained on, are ordered."""

    def __call__(self, dataset: Any, batch_size: int = 1, shuffle: bool = False, **_: Any) -> _Batches:
        return _Batches(self, dataset, batch_size, shuffle)


@dataclass
class _Batches:
    recorder: Recorder
    dataset: Any
    batch_size: int
    shuffle: bool

    def __len__(self) -> int:
        return -(-len(self.dataset.labels) // self.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        count = len(self.dataset.labels)
        is_trained_on = self.shuffle and self.dataset.mode == "train"
        shuffled = torch.randperm if is_trained_on else self.recorder.order
        order = shuffled(count) if self.shuffle else torch.arange(count)
        for rows in order.split(self.batch_size):
            images = torch.from_numpy(self.dataset.images[rows.numpy()])
            labels = torch.from_numpy(np.asarray(self.dataset.labels)[rows.numpy()]).long()
            if is_trained_on:
                self.recorder.drawn.append((images, labels))
            yield rows, images, labels


@dataclass
class TinyData:
    """Random images, as our tasks and as the data manager that the learners ask."""

    stores: dict[str, ArrayPixels] = field(default_factory=dict)
    labels: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        generator = np.random.default_rng(SEED)
        patterns = generator.integers(0, 256, (CLASSES, SIZE, SIZE, 3))
        for split, count in PER_CLASS.items():
            self.labels[split] = np.repeat(np.arange(CLASSES), count)
            noise = generator.integers(-90, 90, (CLASSES * count, SIZE, SIZE, 3))
            images = np.clip(patterns[self.labels[split]] + noise, 0, 255)
            self.stores[split] = ArrayPixels(images.astype(np.uint8))

    def image_set(self, split: str, classes: Iterable[int]) -> ImageSet:
        """Return the images of some classes."""
        return ImageSet(self.stores[split], self.labels[split]).of_classes(classes)

    def task(self, index: int) -> Task:
        """Return one of our tasks."""
        classes = range(index * EACH, (index + 1) * EACH)
        return Task(index, f"task {index}", classes, *(self.image_set(split, classes) for split in ("train", "test")))

    nb_tasks = TASKS
    dataset_name = "tiny"

    def get_task_size(self, task: int) -> int:
        """Answer as PILOT's data manager does."""
        return EACH

    def get_dataset(
        self, indices: Sequence[int], source: str, mode: str, appendent: Any = None, ret_data: bool = False, **_: Any
    ) -> Any:
        """Answer as PILOT's data manager does; images are arrays of float64."""
        own = self.image_set(source, [int(index) for index in indices])
        images, labels = to_floats(own).numpy(), own.labels
        if appendent and len(appendent[0]):
            images, labels = np.concatenate([images, appendent[0]]), np.concatenate([labels, appendent[1]])
        dataset = _Dataset(images, labels, mode)
        return (images, labels, dataset) if ret_data else dataset


@dataclass
class _Dataset:
    images: Any
    labels: Any
    mode: str


def to_floats(images: ImageSet) -> Tensor:
    """Return images as float64 in [0, 1]."""
    pixels = images.pixels(np.arange(len(images)))
    return torch.as_tensor(pixels).to(torch.float64) / 255


class Extract:
    """What methods are given by the trainer: apply a function to all images."""

    def __call__(self, images: ImageSet, function: Any, *, labels: bool = False, gradients: bool = False) -> Tensor:
        """Return the outputs, a row for each image."""
        given = (to_floats(images), *([torch.from_numpy(images.labels)] if labels else []))
        with torch.set_grad_enabled(gradients):
            return function(*given)

    def sum(
        self,
        images: ImageSet,
        function: Any,
        *,
        labels: bool = False,
        gradients: bool = False,
        batch_size: int | None = None,
    ) -> Tensor:
        """Return the sum of the outputs over batches."""
        indices = torch.arange(len(images)).split(batch_size or BATCH)
        parts = [self(images.select(i.numpy()), function, labels=labels, gradients=gradients) for i in indices]
        return torch.stack(parts).sum(0)


class Ours:
    """A method of ours, driven as the trainer does with the plain base optimizer."""

    def __init__(
        self, name: str, backbone: Backbone, make_base: Callable[[list[dict[str, Any]]], Any], **settings: Any
    ):
        info = StreamInfo("class", CLASSES, TASKS)
        self.method = create_method(name, backbone, info, get_method_spec(name).config(**settings))
        self.make_base, self.extract = make_base, Extract()

    def begin(self, task: Task) -> None:
        """Grow, and do what comes before training."""
        self.method.grow(task)
        self.method.start_task(task, self.extract)

    def train(self, task: Task, batches: Sequence[tuple[Tensor, Tensor]], epochs: int) -> None:
        """Train on recorded batches, a constant number of them in every epoch."""
        method = self.method
        for phase in method.phases(task):
            method.enter_phase(task, phase)
            method.start_phase(task, phase, self.extract)
            groups = [
                {"params": group.params, "lr_scale": group.lr_scale} for group in method.param_groups(task, phase)
            ]
            optimizer, schedule = self.make_base(groups)
            steps = len(batches) // epochs
            for number, (images, labels) in enumerate(batches, start=1):
                method.set_train_mode()
                self._step(optimizer, Batch(images, labels, torch.arange(len(labels))))
                if schedule is not None and number % steps == 0:
                    schedule.step()
        method.eval()
        with torch.no_grad():
            method.finish_task(task, self.extract)

    def _step(self, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
        with torch.no_grad():
            prepared = self.method.prepare(batch)
        optimizer.zero_grad()
        self.method.loss(self.method.network, prepared).total.backward()
        optimizer.step()

    @torch.no_grad()
    def answers(self, images: Tensor, score: str) -> Tensor:
        """Return the predicted classes."""
        batch = Batch(images, torch.zeros(len(images), dtype=torch.long), torch.arange(len(images)))
        return self.method.predict(batch)[score].argmax(1)


def fresh_backbone(name: str = "vit_smoke") -> Backbone:
    """Return the small network that both start from."""
    seed_all()
    return create_backbone(name, image_size=SIZE, is_filled_later=True).eval()


def seed_all() -> None:
    """Make everything that draws repeatable."""
    random.seed(SEED)
    np.random.seed(SEED)
    torch.manual_seed(SEED)


def run_lockstep(
    learner: Any,
    ours: Ours,
    recorder: Recorder,
    pairs: Callable[[int], Pairs],
    answers: dict[str, Callable[[Tensor], Tensor]],
    train: str = "_train",
    between: Callable[[], None] = lambda: None,
) -> tuple[float, bool]:
    """Take both through all tasks; return the largest difference of weights, and whether all answers agree.

    Args:
        learner: The original.
        ours: Our method.
        recorder: Its data loader.
        pairs: Which tensors belong together in a task, ours first.
        answers: What the original predicts for images, by our name of the score.
        train: Name of the original's function that trains a task after it has grown.
        between: Called when the original has trained, before ours does: for what it draws only then.
    """
    data, largest, agree, starts = TinyData(), 0.0, True, []
    original_train = getattr(learner, train)

    def train_both(*given: Any, **more: Any) -> Any:
        task = data.task(learner._cur_task)
        ours.begin(task)
        with torch.no_grad():
            for own, theirs in pairs(task.index):
                own.copy_(theirs)
        starts[:] = [own.clone() for own, _ in pairs(task.index)]
        recorder.drawn.clear()
        return original_train(*given, **more)

    setattr(learner, train, train_both)
    for index in range(TASKS):
        learner.incremental_train(data)
        between()
        ours.train(data.task(index), recorder.drawn, EPOCHS)
        ends = pairs(index)
        largest = max([largest, *(float((own - theirs).abs().max()) for own, theirs in ends)])
        is_still = len(starts) == len(ends) and all(torch.equal(a, b) for a, (b, _) in zip(starts, ends, strict=True))
        if is_still and starts:
            raise RuntimeError(f"Task {index} has changed no weight: nothing was compared.")
        learner._network.eval()
        for task in range(index + 1):
            images = to_floats(data.task(task).test)
            with torch.no_grad():
                agree &= all(bool((ours.answers(images, name) == ask(images)).all()) for name, ask in answers.items())
        learner.after_task()
    return largest, agree


def sgd(weight_decay: float = 0.0, schedule: str = "constant", lr: float = RATE) -> Any:
    """Return what makes SGD with momentum for a task, with its learning-rate schedule."""

    def make(groups: list[dict[str, Any]]) -> tuple[torch.optim.Optimizer, Any]:
        optimizer = torch.optim.SGD(_at_rate(groups, lr), momentum=0.9, weight_decay=weight_decay)
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=EPOCHS, eta_min=0.0)
        return optimizer, cosine if schedule == "cosine" else None

    return make


def adam(lr: float = RATE) -> Any:
    """Return what makes Adam for a task."""
    return lambda groups: (torch.optim.Adam(_at_rate(groups, lr)), None)


def _at_rate(groups: list[dict[str, Any]], lr: float) -> list[dict[str, Any]]:
    return [{"params": group["params"], "lr": lr * group["lr_scale"]} for group in groups]


def module_pairs(ours: nn.Module, theirs: nn.Module) -> Pairs:
    """Pair two modules whose parameters have the same names."""
    other = dict(theirs.named_parameters())
    return [(parameter.data, other[name].data) for name, parameter in ours.named_parameters()]
