from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cflat._errors import DataError
from cflat.data import build_stream, class_order, load_dataset
from cflat.data.stream import task_sizes
from data.synthetic import dataset

ORDER_100 = [68, 56, 78, 8, 23, 84, 90, 65, 74, 76, 40, 89, 3, 92, 55, 9, 26, 80, 43, 38]
ORDER_200 = [168, 136, 51, 9, 183, 101, 171, 99, 42, 159, 191, 70, 16, 188, 27, 10, 175, 26, 68, 187]


@pytest.mark.parametrize(
    ("num_classes", "head", "tail"),
    [(100, ORDER_100, [39, 67, 29, 49, 57, 33]), (200, ORDER_200, [195, 29, 177, 185, 161])],
)
def test_class_order_matches_the_published_lists(num_classes, head, tail):
    order = class_order(num_classes, 1993).tolist()
    assert order[: len(head)] == head
    assert order[-len(tail) :] == tail
    assert sorted(order) == list(range(num_classes))


def test_class_order_leaves_the_global_generator_alone():
    before = np.random.get_state()[1].copy()
    class_order(50, 7)
    assert np.array_equal(before, np.random.get_state()[1])


def test_no_seed_keeps_the_order_of_the_dataset():
    assert class_order(7, None).tolist() == list(range(7))


def published_rule(num_classes, initial, increment):
    sizes = [initial]
    while sum(sizes) + increment < num_classes:
        sizes.append(increment)
    left = num_classes - sum(sizes)
    return [*sizes, left] if left else sizes


@pytest.mark.parametrize(
    ("split", "sizes"),
    [
        ((100, 10, 10), [10] * 10),
        ((100, 50, 10), [50, 10, 10, 10, 10, 10]),
        ((100, 50, 20), [50, 20, 20, 10]),
        ((10, 3, 3), [3, 3, 3, 1]),
        ((10, 0, 4), [4, 4, 2]),
        ((10, 10, 3), [10]),
        ((3, 0, 5), [3]),
    ],
)
def test_task_sizes(split, sizes):
    assert task_sizes(*split) == sizes


@given(st.integers(1, 60), st.data())
def test_task_sizes_follow_the_published_rule(num_classes, data):
    initial = data.draw(st.integers(1, num_classes))
    increment = data.draw(st.integers(1, 70))
    assert task_sizes(num_classes, initial, increment) == published_rule(num_classes, initial, increment)


@pytest.mark.parametrize(("initial", "increment"), [(11, 2), (-1, 2), (2, 0), (2, -3), (1.5, 1)])
def test_impossible_sizes_are_refused(initial, increment):
    with pytest.raises(ValueError, match=r"(initial|increment) must be"):
        task_sizes(10, initial, increment)


@settings(deadline=None, max_examples=60)
@given(
    num_classes=st.integers(1, 12),
    increment=st.integers(1, 13),
    seeds=st.tuples(st.none() | st.integers(0, 5), st.none() | st.integers(0, 5)),
    scenario=st.sampled_from(["class", "task"]),
    data=st.data(),
)
def test_class_streams_partition_classes_and_images(num_classes, increment, seeds, scenario, data):
    initial = data.draw(st.integers(0, num_classes))
    source = dataset(num_classes)
    stream = build_stream(
        source, scenario, initial=initial, increment=increment, order_seed=seeds[0], task_order_seed=seeds[1]
    )
    assert [label for task in stream.tasks for label in task.classes] == list(range(num_classes))
    for split in ("train", "test"):
        original = getattr(source, split)
        parts = [getattr(task, split) for task in stream.tasks]
        rows = np.concatenate([part.rows for part in parts])
        assert sorted(rows) == sorted(original.rows)  # every image once, in its own split
        assert all(part.store is original.store for part in parts)
        for task, part in zip(stream.tasks, parts, strict=True):
            assert set(part.labels) == set(task.classes)
        # Remapping is one bijection, told by the names: the same for train and test.
        labels = np.concatenate([part.labels for part in parts])
        names = {row: stream.class_names[label] for row, label in zip(rows, labels, strict=True)}
        expected = {row: source.class_names[label] for row, label in zip(original.rows, original.labels, strict=True)}
        assert names == expected


def test_shuffled_task_order_moves_whole_tasks():
    source = dataset(10)
    plain = build_stream(source, initial=4, increment=3)
    moved = build_stream(source, initial=4, increment=3, task_order_seed=1)
    groups = [frozenset(plain.class_names[c] for c in task.classes) for task in plain.tasks]
    shuffled = [frozenset(moved.class_names[c] for c in task.classes) for task in moved.tasks]
    assert set(groups) == set(shuffled)
    assert groups != shuffled
    assert [task.index for task in moved.tasks] == [0, 1, 2]


