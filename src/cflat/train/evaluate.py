"""Run a method over image sets: features and statistics for methods, accuracies for the record."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cflat.data import Batch, BatchLoader, ImageSet, Split, Stream, Task, Transform
from cflat.methods import Method
from cflat.train.runtime import Runtime


@dataclass
class Extractor:
    """Apply a function of images to whole image sets, in evaluation mode under the test transform."""

    method: Method
    transform: Transform
    batch_size: int
    runtime: Runtime
    check_stop: Callable[[], None] = lambda: None
    """Called before every batch; raises to end the pass."""

    def __call__(
        self, images: ImageSet, function: Callable[..., Tensor], *, labels: bool = False, gradients: bool = False
    ) -> Tensor:
        """Return the concatenated outputs, one row per image, in order, the same on all ranks."""
        loader = self._loader(images)
        outputs = list(self._outputs(loader, function, labels, gradients))
        if self._num_sharing == 1:
            return torch.cat(outputs)
        # In the order of the images: batch b was rank b modulo W's.
        rounds, rows = self._num_rounds(loader), min(self.batch_size, len(images))
        own = outputs[0].new_zeros(rounds, rows, *outputs[0].shape[1:])
        for place, part in zip(own, outputs, strict=False):
            place[: len(part)] = part
        # Only the last batch is short, so all padding ends up behind the images and is cut off.
        return self.runtime.gather(own).transpose(0, 1).flatten(0, 2)[: len(images)]

    def sum(
        self,
        images: ImageSet,
        function: Callable[..., Tensor],
        *,
        labels: bool = False,
        gradients: bool = False,
        batch_size: int | None = None,
    ) -> Tensor:
        """Return the sum of the outputs over all batches, the same on all ranks."""
        loader = self._loader(images, batch_size)
        outputs = self._outputs(loader, function, labels, gradients)
        total = next(outputs).clone()
        for output in outputs:
            total += output
        if self._num_sharing == 1:
            return total
        has_own = self.runtime.rank < len(loader)  # else its batch is another rank's, for the shape alone
        return self.runtime.sum_over_ranks(total if has_own else torch.zeros_like(total))

    def _outputs(
        self, loader: BatchLoader, function: Callable[..., Tensor], labels: bool, gradients: bool
    ) -> Iterator[Tensor]:
        """Yield what the function makes of this rank's batches; there is at least one: all must know its shape."""
        self.method.eval()
        is_first = True
        for batch in self._in_turns(loader):
            if batch is None and is_first:
                batch = next(loader.epoch(0))
            is_first = False
            if batch is None:
                continue
            arguments = (batch.images, batch.labels) if labels else (batch.images,)
            with torch.set_grad_enabled(gradients), self.runtime.autocast():
                output = function(*arguments).detach()
            yield output

    def count_correct(self, stream: Stream, task_index: int, split: Split = "test") -> dict[str, list[int]]:
        """Return for each score the number of right answers on the images of a split of every task seen so far."""
        self.method.eval()
        tasks = stream.tasks[: task_index + 1]
        by_task = [self.count_correct_of_task(stream, task, task.images(split)) for task in tasks]
        return dict(zip(self.method.scores, map(list, zip(*by_task, strict=True)), strict=True))

    @torch.no_grad()
    def count_correct_of_task(self, stream: Stream, task: Task, images: ImageSet) -> list[int]:
        """Return for each score the number of right answers on images of one task; the method is in evaluation mode."""
        names = self.method.scores
        if len(images) == 0:  # a task of a blurry stream that brings no class
            return [0] * len(names)
        # By class, as PILOT and PyCIL have it: methods that let a batch vote depend on who is in it.
        loader = self._loader(images.select(np.argsort(images.labels, kind="stable")))
        correct = torch.zeros(len(names), dtype=torch.int64, device=self.runtime.device)
        for batch in self._in_turns(loader):
            if batch is None:
                continue
            with self.runtime.autocast():
                scores = self.method.predict(batch.without_labels())
            for position, name in enumerate(names):
                correct[position] += is_right(scores[name], batch.labels, stream, task).sum()
        total = correct if self._num_sharing == 1 else self.runtime.sum_over_ranks(correct)
        return [int(count) for count in total.tolist()]

    def _loader(self, images: ImageSet, batch_size: int | None = None) -> BatchLoader:
        size = batch_size or self.batch_size
        return BatchLoader(images, self.transform, size, shuffle=False, device=self.runtime.device)

    def _in_turns(self, loader: BatchLoader) -> Iterator[Batch | None]:
        """Yield this rank's batches, whole ones in turns; None where there is none left for it in the last round.

        All ranks take the same number of rounds, because they agree on a stop before each.
        """
        # A rank without any batch starts at the end of the epoch; if nothing is divided, all ranks start at 0.
        own = loader.epoch(0, min(self.runtime.rank % self._num_sharing, len(loader)), every=self._num_sharing)
        for _ in range(self._num_rounds(loader)):
            self.check_stop()
            yield next(own, None)

    def _num_rounds(self, loader: BatchLoader) -> int:
        return -(-len(loader) // self._num_sharing)

    @property
    def _num_sharing(self) -> int:
        """How many ranks divide the images among them: one if all must do the same, to run a network together."""
        return 1 if self.runtime.is_sharded else self.runtime.world_size


def is_right(scores: Tensor, labels: Tensor, stream: Stream, task: Task) -> Tensor:
    """Return for each image whether the answer is right, by the rules of the stream's scenario."""
    if stream.scenario == "task":
        own = scores[:, task.classes.start : task.classes.stop]
        return own.argmax(dim=1) + task.classes.start == labels
    predicted = scores.argmax(dim=1)
    if stream.label_modulus is not None:
        return predicted % stream.label_modulus == labels % stream.label_modulus
    return predicted == labels
