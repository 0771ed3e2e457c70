"""Every method learns: floors of the accuracy on digits, far above what an untrained network reaches.

Methods for networks from scratch learn five tasks of two digits; methods for pretrained networks learn three tasks with
a small ViT that has seen all digits before.
"""

import copy
from functools import cache

import pytest
import torch
from torch.nn import functional

from cflat.data import BatchLoader, build_stream, load_dataset
from cflat.methods import StreamInfo, create_method, list_methods
from cflat.nn import Classifier, create_backbone
from cflat.train import BaseSettings, Observer, OptimizerChoice, Trainer, TrainSettings
from runs import cpu, tiny_inputs

SGD, ADAM = BaseSettings(lr=0.05, schedule="cosine"), BaseSettings(name="adam", lr=5e-3)

SCRATCH = {
    # Accuracy after the last task, in a class-incremental stream; without a memory, every method forgets there.
    "finetune": 0.15,
    "ewc": 0.25,
    "lwf": 0.40,
    "replay": 0.90,
    "er_ace": 0.90,
    "derpp": 0.70,
    "icarl": 0.92,
    "memo": 0.88,
    "joint": 0.93,
}
PRETRAINED = {
    # Settings that it learns with, and the floor.
    "simplecil": (SGD, 0.70),
    "aper": (ADAM, 0.55),
    "ranpac": (ADAM, 0.70),
    "ease": (ADAM, 0.60),
    "slca": (BaseSettings(lr=0.02), 0.70),
    "duct": (BaseSettings(lr=0.02), 0.55),
    "l2p": (ADAM, 0.55),
    "dualprompt": (ADAM, 0.55),
    "coda_prompt": (ADAM, 0.55),
}


@cache
def digits():
    return load_dataset("digits", train_per_class=60, test_per_class=30)


@cache
def pretrained():
    """A small ViT that was trained on all digits."""
    torch.manual_seed(0)
    network = Classifier(create_backbone("vit_smoke", image_size=8))
    network.head.grow(10)
    optimizer = torch.optim.Adam(network.parameters(), lr=2e-3)
    loader = BatchLoader(digits().train, tiny_inputs().train, 32, shuffle=True)
    for epoch in range(12):
        for batch in loader.epoch(epoch):
            optimizer.zero_grad()
            functional.cross_entropy(network(batch.images), batch.labels).backward()
            optimizer.step()
    return network.backbone


class Losses(Observer):
    """Keeps the mean loss of each epoch of the first task's first phase."""

    def __init__(self):
        self.values = []

    def on_epoch(self, record):
        if record.task == 0 and record.phase == "train":
            self.values.append(record.loss)


@cache
def learned(name, scenario="class", epochs=8):
    """Return the accuracy of the headline score, and the losses of the first task."""
    is_pretrained = name in PRETRAINED
    stream = build_stream(digits(), scenario, **({"initial": 4, "increment": 3} if is_pretrained else {}))
    torch.manual_seed(0)
    backbone = copy.deepcopy(pretrained()) if is_pretrained else create_backbone("small_cnn", image_size=8)
    losses = Losses()
    result = Trainer(
        create_method(name, backbone, StreamInfo(scenario, 10, stream.num_tasks)),
        stream,
        base=PRETRAINED[name][0] if is_pretrained else SGD,
        train=TrainSettings(epochs=epochs, batch_size=16, eval_batch_size=128),
        runtime=cpu(),
        optimizer=OptimizerChoice("none"),
        inputs=tiny_inputs(),
        observer=losses,
        seed=3,
    ).run()
    return next(iter(result.accuracy.values())).last, losses.values


def test_every_method_has_a_floor():
    assert {*SCRATCH, *PRETRAINED} == set(list_methods())


@pytest.mark.parametrize("name", SCRATCH)
def test_methods_learn_from_scratch(name):
    last, losses = learned(name)
    assert last > SCRATCH[name]
    assert losses[-1] < 0.3 * losses[0]


@pytest.mark.parametrize("name", PRETRAINED)
def test_methods_learn_on_a_pretrained_network(name):
    last, losses = learned(name, epochs=4)
    assert last > PRETRAINED[name][1]
    if name != "simplecil":  # which has nothing to train; its prototypes, and those of others, need no training
        assert losses[-1] < 0.7 * losses[0]


def test_joint_training_is_not_below_any_other():
    others = {name: learned(name)[0] for name in SCRATCH}
    assert others.pop("joint") >= max(others.values())


def test_replay_from_a_reservoir_is_far_above_fine_tuning():
    lowest = learned("finetune")[0] + 0.2
    assert learned("derpp")[0] > lowest
    assert learned("er_ace")[0] > lowest


@pytest.mark.parametrize("name", ["ewc", "lwf"])
def test_methods_without_a_memory_are_not_below_fine_tuning_by_task(name):
    assert learned(name, "task")[0] >= learned("finetune", "task")[0]
