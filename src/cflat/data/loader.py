"""`BatchLoader`: yields each `Batch` as a pure function of (seed, task, epoch, step).

Nothing is carried from step to step, so a resumed run starts at any step without saved state, and several
ranks agree on the order without talking. Batches are transformed whole, and ``prefetch`` prepares the next ones on a
thread while the model computes; image files may be decoded by worker processes (`cflat.data.workers`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cache

import numpy as np
import torch
from torch import Tensor

from cflat._ranges import Count, CountOrZero, check, checked
from cflat.data.images import ImageSet
from cflat.data.pixels import FilePixels, Indices
from cflat.data.transforms import Transform
from cflat.data.workers import decoded_ahead

logger = logging.getLogger(__name__)

_ORDER, _AUGMENT, _REPLAY = 0, 1, 2  # keep the random streams of a key apart


def seed_sequence(key: Sequence[int]) -> np.random.SeedSequence:
    """Return the seeds of a key."""
    # NumPy takes a tuple apart in Python, number by number; an array of words means the same in half the time.
    return np.random.SeedSequence(np.array(key, np.uint32) if max(key) < 2**32 else key)


@dataclass(frozen=True)
class Batch:
    """Transformed images with their labels, row numbers and whatever a method prepared for them.

    >>> batch = Batch(torch.zeros(2, 3, 8, 8), torch.tensor([0, 1]), torch.tensor([5, 9]))
    >>> len(batch.with_(teacher=torch.zeros(2, 4)))
    2
    """

    images: Tensor
    """Float images, (B, 3, H, W)."""
    labels: Tensor
    """Labels of the stream, int64, (B,)."""
    rows: Tensor
    """Row of each image in its dataset split, int64, (B,): the key of per-image caches."""
    extras: Mapping[str, Tensor] = field(default_factory=dict)
    """What ``Method.prepare`` added, each with a row for every image: teacher logits, query features, ..."""
    total: int | None = None
    """Images of the whole step, where several ranks share it; None: these are all."""
    is_filler: bool = False
    """Whether this rank has no image of its own in the step; the one it computes on has no weight."""
    replay: tuple[Batch, ...] = ()
    """Stored images that ``Method.replay`` wants in this step: batches of the same size as this one."""

    @property
    def num_images(self) -> int:
        """Images of the step on all ranks."""
        return len(self) if self.total is None else self.total

    @property
    def share(self) -> float:
        """Fraction of the step's images that are in this batch; the fractions of all ranks add up to 1."""
        return 0.0 if self.is_filler else 1.0 if self.total is None else len(self) / self.total

    def __len__(self) -> int:
        return len(self.labels)

    def with_(self, **extras: Tensor) -> Batch:
        """Return a batch that carries these named tensors as well."""
        return replace(self, extras={**self.extras, **extras})

    def without_labels(self) -> Batch:
        """Return the batch as a method may see it at test time: every label is -1."""
        return replace(self, labels=torch.full_like(self.labels, -1))

    def split(self, num_parts: int) -> list[Batch]:
        """Return views of the batch in parts of nearly equal size, the larger ones first.

        Raises:
            ValueError: If something that a method prepared has no row for every image.
        """
        for name, value in self.extras.items():
            if value.ndim == 0 or len(value) != len(self):
                raise ValueError(
                    f"A batch of {len(self)} images cannot be split: its prepared tensor {name!r} has the shape "
                    f"{tuple(value.shape)}. Let Method.prepare() return tensors with one row for each image."
                )
        parts = [value.tensor_split(num_parts) for value in (self.images, self.labels, self.rows)]
        extras = {name: value.tensor_split(num_parts) for name, value in self.extras.items()}
        replay = [part.split(num_parts) for part in self.replay]
        return [
            Batch(
                images,
                labels,
                rows,
                {name: values[index] for name, values in extras.items()},
                replay=tuple(part[index] for part in replay),
            )
            for index, (images, labels, rows) in enumerate(zip(*parts, strict=True))
        ]


@cache
def warn_of_joining() -> None:
    """Log once per process that single images join the batch before."""
    logger.warning(
        "The last batch of an epoch would be a single image; it joins the batch before, for BatchNorm's sake."
    )


