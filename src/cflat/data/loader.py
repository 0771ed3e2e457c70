"""`BatchLoader`: batches as a pure function of (seed, task, epoch, step).

Nothing is carried from step to step, so a resumed run starts at any step without saved state, and several
ranks agree on the order without talking. No worker processes: batches are transformed whole, and
``prefetch`` prepares the next ones on a thread while the model computes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache

import numpy as np
import torch

from cflat._errors import check
from cflat.data.batch import Batch
from cflat.data.images import ImageSet
from cflat.data.pixels import Indices
from cflat.data.transforms import Transform

__all__ = ["BatchLoader"]

logger = logging.getLogger(__name__)

_ORDER, _AUGMENT = 0, 1  # keep the two random streams of a key apart


@cache
def _tell_of_joining() -> None:
    """Say it once."""
    logger.warning(
        "The last batch of an epoch would be a single image; it joins the batch before, for BatchNorm's sake."
    )


class BatchLoader:
    """Yield transformed batches of an image set.

    Step s of W ranks covers ``batch_size * W`` images, and each rank takes every W-th of them. A training
    epoch whose last step has fewer images than ranks repeats images from its start, so that all ranks take
    part in every step; a test epoch reads every image exactly once, and a rank left without images has a
    step less.

    Args:
        images: What to load.
        transform: Applied to whole batches.
        batch_size: Images per step and rank.
        shuffle: A new random order for each epoch (training), or the order of the set (testing).
        seed: Seed of order and augmentation.
        task: Index of the task, so that tasks are not augmented alike.
        drop_last: Leave out a last step that is not full.
        joins_last: Let a last step that would give some rank a single image join the step before it: BatchNorm cannot
            learn from one image.
        rank: Which of the ``world_size`` processes this is.
        world_size: Number of processes that share each epoch.
        device: Where batches are transformed and end up.
        prefetch: Batches to prepare ahead on a background thread; 0 prepares them in the calling thread.
    """

    def __init__(
        self,
        images: ImageSet,
        transform: Transform,
        batch_size: int,
        *,
        shuffle: bool,
        seed: int = 0,
        task: int = 0,
        drop_last: bool = False,
        joins_last: bool = False,
        rank: int = 0,
        world_size: int = 1,
        device: torch.device | str = "cpu",
        prefetch: int = 0,
    ) -> None:
        check("batch_size", batch_size, above=0, integer=True)
        check("world_size", world_size, above=0, integer=True)
        check("rank", rank, at_least=0, below=world_size, integer=True)
        for name, value in (("seed", seed), ("task", task), ("prefetch", prefetch)):
            check(name, value, at_least=0, integer=True)
        if len(images) == 0:
            raise ValueError("BatchLoader needs at least one image, got an empty set.")
        self.images = images
        self.transform = transform
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.seed = seed
        self.task = task
        self.drop_last = drop_last
        self.joins_last = joins_last
        self.rank = rank
        self.world_size = world_size
        self.device = torch.device(device)
        self.prefetch = prefetch
        if self.has_joined:
            _tell_of_joining()

    def __len__(self) -> int:
        """Return the steps per epoch of this rank."""
        full, rest = divmod(len(self.images), self.batch_size * self.world_size)
        if self.has_joined:
            return full
        takes_rest = rest > 0 and not self.drop_last and (self.shuffle or rest > self.rank)
        return full + int(takes_rest)

    @property
    def has_joined(self) -> bool:
        """Whether the last step holds what would have been one more."""
        full, rest = divmod(len(self.images), self.batch_size * self.world_size)
        return self.joins_last and not self.drop_last and full > 0 and 0 < rest < 2 * self.world_size

    def __iter__(self) -> Iterator[Batch]:
        return self.epoch(0)

    def epoch(self, index: int, start_step: int = 0) -> Iterator[Batch]:
        """Yield the batches of epoch ``index`` from ``start_step`` on."""
        check("epoch", index, at_least=0, integer=True)
        check("start_step", start_step, at_least=0, at_most=len(self), integer=True)
        order = self._order(index)
        steps = range(start_step, len(self))
        if self.prefetch == 0:
            return (self._batch(order, index, step) for step in steps)
        return self._prefetched(order, index, steps)

    def _order(self, epoch: int) -> Indices:
        count = len(self.images)
        if not self.shuffle:
            return np.arange(count)
        order = np.random.default_rng((_ORDER, self.seed, self.task, epoch)).permutation(count)
        missing = self.world_size - count % (self.batch_size * self.world_size)
        if not self.drop_last and 0 < missing < self.world_size:
            order = np.concatenate([order, np.resize(order, missing)])
        return order

    def _batch(self, order: Indices, epoch: int, step: int) -> Batch:
        span = self.batch_size * self.world_size
        is_joined = self.has_joined and step == len(self) - 1
        chosen = order[step * span : None if is_joined else (step + 1) * span]
        generator = torch.Generator()
        key = np.random.SeedSequence((_AUGMENT, self.seed, self.task, epoch, step))
        generator.manual_seed(int(key.generate_state(1, np.uint64)[0]))
        # Draws are made for the whole step: an image is augmented alike for any number of ranks.
        draws = self.transform.draw(len(chosen), generator)[self.rank :: self.world_size]
        mine = chosen[self.rank :: self.world_size]
        pixels = self.images.pixels(mine)
        on_device = (
            pixels.to(self.device) if isinstance(pixels, torch.Tensor) else [image.to(self.device) for image in pixels]
        )
        return Batch(
            self.transform.apply(on_device, draws),
            torch.from_numpy(self.images.labels[mine]).to(self.device),
            torch.from_numpy(self.images.rows[mine]).to(self.device),
        )

    def _prefetched(self, order: Indices, epoch: int, steps: range) -> Iterator[Batch]:
        # One thread: steps arrive in order, and decoding and transforms leave the interpreter lock to the
        # model.
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="cflat-loader") as pool:
            pending: list[Future[Batch]] = []
            try:
                for step in steps:
                    pending.append(pool.submit(self._batch, order, epoch, step))
                    if len(pending) > self.prefetch:
                        yield pending.pop(0).result()
                while pending:
                    yield pending.pop(0).result()
            finally:
                for future in pending:
                    future.cancel()
