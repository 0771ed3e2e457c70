"""Surgery: frozen means frozen, halves make a whole, merges follow the formula."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from cflat.nn.backbone import create_backbone
from cflat.nn.surgery import (
    freeze,
    frozen_copy,
    merge_weights,
    named_weights,
    split_backbone,
    train_unfrozen_,
    unfreeze,
)
from cflat.nn.transport import transport_plan, transport_rows


@pytest.mark.parametrize(
    ("name", "image_size"),
    [
        ("resnet18", 32),
        ("resnet34_cifar", 16),
        ("resnet32", 16),
        ("small_cnn", 8),
        ("vit_smoke", 8),
        ("timm:vit_medium_patch16_gap_240", 32),
    ],
)
def test_split_halves_make_the_whole(name: str, image_size: int) -> None:
    backbone = create_backbone(name, image_size=image_size).eval()
    generalised, specialised = split_backbone(backbone)
    images = torch.rand(2, 3, image_size, image_size)
    assert torch.equal(specialised(generalised(images)), backbone(images))
    num_parameters = sum(p.numel() for half in (generalised, specialised) for p in half.parameters())
    assert num_parameters == sum(p.numel() for p in backbone.parameters())
    assert sum(p.numel() for p in specialised.parameters()) > 0


def test_split_leaves_the_backbone_alone() -> None:
    backbone = create_backbone("vit_smoke").eval()
    images = torch.rand(2, 3, 8, 8)
    before = backbone(images)
    generalised, specialised = split_backbone(backbone)
    with torch.no_grad():
        for parameter in [*generalised.parameters(), *specialised.parameters()]:
            parameter.zero_()
    assert torch.equal(backbone(images), before)


@pytest.mark.parametrize("name", ["timm:mobilenetv3_small_050", "timm:vit_base_patch16_siglip_224"])
def test_other_networks_cannot_be_split(name: str) -> None:
    with torch.device("meta"):
        backbone = create_backbone(name)
    with pytest.raises(ValueError, match=f"{name} cannot be split"):
        split_backbone(backbone)


def test_frozen_copies_share_nothing_and_have_no_gradients() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
    teacher = frozen_copy(module)
    assert not teacher.training
    assert module.training
    assert not any(parameter.requires_grad for parameter in teacher.parameters())
    assert all(parameter.requires_grad for parameter in module.parameters())
    with torch.no_grad():
        module[0].weight.add_(1.0)
    assert not torch.equal(teacher[0].weight, module[0].weight)
    assert unfreeze(teacher).training
    assert all(parameter.requires_grad for parameter in teacher.parameters())


def test_training_mode_spares_frozen_parts() -> None:
    frozen = freeze(nn.Sequential(nn.Conv2d(1, 1, 1), nn.BatchNorm2d(1), nn.Dropout(0.5)))
    model = nn.ModuleDict({"frozen": frozen, "head": nn.Sequential(nn.Linear(1, 1), nn.Dropout(0.5))})
    model.eval()
    train_unfrozen_(model)
    assert model.training
    assert model["head"][1].training
    assert not any(module.training for module in frozen.modules())


weights = st.floats(-2, 2, allow_nan=False)


@settings(deadline=None, max_examples=30)
@given(st.lists(weights, min_size=1, max_size=4), weights)
def test_merge_follows_the_formula(scales: list[float], alpha: float) -> None:
    base = {"a": torch.randn(3, dtype=torch.float64)}
    deltas = [{"a": torch.randn(3, dtype=torch.float64)} for _ in scales]
    merged = merge_weights(base, deltas, scales, alpha=alpha)
    expected = base["a"] + sum(alpha * s * d["a"] for s, d in zip(scales, deltas, strict=True))
    torch.testing.assert_close(merged["a"], expected)


def test_one_full_merge_returns_the_tuned_network() -> None:
    module = create_backbone("small_cnn")
    before = named_weights(module)
    tuned = copy.deepcopy(module)
    with torch.no_grad():
        for parameter in tuned.parameters():
            parameter.add_(torch.randn_like(parameter))
    delta = {name: value - before[name] for name, value in named_weights(tuned).items()}
    module.load_state_dict(merge_weights(before, [delta], [1.0], alpha=1.0), strict=False)
    for found, expected in zip(module.parameters(), tuned.parameters(), strict=True):
        torch.testing.assert_close(found, expected)
        assert found.requires_grad
    module.load_state_dict(merge_weights(before, [], [], alpha=0.25), strict=False)
    assert all(torch.equal(value, before[name]) for name, value in module.named_parameters())


def test_merge_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match="1 deltas and 2 scales"):
        merge_weights({}, [{}], [1.0, 1.0], alpha=1.0)


@pytest.mark.parametrize(("num_new", "num_old"), [(5, 5), (3, 7)])
def test_transport_plan_has_uniform_marginals(num_new: int, num_old: int) -> None:
    plan = transport_plan(torch.randn(num_new, 6), torch.randn(num_old, 6), regularization=0.5)
    torch.testing.assert_close(plan.sum(0), torch.full((num_old,), 1 / num_old), atol=1e-5, rtol=0)
    torch.testing.assert_close(plan.sum(1), torch.full((num_new,), 1 / num_new), atol=1e-5, rtol=0)


def test_transport_finds_matching_classes_far_apart() -> None:
    # Every distance is at least 50, against a regularization of 0.02: outside the log domain all underflows.
    old_means = 100 * torch.eye(4, 5)
    order = torch.tensor([2, 0, 3, 1])
    new_means = old_means[order] + 50 * torch.eye(5)[4]
    new_rows = torch.randn(4, 4)
    moved = transport_rows(torch.zeros(4, 4), new_rows, old_means, new_means, ratio=1.0)
    torch.testing.assert_close(moved[order], new_rows, atol=1e-5, rtol=0)


def test_transport_ratio_and_plan_scale() -> None:
    old_rows, new_rows = torch.randn(3, 4), torch.randn(5, 4)
    means = torch.randn(3, 4), torch.randn(5, 4)
    assert torch.equal(transport_rows(old_rows, new_rows, *means, ratio=0.0), old_rows)
    full = transport_rows(old_rows, new_rows, *means, ratio=1.0)
    small = transport_rows(old_rows, new_rows, *means, ratio=1.0, normalize_plan=False)
    torch.testing.assert_close(full, 3 * small)
    assert full.abs().max() <= new_rows.abs().max() + 1e-4


def test_plain_sinkhorn_vanishes_where_the_public_codes_does(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    old, new = 10 * functional.normalize(torch.randn(5, 8)), 10 * functional.normalize(torch.randn(5, 8)) + 20
    assert torch.cdist(new, old).min() > 745 * 0.02  # as between the class means of DomainNet
    rows = torch.randn(5, 8), torch.randn(5, 8)
    assert float(transport_plan(new, old, regularization=0.02).sum()) == pytest.approx(1, abs=1e-3)
    with caplog.at_level(logging.WARNING):
        plan = transport_plan(new, old, regularization=0.02, sinkhorn="plain")
    assert float(plan.sum()) == 0
    assert "misses its marginals" in caplog.text
    moved = transport_rows(*rows, old, new, ratio=0.25, sinkhorn="plain")
    torch.testing.assert_close(moved, 0.75 * rows[0])
    both = [transport_plan(new, old, regularization=2.0, sinkhorn=kind) for kind in ("log", "plain")]
    torch.testing.assert_close(*both, atol=1e-6, rtol=0)


def test_a_plan_that_is_far_from_its_marginals_is_told(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    with caplog.at_level(logging.WARNING):
        transport_plan(50 * torch.randn(40, 8), 50 * torch.randn(40, 8), regularization=1e-3)
    assert "misses its marginals" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        transport_plan(torch.randn(6, 8), torch.randn(6, 8), regularization=0.5)
    assert not caplog.text
    with caplog.at_level(logging.WARNING):
        transport_plan(torch.full((6, 8), torch.nan), torch.randn(6, 8), regularization=0.5)
    assert "misses its marginals by nan" in caplog.text
