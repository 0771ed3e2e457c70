"""Rows of the methods that are held against Mammoth: replay from a reservoir, and online EWC.

The steps, the penalty and the buffer are Mammoth's own. What is replaced is its base class, which only wires up
arguments and datasets, and the random numbers of its buffer, which are ours.
"""

from __future__ import annotations

import copy
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from parity_lockstep import (
    BATCH,
    CLASSES,
    EPOCHS,
    RATE,
    SEED,
    TASKS,
    Checkout,
    Extract,
    TinyData,
    Verified,
    fresh_backbone,
    seed_all,
    to_floats,
)
from torch import Tensor, nn

from cflat.data import Batch, ImageSet, Task
from cflat.methods import Method, Seen, StreamInfo, create_method, get_method_spec

ROWS: dict[str, tuple[str, Callable[[Checkout], Verified]]] = {}
MEMORY, ALPHA, BETA, LAMBDA, GAMMA = 12, 0.3, 0.7, 50.0, 0.9
BY_DOMAIN = f"ViT of 6 blocks, {TASKS} tasks with the same {CLASSES} classes, {EPOCHS} epochs each, float64"
BY_CLASS = f"ViT of 6 blocks, {TASKS} tasks of {CLASSES // TASKS} classes, {EPOCHS} epochs each, float64"


class Numbers:
    """Stands in for NumPy in Mammoth's buffer: draws what our memory draws."""

    def __init__(self) -> None:
        self.of_step = self.of_memory = np.random.default_rng(0)
        self.random = SimpleNamespace(randint=self._slot, choice=self._chosen)

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    def _slot(self, low: int, high: int) -> int:
        return int(self.of_memory.integers(high))

    def _chosen(self, count: int, size: int, replace: bool) -> Any:
        return self.of_step.permutation(count)[:size]


class Base(nn.Module):
    """What Mammoth's base class gives a model: network, optimizer, loss and arguments."""

    def __init__(self, net: nn.Module, loss: Any, args: Namespace, transform: Any, dataset: Any = None) -> None:
        super().__init__()
        self.net, self.loss, self.args, self.transform = net, loss, args, transform
        self.device, self.current_task = torch.device("cpu"), 0
        self.begin(net, 0)

    def begin(self, net: nn.Module, task: int) -> None:
        """Start a task with the network as it has grown."""
        self.net, self.current_task = net, task
        self.opt = torch.optim.SGD(net.parameters(), lr=RATE, momentum=0.9)


class Flat(nn.Module):
    """A network with weights and gradients as one vector, as Mammoth's backbones offer them."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor) -> Tensor:
        """Return logits."""
        return self.network(images)

    def get_params(self) -> Tensor:
        """Return all weights."""
        return torch.cat([weight.flatten() for weight in self.parameters()])

    def get_grads(self) -> Tensor:
        """Return all gradients."""
        return torch.cat([weight.grad.flatten() for weight in self.parameters() if weight.grad is not None])

    def set_grads(self, values: Tensor) -> None:
        """Set all gradients."""
        weights = list(self.parameters())
        for weight, part in zip(weights, values.split([weight.numel() for weight in weights]), strict=True):
            weight.grad = part.view_as(weight).clone()


@contextmanager
def mammoth(checkout: Checkout, name: str) -> Iterator[tuple[ModuleType, Numbers]]:
    """Give a model file of Mammoth, and the random numbers of its buffer."""
    stubs = {
        "models": {"__path__": [str(checkout.path / "models")]},
        "models.utils": {"__path__": [str(checkout.path / "models" / "utils")]},
        "models.utils.continual_model": {"ContinualModel": Base},
        "utils.args": {"ArgumentParser": ArgumentParser, "add_rehearsal_args": lambda parser: None},
        "utils.kornia_utils": {"KorniaAugNoGrad": type("KorniaAugNoGrad", (), {})},
    }
    for module, content in stubs.items():
        sys.modules[module] = ModuleType(module)
        vars(sys.modules[module]).update(content)
    try:
        with checkout.imported(f"models.{name}", "utils.buffer") as (own, buffer):
            numbers = Numbers()
            buffer.np = numbers  # type: ignore[attr-defined]
            yield own, numbers
    finally:
        for module in stubs:
            sys.modules.pop(module, None)


def tasks(by_domain: bool) -> list[Task]:
    """Return tasks of new classes, or of other images of the same ones."""
    data = TinyData()
    if not by_domain:
        return [data.task(index) for index in range(TASKS)]
    every = range(CLASSES)
    train, test = data.image_set("train", every), data.image_set("test", every)
    each = len(train) // CLASSES
    # Four images of each class, so that every batch is full: Mammoth divides the Fisher information by batches.
    chosen = [[label * each + (2 * i + k) % each for label in every for k in range(4)] for i in range(TASKS)]
    return [Task(i, f"part {i}", every, train.select(rows), test) for i, rows in enumerate(chosen)]


def batches_of(task: Task) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield rows, images and labels of all epochs; every batch has every class of the task."""
    by_class = [np.flatnonzero(task.train.labels == label) for label in task.classes]
    order = np.stack(by_class, axis=1).flatten()
    for _ in range(EPOCHS):
        for chosen in np.split(order, range(BATCH, len(order), BATCH)):
            part = task.train.select(chosen)
            yield torch.from_numpy(part.rows), images_of(part), torch.from_numpy(part.labels)


