"""Evaluation: in which order test images are shown."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from cflat.data import Batch, ImageSet, build_stream, eval_transform, load_dataset
from cflat.methods import Loss, Method, StreamInfo
from cflat.train.evaluate import Extractor
from runs import IMAGE_SIZE, cpu


class Listener(Method):
    """Notes which images come together."""

    def __init__(self, label_of: dict[int, int]) -> None:
        super().__init__(StreamInfo("class", 10))
        self.network = nn.Identity()
        self.label_of = label_of
        self.labels: list[list[int]] = []
        self.rows: list[list[int]] = []

    def grow(self, task) -> None: ...

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        raise AssertionError

    def predict(self, batch: Batch) -> dict[str, Tensor]:
        labels = [self.label_of[row] for row in batch.rows.tolist()]  # a batch does not tell them
        self.labels.append(labels)
        self.rows.append(batch.rows.tolist())
        return {"logits": torch.nn.functional.one_hot(torch.tensor(labels), 10).float()}


def test_test_images_come_class_by_class_as_in_pilot() -> None:
    """A batch that votes for its prompts (L2P, DualPrompt) sees one or two classes, as in the published code."""
    stream = build_stream(load_dataset("digits", test_per_class=6), initial=5, increment=5)
    assert not np.array_equal(
        stream.tasks[0].test.labels, np.sort(stream.tasks[0].test.labels)
    )  # else nothing is shown
    images = ImageSet.concat([task.test for task in stream.tasks])
    method = Listener(dict(zip(images.rows.tolist(), images.labels.tolist(), strict=True)))
    counts = Extractor(method, eval_transform("none", IMAGE_SIZE), 4, cpu()).count_correct(stream, 1)
    assert counts == {"logits": [30, 30]}
    seen = [label for labels in method.labels for label in labels]
    assert seen == sorted(seen)
    within = [row for rows in method.rows for row in rows][:6]
    assert within == sorted(within)  # and in the order of the files within a class
    assert [len(labels) for labels in method.labels] == [4] * 7 + [2] + [4] * 7 + [2]  # no batch in two tasks
