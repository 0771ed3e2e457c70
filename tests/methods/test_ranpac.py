"""RanPAC's classifier is one ridge regression, however the data arrive."""

import pytest
import torch
from torch.nn import functional

from cflat.data import BatchLoader
from cflat.methods.ranpac import RanPAC, RanPACConfig
from methods.streams import domain_stream, stream_of, uneven_stream, whole_task
from runs import tiny_inputs, tiny_method, tiny_run

EXACT = RanPACConfig(num_projections=40, double=True, adapt=False)


def images_of(images):
    return next(iter(BatchLoader(images, tiny_inputs().eval, len(images), shuffle=False)))


def trained(stream, config) -> RanPAC:
    method = tiny_method("ranpac", stream, config=config)
    tiny_run(method, stream, epochs=1)
    return method


@pytest.mark.parametrize("stream", [uneven_stream(), domain_stream()], ids=["class", "domain"])
@torch.no_grad()
def test_tasks_one_by_one_equal_all_at_once_and_a_dense_solve(stream):
    parts, whole = trained(stream, EXACT), trained(stream_of(whole_task(), scenario=stream.scenario), EXACT)
    torch.testing.assert_close(parts.ridge.gram, whole.ridge.gram, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(parts.ridge.class_sums, whole.ridge.class_sums, rtol=1e-6, atol=1e-6)
    batch = images_of(whole_task().train)
    projected = torch.relu(parts.network.features(batch.images).double() @ parts.ridge.projection)
    gram = projected.T @ projected + parts.ridge.ridge * torch.eye(40, dtype=torch.float64)
    solution = torch.linalg.solve(gram, projected.T @ functional.one_hot(batch.labels, 6).double())
    torch.testing.assert_close(parts.predict(batch)["logits"], (projected @ solution).float(), rtol=1e-4, atol=1e-4)


def test_projections_follow_the_network_and_the_seed():
    assert RanPACConfig().make_head(768).num_projections == 10_000
    assert RanPACConfig().make_head(64).num_projections == 1024
    assert RanPACConfig(num_projections=30).make_head(64).num_projections == 30
    stream = uneven_stream()
    first, again, other = (tiny_method("ranpac", stream, seed=seed).ridge.projection for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_cosine_scoring_is_another_classifier_on_the_same_solution():
    stream = uneven_stream()
    linear, cosine = (trained(stream, RanPACConfig(num_projections=40, scoring=s)) for s in ("linear", "cosine"))
    assert torch.equal(linear.ridge.weight, cosine.ridge.weight)
    batch = images_of(whole_task().test)
    with torch.no_grad():
        scores = cosine.predict(batch)["logits"]
        assert scores.abs().max() <= 1 + 1e-6
        assert not torch.allclose(scores, linear.predict(batch)["logits"], atol=1e-3)


def test_without_adapters_the_backbone_is_used_as_it_is():
    stream = uneven_stream()
    method = tiny_method("ranpac", stream, config=EXACT)
    result = tiny_run(method, stream)
    images = torch.rand(2, 3, 8, 8)
    assert result.cost.steps == 0
    torch.testing.assert_close(method.network.eval().features(images), method.network.backbone(images))