@checked
@dataclass(eq=False, repr=False)
class BatchLoader:
    """Yield transformed batches of an image set.

    Every step covers ``batch_size`` images, whatever the number of ranks, and rank r of W takes its images r, r + W,
    r + 2 W, ... No image is left out or repeated: a rank that has none in a step, because there are fewer than ranks,
    gets one that is marked as a filler, because collectives need all ranks in every step.

    Args:
        images: What to load.
        transform: Applied to whole batches.
        batch_size: Images per step, on all ranks together.
        shuffle: A new random order for each epoch (training), or the order of the set (testing).
        seed: Seed of order and augmentation.
        task: Index of the task: tasks are not augmented alike.
        drop_last: Leave out a last step that is not full.
        least_last: A last step with fewer images than this joins the step before it: BatchNorm cannot learn from one.
        rank: Which of the ``world_size`` processes this is.
        world_size: Number of processes that share each step.
        device: Where batches are transformed and end up.
        prefetch: Batches to prepare ahead on a background thread; 0 prepares them in the calling thread, as do image
            files that worker processes decode, whatever the number.
    """

    images: ImageSet
    transform: Transform
    batch_size: Count
    _: KW_ONLY
    shuffle: bool
    seed: CountOrZero = 0
    task: CountOrZero = 0
    drop_last: bool = False
    least_last: Count = 1
    rank: CountOrZero = 0
    world_size: Count = 1
    device: torch.device | str = "cpu"
    prefetch: CountOrZero = 0

    def __post_init__(self) -> None:
        check("rank", self.rank, below=self.world_size)
        if len(self.images) == 0:
            raise ValueError("BatchLoader needs at least one image, got an empty set.")
        self.device = torch.device(self.device)
        if self.has_joined:
            warn_of_joining()

    def __len__(self) -> int:
        """Return the steps per epoch, which are the same for all ranks."""
        full, rest = divmod(len(self.images), self.batch_size)
        return full + int(rest > 0 and not self.drop_last and not self.has_joined)

    @property
    def has_joined(self) -> bool:
        """Whether the last step holds what would have been one more."""
        full, rest = divmod(len(self.images), self.batch_size)
        return not self.drop_last and full > 0 and 0 < rest < self.least_last

    def __iter__(self) -> Iterator[Batch]:
        return self.epoch(0)

    @checked
    def epoch(self, index: CountOrZero, start_step: CountOrZero = 0, every: Count = 1) -> Iterator[Batch]:
        """Yield the batches of epoch ``index`` from ``start_step`` on, or only each ``every``-th of them."""
        # len(self) is a position too: a checkpoint may be taken between the last step and the end of the epoch.
        check("start_step", start_step, at_most=len(self))
        order = np.arange(len(self.images))
        if self.shuffle:
            order = np.random.default_rng((_ORDER, self.seed, self.task, index)).permutation(order)
        steps = range(start_step, len(self), every)
        store = self.images.store
        if isinstance(store, FilePixels) and store.num_workers:
            return self._decoded_ahead(store, order, index, steps)
        if self.prefetch == 0:
            return (self._batch(order, index, step) for step in steps)
        return self._prefetched(order, index, steps)

    def _chosen(self, order: Indices, step: int) -> Indices:
        """Return the images of a step, over all ranks."""
        is_joined = self.has_joined and step == len(self) - 1
        return order[step * self.batch_size : None if is_joined else (step + 1) * self.batch_size]

    def _own(self, chosen: Indices) -> slice:
        """Return which of them are this rank's; one that is left without any fills in with the first."""
        return slice(1) if self.rank >= len(chosen) else slice(self.rank, None, self.world_size)

    def replay_rng(self, epoch: int, step: int) -> np.random.Generator:
        """Return the random numbers by which a step chooses stored images: the same on all ranks."""
        return np.random.default_rng((_REPLAY, self.seed, self.task, epoch, step))

    def load_replay(
        self, images: ImageSet, extras: Mapping[str, Tensor], epoch: int, step: int, number: int = 0
    ) -> Batch:
        """Return this rank's part of stored images for a step, augmented with random numbers of their own."""
        key = (_REPLAY, self.seed, self.task, epoch, step, 1 + number)
        batch = self._load(images, np.arange(len(images)), key)
        own = self._own(np.arange(len(images)))
        return batch.with_(**{name: value[own].to(self.device) for name, value in extras.items()})

    def _batch(self, order: Indices, epoch: int, step: int, decoded: Mapping[int, Tensor] | None = None) -> Batch:
        key = (_AUGMENT, self.seed, self.task, epoch, step)
        return self._load(self.images, self._chosen(order, step), key, decoded)

    def _load(
        self, images: ImageSet, chosen: Indices, key: Sequence[int], decoded: Mapping[int, Tensor] | None = None
    ) -> Batch:
        """Return this rank's part of the chosen images, transformed with the random numbers of a key."""
        generator = torch.Generator()
        generator.manual_seed(int(seed_sequence(key).generate_state(1, np.uint64)[0]))
        own = self._own(chosen)
        # Draws are made for the whole step: an image is augmented alike for any number of ranks.
        draws = self.transform.draw(len(chosen), generator)[own]
        mine = chosen[own]
        inputs: list[Tensor] = []
        for pixels in images.pixel_parts(mine, decoded):
            done = sum(map(len, inputs))
            moved = (
                pixels.to(self.device) if isinstance(pixels, Tensor) else [image.to(self.device) for image in pixels]
            )
            inputs.append(self.transform.apply(moved, draws[done : done + len(pixels)]))
        return Batch(
            inputs[0] if len(inputs) == 1 else torch.cat(inputs),
            torch.from_numpy(images.labels[mine]).to(self.device),
            torch.from_numpy(images.rows[mine]).to(self.device),
            total=len(chosen),
            is_filler=self.rank >= len(chosen),
        )

    def _decoded_ahead(self, store: FilePixels, order: Indices, epoch: int, steps: range) -> Iterator[Batch]:
        shares = [self._chosen(order, step) for step in steps]
        rows = [self.images.rows[chosen[self._own(chosen)]] for chosen in shares]
        for step, decoded in zip(steps, decoded_ahead(store, rows, store.num_workers), strict=True):
            yield self._batch(order, epoch, step, decoded)

    def _prefetched(self, order: Indices, epoch: int, steps: range) -> Iterator[Batch]:
        # One thread: steps arrive in order, and decoding and transforms release the interpreter lock.
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="cflat-loader") as pool:
            pending: list[Future[Batch]] = []
            try:
                for step in steps:
                    pending.append(pool.submit(self._batch, order, epoch, step))
                    if len(pending) > self.prefetch:
                        yield pending.pop(0).result()
                while pending:
                    yield pending.pop(0).result()
            finally:  # the consumer may stop early: do not load what nobody will read
                for future in pending:
                    future.cancel()
