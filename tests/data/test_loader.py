from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cflat.data import Batch, BatchLoader, eval_transform, train_transform
from data.synthetic import image_set

RANDOM = train_transform("cifar", 4)
PLAIN = eval_transform("none", 4)


def equal(one: Batch, other: Batch) -> bool:
    return all(torch.equal(getattr(one, name), getattr(other, name)) for name in ("images", "labels", "rows"))


def test_a_batch_holds_what_its_rows_say():
    images = image_set([3, 1, 2, 0, 1]).select([4, 2, 0])
    (batch,) = BatchLoader(images, PLAIN, 8, shuffle=False).epoch(0)
    assert batch.rows.tolist() == [4, 2, 0]
    assert batch.labels.tolist() == [1, 2, 3]
    assert torch.equal((batch.images * 255).round().byte(), images.pixels([0, 1, 2]))


@settings(deadline=None, max_examples=40)
@given(count=st.integers(1, 30), batch_size=st.integers(1, 8), data=st.data(), prefetch=st.integers(0, 2))
def test_resuming_at_any_step_gives_the_tail_of_the_epoch(count, batch_size, data, prefetch):
    images = image_set(np.arange(count) % 3)
    make = lambda ahead: BatchLoader(images, RANDOM, batch_size, shuffle=True, seed=5, task=2, prefetch=ahead)  # noqa: E731
    whole = list(make(0).epoch(3))
    start = data.draw(st.integers(0, len(whole)))
    tail = list(make(prefetch).epoch(3, start_step=start))
    assert len(whole) == len(make(0))
    assert len(tail) == len(whole) - start
    assert all(equal(a, b) for a, b in zip(whole[start:], tail, strict=True))


KEYS = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]


def first_batch(images, key, *, shuffle):
    seed, task, epoch = key
    return next(BatchLoader(images, RANDOM, 64, shuffle=shuffle, seed=seed, task=task).epoch(epoch))


def test_seed_task_and_epoch_each_change_the_order():
    images = image_set(np.zeros(64))
    assert len({tuple(first_batch(images, key, shuffle=True).rows.tolist()) for key in KEYS}) == 4


def test_seed_task_and_epoch_each_change_the_augmentation():
    images = image_set(np.zeros(64))
    batches = [first_batch(images, key, shuffle=False).images for key in KEYS]
    assert not any(torch.equal(batches[i], batches[j]) for i in range(4) for j in range(i))


def test_steps_are_augmented_differently():
    images = image_set([0, 0]).select([0, 0, 0, 0, 0, 0, 0, 0])
    batches = list(BatchLoader(images, RANDOM, 4, shuffle=True).epoch(0))
    assert not torch.equal(batches[0].images, batches[1].images)


def test_global_generators_are_neither_read_nor_advanced():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    one = next(BatchLoader(image_set([0] * 9), RANDOM, 4, shuffle=True).epoch(0))
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(2)
    np.random.seed(5)
    assert equal(one, next(BatchLoader(image_set([0] * 9), RANDOM, 4, shuffle=True).epoch(0)))


@settings(deadline=None, max_examples=60)
@given(count=st.integers(1, 40), batch_size=st.integers(1, 9), world_size=st.integers(1, 4), shuffle=st.booleans())
def test_ranks_keep_step_and_see_every_image_exactly_once(count, batch_size, world_size, shuffle):
    images = image_set(np.zeros(count))
    parts = [
        list(BatchLoader(images, RANDOM, batch_size, shuffle=shuffle, rank=rank, world_size=world_size).epoch(1))
        for rank in range(world_size)
    ]
    assert {len(part) for part in parts} == {-(-count // batch_size)}
    assert all(len(batch) > 0 for part in parts for batch in part)
    rows = [row for part in parts for batch in part if not batch.is_filler for row in batch.rows.tolist()]
    assert sorted(rows) == list(range(count))
    for step in zip(*parts, strict=True):
        assert sum(batch.share for batch in step) == pytest.approx(1)
        assert {batch.total for batch in step} == {sum(len(batch) for batch in step if not batch.is_filler)}


def test_a_rank_without_images_has_a_filler_of_the_same_step():
    ranks = [
        list(BatchLoader(image_set([0] * 5), PLAIN, 4, shuffle=True, rank=r, world_size=3).epoch(0)) for r in range(3)
    ]
    assert [[batch.is_filler for batch in rank] for rank in ranks] == [[False, False], [False, True], [False, True]]
    assert equal(ranks[1][1], ranks[0][1])
    assert [rank[1].share for rank in ranks] == [1, 0, 0]


def test_two_ranks_share_the_images_of_one():
    images = image_set(np.arange(22) % 4)
    single = list(BatchLoader(images, RANDOM, 8, shuffle=True, seed=3).epoch(2))
    pair = [list(BatchLoader(images, RANDOM, 8, shuffle=True, seed=3, rank=r, world_size=2).epoch(2)) for r in (0, 1)]
    for step, batch in enumerate(single):
        for rank in (0, 1):
            share = Batch(batch.images[rank::2], batch.labels[rank::2], batch.rows[rank::2])
            assert equal(pair[rank][step], share)


def test_whole_batches_can_be_taken_in_turns():
    loader = BatchLoader(image_set(np.zeros(22)), PLAIN, 4, shuffle=False)
    turns = [[batch.rows.tolist() for batch in loader.epoch(0, rank, every=4)] for rank in range(4)]
    whole = [batch.rows.tolist() for batch in loader]
    assert turns == [whole[0::4], whole[1::4], whole[2::4], whole[3::4]]


def test_drop_last_leaves_out_the_short_step():
    loader = BatchLoader(image_set([0] * 10), PLAIN, 4, shuffle=True, drop_last=True)
    assert [len(batch) for batch in loader.epoch(0)] == [4, 4]
    assert len(loader) == 2


def test_a_prefetching_epoch_can_be_left_early():
    loader = BatchLoader(image_set([0] * 40), RANDOM, 2, shuffle=True, prefetch=3)
    batches = loader.epoch(0)
    first = next(batches)
    batches.close()
    assert equal(first, next(loader.epoch(0)))


@pytest.mark.parametrize(
    "wrong",
    [{"batch_size": 0}, {"rank": 2, "world_size": 2}, {"seed": -1}, {"prefetch": -1}, {"world_size": 0}],
)
def test_wrong_arguments_are_refused(wrong):
    arguments = {"batch_size": 4, **wrong}
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be"):
        BatchLoader(image_set([0, 1]), PLAIN, arguments.pop("batch_size"), shuffle=False, **arguments)


def test_empty_sets_and_steps_beyond_the_epoch_are_refused():
    with pytest.raises(ValueError, match="empty set"):
        BatchLoader(image_set([0]).select([]), PLAIN, 4, shuffle=False)
    with pytest.raises(ValueError, match="start_step must be"):
        BatchLoader(image_set([0]), PLAIN, 4, shuffle=False).epoch(0, start_step=2)


def test_extras_are_added_to_a_batch_of_its_own():
    batch = next(BatchLoader(image_set([0, 1]), PLAIN, 2, shuffle=False).epoch(0))
    more = batch.with_(teacher=torch.ones(2, 3)).with_(query=torch.zeros(2, 1))
    assert set(more.extras) == {"teacher", "query"}
    assert more.images is batch.images
    assert not batch.extras