def test_every_task_is_tested_on_its_own_classes():
    stream = build_stream(dataset(10), initial=4, increment=3)
    assert [len(task.test) for task in stream.tasks] == [8, 6, 6]
    assert [set(task.test.labels) for task in stream.tasks] == [set(range(4)), set(range(4, 7)), set(range(7, 10))]
    assert [task.classes.stop for task in stream.tasks] == [4, 7, 10]
    assert len(stream.all_train) == 30


def test_without_sizes_own_data_makes_five_tasks_and_known_data_its_usual_split():
    assert build_stream(dataset(10)).num_tasks == 5
    assert build_stream(dataset(3)).num_tasks == 2  # of two classes and one: three tasks would have one each
    assert build_stream(replace(dataset(10), split=(4, 2))).tasks[0].num_classes == 4


def test_shared_domain_stream():
    source = dataset(3, num_domains=4)
    stream = build_stream(source, "domain")
    assert [task.name for task in stream.tasks] == list(source.domain_names)
    assert stream.num_classes == 3
    assert stream.label_modulus is None
    for index, task in enumerate(stream.tasks):
        assert task.classes == range(3)
        assert set(task.train.domains) == {index}
        assert np.array_equal(task.train.labels, source.train.labels[task.train.rows])
    assert sorted(stream.all_train.rows) == list(range(len(source.train)))


