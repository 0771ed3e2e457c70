"""Small streams of digits that the usual split does not give: the same classes again, and tasks of unequal size."""

from __future__ import annotations

from itertools import pairwise

from cflat.data import ImageSet, Stream, Task
from runs import tiny_stream


def whole_task() -> Task:
    """All images of six digits as one task."""
    tasks = tiny_stream().tasks
    train, test = (ImageSet.concat([getattr(task, part) for task in tasks]) for part in ("train", "test"))
    return Task(0, "all", range(6), train, test)


def stream_of(*tasks: Task, scenario: str = "class") -> Stream:
    names = tiny_stream().class_names
    return Stream(scenario, tasks, tasks[-1].classes.stop, names[: tasks[-1].classes.stop])


def uneven_stream() -> Stream:
    """Tasks of 3, 1 and 2 classes."""
    whole = whole_task()
    ranges = [range(start, stop) for start, stop in pairwise([0, 3, 4, 6])]
    tasks = [Task(i, str(r), r, whole.train.of_classes(r), whole.test.of_classes(r)) for i, r in enumerate(ranges)]
    return stream_of(*tasks)


def domain_stream() -> Stream:
    """Two tasks with the same six classes and different images."""
    whole = whole_task()
    halves = [slice(None, None, 2), slice(1, None, 2)]
    tasks = [
        Task(i, f"half {i}", range(6), whole.train.select(range(len(whole.train))[half]), whole.test)
        for i, half in enumerate(halves)
    ]
    return stream_of(*tasks, scenario="domain")
