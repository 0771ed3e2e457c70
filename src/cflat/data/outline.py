"""`Outline`: what predictions need to know of the stream that a method was trained on, without any image."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np

from cflat._errors import DataError
from cflat.data.images import ImageSet, vector_size
from cflat.data.pixels import ArrayPixels
from cflat.data.stream import Scenario, Stream, Task

MAX_LETTERS = 40
"""Names that are longer together are cut."""


def shortlist(names: Sequence[str]) -> str:
    """Return names in a line that is not too long; at least one of them is named.

    >>> shortlist(["cat", "dog"]), shortlist(["sulphur-crested cockatoo", "giant panda", "tea pot"])
    ('cat, dog', 'sulphur-crested cockatoo and 2 more')
    """
    if len(", ".join(names)) <= MAX_LETTERS:
        return ", ".join(names)
    shown = 1
    # 12 letters are left for " and 99 more".
    while len(", ".join(names[: shown + 1])) <= MAX_LETTERS - 12:
        shown += 1
    more = len(names) - shown
    return ", ".join(names[:shown]) + (f" and {more} more" if more else "")


@dataclass(frozen=True)
class Outline:
    """The tasks of a stream by name and labels, and what the labels are called."""

    scenario: Scenario
    tasks: tuple[tuple[str, range], ...]
    """Name and stream labels of each task, in order."""
    class_names: tuple[str, ...]
    """Name of each stream label."""
    label_modulus: int | None = None
    """Set when every domain has labels of its own; see `Stream`."""
    vector_size: int | None = None
    """Numbers per image of a stream of feature vectors; None for images."""

    @classmethod
    def of(cls, stream: Stream) -> Outline:
        """Return the outline of a stream."""
        tasks = tuple((task.name, task.classes) for task in stream.tasks)
        size = vector_size(stream.tasks[0].train)
        return cls(stream.scenario, tasks, stream.class_names, stream.label_modulus, size)

    @property
    def answers(self) -> tuple[str, ...]:
        """What an image can be called: the class names, once each if every domain has labels of its own."""
        if self.label_modulus is None:
            return self.class_names
        prefix = f"{self.tasks[0][0]}/"
        return tuple(name.removeprefix(prefix) for name in self.class_names[: self.label_modulus])

    def title_of(self, task: int) -> str:
        """Return what a task is about: its domain, or the names of its classes."""
        name, labels = self.tasks[task]
        if self.scenario in ("domain", "blurry"):
            return name
        return shortlist(self.class_names[labels.start : labels.stop])

    def empty_tasks(self, num_tasks: int) -> list[Task]:
        """Return the first tasks without their images: enough for `Method.grow`."""
        nothing = ImageSet(ArrayPixels(np.zeros((0, 1, 1, 3), np.uint8)), [])
        return [
            Task(index, name, classes, nothing, nothing) for index, (name, classes) in enumerate(self.tasks[:num_tasks])
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values; `from_dict` reads them back."""
        return {
            "scenario": self.scenario,
            "tasks": [
                {"name": name, "first_label": labels.start, "num_labels": len(labels)} for name, labels in self.tasks
            ],
            "class_names": list(self.class_names),
            "label_modulus": self.label_modulus,
            "vector_size": self.vector_size,
        }

    def fingerprint(self) -> str:
        """Return a hash that no other outline has."""
        return hashlib.blake2b(json.dumps(self.to_dict(), sort_keys=True).encode(), digest_size=16).hexdigest()

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Outline:
        """Read what `to_dict` returned.

        Raises:
            DataError: If it is something else.
        """
        try:
            scenario, modulus, size = (values[key] for key in ("scenario", "label_modulus", "vector_size"))
            names = tuple(map(str, values["class_names"]))
            tasks = tuple((str(task["name"]), _labels(task, len(names))) for task in values["tasks"])
            if scenario not in get_args(Scenario):
                raise ValueError(f"unknown scenario {scenario!r:.80}")
            # type(), not isinstance: Booleans are rejected.
            if not tasks or any(type(number) not in (int, type(None)) or number == 0 for number in (modulus, size)):
                raise ValueError("it has no tasks, or numbers that are none")
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"This is not a description of a stream: {error}.") from error
        return cls(scenario, tasks, names, modulus, size)


def _labels(task: Mapping[str, Any], num_names: int) -> range:
    first, count = task["first_label"], task["num_labels"]
    if not 0 <= first <= first + count <= num_names:  # a task of a blurry stream may bring no class
        raise ValueError(f"a task has the labels {first} to {first + count - 1}, there are {num_names} names")
    return range(first, first + count)
