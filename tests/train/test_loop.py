"""Settings of the loop that no method and no optimizer knows: clipping, test batches, hidden labels, scores by task."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cflat.data.loader import seed_sequence
from cflat.methods import get_method_spec
from cflat.methods.finetune import Finetune
from cflat.nn.backbone import create_backbone
from cflat.train import BaseSettings, Observer, OptimizerChoice, Trainer, TrainSettings
from cflat.train.evaluate import is_right
from runs import IMAGE_SIZE, an_epoch, cpu, tiny_inputs, tiny_method, tiny_stream

SMALL = 1e-3


class Norms(Observer):
    """Remember the length of every direction that the base optimizer is given."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_phase_start(self, optimizer, network) -> None:
        def see(base, *_):
            grads = [p.grad for group in base.param_groups for p in group["params"] if p.grad is not None]
            self.seen.append(float(torch.cat([grad.reshape(-1) for grad in grads]).norm()))

        optimizer.base.register_step_pre_hook(see)


def run(method, stream, observer=None, optimizer="none", **train):
    return Trainer(
        method,
        stream,
        base=BaseSettings(lr=0.05),
        train=TrainSettings(epochs=1, batch_size=16, **train),
        runtime=cpu(),
        optimizer=OptimizerChoice(optimizer),
        inputs=tiny_inputs(),
        observer=observer or Observer(),
    ).run()


@pytest.mark.parametrize("optimizer", ["none", "c_flat"])
def test_directions_are_clipped(optimizer: str) -> None:
    stream, free, clipped = tiny_stream(), Norms(), Norms()
    run(tiny_method("finetune", stream), stream, free, optimizer)
    run(tiny_method("finetune", stream), stream, clipped, optimizer, clip_norm=SMALL)
    assert min(free.seen) > SMALL
    assert max(clipped.seen) <= SMALL * (1 + 1e-4)


class Watched(Finetune):
    """Remember what `predict` is shown."""

    def __init__(self, *arguments) -> None:
        super().__init__(*arguments)
        self.shown = []

    def predict(self, batch):
        self.shown.append(batch)
        return super().predict(batch)


def test_test_batches_have_their_own_size_and_no_labels() -> None:
    stream = tiny_stream()
    info = tiny_method("finetune", stream).info
    method = Watched(get_method_spec("finetune").config(), create_backbone("small_cnn", image_size=IMAGE_SIZE), info)
    result = run(method, stream, eval_batch_size=5)
    sizes = [len(batch) for batch in method.shown]
    assert max(sizes) == 5
    assert sum(sizes) == result.accuracy["logits"].total.sum() + result.accuracy["logits"].total[0]
    assert all((batch.labels == -1).all() for batch in method.shown)


def test_a_known_task_decides_among_its_own_classes_alone() -> None:
    stream = tiny_stream("task")
    task = stream.tasks[1]
    labels = torch.tensor([task.classes.start, task.classes.start + 1])
    scores = torch.zeros(2, stream.num_classes)
    scores[:, 0] = 9.0  # of another task
    scores[0, task.classes.start] = 1.0
    scores[1, task.classes.start + 2] = 1.0
    assert is_right(scores, labels, stream, task).tolist() == [True, False]
    assert is_right(scores, labels, tiny_stream("class"), task).tolist() == [False, False]


def test_observers_find_their_state_by_name() -> None:
    """A bar more or less, as with --quiet, must not shift the states of the others."""
    from cflat.runs.trackers import TrackerObserver
    from cflat.train.observer import Observers

    class Count(Observer):
        def __init__(self) -> None:
            self.number = 0

        def on_epoch(self, record) -> None:
            self.number += 1

        def state(self):
            return {"number": self.number}

        def load(self, state) -> None:
            self.number = state["number"]

    first, second = Count(), Count()
    told = Observers([Observer(), first, TrackerObserver(lambda: None), second])
    second.number = 10
    first.on_epoch(an_epoch())
    saved = told.state()
    again = [Count(), Count()]
    Observers(again).load(saved)
    assert [one.number for one in again] == [1, 10]


class Meddler(Observer):
    """Leave the network in the wrong modes after every step, and record those that the next one finds."""

    def __init__(self, method) -> None:
        self.method = method
        self.found: list[list[bool]] = []

    def on_step_start(self, epoch, objective, batch) -> None:
        self.found.append([module.training for module in self.method.network.modules()])

    def on_step(self, event) -> None:
        self.method.train(mode=event.step % 2 == 0)


def test_every_step_trains_in_the_modes_of_its_phase() -> None:
    stream = tiny_stream()
    method = tiny_method("finetune", stream)
    for parameter in method.network.backbone.model.layer1.parameters():
        parameter.requires_grad_(False)
    meddler = Meddler(method)
    run(method, stream, meddler, anytime_every=16)
    method.eval()
    method.set_train_mode()
    modes = [module.training for module in method.network.modules()]
    assert False in modes  # BatchNorm of the frozen layer must keep its statistics
    assert True in modes
    assert all(found == modes for found in meddler.found)


@pytest.mark.parametrize("key", [(0,), (7, 2, 0, 0, 3), (2**32 - 1, 0), (2**32, 0, 5), (2**70, 1)])
def test_keys_seed_as_numpy_has_it(key: tuple[int, ...]) -> None:
    """Every run on disk depends on these numbers."""
    words = seed_sequence(key).generate_state(4)
    assert (words == np.random.SeedSequence(key).generate_state(4)).all()
