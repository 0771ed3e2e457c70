"""Wrong labels on purpose: some training images of a stream get the label of another class of their task."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from cflat._errors import DataError
from cflat._ranges import Fraction, checked
from cflat.data.dataset import image_groups, share_of
from cflat.data.stream import Stream, Task

_NOISE = 4
"""Key of these random numbers beside those that choose images."""


@checked
def with_label_noise(stream: Stream, label_noise: Fraction, seed: int = 0) -> Stream:
    """Return the stream with a share of each class's training labels (and domain's) replaced, evenly at random.

    The new label is another class of the same task, so that images stay in their task and no class of a later task is
    given away. Every class keeps at least one image of its own. Test and validation images keep their labels.
    ``label_noise`` is the share, in [0, 1); 0 returns the stream itself.

    Raises:
        DataError: If a task has a single class: there is no other label to give.
    """
    if label_noise == 0:
        return stream
    return replace(stream, tasks=tuple(_noisy(task, label_noise, seed) for task in stream.tasks))


def _noisy(task: Task, share: float, seed: int) -> Task:
    if task.num_classes < 2:
        raise DataError(
            f"Label noise needs two classes in every task, task {task.name!r} has one; raise initial and increment."
        )
    labels = task.train.labels.copy()
    for (label, domain), positions in image_groups(task.train).items():
        rng = np.random.default_rng((seed, _NOISE, label, domain + 1))
        wrong = rng.permutation(positions)[: share_of(share, len(positions))]
        others = np.setdiff1d(np.asarray(task.classes), [label])
        labels[wrong] = rng.choice(others, size=len(wrong))
    return replace(task, train=task.train.with_labels(labels))
