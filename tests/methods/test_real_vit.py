"""CODA-Prompt and SLCA on the real ViT-Tiny and CIFAR-100, from the command line: all optimizers, by class and by task.

Two tasks of three classes at 64 px; skipped where the shared weights are not.
"""

import json

import pytest

from cflat.cli.main import run_app

OPTIMIZERS = ("none", "sam", "c_flat", "c_flat_turbo")
SMALL = (
    *("stream.initial=3", "stream.increment=3", "stream.max_tasks=2", "backbone.image_size=64"),
    *("data.train_per_class=16", "data.test_per_class=10", "train.epochs=4"),
)
SETTINGS = {
    "coda_prompt": ("base.lr=0.01", "train.batch_size=8"),
    "slca": (),
}
FLOORS = {"class": 0.25, "task": 0.45}
"""Accuracy after the last task; guessing gives a sixth and a third."""


def learned(method, optimizer, scenario, shared, folder, capsys):
    """Run the command; return the accuracy after the last task, and the evaluations of a step."""
    weights = shared / "weights" / "vit_tiny_patch16_224.safetensors"
    words = ["run", "--method", method, "--data", "cifar100", "--optimizer", optimizer, "--preset", "cpu", "--json"]
    places = ["--data-root", str(shared / "data"), "--weights", str(weights), "--out", str(folder / "run")]
    assert run_app([*words, *places, f"stream.scenario={scenario}", *SMALL, *SETTINGS[method]]) == 0
    found = json.loads(capsys.readouterr().out)
    return found["last"], found["evaluations_per_step"]


@pytest.mark.parametrize("method", SETTINGS)
def test_methods_learn_on_real_weights(method, shared, tmp_path, capsys):
    last, _ = learned(method, "none", "class", shared, tmp_path, capsys)
    assert last > FLOORS["class"]


@pytest.mark.slow
@pytest.mark.parametrize("scenario", FLOORS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("method", SETTINGS)
def test_methods_learn_on_real_weights_with_every_optimizer(method, optimizer, scenario, shared, tmp_path, capsys):
    last, evaluations = learned(method, optimizer, scenario, shared, tmp_path, capsys)
    assert last > FLOORS[scenario]
    fewest, most = {"none": (1, 1), "sam": (2, 2), "c_flat": (4, 4), "c_flat_turbo": (1, 4)}[optimizer]
    assert fewest <= evaluations <= most