def test_growing_domain_stream():
    source = dataset(3, num_domains=4)
    stream = build_stream(source, "domain", labels="growing")
    assert stream.num_classes == 12
    assert stream.label_modulus == 3
    for index, task in enumerate(stream.tasks):
        assert task.classes == range(3 * index, 3 * index + 3)
        assert np.array_equal(task.test.labels % 3, source.test.labels[task.test.rows])
        assert set(task.test.labels // 3) == {index}
    assert stream.class_names[4] == "domain 1/class 1"


def test_growing_labels_follow_the_order_of_the_tasks():
    source = dataset(3, num_domains=4)
    stream = build_stream(source, "domain", labels="growing", domain_order=["domain 2", "domain 0"])
    assert [task.classes for task in stream.tasks] == [range(3), range(3, 6)]
    assert set(stream.tasks[0].train.labels) == {0, 1, 2}
    assert set(stream.tasks[0].train.domains) == {2}
    assert stream.class_names[3] == "domain 0/class 0"


def test_domain_order_can_be_named_or_shuffled():
    source = dataset(2, num_domains=4)
    named = build_stream(source, "domain", domain_order=["domain 2", "domain 0"])
    assert [task.name for task in named.tasks] == ["domain 2", "domain 0"]
    shuffled = build_stream(source, "domain", task_order_seed=0)
    assert {task.name for task in shuffled.tasks} == set(source.domain_names)
    assert [task.name for task in shuffled.tasks] != list(source.domain_names)


@pytest.mark.parametrize(
    ("order", "message"),
    [
        (["domain 9"], "Unknown domain 'domain 9'. Did you mean 'domain"),
        (["domain 1", "domain 1"], "once each"),
        ([], "once each"),
    ],
)
def test_wrong_domain_orders_are_refused(order, message):
    with pytest.raises(ValueError, match=message):
        build_stream(dataset(2, num_domains=3), "domain", domain_order=order)


def test_domain_stream_needs_domains():
    with pytest.raises(DataError, match="'synthetic' has no domains"):
        build_stream(dataset(3), "domain")


def test_a_domain_without_images_is_refused():
    source = dataset(2, num_domains=2)
    only_first = source.test.select(source.test.domains == 0)
    with pytest.raises(DataError, match="Domain 'domain 1' of dataset 'synthetic' has no test images"):
        build_stream(replace(source, test=only_first), "domain")


def test_growing_labels_need_every_class_in_every_domain():
    source = dataset(2, num_domains=2)
    hole = (source.train.domains == 1) & (source.train.labels == 1)
    broken = replace(source, train=source.train.select(~hole))
    with pytest.raises(DataError, match=r"Domain 'domain 1' .* no training image of class 'class 1'"):
        build_stream(broken, "domain", labels="growing")
    assert build_stream(broken, "domain").num_tasks == 2


def test_unknown_scenarios_and_labels_are_refused():
    with pytest.raises(ValueError, match=r"Unknown scenario 'clas'. Did you mean 'class'"):
        build_stream(dataset(3), "clas")
    with pytest.raises(ValueError, match="'shared' or 'growing', got 'own'"):
        build_stream(dataset(3, num_domains=2), "domain", labels="own")


def test_fingerprint_tells_streams_apart_and_only_those():
    base = build_stream(dataset(6), initial=2, increment=2).fingerprint()
    assert build_stream(dataset(6), initial=2, increment=2).fingerprint() == base
    others = [
        build_stream(dataset(6), initial=3, increment=3),
        build_stream(dataset(6), initial=2, increment=2, order_seed=1),
        build_stream(dataset(6), initial=2, increment=2, task_order_seed=3),
        build_stream(dataset(6), "task", initial=2, increment=2),
        build_stream(dataset(6, seed=1), initial=2, increment=2),
        build_stream(dataset(6, train_per_class=4), initial=2, increment=2),
        build_stream(dataset(6).subsample(2, None), initial=2, increment=2),
        build_stream(dataset(6).subsample(2, None, seed=1), initial=2, increment=2),
    ]
    assert len({base, *(stream.fingerprint() for stream in others)}) == 9


def test_fingerprint_tells_images_of_equal_labels_apart():
    source = dataset(1, train_per_class=4)
    prints = [build_stream(replace(source, train=source.train.select(rows))).fingerprint() for rows in ([0, 1], [0, 2])]
    assert prints[0] != prints[1]


def test_first_tasks_are_those_of_the_whole_stream():
    whole = build_stream(dataset(10), initial=2, increment=2)
    part = whole.first(3)
    assert part.num_tasks == 3
    assert part.num_classes == 6
    assert part.class_names == whole.class_names[:6]
    assert [task.classes for task in part.tasks] == [task.classes for task in whole.tasks[:3]]
    assert set(part.all_train.labels.tolist()) == set(range(6))
    assert part.fingerprint() != whole.fingerprint()
    assert whole.first(100).fingerprint() == whole.fingerprint()
    with pytest.raises(ValueError, match="num_tasks"):
        whole.first(0)


def test_a_blurry_stream_spreads_some_images_and_names_classes_as_they_appear():
    data = load_dataset("digits")
    stream = build_stream(data, "blurry", initial=2, increment=2, disjoint=0.4, blur=0.3)
    rows = np.concatenate([task.train.rows for task in stream.tasks])
    assert sorted(rows) == sorted(data.train.rows)  # every image once
    assert [label for task in stream.tasks for label in task.classes] == list(range(10))
    homes = {label: {t.index for t in stream.tasks if (t.train.labels == label).any()} for label in range(10)}
    for task in stream.tasks:
        assert task.train.labels.max() < task.classes.stop  # no label before its class
        assert all(min(homes[label]) == task.index for label in task.classes)
        assert set(task.test.labels) == set(task.classes)
    assert sum(len(tasks) == 1 for tasks in homes.values()) == 4
    for label, tasks in homes.items():
        counts = sorted(((t.train.labels == label).sum() for t in stream.tasks), reverse=True)
        assert len(tasks) == 1 or 0.7 <= counts[0] / sum(counts) < 0.85  # 0.7, and what falls back on the home task
    names = [data.class_names.index(name) for name in stream.class_names]
    for task in stream.tasks:
        wanted = dict(zip(data.train.rows.tolist(), data.train.labels.tolist(), strict=True))
        assert [names[label] for label in task.train.labels] == [wanted[row] for row in task.train.rows]


def test_without_shared_classes_a_blurry_stream_is_a_class_stream():
    data = load_dataset("digits")
    blurry = build_stream(data, "blurry", disjoint=1.0)
    plain = build_stream(data, "class")
    for one, other in zip(blurry.tasks, plain.tasks, strict=True):
        assert one.classes == other.classes
        assert np.array_equal(one.train.rows, other.train.rows)
        assert np.array_equal(one.train.labels, other.train.labels)


def test_later_tasks_of_a_blurry_stream_may_bring_no_class():
    stream = build_stream(load_dataset("digits"), "blurry", disjoint=0.0, blur=1.0)
    assert stream.tasks[0].classes == range(10)
    assert all(len(task.classes) == len(task.test) == 0 for task in stream.tasks[1:])
    with pytest.raises(ValueError, match="blur must be"):
        build_stream(load_dataset("digits"), "blurry", blur=1.5)
