"""Features of a frozen backbone: made once, found again, and learned from like any dataset."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from cflat import ConfigError, DataError
from cflat.cli.main import run_app
from cflat.config.documents import parse_overrides
from cflat.config.presets import resolve_config
from cflat.config.run_config import RunConfig
from cflat.data import build_stream, eval_transform, load_dataset, vector_size
from cflat.nn.backbone import create_backbone
from cflat.runs.features import features_config, make_features
from cflat.runs.run import assemble, run
from cflat.train import TrainingInterrupted
from runs import resume

CLASSES, SIZE = 6, 12


@pytest.fixture(scope="module")
def vectors(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Clusters around one centre for each class."""
    rng = np.random.default_rng(0)
    centres = 3 * rng.standard_normal((CLASSES, SIZE))
    arrays = {}
    for split, per_class in (("train", 20), ("test", 10)):
        labels = np.repeat(np.arange(CLASSES), per_class)
        arrays[f"x_{split}"] = (centres[labels] + rng.standard_normal((len(labels), SIZE))).astype(np.float32)
        arrays[f"y_{split}"] = labels
    path = tmp_path_factory.mktemp("vectors") / "vectors.npz"
    np.savez(path, **arrays, split=np.array([2, 2]))
    return path


def configure(vectors: Path, *overrides: str) -> RunConfig:
    fixed = [
        "train.epochs=4",
        "base.lr=0.02",
        f"data=features:{vectors}",
        "backbone.width=32",
        "runtime.accelerator=cpu",
    ]
    return resolve_config(parse_overrides([*fixed, *overrides]))


def small(precision: str = "32", **backbone: object) -> RunConfig:
    return features_config(
        {
            "data": {"name": "digits", "train_per_class": 5, "test_per_class": 3},
            "backbone": {"name": "small_cnn", "weights": "random", "inputs": "none", **backbone},
            "runtime": {"accelerator": "cpu", "precision": precision},
        }
    )


@pytest.mark.parametrize(("method", "scenario"), [("finetune", "task"), ("replay", "class"), ("icarl", "class")])
@pytest.mark.parametrize("optimizer", ["none", "c_flat_turbo"])
def test_methods_learn_from_vectors(vectors: Path, method: str, scenario: str, optimizer: str) -> None:
    config = configure(vectors, f"method={method}", f"stream.scenario={scenario}", f"optimizer={optimizer}")
    assert (config.backbone.name, config.backbone.inputs, config.preset) == ("mlp", "vectors", "cpu")
    summary = run(config)
    matrix = summary.headline
    assert matrix.num_stages == CLASSES // 2
    assert all(matrix.correct.diagonal() > 0.8 * matrix.total)


def test_a_stopped_run_on_vectors_goes_on_to_the_same_result(vectors: Path, tmp_path: Path) -> None:
    config = configure(vectors, "method=replay", "optimizer=c_flat_turbo", "train.checkpoint_minutes=0")
    whole = run(config, tmp_path / "whole")
    steps = iter(range(1000))
    with pytest.raises(TrainingInterrupted):
        run(config, tmp_path / "stopped", should_stop=lambda: next(steps) == 17)
    again = resume(tmp_path / "stopped")
    assert again.accuracy == whole.accuracy
    weights = [
        torch.load(sorted((tmp_path / name / "checkpoints").glob("*.pt"))[-1], weights_only=True)
        for name in ("whole", "stopped")
    ]
    ours, theirs = (state["method"] for state in weights)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_changed_vectors_are_another_stream(vectors: Path, tmp_path: Path) -> None:
    arrays = dict(np.load(vectors))
    arrays["x_train"][3, 4] += 1e-3
    np.savez(tmp_path / "changed.npz", **arrays)
    before, after = (
        build_stream(load_dataset(f"features:{path}")).fingerprint() for path in (vectors, tmp_path / "changed.npz")
    )
    assert before != after


def test_class_means_of_vectors_need_no_network(vectors: Path) -> None:
    config = resolve_config({"method": "simplecil", "data": f"features:{vectors}", "runtime": {"accelerator": "cpu"}})
    assert config.backbone.name == "identity"
    assert run(config).headline.last > 0.9


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["method=replay", "backbone=small_cnn"], "holds vectors, which backbone 'small_cnn' cannot read"),
        (["method=replay", "backbone.image_size=32"], "neither cropped nor resized"),
        (["method=replay", "backbone.inputs=cifar"], "neither cropped nor resized"),
        (["method=replay", "preset=paper"], "made for photographs"),
        (["method=l2p"], "runs on vit backbones"),
        (["method=replay", "backbone.depth=0"], "backbone.depth must be at least 1, got 0"),
    ],
)
def test_what_vectors_cannot_do_is_said(vectors: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_config(parse_overrides([f"data=features:{vectors}", *overrides]))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["backbone.width=32"], "backbone.width can be chosen for backbone mlp only"),
        (["backbone=identity"], "'identity' is for features:PATH; 'digits' holds images"),
        (["backbone.inputs=vectors"], "'vectors' is for features:PATH; 'digits' holds images"),
    ],
)
def test_what_images_cannot_do_is_said(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_config(parse_overrides(["method=replay", "data=digits", *overrides]))


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((4, 8, 8, 3), np.uint8), r"uint8 values of shape \(4, 8, 8, 3\); expected floats"),
        (np.zeros((4, 0), np.float32), r"shape \(4, 0\)"),
        (np.array([[0.0], [np.nan], [1.0], [np.inf]]), r"x_train of wrong.npz\[1\] is not finite \(2 such vectors\)"),
    ],
)
def test_arrays_that_are_no_vectors_are_refused(tmp_path: Path, array: np.ndarray, message: str) -> None:
    labels = np.array([0, 1, 0, 1])
    np.savez(tmp_path / "wrong.npz", x_train=array, y_train=labels, x_test=array, y_test=labels)
    with pytest.raises(DataError, match=message):
        load_dataset(f"features:{tmp_path / 'wrong.npz'}")


