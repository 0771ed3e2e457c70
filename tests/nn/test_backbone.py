"""Backbones: shapes, names, data configs, weights from files and what is said when they do not fit."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file

from cflat._errors import DataError
from cflat.nn.backbone import Backbone, create_backbone, list_backbones
from cflat.nn.heads import NearestMeanHead

SHAPES = [
    ("resnet18", 64, 512, "resnet"),
    ("resnet34_cifar", 32, 512, "resnet"),
    ("resnet8", 16, 64, "resnet"),
    ("resnet32", 32, 64, "resnet"),
    ("small_cnn", 8, 64, "other"),
    ("mlp", 8, 256, "other"),
    ("mlp", 1, 256, "other"),
    ("identity", 1, 3, "other"),
    ("vit_tiny", 32, 192, "vit"),
    ("vit_smoke", 8, 64, "vit"),
    ("vit-smoke", 28, 64, "vit"),
    ("timm:resnet10t", 64, 512, "resnet"),
    ("timm:vit_tiny_patch16_224", 48, 192, "vit"),
]


@pytest.fixture
def tiny_weights(shared: Path) -> Path:
    return shared / "weights" / "vit_tiny_patch16_224.safetensors"


@pytest.mark.parametrize(("name", "image_size", "feature_dim", "family"), SHAPES)
def test_features_have_the_promised_shape(name: str, image_size: int, feature_dim: int, family: str) -> None:
    backbone = create_backbone(name, image_size=image_size).eval()
    features = backbone(torch.rand(2, 3, image_size, image_size))
    assert features.shape == (2, feature_dim) == (2, backbone.feature_dim)
    assert (backbone.family, backbone.image_size) == (family, image_size)


@pytest.mark.parametrize("name", ["small_cnn", "vit_smoke", "resnet32", "resnet18_cifar"])
def test_other_channel_counts_give_a_mean_and_std_per_channel(name: str) -> None:
    backbone = create_backbone(name, num_channels=1, image_size=8).eval()
    assert backbone(torch.rand(2, 1, 8, 8)).shape == (2, backbone.feature_dim)
    assert len(backbone.mean) == len(backbone.std) == 1


def test_cifar_stem_keeps_the_resolution() -> None:
    cifar, imagenet = (create_backbone(name, image_size=32).eval() for name in ("resnet18_cifar", "resnet18"))
    images = torch.rand(1, 3, 32, 32)
    assert cifar.model.forward_features(images).shape[-1] == 4
    assert imagenet.model.forward_features(images).shape[-1] == 1


@pytest.mark.parametrize(("name", "size"), [("resnet8", 74_640), ("resnet32", 463_504)])
def test_cifar_resnets_have_the_published_size(name: str, size: int) -> None:
    # He et al. 2016, table 6: ResNet-32 has 0.46 M parameters with the 10-way head; shortcuts have none.
    assert sum(p.numel() for p in create_backbone(name).parameters()) == size


def test_data_configs_come_with_the_weights() -> None:
    assert create_backbone("vit_tiny", image_size=32).mean == (0.5, 0.5, 0.5)
    assert create_backbone("resnet18").std == (0.229, 0.224, 0.225)
    assert create_backbone("resnet32").mean == (0.5071, 0.4867, 0.4408)
    assert create_backbone("resnet18").image_size == 224


def test_vit_features_are_the_cls_token_after_the_final_norm() -> None:
    backbone = create_backbone("vit_smoke").eval()
    images = torch.rand(3, 3, 8, 8)
    tokens = backbone.model.forward_features(images)
    assert torch.equal(backbone(images), tokens[:, 0])
    assert isinstance(backbone.model.norm, torch.nn.LayerNorm)


@pytest.mark.parametrize("name", ["vit_tiny", "vit_base", "vit_large", "vit_base_in21k"])
def test_vit_names_stand_for_existing_explicit_tags(name: str) -> None:
    with torch.device("meta"):
        tag = create_backbone(name).model.pretrained_cfg["tag"]
    assert tag == ("augreg_in21k" if name.endswith("in21k") else "augreg_in21k_ft_in1k")


def test_random_vits_warn_and_others_do_not(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        create_backbone("resnet32")
        assert not caplog.records
        create_backbone("vit_smoke")
    assert "random weights" in caplog.text


def test_an_mlp_has_the_chosen_layers_and_nothing_else() -> None:
    backbone = create_backbone("mlp", num_channels=192, image_size=1, width=32, depth=3)
    assert backbone(torch.rand(2, 192)).shape == (2, 32)
    assert sum(p.numel() for p in backbone.parameters()) == (192 + 1) * 32 + 2 * (32 + 1) * 32
    assert not list(backbone.buffers())


def test_every_listed_name_has_a_description() -> None:
    names = list_backbones()
    assert {"resnet18", "resnet34_cifar", "resnet32", "vit_large", "vit_smoke", "small_cnn"} <= names.keys()
    assert all(names.values())
    assert list_backbones("vit_base*").keys() == {"vit_base", "vit_base_in21k"}


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("resnet19", {}, "Did you mean 'resnet"),
        ("timm:nonsense", {}, "no model 'nonsense'"),
        ("vit_tiny", {"image_size": 100}, "multiple of vit_tiny's patch size 16, got 100"),
        ("vit_smoke", {"image_size": 3}, "image_size must be at least 4, got 3"),
        ("resnet32", {"weights": "timm"}, "resnet32 has no published weights"),
        ("resnet32", {"drop_path_rate": 0.1}, "drop_path_rate must be at most 0, got 0.1"),
        ("resnet32", {"width": 8}, "width can be chosen for mlp only; resnet32 has its own"),
        ("mlp", {"depth": 0}, "depth must be a whole number and at least 1, got 0"),
        ("resnet32", {"num_channels": 0}, "num_channels must be"),
    ],
)
def test_wrong_arguments_are_named(name: str, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        create_backbone(name, **options)


def test_published_weights_out_of_reach_say_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(DataError, match="path of a downloaded file"):
        create_backbone("resnet18", weights="timm")


@pytest.mark.parametrize("suffix", ["safetensors", "pt", "backbone.pt", "wrapped.pt"])
def test_weights_round_trip_through_files(tmp_path: Path, suffix: str) -> None:
    source = timm.create_model("resnet18", num_classes=7)
    path = tmp_path / f"weights.{suffix}"
    state = source.state_dict()
    if suffix == "safetensors":
        save_file(state, path)
    elif suffix == "backbone.pt":
        source.reset_classifier(0)
        saved = Backbone(source, name="x", image_size=32, num_channels=3, mean=(0.5,), std=(0.5,))
        torch.save(saved.state_dict(), path)
    else:
        torch.save({"state_dict": state} if "wrapped" in suffix else state, path)
    loaded = create_backbone("resnet18", weights=path)
    for name, value in loaded.model.state_dict().items():
        assert torch.equal(value, state[name]), name


def test_weights_that_do_not_fit_name_the_keys(tmp_path: Path) -> None:
    path = tmp_path / "weights.pt"
    state = create_backbone("vit_smoke").model.state_dict()
    del state["norm.bias"]
    state["extra.key"] = torch.zeros(1)
    state["cls_token"] = torch.zeros(1, 1, 32)
    torch.save(state, path)
    with pytest.raises(DataError) as caught:
        create_backbone("vit_smoke", weights=path)
    message = str(caught.value)
    assert "1 missing (norm.bias)" in message
    assert "1 unexpected (extra.key)" in message
    assert "cls_token (1, 1, 32) instead of (1, 1, 64)" in message
    with pytest.raises(DataError, match=r"and \d+ more"):
        create_backbone("resnet32", weights=path)


def test_position_embeddings_are_resampled_for_other_sizes(tmp_path: Path) -> None:
    small = create_backbone("vit_tiny", image_size=32).model
    path = tmp_path / "weights.pt"
    torch.save(small.state_dict(), path)
    positions = create_backbone("vit_tiny", image_size=64, weights=path).model.pos_embed
    assert positions.shape == (1, 17, 192)
    assert torch.equal(positions[:, 0], small.pos_embed[:, 0])
    torch.testing.assert_close(positions[:, 1:].mean(1), small.pos_embed[:, 1:].mean(1), atol=1e-3, rtol=0)


def test_other_patch_sizes_are_refused_rather_than_resampled(tmp_path: Path) -> None:
    path = tmp_path / "weights.pt"
    torch.save(create_backbone("vit_smoke", image_size=8).model.state_dict(), path)
    with pytest.raises(DataError, match=r"patch_embed\.proj\.weight"):
        create_backbone("vit_smoke", image_size=32, weights=path)


def test_a_failed_load_leaves_no_half_loaded_model_behind(tmp_path: Path) -> None:
    from cflat.nn.weights import load_weights_

    backbone = create_backbone("small_cnn")
    before = {name: value.clone() for name, value in backbone.model.state_dict().items()}
    state = {name: torch.ones_like(value) for name, value in before.items()}
    state.pop("layer3.0.weight")
    torch.save(state, tmp_path / "weights.pt")
    with pytest.raises(DataError):
        load_weights_(backbone.model, tmp_path / "weights.pt")
    assert all(torch.equal(value, before[name]) for name, value in backbone.model.state_dict().items())


class _Payload:
    """Writes a file when an unsafe unpickler builds it."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple:
        return Path.write_text, (self.target, "executed")


