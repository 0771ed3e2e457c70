"""Validation images and label noise: what is cut from the training images, and what is done to their labels."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from cflat._errors import DataError
from cflat.data import Dataset, build_stream, load_dataset, with_label_noise
from cflat.data.dataset import image_groups
from data.synthetic import dataset, image_set


@settings(deadline=None, max_examples=30)
@given(
    per_class=st.integers(1, 12),
    num_domains=st.sampled_from([0, 2]),
    share=st.floats(0.01, 0.9),
    seed=st.integers(0, 5),
)
def test_every_class_and_domain_gives_its_share_and_keeps_one_image(per_class, num_domains, share, seed):
    whole = dataset(4, train_per_class=per_class, num_domains=num_domains)
    cut = whole.hold_out(share, seed)
    assert sorted([*cut.train.rows, *cut.validation.rows]) == whole.train.rows.tolist()
    kept, held = image_groups(cut.train), image_groups(cut.validation)
    for key, positions in image_groups(whole.train).items():
        number = len(held.get(key, []))
        assert len(kept[key]) == len(positions) - number >= 1
        assert number == (0 if per_class == 1 else min(per_class - 1, max(1, int(share * per_class + 0.5))))
    assert np.array_equal(cut.validation.rows, whole.hold_out(share, seed).validation.rows)


def test_another_seed_keeps_other_images_aside_and_nothing_kept_is_the_same_dataset():
    whole = dataset(4, train_per_class=10)
    assert not np.array_equal(whole.hold_out(0.3, 0).validation.rows, whole.hold_out(0.3, 1).validation.rows)
    assert whole.hold_out(0.0) is whole


def test_the_cut_comes_first_so_it_does_not_depend_on_how_much_is_trained_on():
    few, many = (load_dataset("digits", train_per_class=n, validation=0.2) for n in (5, 50))
    assert np.array_equal(few.validation.rows, many.validation.rows)
    assert set(few.train.rows) < set(many.train.rows)
    assert not set(many.train.rows) & set(many.validation.rows)
    assert len(load_dataset("digits", validation=0.2, validation_per_class=3).validation) == 30


def folders(path):
    for split, number in (("train", 5), ("test", 2)):
        for label in ("cat", "dog"):
            (path / split / label).mkdir(parents=True)
            for index in range(number):
                Image.fromarray(np.full((4, 4, 3), index, np.uint8)).save(path / split / label / f"{index}.png")
    return f"folder:{path}"


def arrays(path):
    labels = np.repeat([0, 1], 5)
    pixels = np.zeros((10, 4, 4, 3), np.uint8)
    np.savez(path / "own.npz", x_train=pixels, y_train=labels, x_test=pixels, y_test=labels)
    return f"npz:{path / 'own.npz'}"


def lists(path):
    folders(path / "photo")
    for split, number in (("train", 5), ("test", 2)):
        lines = [
            f"photo/{split}/{name}/{i}.png {label}" for label, name in enumerate(("cat", "dog")) for i in range(number)
        ]
        (path / f"photo_{split}.txt").write_text("\n".join(lines))
    return f"domains:{path}"


@pytest.mark.parametrize("make", [folders, arrays, lists])
def test_files_lists_and_arrays_can_be_cut(make, tmp_path):
    loaded = load_dataset(make(tmp_path), validation=0.4)
    stream = build_stream(loaded, "domain" if make is lists else "class", **({} if make is lists else {"increment": 1}))
    for task in stream.tasks:
        assert len(task.train) == 3 * len(np.unique(task.train.labels))
        assert len(task.validation) == 2 * len(np.unique(task.train.labels))
        assert not set(task.train.rows) & set(task.validation.rows)
        task.validation.pixels([0])


@pytest.mark.parametrize(("scenario", "labels"), [("class", "shared"), ("domain", "shared"), ("domain", "growing")])
def test_validation_images_go_to_the_task_of_their_class_or_domain(scenario, labels):
    whole = dataset(6, train_per_class=5, num_domains=3).hold_out(0.4)
    stream = build_stream(whole, scenario, **({"labels": labels} if scenario == "domain" else {"increment": 2}))
    plain = build_stream(
        dataset(6, train_per_class=5, num_domains=3),
        scenario,
        **({"labels": labels} if scenario == "domain" else {"increment": 2}),
    )
    found = []
    for task, before in zip(stream.tasks, plain.tasks, strict=True):
        assert set(task.validation.labels) <= set(task.classes)
        known = dict(zip(before.train.rows.tolist(), before.train.labels.tolist(), strict=True))
        assert [known[row] for row in task.validation.rows.tolist()] == task.validation.labels.tolist()
        found += task.validation.rows.tolist()
    assert sorted(found) == sorted(whole.validation.rows)
    assert not set(found) & set(stream.all_train.rows.tolist())
    assert stream.fingerprint() != plain.fingerprint()


def test_a_task_without_validation_images_is_refused():
    train = image_set([0, 0, 0, 1])
    whole = Dataset("synthetic", train, image_set([0, 1]), ("many", "one")).hold_out(0.5)
    with pytest.raises(DataError, match="has no validation image"):
        build_stream(whole, increment=1, order_seed=None)


@settings(deadline=None, max_examples=30)
@given(share=st.floats(0.01, 0.95), per_class=st.integers(1, 12), seed=st.integers(0, 5))
def test_noise_replaces_the_share_of_each_class_by_others_of_the_task(share, per_class, seed):
    clean = build_stream(dataset(6, train_per_class=per_class + 1).hold_out(0.1), initial=3, increment=3)
    noisy = with_label_noise(clean, share, seed)
    for before, after in zip(clean.tasks, noisy.tasks, strict=True):
        assert np.array_equal(before.train.rows, after.train.rows)
        assert set(after.train.labels) <= set(before.classes)
        for positions in image_groups(before.train).values():
            changed = before.train.labels[positions] != after.train.labels[positions]
            assert changed.sum() == min(per_class - 1, max(1, int(share * per_class + 0.5)))
        assert np.array_equal(before.test.labels, after.test.labels)
        assert np.array_equal(before.validation.labels, after.validation.labels)
    assert noisy.fingerprint() == with_label_noise(clean, share, seed).fingerprint()


def test_no_noise_changes_nothing_and_a_single_class_cannot_be_mistaken():
    stream = build_stream(dataset(4), increment=1)
    assert with_label_noise(stream, 0.0) is stream
    with pytest.raises(DataError, match="two classes in every task"):
        with_label_noise(stream, 0.2)


def test_a_split_without_a_validation_image_is_explained():
    single = dataset(4, train_per_class=1).hold_out(0.2).subsample(None, None, validation_per_class=2)
    assert len(single.validation) == 0
    with pytest.raises(DataError, match="has no validation image: none of its classes has two training images"):
        build_stream(single, increment=2)
