from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cflat._errors import DataError
from cflat.data import ExemplarMemory, ImageSet, ReservoirMemory, build_stream, herding
from cflat.data.pixels import ArrayPixels
from data.synthetic import dataset, image_set


def naive_herding(features, num):
    vectors = features.double()
    vectors = vectors / (vectors.norm(dim=1, keepdim=True) + 1e-8)
    mean = vectors.mean(dim=0)
    chosen = []
    for k in range(1, num + 1):
        distances = {}
        for i in range(len(vectors)):
            if i not in chosen:
                total = vectors[i] + sum((vectors[j] for j in chosen), torch.zeros_like(mean))
                distances[i] = float((mean - total / k).norm())
        chosen.append(min(distances, key=distances.get))
    return chosen


@pytest.mark.parametrize("seed", range(5))
def test_herding_equals_the_loop(seed):
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(23, 6, generator=generator) + 0.5
    assert herding(features, 23).tolist() == naive_herding(features, 23)


def test_herding_survives_rows_of_zeros():
    features = torch.cat([torch.zeros(2, 3), torch.eye(3)])
    assert sorted(herding(features, 5).tolist()) == list(range(5))


def test_herding_starts_at_the_row_nearest_to_the_mean():
    features = torch.nn.functional.normalize(torch.randn(50, 8), dim=1)
    nearest = (features - features.mean(0)).norm(dim=1).argmin()
    assert herding(features, 1).tolist() == [int(nearest)]


def test_herding_refuses_more_than_there_are():
    with pytest.raises(ValueError, match="num must be"):
        herding(torch.randn(3, 2), 4)


def features_of(images):
    generator = torch.Generator().manual_seed(int(images.rows.sum()))
    return torch.randn(len(images), 5, generator=generator)


def fill(memory, stream):
    for task in stream.tasks:
        memory.update(task.train, features_of(task.train))
    return memory


@settings(deadline=None, max_examples=50)
@given(
    total=st.integers(1, 60),
    selection=st.sampled_from(["herding", "random"]),
    sizes=st.lists(st.integers(1, 9), min_size=2, max_size=6),
)
def test_a_fixed_total_is_never_exceeded(total, selection, sizes):
    memory = ExemplarMemory(total=total, selection=selection)
    images = image_set(np.repeat(np.arange(len(sizes)), sizes))
    for label in range(len(sizes)):
        task = images.of_classes([label])
        if total < label + 1:
            with pytest.raises(ValueError, match=f"memory of {total} images cannot hold {label + 1} classes"):
                memory.update(task, features_of(task))
            return
        memory.update(task, features_of(task))
        assert len(memory) <= total
        quota = total // (label + 1)
        kept = [len(memory.images().of_classes([c])) for c in range(label + 1)]
        assert kept == [min(quota, n) for n in sizes[: label + 1]]


def test_a_fixed_number_per_class_keeps_small_classes_whole():
    images = image_set([0] * 7 + [1] * 2 + [2] * 5)
    memory = ExemplarMemory(per_class=4)
    memory.update(images, features_of(images))
    assert [len(memory.images().of_classes([c])) for c in range(3)] == [4, 2, 4]


@pytest.mark.parametrize("selection", ["herding", "random"])
def test_shrinking_keeps_the_first_of_the_stored_order(selection):
    stream = build_stream(dataset(6, train_per_class=8), initial=2, increment=2)
    memory = ExemplarMemory(total=16, selection=selection)
    memory.update(stream.tasks[0].train, features_of(stream.tasks[0].train))
    before = {label: memory.images().of_classes([label]).rows.tolist() for label in (0, 1)}
    memory.update(stream.tasks[1].train, features_of(stream.tasks[1].train))
    for label in (0, 1):
        assert len(before[label]) == 8
        assert memory.images().of_classes([label]).rows.tolist() == before[label][:4]


def test_exemplars_are_herded_per_class_in_order():
    images = image_set([0, 1] * 6)
    features = features_of(images)
    memory = ExemplarMemory(per_class=3)
    memory.update(images, features)
    for label in (0, 1):
        where = np.flatnonzero(images.labels == label)
        expected = where[naive_herding(features[where], 3)]
        assert memory.images().of_classes([label]).rows.tolist() == expected.tolist()


def test_random_selection_depends_on_the_seed_alone():
    images = image_set([0] * 30)
    rows = []
    for seed in (1, 1, 2):
        memory = ExemplarMemory(per_class=10, selection="random", seed=seed)
        memory.update(images)
        rows.append(memory.images().rows.tolist())
    assert rows[0] == rows[1] != rows[2]
    assert len(set(rows[0])) == 10


def test_a_class_that_returns_in_a_new_domain_shares_its_budget():
    stream = build_stream(dataset(3, train_per_class=9, num_domains=3), "domain")
    memory = fill(ExemplarMemory(total=18), stream)
    assert len(memory) == 18
    for label in range(3):
        assert sorted(memory.images().of_classes([label]).domains.tolist()) == [0, 0, 1, 1, 2, 2]
    with pytest.raises(ValueError, match="cannot cover the 3 tasks"):
        fill(ExemplarMemory(per_class=2), stream)