def test_the_file_holds_the_features_of_every_image(tmp_path: Path) -> None:
    weights = tmp_path / "weights.pt"
    torch.save(create_backbone("small_cnn").model.state_dict(), weights)
    told: list[tuple[int, int]] = []
    config = small(weights=str(weights))
    made = make_features(config, tmp_path / "f.npz", batch_size=16, tell=lambda *counts: told.append(counts))
    assert (made.num_train, made.num_test, made.size, made.is_new) == (50, 30, 64, True)
    assert told[-1] == (80, 80)
    images = load_dataset("digits", train_per_class=5, test_per_class=3)
    vectors = load_dataset(f"features:{made.path}")
    assert vector_size(vectors.train) == 64
    assert (vectors.class_names, vectors.split) == (images.class_names, images.split)
    backbone = create_backbone("small_cnn", weights=weights).eval()
    everything = np.arange(50)
    with torch.no_grad():
        expected = backbone(eval_transform("none", 8)(images.train.pixels(everything)))
    torch.testing.assert_close(vectors.train.pixels(everything), expected)
    assert np.array_equal(vectors.train.labels, images.train.labels)


def test_features_are_found_again_and_other_ones_are_refused(tmp_path: Path) -> None:
    weights = tmp_path / "weights.pt"
    torch.save(create_backbone("small_cnn").model.state_dict(), weights)
    path = tmp_path / "f.npz"
    made = make_features(small(weights=str(weights)), path)
    written = path.read_bytes()
    weights.rename(tmp_path / "renamed.pt")
    again = make_features(small(weights=str(tmp_path / "renamed.pt")), path)
    assert (again.is_new, again.origin) == (False, made.origin)
    torch.save(create_backbone("small_cnn").model.state_dict(), weights)
    with pytest.raises(DataError, match="not the same: weights"):
        make_features(small(weights=str(weights)), path)
    with pytest.raises(DataError, match="not the same: inputs"):
        make_features(small(weights=str(tmp_path / "renamed.pt"), inputs="cifar"), path)
    with pytest.raises(DataError, match="not the same: precision"):
        make_features(small(weights=str(tmp_path / "renamed.pt"), precision="bf16"), path)
    assert path.read_bytes() == written
    path.write_bytes(written[:100])
    with pytest.raises(DataError, match="is not a features file"):
        make_features(small(weights=str(tmp_path / "renamed.pt")), path)


def test_the_default_name_is_that_of_the_origin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save(create_backbone("small_cnn").model.state_dict(), "weights.pt")
    plain, cifar = (make_features(small(weights="weights.pt", inputs=inputs)) for inputs in ("none", "cifar"))
    assert plain.path != cifar.path
    assert not make_features(small(weights="weights.pt")).is_new


def test_domains_are_kept(tmp_path: Path) -> None:
    chosen = {
        "data": {"name": "rotated_digits", "train_per_class": 2, "test_per_class": 2},
        "backbone": {"name": "small_cnn"},
    }
    made = make_features(features_config(chosen), tmp_path / "f.npz")
    config = resolve_config({"method": "replay", "data": f"features:{made.path}", "stream": {"scenario": "domain"}})
    assert [task.name for task in assemble(config).stream.tasks] == ["upright", "left", "upside_down", "right"]


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"backbone": {"name": "small_cnn"}}, "data.name must be given"),
        ({"data": {"name": "digits"}}, "backbone.name must be given"),
        ({"data": {"name": "digits"}, "backbone": {"name": "vit_tiny"}}, "backbone.weights must be given"),
        ({"data": {"name": "digits"}, "backbone": {"name": "small_cnn"}, "train": {"epochs": 2}}, "leave train out"),
    ],
)
def test_what_is_missing_is_said(chosen: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        features_config(chosen)


def test_the_command_makes_a_file_that_a_run_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "digits.npz"
    arguments = ["features", "--data", "digits", "--backbone", "small_cnn", "--weights", "random", "--out", str(path)]
    assert run_app([*arguments, "data.train_per_class=4", "data.test_per_class=2", "runtime.accelerator=cpu"]) == 0
    told = capsys.readouterr()
    assert "64 features of 40 train and 20 test images" in told.out
    assert "60 of 60 images" in told.err
    run_options = ["--preset", "smoke", "--out", str(tmp_path / "run"), "--json", "runtime.accelerator=cpu"]
    assert run_app(["run", "--method", "replay", "--data", f"features:{path}", *run_options]) == 0
    assert json.loads(capsys.readouterr().out)["evaluations_per_step"] == 1
