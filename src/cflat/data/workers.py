"""Decode image files in worker processes, ahead of their use, for tasks that do not fit into memory.

Workers only decode, and only what is not kept in memory. Order, augmentation and the cache stay with the process that
trains: batches are the same bits for any number of workers. Memory is bounded by the cache and by the few batches that
are under way.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from cflat._errors import DataError
from cflat.data.pixels import FilePixels, Indices, decode_image

AHEAD = 2
"""Batches under way for each worker."""


def decoded_ahead(store: FilePixels, steps: Sequence[Indices], num_workers: int) -> Iterator[Mapping[int, Tensor]]:
    """Yield for each step the images of its rows that are not kept in memory, and keep them while there is room.

    The worker processes end with the iterator. A file that cannot be decoded raises a `DataError`.
    """
    # With an empty cache every image is missing: no need to look up all paths.
    if len(store.cache) and not any(len(store.missing(rows)) for rows in steps):
        yield from ({} for _ in steps)  # nothing is left to decode: start no process
        return
    loader = DataLoader(
        _Files(store),
        # An item of the sampler is the whole step.
        batch_size=None,
        sampler=(store.missing(rows) for rows in steps),  # of each step when its turn comes
        num_workers=num_workers,
        prefetch_factor=AHEAD,
        # Its own: each start draws a seed for the workers, by default from the numbers that methods draw from.
        generator=torch.Generator(),
        worker_init_fn=_leave_signals_to_the_trainer,
    )
    for packed in loader:
        yield store.keep(*_unpacked(packed))


class _Files(Dataset[tuple[Tensor, Tensor] | str]):
    """What a worker does: decode the files of these rows, into one tensor and a table of (row, height, width).

    One tensor, since each that travels takes a file descriptor of the process that trains. For a broken file, return
    the message: exceptions of workers arrive wrapped in a traceback.
    """

    def __init__(self, store: FilePixels) -> None:
        self.root, self.paths, self.short_side = store.root, store.paths, store.short_side

    def __getitem__(self, rows: Indices) -> tuple[Tensor, Tensor] | str:
        try:
            images = [decode_image(self.root / self.paths[row], self.short_side) for row in rows]
        except DataError as error:
            return str(error)
        sizes = [(row, *image.shape[1:]) for row, image in zip(rows.tolist(), images, strict=True)]
        # torch.cat needs one tensor, and a step may have nothing to decode.
        nothing = torch.empty(0, dtype=torch.uint8)
        pixels = torch.cat([nothing, *(image.permute(1, 2, 0).flatten() for image in images)])
        return pixels, torch.tensor(sizes, dtype=torch.int64).reshape(-1, 3)


def _unpacked(packed: tuple[Tensor, Tensor] | str) -> tuple[Indices, list[Tensor]]:
    if isinstance(packed, str):
        raise DataError(packed)
    pixels, sizes = packed
    rows, shapes = sizes[:, 0], sizes[:, 1:]
    parts = pixels.split((3 * shapes.prod(dim=1)).tolist())
    # In memory as `decode_image` leaves them, channels last: what follows may depend on it in the last bit.
    images = [part.view(*shape, 3).permute(2, 0, 1) for part, shape in zip(parts, shapes.tolist(), strict=True)]
    return rows.numpy(), images


def _leave_signals_to_the_trainer(worker: int) -> None:
    """A Ctrl-C reaches all processes; the trainer finishes its step, saves, and ends its workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
