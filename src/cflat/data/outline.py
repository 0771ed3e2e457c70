"""`Outline`: what a trained method must know of its stream to answer questions, without any image."""

from __future__ import annotations

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
        return name if self.scenario == "domain" else shortlist(self.class_names[labels.start : labels.stop])

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

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Outline:
        """Read what `to_dict` returned.

        Raises:
            DataError: If it is something else.
        """
        try:
            if values["scenario"] not in get_args(Scenario):
                raise ValueError(f"unknown scenario {values['scenario']!r}")
            tasks = tuple(
                (str(task["name"]), range(task["first_label"], task["first_label"] + task["num_labels"]))
                for task in values["tasks"]
            )
            names = tuple(map(str, values["class_names"]))
            return cls(values["scenario"], tasks, names, values["label_modulus"], values["vector_size"])
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"This is not a description of a stream: {error}.") from error