@pytest.mark.parametrize("kind", ["absent", "garbage", "pickle", "list", "truncated"])
def test_unreadable_files_are_named_and_never_executed(tmp_path: Path, kind: str) -> None:
    path = tmp_path / ("weights.safetensors" if kind == "truncated" else "weights.pt")
    target = tmp_path / "target"
    if kind == "garbage":
        path.write_bytes(b"not weights")
    elif kind == "pickle":
        torch.save({**create_backbone("small_cnn").model.state_dict(), "fc.weight": _Payload(target)}, path)
    elif kind == "list":
        torch.save([torch.zeros(1)], path)
    elif kind == "truncated":
        save_file(create_backbone("small_cnn").model.state_dict(), path)
        path.write_bytes(path.read_bytes()[:-100])
    message = f"No weights file at {path}" if kind == "absent" else f"weights file {path} cannot be read"
    with pytest.raises(DataError, match=message):
        create_backbone("small_cnn", weights=path)
    assert not target.exists()


@pytest.mark.parametrize("image_size", [112, 224])
def test_real_vit_tiny_weights_load(tiny_weights: Path, image_size: int) -> None:
    backbone = create_backbone("vit_tiny", weights=tiny_weights, image_size=image_size).eval()
    saved = load_file(tiny_weights)
    assert torch.equal(backbone.model.blocks[11].mlp.fc2.weight, saved["blocks.11.mlp.fc2.weight"])
    positions = backbone.model.pos_embed
    assert positions.shape[1] == 1 + (image_size // 16) ** 2
    assert torch.equal(positions[:, 0], saved["pos_embed"][:, 0])
    assert torch.equal(positions, saved["pos_embed"]) == (image_size == 224)
    with torch.no_grad():
        assert backbone(torch.zeros(1, 3, image_size, image_size)).isfinite().all()


def test_real_weights_of_another_width_are_refused(tiny_weights: Path) -> None:
    with pytest.raises(DataError, match=r"blocks.0.attn.proj.bias \(192,\) instead of \(384,\)"):
        create_backbone("timm:vit_small_patch16_224", weights=tiny_weights)


@pytest.mark.slow
def test_real_vit_tiny_tells_cifar_classes_apart(shared: Path, tiny_weights: Path) -> None:
    """Nearest class mean from 20 train images per class, on the first 10 test images of each class."""
    import numpy as np
    from torchvision.transforms.v2.functional import InterpolationMode, resize

    backbone = create_backbone("vit_tiny", weights=tiny_weights).eval()
    with np.load(shared / "data" / "cifar100.npz") as arrays:
        splits = {split: (arrays[f"x_{split}"], arrays[f"y_{split}"]) for split in ("train", "test")}

    def features(split: str, per_class: int) -> tuple[torch.Tensor, torch.Tensor]:
        pixels, labels = splits[split]
        rows = np.concatenate([np.flatnonzero(labels == label)[:per_class] for label in range(100)])
        images = torch.from_numpy(pixels[rows]).permute(0, 3, 1, 2)
        parts = []
        for chunk in images.split(50):
            large = resize(chunk, [224, 224], InterpolationMode.BICUBIC, antialias=True).float() / 255
            with torch.inference_mode():
                parts.append(backbone((large - 0.5) / 0.5))
        return torch.cat(parts), torch.from_numpy(labels[rows]).long()

    head = NearestMeanHead(backbone.feature_dim)
    head.update(*features("train", 20))
    found, labels = features("test", 10)
    accuracy = (head(found).argmax(1) == labels).float().mean().item()
    assert accuracy >= 0.60, accuracy