def test_state_round_trips_through_a_checkpoint_file(tmp_path):
    stream = build_stream(dataset(6, train_per_class=5), initial=2, increment=2)
    memory = fill(ExemplarMemory(total=12), stream)
    torch.save(memory.state(), tmp_path / "memory.pt")
    restored = ExemplarMemory(total=12)
    restored.load_state(torch.load(tmp_path / "memory.pt", weights_only=True), stream.all_train)
    for name in ("rows", "labels"):
        assert np.array_equal(getattr(restored.images(), name), getattr(memory.images(), name))
    assert restored.num_updates == memory.num_updates
    extra = stream.tasks[0].train
    for one in (memory, restored):
        one.update(extra.with_labels(extra.labels + 6), features_of(extra))
    assert restored.images().rows.tolist() == memory.images().rows.tolist()


def test_an_empty_memory_has_a_state_too():
    memory = ExemplarMemory(total=3)
    memory.load_state(memory.state(), image_set([0]))
    assert len(memory) == 0
    with pytest.raises(ValueError, match="memory is empty"):
        memory.images()
    assert len(memory.rehearse(image_set([0, 1]))) == 2


def test_a_state_of_another_stream_is_refused():
    source = dataset(6, train_per_class=5)
    state = fill(ExemplarMemory(total=12), build_stream(source, initial=2, increment=2)).state()
    with pytest.raises(DataError, match="another dataset, subsample or class order"):
        ExemplarMemory(total=12).load_state(state, build_stream(source, order_seed=3).all_train)
    with pytest.raises(DataError, match="is not in the training images"):
        ExemplarMemory(total=12).load_state(state, source.train.select([0]))


def test_rehearsal_joins_new_images_and_exemplars():
    stream = build_stream(dataset(4, train_per_class=5), initial=2, increment=2)
    memory = ExemplarMemory(per_class=2)
    memory.update(stream.tasks[0].train, features_of(stream.tasks[0].train))
    joined = memory.rehearse(stream.tasks[1].train)
    assert len(joined) == 14
    assert set(joined.labels) == {0, 1, 2, 3}


def test_wrong_arguments_are_refused():
    for wrong in ({}, {"total": 5, "per_class": 5}):
        with pytest.raises(ValueError, match="exactly one"):
            ExemplarMemory(**wrong)
    with pytest.raises(ValueError, match="total must be"):
        ExemplarMemory(total=0)
    with pytest.raises(ValueError, match="'herding' or 'random', got 'best'"):
        ExemplarMemory(total=5, selection="best")
    with pytest.raises(ValueError, match="one feature row for each of 2 images, got none"):
        ExemplarMemory(total=5).update(image_set([0, 1]))


def reservoir_of(num, *, classes=1, **budget):
    memory = ReservoirMemory(**budget)
    for start in range(0, num, 7):
        rows = torch.arange(start, min(start + 7, num))
        memory.observe(rows, rows % classes)
    return memory


def stored_rows(memory):
    return sorted(item.row for slots in memory.slots.values() for item in slots)


def test_every_image_has_the_same_chance_to_be_in_a_reservoir():
    counts = np.zeros(40)
    for seed in range(600):
        counts[stored_rows(reservoir_of(40, total=10, seed=seed))] += 1
    assert counts.sum() == 6000
    assert np.abs(counts / 600 - 0.25).max() < 0.08  # more than four deviations


def test_a_balanced_reservoir_gives_every_class_the_same_number():
    memory = ReservoirMemory(total=12, balanced=True)
    memory.observe(torch.arange(50), torch.zeros(50, dtype=torch.long))
    assert len(memory) == 12
    memory.observe(torch.arange(50, 56), torch.ones(6, dtype=torch.long))
    memory.observe(torch.arange(56, 90), torch.full((34,), 2))
    assert {key: len(slots) for key, slots in memory.slots.items()} == {0: 4, 1: 4, 2: 4}
    each = reservoir_of(90, classes=3, per_class=5)
    assert {key: len(slots) for key, slots in each.slots.items()} == {0: 5, 1: 5, 2: 5}


def test_a_drawn_batch_has_no_repeats_while_there_are_enough():
    memory = reservoir_of(30, total=8)
    like = ImageSet(ArrayPixels(np.zeros((30, 4, 4, 3), np.uint8)), np.zeros(30))
    rng = np.random.default_rng(0)
    assert len(set(memory.draw(8, rng, like)[0].rows)) == 8
    images, _ = memory.draw(20, rng, like)
    assert len(images) == 20
    assert sorted(set(images.rows)) == stored_rows(memory)


def test_logits_of_a_head_that_has_grown_keep_their_width_through_a_checkpoint():
    memory = ReservoirMemory(total=4, seed=1)
    for width in (2, 3):
        rows = torch.arange(2) + 2 * width
        memory.observe(rows, torch.zeros(2, dtype=torch.long), logits=torch.full((2, width), float(width)))
    like = ImageSet(ArrayPixels(np.zeros((10, 4, 4, 3), np.uint8)), np.zeros(10))
    restored = ReservoirMemory(total=4, seed=1)
    restored.load_state(memory.state(), like)
    for found in (memory, restored):
        images, tensors = found.draw(4, np.random.default_rng(0), like)
        assert tensors["logits"].shape == (4, 3)
        widths = dict(zip(images.rows.tolist(), tensors["logits_width"].tolist(), strict=True))
        assert widths == {4: 2, 5: 2, 6: 3, 7: 3}
    for found in (memory, restored):
        found.observe(torch.arange(8, 10), torch.zeros(2, dtype=torch.long), logits=torch.zeros(2, 3))
    assert stored_rows(memory) == stored_rows(restored)
    with pytest.raises(DataError, match="another dataset"):
        restored.load_state(memory.state(), like.select(range(3)))
