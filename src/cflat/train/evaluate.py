"""Run a method over image sets without gradients: features for methods, accuracies for the record."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from cflat.data import Batch, BatchLoader, ImageSet, Split, Stream, Task, Transform
from cflat.methods import Method
from cflat.train.runtime import Runtime

__all__ = ["Extractor", "count_correct", "count_correct_of_task"]


class Extractor:
    """Apply a function of images to whole image sets, in evaluation mode under the test transform.

    Args:
        method: Switched to evaluation mode first.
        transform: The test transform.
        batch_size: Images at a time.
        runtime: Precision and device.
        heed_stop: Called before every batch; raises to end the pass.
    """

    def __init__(
        self,
        method: Method,
        transform: Transform,
        batch_size: int,
        runtime: Runtime,
        heed_stop: Callable[[], None] = lambda: None,
    ) -> None:
        self.method = method
        self.transform = transform
        self.batch_size = batch_size
        self.runtime = runtime
        self.heed_stop = heed_stop

    @torch.no_grad()
    def __call__(self, images: ImageSet, function: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the concatenated outputs, one row per image, in order, the same on all ranks."""
        self.method.eval()
        loader = BatchLoader(images, self.transform, self.batch_size, shuffle=False, device=self.runtime.device)
        outputs: list[Tensor] = []
        for batch in _in_turns(loader, self.runtime, self.heed_stop):
            if batch is None and not outputs:
                batch = next(loader.epoch(0))  # every rank must know what outputs look like
            if batch is not None:
                with self.runtime.autocast():
                    outputs.append(function(batch.images))
        if _num_sharing(self.runtime) == 1:
            return torch.cat(outputs)
        return self._gathered(outputs, loader)

    def _gathered(self, outputs: list[Tensor], loader: BatchLoader) -> Tensor:
        """Return the outputs of all ranks in the order of the images: batch b was rank b modulo W's."""
        rounds, rows = _num_rounds(loader, self.runtime), min(self.batch_size, len(loader.images))
        own = outputs[0].new_zeros(rounds, rows, *outputs[0].shape[1:])
        for place, part in zip(own, outputs, strict=False):
            place[: len(part)] = part
        return self.runtime.gather(own).transpose(0, 1).flatten(0, 2)[: len(loader.images)]


def count_correct(
    method: Method,
    stream: Stream,
    task_index: int,
    transform: Transform,
    batch_size: int,
    runtime: Runtime,
    split: Split = "test",
    heed_stop: Callable[[], None] = lambda: None,
) -> dict[str, list[int]]:
    """Return for each score the number of right answers on the images of a split of every task seen so far.

    ``heed_stop`` is called before every batch and raises to end the pass.
    """
    method.eval()
    counts: dict[str, list[int]] = {name: [] for name in method.scores}
    for task in stream.tasks[: task_index + 1]:
        correct = count_correct_of_task(
            method, stream, task, task.images(split), transform, batch_size, runtime, heed_stop
        )
        for name, count in zip(method.scores, correct, strict=True):
            counts[name].append(count)
    return counts


@torch.no_grad()
def count_correct_of_task(
    method: Method,
    stream: Stream,
    task: Task,
    images: ImageSet,
    transform: Transform,
    batch_size: int,
    runtime: Runtime,
    heed_stop: Callable[[], None] = lambda: None,
) -> list[int]:
    """Return for each score the number of right answers on images of one task; the method is in evaluation mode."""
    loader = BatchLoader(
        # By class, as PILOT and PyCIL have it: methods that let a batch vote depend on who is in it.
        images.select(np.argsort(images.labels, kind="stable")),
        transform,
        batch_size,
        shuffle=False,
        device=runtime.device,
    )
    correct = torch.zeros(len(method.scores), dtype=torch.int64, device=runtime.device)
    for batch in _in_turns(loader, runtime, heed_stop):
        if batch is None:
            continue
        with runtime.autocast():
            scores = method.predict(batch.without_labels())
        for position, name in enumerate(method.scores):
            correct[position] += _is_right(scores[name], batch.labels, stream, task).sum()
    total = correct if _num_sharing(runtime) == 1 else runtime.sum_over_ranks(correct)
    return [int(count) for count in total.tolist()]


def _in_turns(loader: BatchLoader, runtime: Runtime, heed_stop: Callable[[], None]) -> Iterator[Batch | None]:
    """Yield this rank's batches, whole ones in turns; None where there is none left for it in the last round.

    All ranks take the same number of rounds, so that they can agree on a stop before each.
    """
    num_ranks = _num_sharing(runtime)
    own = loader.epoch(0, min(runtime.rank % num_ranks, len(loader)), every=num_ranks)
    for _ in range(_num_rounds(loader, runtime)):
        heed_stop()
        yield next(own, None)


def _num_rounds(loader: BatchLoader, runtime: Runtime) -> int:
    return -(-len(loader) // _num_sharing(runtime))


def _num_sharing(runtime: Runtime) -> int:
    """Return how many ranks divide the images among them: one if all must do the same, to run a network together."""
    return 1 if runtime.is_sharded else runtime.world_size


def _is_right(scores: Tensor, labels: Tensor, stream: Stream, task: Task) -> Tensor:
    if stream.scenario == "task":
        own = scores[:, task.classes.start : task.classes.stop]
        return own.argmax(dim=1) + task.classes.start == labels
    predicted = scores.argmax(dim=1)
    if stream.label_modulus is not None:
        return predicted % stream.label_modulus == labels % stream.label_modulus
    return predicted == labels
