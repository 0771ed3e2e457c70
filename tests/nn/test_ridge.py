"""Ridge head: one decomposition equals many solves, many tasks equal one, states load."""

from __future__ import annotations

import logging

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from cflat.nn.ridge import RIDGES, RidgeHead, ridge_errors, ridge_solution


def problem(num_rows: int, num_classes: int = 4, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(num_rows) % num_classes
    centres = 2 * torch.randn(num_classes, 6, generator=generator)
    return centres[labels] + torch.randn(num_rows, 6, generator=generator), labels


@pytest.mark.parametrize(("num_rows", "num_inputs"), [(20, 50), (60, 30), (30, 30)])
def test_one_decomposition_equals_seventeen_dense_solves(num_rows: int, num_inputs: int) -> None:
    rows = torch.randn(num_rows + 8, num_inputs, dtype=torch.float64).relu()
    targets = functional.one_hot(torch.arange(num_rows + 8) % 3).double()
    fit, held_out = rows.split([num_rows, 8])
    fit_targets, held_out_targets = targets.split([num_rows, 8])
    expected = []
    for ridge in RIDGES:
        damped = fit.T @ fit + ridge * torch.eye(num_inputs, dtype=torch.float64)
        solution = torch.linalg.solve(damped, fit.T @ fit_targets)
        expected.append((held_out @ solution - held_out_targets).square().mean())
    errors = ridge_errors(fit, fit_targets, held_out, held_out_targets, RIDGES)
    assert len(errors) == 17
    # Dense solves at ridge 1e-8 lose some eight digits to conditioning; the decomposition does not.
    torch.testing.assert_close(errors, torch.stack(expected), rtol=1e-5, atol=1e-9)


def test_single_precision_agrees_with_double_for_every_ridge() -> None:
    features, labels = problem(120)
    projected, targets = RidgeHead(6, 300, seed=0).project(features), functional.one_hot(labels).float()
    parts = (projected[:100], targets[:100], projected[100:], targets[100:])
    single, double = ridge_errors(*parts, RIDGES), ridge_errors(*(part.double() for part in parts), RIDGES)
    # Ridges below the rounding of the Gram matrix feel the order of its sums, which differs between processors: 1.5 %
    # was seen. A dense solve is off by orders of magnitude there.
    torch.testing.assert_close(single.double(), double, rtol=5e-2, atol=1e-4)
    assert int(single.argmin()) == int(double.argmin())


def test_selection_finds_the_best_candidate_of_its_split() -> None:
    features, labels = problem(50)
    head = RidgeHead(6, 64, seed=1, dtype=torch.float64)
    chosen = head.select_ridge(features, labels, seed=3)
    order = torch.randperm(50, generator=torch.Generator().manual_seed(3))
    projected = (features[order].double() @ head.projection).relu()
    targets = functional.one_hot(labels[order]).double()
    errors = {}
    for ridge in RIDGES:
        damped = projected[:40].T @ projected[:40] + ridge * torch.eye(64, dtype=torch.float64)
        solution = torch.linalg.solve(damped, projected[:40].T @ targets[:40])
        errors[ridge] = (projected[40:] @ solution - targets[40:]).square().mean().item()
    assert chosen == min(errors, key=errors.__getitem__)
    assert RIDGES[0] < chosen < RIDGES[-1]


@settings(deadline=None, max_examples=30)
@given(st.permutations(range(3)))
def test_tasks_in_any_order_equal_one_shot(order: list[int]) -> None:
    features, labels = problem(60, num_classes=6)
    whole, parts = (RidgeHead(6, 40, seed=0, dtype=torch.float64) for _ in range(2))
    whole.accumulate(features, labels)
    for task in order:
        rows = (labels // 2) == task
        parts.accumulate(features[rows], labels[rows])
    torch.testing.assert_close(parts.gram, whole.gram)
    torch.testing.assert_close(parts.class_sums, whole.class_sums)
    whole.solve(0.1)
    parts.solve(0.1)
    torch.testing.assert_close(parts(features), whole(features))


def test_solution_equals_a_dense_solve_and_classifies() -> None:
    features, labels = problem(80)
    head = RidgeHead(6, 100, seed=0, dtype=torch.float64)
    head.fit(features, labels, seed=0)
    projected = (features.double() @ head.projection).relu()
    damped = projected.T @ projected + head.ridge * torch.eye(100, dtype=torch.float64)
    expected = torch.linalg.solve(damped, projected.T @ functional.one_hot(labels).double())
    torch.testing.assert_close(head.weight.T, expected)
    assert (head(features).argmax(1) == labels).float().mean() > 0.9
    single = RidgeHead(6, 100, seed=0)
    single.fit(features, labels, seed=0)
    torch.testing.assert_close(single(features), head(features), atol=1e-2, rtol=1e-2)


def test_chunks_do_not_change_the_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    features, labels = problem(50)
    whole, chunked = (RidgeHead(6, 20, seed=0, dtype=torch.float64) for _ in range(2))
    whole.accumulate(features, labels)
    monkeypatch.setattr("cflat.nn.ridge._NUM_CHUNK_ROWS", 7)
    chunked.accumulate(features, labels)
    torch.testing.assert_close(chunked.gram, whole.gram)
    torch.testing.assert_close(chunked.class_sums, whole.class_sums)


def test_cosine_scoring_is_another_classifier() -> None:
    features, labels = problem(40)
    linear, cosine = RidgeHead(6, 30, seed=0), RidgeHead(6, 30, seed=0, scoring="cosine")
    for head in (linear, cosine):
        head.fit(features, labels, seed=0)
    expected = functional.cosine_similarity(linear.project(features)[:, None], linear.weight[None], dim=-1)
    torch.testing.assert_close(cosine(features), expected)
    assert not torch.allclose(cosine(features), linear(features))


def test_projection_depends_on_the_seed_alone() -> None:
    first = RidgeHead(6, 10, seed=5).projection
    torch.rand(3)
    assert torch.equal(first, RidgeHead(6, 10, seed=5).projection)
    assert not torch.equal(first, RidgeHead(6, 10, seed=6).projection)


@pytest.mark.parametrize("num_classes", [0, 2, 9])
def test_states_of_any_size_load_and_continue(num_classes: int) -> None:
    features, labels = problem(60, num_classes=6)
    source = RidgeHead(6, 20, seed=0, dtype=torch.float64)
    source.fit(features[labels < 4], labels[labels < 4], seed=0)
    target = RidgeHead(6, 20, seed=9, dtype=torch.float64)
    target.grow(num_classes)
    target.load_state_dict(source.state_dict())
    assert torch.equal(target(features), source(features))
    for head in (source, target):
        head.fit(features[labels >= 4], labels[labels >= 4], seed=1)
    assert torch.equal(target(features), source(features))
    assert target.num_classes == 6


def test_nothing_large_is_kept_before_the_first_task() -> None:
    head = RidgeHead(6, 1000, seed=0)
    assert sum(value.numel() for value in head.state_dict().values()) < 10_000
    assert head(torch.randn(2, 6)).shape == (2, 0)


def test_singular_matrices_get_a_larger_ridge_and_a_word(caplog: pytest.LogCaptureFixture) -> None:
    gram = torch.full((4, 4), 1e9)
    gram[0, 0] -= 300.0  # indefinite by far more than the ridge
    with caplog.at_level(logging.WARNING):
        solution, used = ridge_solution(gram, torch.ones(4, 1), 1e-8)
    assert used > 1e-8
    assert solution.isfinite().all()
    assert "rounding errors" in caplog.text
    with pytest.raises(ValueError, match="NaN or infinity"):
        ridge_solution(torch.full((2, 2), torch.nan), torch.ones(2, 1), 1.0)


def test_one_row_cannot_be_split_and_keeps_the_ridge_before() -> None:
    head = RidgeHead(6, 10, seed=0)
    with pytest.raises(ValueError, match="must be at least 2, got 1"):
        head.select_ridge(torch.randn(1, 6), torch.tensor([0]), seed=0)
    head.fit(torch.ones(1, 6), torch.tensor([0]), seed=0)
    assert float(head.ridge) == 1.0
    features, labels = problem(60)
    head.fit(features, labels, seed=0)
    before = float(head.ridge)
    head.fit(torch.ones(1, 6), torch.tensor([7]), seed=0)
    assert float(head.ridge) == before
    assert head.num_classes == 8


_LARGEST = torch.finfo(torch.float32).max


@pytest.mark.parametrize("ridge", [0.0, 1e-300, 1e-8, 1.0])
@pytest.mark.parametrize(
    "scale", [0.0, 1e-30, 1.0, 1e9, _LARGEST / 1e3, _LARGEST, -1.0, -_LARGEST, torch.inf, torch.nan]
)
def test_every_gram_matrix_has_an_answer_or_a_sentence(scale: float, ridge: float) -> None:
    gram = scale * torch.tensor([[1.0, 2.0], [2.0, 1.0]])  # indefinite
    if 3 * abs(scale) <= _LARGEST / 10:
        solution, used = ridge_solution(gram, torch.ones(2, 1), ridge)
        assert solution.isfinite().all()
        assert used >= ridge
    else:
        with pytest.raises(ValueError, match="too large"):
            ridge_solution(gram, torch.ones(2, 1), ridge)
