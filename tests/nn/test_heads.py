"""Heads: growth keeps what was learned, scores follow the formulas, states of any size load."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from cflat.nn.heads import CosineHead, LinearHead, NearestMeanHead

sizes = st.lists(st.integers(0, 5), min_size=1, max_size=4)


@pytest.mark.parametrize("head_type", [LinearHead, CosineHead])
@settings(deadline=None, max_examples=30)
@given(increments=sizes)
def test_growth_keeps_old_scores(head_type: type, increments: list[int]) -> None:
    head, features = head_type(6), torch.randn(3, 6)
    for num_new in increments:
        before = head(features)
        head.grow(num_new)
        assert head.num_classes == before.shape[1] + num_new
        torch.testing.assert_close(head(features)[:, : before.shape[1]], before)
    assert head(features).shape == (3, sum(increments))


def test_linear_rows_are_kaiming_uniform_with_linear_gain() -> None:
    head = LinearHead(300, 100)
    bound = (3 / 300) ** 0.5
    assert 0.98 * bound < head.weight.abs().max() <= bound
    assert torch.equal(head.bias, torch.zeros(100))
    narrow = LinearHead(300, 100, init="truncated_normal")
    assert narrow.weight.std().item() == pytest.approx(0.02, rel=0.05)


def test_linear_growth_in_both_directions_keeps_the_top_left_block() -> None:
    head = LinearHead(4, 3)
    nn.init.normal_(head.bias)
    weight, bias = head.weight.detach().clone(), head.bias.detach().clone()
    head.grow(2, num_new_features=5)
    assert (head.num_classes, head.feature_dim) == (5, 9)
    assert torch.equal(head.weight[:3, :4], weight)
    assert torch.equal(head.bias, torch.cat([bias, torch.zeros(2)]))
    assert head.weight[:3, 4:].abs().min() > 0
    assert head.weight.is_leaf
    assert head.weight.requires_grad


def test_growth_of_a_frozen_head_stays_frozen() -> None:
    head = LinearHead(4, 3).requires_grad_(False)
    head.grow(2)
    assert not any(parameter.requires_grad for parameter in head.parameters())


def test_cosine_scores_ignore_lengths_and_scale_with_sigma() -> None:
    head, features = CosineHead(8, 4), torch.randn(5, 8)
    scores = head(features)
    assert scores.abs().max() <= 1
    torch.testing.assert_close(head(7 * features), scores)
    nn.init.constant_(head.sigma, 3.0)
    torch.testing.assert_close(head(features), 3 * scores)
    head.grow(2)
    assert head.sigma.item() == 3.0
    assert head.weight.abs().max() <= 8**-0.5


def test_zero_rows_have_the_documented_trap() -> None:
    def row_gradients(zero_rows: bool) -> torch.Tensor:
        head = CosineHead(8)
        head.grow(3, zero_rows=zero_rows)
        functional.cross_entropy(head(torch.randn(4, 8)), torch.tensor([0, 1, 2, 0])).backward()
        return head.weight.grad.norm()

    assert row_gradients(zero_rows=True) > 1e9
    assert row_gradients(zero_rows=False) < 10


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 20), st.integers(0, 2**31))
def test_nearest_means_do_not_depend_on_batches(num_first: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(21, 5, generator=generator)
    labels = torch.randint(0, 4, (21,), generator=generator)
    whole, parts = NearestMeanHead(5), NearestMeanHead(5)
    whole.update(features, labels)
    parts.update(features[:num_first], labels[:num_first])
    parts.update(features[num_first:], labels[num_first:])
    torch.testing.assert_close(whole.means, parts.means)
    for label in labels.unique():
        torch.testing.assert_close(whole.means[label], features[labels == label].mean(0))


def test_euclidean_head_is_icarls_rule() -> None:
    features, labels = torch.randn(30, 6), torch.arange(30) % 3
    head = NearestMeanHead(6, metric="euclidean")
    head.update(features, labels)
    unit = functional.normalize(features, dim=1)
    means = torch.stack([functional.normalize(unit[labels == c].mean(0), dim=0) for c in range(3)])
    expected = -((unit[:, None] - means[None]) ** 2).sum(-1)
    torch.testing.assert_close(head(features), expected)


def test_features_of_half_precision_are_normalized_in_full() -> None:
    torch.manual_seed(0)
    features, labels = torch.randn(30, 6).bfloat16(), torch.arange(30) % 3
    half, full = NearestMeanHead(6, metric="euclidean"), NearestMeanHead(6, metric="euclidean")
    half.update(features, labels)
    full.update(features.float(), labels)
    assert torch.equal(half.sums, full.sums)


def test_cosine_and_euclidean_means_differ_for_features_of_unequal_length() -> None:
    features, labels = torch.tensor([[10.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 0])
    raw, unit = NearestMeanHead(2), NearestMeanHead(2, metric="euclidean")
    raw.update(features, labels)
    unit.update(features, labels)
    torch.testing.assert_close(raw.means, torch.tensor([[5.0, 0.5]]))
    torch.testing.assert_close(unit.means, torch.full((1, 2), 0.5**0.5))


def test_classes_without_features_never_win() -> None:
    head = NearestMeanHead(2, num_classes=3)
    head.update(torch.tensor([[-1.0, 0.0]]), torch.tensor([1]))
    head.update(torch.empty(0, 2), torch.empty(0, dtype=torch.int64))
    scores = head(torch.tensor([[1.0, 0.0]]))
    assert scores.argmax().item() == 1
    assert scores[0, [0, 2]].isneginf().all()
    head.reset()
    assert head.num_classes == 3
    assert head(torch.ones(1, 2)).isneginf().all()


@pytest.mark.parametrize("head_type", [LinearHead, CosineHead, NearestMeanHead])
@pytest.mark.parametrize("num_classes", [0, 2, 9])
def test_states_of_any_size_load(head_type: type, num_classes: int) -> None:
    source = head_type(4, 5)
    if isinstance(source, NearestMeanHead):
        source.update(torch.randn(20, 4), torch.arange(20) % 5)
    target = nn.ModuleDict({"head": head_type(4, num_classes)})
    target.load_state_dict({f"head.{name}": value for name, value in source.state_dict().items()})
    features = torch.randn(3, 4)
    assert torch.equal(target["head"](features), source(features))
    assert target["head"].num_classes == 5