def images_of(images: ImageSet) -> Tensor:
    """Return images that float32, in which Mammoth's buffer keeps them, can hold."""
    return to_floats(images).float().double()


def our_step(method: Method, base: torch.optim.Optimizer, batch: Batch, rng: np.random.Generator) -> None:
    """Make a step as the trainer does."""
    method.set_train_mode()
    stored = [
        Batch(
            images_of(part.images),
            torch.from_numpy(part.images.labels),
            torch.from_numpy(part.images.rows),
            part.extras,
        )
        for part in method.replay(len(batch), rng)
    ]
    with torch.no_grad():
        batch = method.prepare(replace(batch, replay=tuple(stored)))
    base.zero_grad()
    loss = method.loss(method.network, batch)
    loss.total.backward()
    base.step()
    method.after_step(Seen(batch.rows, batch.labels, loss.outputs))


def run(
    checkout: Checkout, name: str, theirs: str, args: dict[str, Any], *, by_domain: bool, **settings: Any
) -> tuple[float, bool]:
    """Take both through all tasks; return the largest difference of weights, and whether all answers agree."""
    stream, largest, agree = tasks(by_domain), 0.0, True
    with mammoth(checkout, name if name != "ewc" else "ewc_on") as (own, numbers):
        seed_all()
        info = StreamInfo("domain" if by_domain else "class", CLASSES, TASKS)
        method = create_method(name, fresh_backbone(), info, get_method_spec(name).config(**settings))
        namespace = Namespace(**args, minibatch_size=BATCH, batch_size=BATCH, buffer_size=MEMORY)
        model: Any = None
        for task in stream:
            method.grow(task)
            net = Flat(copy.deepcopy(method.network)) if model is None else grown(model.net, method.network)
            if model is None:
                model = getattr(own, theirs)(net, nn.functional.cross_entropy, namespace, torch.Tensor.double)
            model.begin(net, task.index)
            base = torch.optim.SGD(list(method.network.parameters()), lr=RATE, momentum=0.9)
            for step, (rows, images, labels) in enumerate(batches_of(task)):
                key = (SEED, task.index, step)
                numbers.of_step = np.random.default_rng(key)
                if hasattr(method, "memory"):
                    numbers.of_memory = np.random.default_rng((0, method.memory.num_seen))
                our_step(method, base, Batch(images, labels, rows), np.random.default_rng(key))
                model.observe(images, labels, images)
            method.eval()
            method.finish_task(task, Extract())
            if hasattr(model, "end_task") and name == "ewc":
                indices = torch.arange(len(task.train)).split(BATCH)
                parts = [task.train.select(index.numpy()) for index in indices]
                loader = [(to_floats(part), torch.from_numpy(part.labels)) for part in parts]
                model.end_task(SimpleNamespace(train_loader=loader))
            pairs = zip(method.network.parameters(), model.net.parameters(), strict=True)
            largest = max(largest, *(float((a - b).abs().max()) for a, b in pairs))
            with torch.no_grad():
                test = to_floats(task.test)
                agree &= bool((method.network(test).argmax(1) == model.net(test).argmax(1)).all())
    return largest, agree


def grown(net: Flat, ours: nn.Module) -> Flat:
    """Return Mammoth's network with the outputs that ours has got; weights that both have stay its own."""
    made = Flat(copy.deepcopy(ours))
    with torch.no_grad():
        for new, old in zip(made.parameters(), net.parameters(), strict=True):
            new[tuple(slice(size) for size in old.shape)] = old
    return made


def derpp(checkout: Checkout) -> Verified:
    """Stored logits and labels, in two batches from the reservoir."""
    args = {"alpha": ALPHA, "beta": BETA}
    found = run(checkout, "derpp", "Derpp", args, by_domain=True, **args, memory_total=MEMORY)
    why = "its buffer keeps float32; its head has all classes from the start, hence tasks with the same ones here"
    return Verified("derpp", checkout.version, BY_DOMAIN, *found, why)


def er_ace(checkout: Checkout) -> Verified:
    """New images among the classes of their batch, stored ones among all."""
    args = {"use_custom_classifier": False, "task_free": False}
    found = run(checkout, "er_ace", "ErACE", args, by_domain=False, memory_total=MEMORY)
    return Verified("er_ace", checkout.version, BY_CLASS, *found, "a linear head; Mammoth's default is a cosine")


def ewc(checkout: Checkout) -> Verified:
    """Online EWC."""
    how = {"fisher": "weighted", "consolidation": "online", "decay": GAMMA, "classes": "seen"}
    args = {"e_lambda": LAMBDA, "gamma": GAMMA}
    found = run(checkout, "ewc", "EwcOn", args, by_domain=True, weight=2 * LAMBDA, **how)
    why = "`fisher: weighted`, `consolidation: online` and `classes: seen` are Mammoth's; its lambda has no factor 1/2"
    return Verified("ewc", checkout.version, BY_DOMAIN, *found, why)


ROWS.update({"derpp": ("mammoth", derpp), "er_ace": ("mammoth", er_ace), "ewc": ("mammoth", ewc)})
