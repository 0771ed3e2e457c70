"""Avalanche, its real strategies on a stream of digits: each run equals a loop with closures bit for bit."""

from __future__ import annotations

import by_hand
import numpy as np
import pytest
import torch
from avalanche.benchmarks import nc_benchmark
from avalanche.benchmarks.utils import as_classification_dataset
from avalanche.training import AGEM, EWC, LwF, Naive, Replay
from avalanche.training.determinism.rng_manager import RNGManager
from avalanche.training.plugins import EvaluationPlugin, LRSchedulerPlugin, SupervisedPlugin
from sklearn.datasets import load_digits
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import TensorDataset

import cflat
from cflat.integrations.avalanche import FlatPlugin
from faults import differences

NUM_TASKS = 3
STRATEGIES = {
    "naive": (Naive, {}),
    "replay": (Replay, {"mem_size": 40}),
    "ewc": (EWC, {"ewc_lambda": 5.0}),
    "lwf": (LwF, {"alpha": 1.0, "temperature": 2.0}),
    "agem": (AGEM, {"patterns_per_exp": 20, "sample_size": 20}),
}


def make_stream():
    images, labels = load_digits(n_class=9, return_X_y=True)
    chosen = np.concatenate([np.flatnonzero(labels == label)[:24] for label in range(9)])
    data = TensorDataset(torch.tensor(images[chosen] / 16, dtype=torch.float32), torch.tensor(labels[chosen]))
    data.targets = data.tensors[1].tolist()
    return nc_benchmark(
        as_classification_dataset(data), as_classification_dataset(data), NUM_TASKS, task_labels=False, seed=4
    ).train_stream


@pytest.fixture(scope="module")
def stream():
    return make_stream()


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.2))
        self.head = nn.Linear(16, 9)

    def forward(self, images):
        return self.head(self.body(images))


class WithClosures:
    """What one has to write without the plugin: Avalanche's loop with its body in a closure."""

    def training_epoch(self, **kwargs):
        for self.mbatch in self.dataloader:  # noqa: B020 - as in Avalanche
            self._unpack_minibatch()
            self._before_training_iteration()
            self.optimizer.zero_grad()  # EWC leaves the gradients of its importances behind

            def closure():
                self.loss = self._make_empty_loss()
                self._before_forward()
                self.mb_output = self.forward()
                self._after_forward()
                self.loss += self.criterion()
                self._before_backward()
                self.backward()
                self._after_backward()
                return self.loss

            self.loss = self.optimizer.step(closure)
            self._after_training_iteration()


def train(stream, row, name, by_plugin, scheduled=False, **options):
    cls, settings = STRATEGIES[name]
    RNGManager.set_random_seeds(by_hand.SEED)
    model = Classifier()
    optimizer = by_hand.optimizer_for(row, model, **options)
    plugins = [FlatPlugin(NUM_TASKS)] if by_plugin else []
    if scheduled:
        plugins.append(LRSchedulerPlugin(lr_scheduler.StepLR(optimizer, 1, 0.5), reset_lr=False))
    kind = cls if by_plugin else type("ByHand", (WithClosures, cls), {})
    strategy = kind(
        model=model, optimizer=optimizer, criterion=nn.CrossEntropyLoss(), train_mb_size=16, train_epochs=1,
        evaluator=EvaluationPlugin(), plugins=plugins, **settings,
    )  # fmt: skip
    for index, experience in enumerate(stream):
        if not by_plugin:
            optimizer.start_task(index, NUM_TASKS)
        strategy.train(experience)
    return by_hand.snapshot(model, optimizer)


@pytest.mark.parametrize("row", by_hand.ROWS, ids=str)
@pytest.mark.parametrize("name", STRATEGIES)
def test_the_plugin_equals_a_loop_with_closures(name, row, stream):
    ours, expected = train(stream, row, name, True), train(stream, row, name, False)
    assert ours["optimizer"]["wrapper"]["telemetry"]["steps"] > 12
    assert not differences(ours, expected)


def test_schedules_and_clipping_work_as_usual(stream):
    settings = {"scheduled": True, "options": cflat.StepOptions(max_norm=0.2)}
    ours, expected = (train(stream, by_hand.ROWS[2], "ewc", by_plugin, **settings) for by_plugin in (True, False))
    assert ours["optimizer"]["param_groups"][0]["lr"] == 0.05 * 0.5**NUM_TASKS
    assert not differences(ours, expected)


def test_a_plugin_that_changes_gradients_after_the_step_is_refused(stream):
    class Late(SupervisedPlugin):
        def before_update(self, strategy, **kwargs):
            nn.utils.clip_grad_norm_(strategy.model.parameters(), 0.1)

    model = Classifier()
    strategy = Naive(
        model=model, optimizer=by_hand.optimizer_for(by_hand.ROWS[2], model), criterion=nn.CrossEntropyLoss(),
        train_mb_size=16, evaluator=EvaluationPlugin(), plugins=[FlatPlugin(), Late()],
    )  # fmt: skip
    with pytest.raises(cflat.ClosureError, match="changed after the loop over passes"):
        strategy.train(stream[0])


def test_without_the_plugin_the_strategy_is_refused(stream):
    model = Classifier()
    strategy = Naive(
        model=model, optimizer=by_hand.optimizer_for(by_hand.ROWS[1], model), criterion=nn.CrossEntropyLoss(),
        train_mb_size=16, evaluator=EvaluationPlugin(),
    )  # fmt: skip
    with pytest.raises(cflat.ClosureError, match="needs a closure"):
        strategy.train(stream[0])


def test_a_plain_optimizer_is_refused(stream):
    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    strategy = Naive(
        model=model, optimizer=optimizer, criterion=nn.CrossEntropyLoss(), train_mb_size=16,
        evaluator=EvaluationPlugin(), plugins=[FlatPlugin()],
    )  # fmt: skip
    with pytest.raises(cflat.ClosureError, match="Expected an optimizer of cflat, got SGD"):
        strategy.train(stream[0])
