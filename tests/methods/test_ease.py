"""EASE's completion, reweighting and adapters against plain loops."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from cflat.data import BatchLoader
from cflat.methods.ease import EASEConfig, block_weights, complete_, reweighted_cosines
from methods.streams import uneven_stream, whole_task
from nn.passes import vit_features
from runs import tiny_inputs, tiny_method, tiny_run

sizes = st.lists(st.integers(1, 4), min_size=1, max_size=5)


def cosine(one, other):
    return float(functional.cosine_similarity(one, other, dim=0))


def random_prototypes(task_sizes, dim=5):
    starts = [sum(task_sizes[:i]) for i in range(len(task_sizes))]
    owners = [task for task, size in enumerate(task_sizes) for _ in range(size)]
    generator = torch.Generator().manual_seed(sum(task_sizes))
    return torch.randn(len(starts), len(owners), dim, dtype=torch.float64, generator=generator), starts, owners


def completed_by_loops(prototypes, owners, newest_only):
    result, newest = prototypes.clone(), max(owners)
    for c, i in enumerate(owners):
        for j in range(i + 1, newest + 1):
            if newest_only and j != newest:
                continue
            known = [r for r, owner in enumerate(owners) if owner >= j]
            cosines = torch.tensor([cosine(prototypes[i, c], prototypes[i, r]) for r in known], dtype=torch.float64)
            result[j, c] = sum(w * prototypes[j, r] for w, r in zip(cosines.softmax(0), known, strict=True))
    return result


@given(sizes, st.booleans())
def test_completion_equals_loops_over_classes(task_sizes, newest_only):
    prototypes, starts, owners = random_prototypes(task_sizes)
    expected = completed_by_loops(prototypes, owners, newest_only)
    complete_(prototypes, starts, newest_only=newest_only)
    torch.testing.assert_close(prototypes, expected)


def test_completion_follows_the_softmax_of_similarities():
    block = torch.tensor([[1.0, 0.0], [1.0, 0.0], [-1.0, 0.0], [-1.0, 0.0]])  # one old class, equal to a new one
    prototypes = torch.stack([block, block])
    complete_(prototypes, [0, 1])
    weights = torch.tensor([1.0, -1.0, -1.0]).softmax(0)
    torch.testing.assert_close(prototypes[1, 0], weights @ block[1:])
    assert torch.equal(prototypes[0], block)
    assert torch.equal(prototypes[1, 1:], block[1:])


@given(sizes, st.booleans())
def test_scores_equal_loops_over_classes_and_blocks(task_sizes, has_plain):
    prototypes, starts, owners = random_prototypes(task_sizes)
    features = torch.randn(3, len(starts) + has_plain, 5, dtype=torch.float64)
    tasks = features[:, 1:] if has_plain else features
    plain = torch.randn(1, len(owners), 5, dtype=torch.float64)
    expected = torch.zeros(3, len(owners), dtype=torch.float64)
    for b in range(3):
        for c, i in enumerate(owners):
            expected[b, c] = cosine(tasks[b, i], prototypes[i, c])
            for j in range(len(starts)):
                if j != i:
                    expected[b, c] += 0.3 / (len(starts) - 1) * cosine(tasks[b, j], prototypes[j, c])
            if has_plain:
                expected[b, c] += 0.7 * cosine(features[b, 0], plain[0, c])
    blocks = torch.cat([plain, prototypes]) if has_plain else prototypes
    scores = reweighted_cosines(features, blocks, block_weights(blocks, starts, 0.3, 0.7))
    torch.testing.assert_close(scores, expected)


@pytest.mark.parametrize("use_init_ptm", [False, True])
@torch.no_grad()
def test_prototypes_are_true_means_where_images_were_and_completed_elsewhere(use_init_ptm):
    stream = uneven_stream()
    method = tiny_method("ease", stream, config=EASEConfig(use_init_ptm=use_init_ptm))
    with torch.enable_grad():
        tiny_run(method, stream, epochs=1)
    backbone = method.network.backbone
    sets = [list(adapters) for adapters in (*method.frozen_sets, method.network.adapters)]
    batch = next(iter(BatchLoader(whole_task().train, tiny_inputs().eval, 100, shuffle=False)))
    features = torch.stack([vit_features(backbone, batch.images, adapters=one) for one in sets])
    torch.testing.assert_close(method.features(batch.images), features.transpose(0, 1), rtol=1e-4, atol=1e-4)
    true = torch.stack([features[:, batch.labels == label].mean(1) for label in range(6)], dim=1)
    completed = completed_by_loops(true[-3:], [0, 0, 0, 1, 2, 2], newest_only=False)
    torch.testing.assert_close(method.prototypes[-3:], completed, rtol=1e-4, atol=1e-4)
    assert len(method.prototypes) == 3 + use_init_ptm
    if use_init_ptm:
        assert torch.equal(features[0], backbone(batch.images))
        torch.testing.assert_close(method.prototypes[0], true[0], rtol=1e-4, atol=1e-4)


def test_tasks_leave_older_adapters_alone():
    stream = uneven_stream()
    method = tiny_method("ease", stream)
    first = type(stream)("class", stream.tasks[:1], 6, stream.class_names)
    tiny_run(method, first, epochs=1)
    trained = {key: value.clone() for key, value in method.network.adapters.state_dict().items()}
    again = tiny_method("ease", stream)
    tiny_run(again, stream, epochs=1)
    assert len(again.frozen_sets) == 2
    assert not any(p.requires_grad for p in again.frozen_sets.parameters())
    for key, value in again.frozen_sets[0].state_dict().items():
        assert torch.equal(value, trained[key]), key
    assert again.network.head.num_classes == 2
    assert any(key.startswith("frozen_sets.1.") for key in again.state_dict())


def test_old_blocks_stay_as_completed_unless_they_are_recalculated():
    stream = uneven_stream()
    recalculated, kept = (tiny_method("ease", stream, config=EASEConfig(recalc_sim=r)) for r in (True, False))
    for method in (recalculated, kept):
        tiny_run(method, stream, epochs=1)
    assert not torch.equal(recalculated.prototypes[1, :3], kept.prototypes[1, :3])
    assert torch.equal(recalculated.prototypes[2, :4], kept.prototypes[2, :4])


def test_a_state_loads_into_a_grown_method():
    stream = uneven_stream()
    source = tiny_method("ease", stream)
    tiny_run(source, stream, epochs=1)
    target = tiny_method("ease", stream, seed=9)
    for task in stream.tasks:
        target.grow(task)
    target.load_state_dict(source.state_dict())
    batch = next(iter(BatchLoader(whole_task().test, tiny_inputs().eval, 48, shuffle=False)))
    with torch.no_grad():
        assert torch.equal(target.eval().predict(batch)["logits"], source.eval().predict(batch)["logits"])
