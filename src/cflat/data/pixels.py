"""Where pixels come from: arrays in memory, or image files that are decoded on first use and then kept.

Stores return uint8 RGB images as (3, H, W) tensors, grey images repeated over the three channels: any backbone reads
any dataset. Or they return one vector for each image, in the place of pixels.
"""

from __future__ import annotations

import hashlib
import math
import os
import struct
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import BinaryIO, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from PIL import ExifTags, Image, UnidentifiedImageError
from torch import Tensor

from cflat._errors import DataError
from cflat._files import open_regular
from cflat._ranges import Count, CountOrZero, check, checked

Indices: TypeAlias = npt.NDArray[np.int64]
Pixels: TypeAlias = Tensor | list[Tensor]
"""Stacked (B, 3, H, W) when all images have one size, else a list of (3, H, W)."""

DEFAULT_CACHE_BYTES = 2 << 30
WHOLE_BYTES = 1 << 18
"""Larger image files are hashed by their size, beginning, middle and end."""
SAMPLE_BYTES = 1 << 16
NUM_READERS = 8
FILES_PER_PART = 256
MAX_PIXELS = 100_000_000
LARGE_PIXELS = 1 << 25
"""Larger images are shrunk by a whole factor as soon as they are decoded."""
PART_BYTES = 1 << 28
"""Decoded pixels of a batch to hold before they are transformed."""
MAX_ASPECT = 100
"""Longer images would fill the memory once their short side is enlarged to the input size."""
# Not all that PIL knows: its reader of EPS, for example, starts Ghostscript.
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
"""Formats that are decoded, whatever the file name."""
_SCALED = ("PNG", "PPM")
"""Formats whose 16-bit images PIL returns as 32-bit integers."""
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""The transposition that undoes each EXIF orientation."""
_REASONS: dict[type[BaseException], str] = {
    FileNotFoundError: "the file does not exist",
    UnidentifiedImageError: "it is not an image in a known format",
}


class ArrayStore:
    """Hold a number of equal-sized arrays in memory, one for each image, under a name for messages."""

    def __init__(self, values: Tensor, name: str) -> None:
        self.name = name
        self._values = values

    def __len__(self) -> int:
        return len(self._values)

    def read(self, rows: Indices) -> Tensor:
        """Return the arrays of these rows as one batch."""
        # from_numpy rejects negative strides, which rows in reverse order have.
        return self._values[torch.from_numpy(np.ascontiguousarray(rows))]

    def read_parts(self, rows: Indices, decoded: Mapping[int, Tensor] | None = None) -> Iterator[Tensor]:
        """Yield the arrays of these rows, all at once: they are in memory anyway."""
        yield self.read(rows)

    def content(self, row: int) -> bytes:
        """Return the raw numbers of one image, which are equal for equal images."""
        return self._values[row].numpy().tobytes()

    def describe(self, row: int) -> str:
        """Name an image by the array and its row."""
        return f"{self.name}[{row}]"

    def fingerprint(self, rows: Indices | None = None) -> str:
        """Hash shape and numbers, always of all rows."""
        digest = hashlib.blake2b(str(tuple(self._values.shape)).encode(), digest_size=16)
        digest.update(self._values.numpy().data)
        return digest.hexdigest()


class ArrayPixels(ArrayStore):
    """Hold uint8 images in memory: NumPy (N, H, W, 3), (N, H, W, 1), (N, H, W), or a tensor (N, 3 or 1, H, W)."""

    def __init__(self, array: npt.NDArray[np.uint8] | Tensor, name: str = "images") -> None:
        is_tensor, shape = isinstance(array, Tensor), tuple(array.shape)
        if array.dtype != (torch.uint8 if is_tensor else np.uint8):
            raise DataError(f"{name} holds {array.dtype} values; expected uint8 pixels from 0 to 255.")
        images = array if is_tensor or len(shape) != 3 else array[..., None]
        if images.ndim != 4 or images.shape[1 if is_tensor else 3] not in (1, 3):
            expected = "(images, height, width, 3), (images, height, width, 1) or (images, height, width)"
            raise DataError(f"{name} has shape {shape}; expected {expected}.")
        if len(images) and 0 in shape:
            raise DataError(f"{name} has shape {shape}: images without pixels.")
        if not isinstance(images, Tensor):
            images = torch.from_numpy(np.array(images.transpose(0, 3, 1, 2), order="C"))
        super().__init__(images.contiguous(), name)

    def read(self, rows: Indices) -> Tensor:
        """Return the images of these rows as one batch, grey ones with three equal channels."""
        return super().read(rows).expand(-1, 3, -1, -1)  # a view: grey images take a third of the memory


class ArrayVectors(ArrayStore):
    """Hold float32 vectors (N, D) in memory, such as the features of a frozen backbone, in the place of pixels."""

    def __init__(self, array: npt.NDArray[np.generic], name: str = "vectors") -> None:
        if array.ndim != 2 or array.shape[1] == 0 or not np.issubdtype(array.dtype, np.floating):
            raise DataError(
                f"{name} holds {array.dtype} values of shape {array.shape}; expected floats, (images, features)."
            )
        vectors = np.ascontiguousarray(array, dtype=np.float32)
        # After the cast, in which a large float64 becomes infinite.
        wrong = np.flatnonzero(~np.isfinite(vectors).all(axis=1))
        if len(wrong):
            raise DataError(f"{name}[{wrong[0]}] is not finite ({len(wrong)} such vectors); recompute the features.")
        super().__init__(torch.from_numpy(vectors), name)
        self.size = vectors.shape[1]
        """Numbers per vector."""


class DecodedCache:
    """Keep decoded images until ``budget_bytes`` are used; later images are decoded again at every read."""

    # Nothing is evicted: a shuffled epoch reads every image once, so any fixed subset saves as many decodings, and
    # eviction would only add copies.

    def __init__(self, budget_bytes: int = DEFAULT_CACHE_BYTES) -> None:
        check("cache_bytes", budget_bytes, at_least=0, integer=True)
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self._images: dict[Path, Tensor] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._images)

    def __contains__(self, path: Path) -> bool:
        return path in self._images

    def get(self, path: Path, short_side: int | None) -> Tensor:
        """Return the image at ``path``, from memory when it is kept there."""
        # Without the lock: at worst two threads decode the same file, and the first one's image is kept.
        image = self._images.get(path)
        if image is None:
            image = decode_image(path, short_side)
            self.keep(path, image)
        return image

    def keep(self, path: Path, image: Tensor, *, is_view: bool = False) -> None:
        """Keep a decoded image while the budget lasts; of a view, keep a copy instead of all that it looks at."""
        with self._lock:
            if path not in self._images and self.used_bytes + image.nbytes <= self.budget_bytes:
                self._images[path] = image.clone() if is_view else image
                self.used_bytes += image.nbytes


@checked
@dataclass(eq=False, repr=False)
class FilePixels:
    """Decode image files on request and keep them in memory while the budget lasts."""

    root: Path
    paths: Sequence[str]
    """One for each row, relative to the root."""
    _: KW_ONLY
    short_side: Count | None = None
    """Shrink images whose shorter side is longer than this; ``None`` keeps the file's resolution."""
    cache: DecodedCache = field(default_factory=DecodedCache)
    """Where decoded images are kept; the splits of a dataset share one."""
    num_workers: CountOrZero = 0
    """Processes in which a `BatchLoader` has images decoded ahead; 0 decodes when they are read."""

    def __post_init__(self) -> None:
        self.paths = tuple(self.paths)

    def __len__(self) -> int:
        return len(self.paths)

    def path(self, row: int) -> Path:
        """Return the path of an image."""
        return self.root / self.paths[row]

    def missing(self, rows: Indices) -> Indices:
        """Return those of the rows that are not kept in memory."""
        return np.array([row for row in rows if self.path(row) not in self.cache], dtype=np.int64)

    def keep(self, rows: Indices, images: Sequence[Tensor]) -> dict[int, Tensor]:
        """Keep what workers have decoded while the budget lasts; return all of it by row."""
        for row, image in zip(rows, images, strict=True):
            self.cache.keep(self.path(row), image, is_view=True)
        return dict(zip(rows.tolist(), images, strict=True))

    def read(self, rows: Indices) -> Pixels:
        """Return the images of these rows, stacked when their sizes agree."""
        return _stacked([self.cache.get(self.path(row), self.short_side) for row in rows])

    def read_parts(self, rows: Indices, decoded: Mapping[int, Tensor] | None = None) -> Iterator[Pixels]:
        """Yield the images of these rows in parts that fit into memory, nearly always a single one.

        ``decoded`` holds, by row, images that workers have decoded already.
        """
        part: list[Tensor] = []
        size = 0
        for row in rows.tolist():
            known = None if decoded is None else decoded.get(row)
            part.append(self.cache.get(self.path(row), self.short_side) if known is None else known)
            size += part[-1].nbytes
            if size > PART_BYTES:
                yield _stacked(part)
                part, size = [], 0
        if part:
            yield _stacked(part)

    def content(self, row: int) -> bytes:
        """Return the encoded file."""
        with _reading(self.path(row)) as file:
            return file.read()

    def header_problem(self, row: int) -> str | None:
        """Return what is wrong with the header of an image file, or None."""
        try:
            with _reading(self.path(row)) as file, _open_image(file):
                return None
        except DataError as error:
            return str(error)

    def describe(self, row: int) -> str:
        """Name an image by its path."""
        return str(self.path(row))

    def fingerprint(self, rows: Indices | None = None) -> str:
        """Hash the relative paths, the files' content and the stored size, wherever the folder lies."""
        paths = self.paths if rows is None else [self.paths[row] for row in np.unique(rows)]
        digest = hashlib.blake2b(str(self.short_side).encode(), digest_size=16)
        # Threads: most of the time goes into waiting for the disk, and hashing releases the interpreter lock.
        with ThreadPoolExecutor(NUM_READERS, thread_name_prefix="cflat-hash") as pool:
            parts = [paths[start : start + FILES_PER_PART] for start in range(0, len(paths), FILES_PER_PART)]
            # map() keeps the order: the hash does not depend on which thread is first.
            for part in pool.map(self._hash_files, parts):
                digest.update(part)
        return digest.hexdigest()

    def _hash_files(self, paths: Sequence[str]) -> bytes:
        digest = hashlib.blake2b(digest_size=16)
        for path in paths:
            # File names need not be UTF-8; Python keeps foreign bytes as lone surrogates.
            digest.update(f"{path}\n".encode(errors="surrogateescape"))
            digest.update(_hash_content(self.root / path))
        return digest.digest()


PixelStore: TypeAlias = ArrayStore | FilePixels
"""The images of one dataset split, addressed by row."""


def decode_image(path: Path, short_side: int | None = None) -> Tensor:
    """Decode one file as a uint8 RGB tensor (3, H, W), turned by its EXIF data, shrunk to ``short_side`` if given.

    Of an animation, this is the first image. Alpha is dropped.
    """
    with _reading(path) as file, _open_image(file) as image:
        plain = _eight_bits(image)
        # A palette with alpha per entry makes PIL warn unless it goes through RGBA.
        rgb = (plain.convert("RGBA") if "transparency" in plain.info else plain).convert("RGB")
        turn = _TURNS.get(_orientation(image))
    if rgb.width * rgb.height > LARGE_PIXELS:
        rgb = rgb.reduce(math.ceil(math.sqrt(rgb.width * rgb.height / LARGE_PIXELS)))
    if short_side is not None and min(rgb.size) > short_side:
        factor = short_side / min(rgb.size)
        width, height = (max(short_side, round(side * factor)) for side in rgb.size)
        rgb = rgb.resize((width, height), Image.Resampling.BICUBIC)
    rgb = rgb if turn is None else rgb.transpose(turn)  # last: small images are turned faster
    # A copy: what asarray gives is not writable, and torch warns about that.
    return torch.from_numpy(np.array(rgb)).permute(2, 0, 1)


def _open_image(file: BinaryIO) -> Image.Image:
    """Open an image, and reject by its header, before a pixel is decoded, what no image of a dataset is like."""
    image = _identified(file)
    width, height = image.size
    if min(width, height) == 0:
        raise ValueError("it has no pixels")
    if width * height > MAX_PIXELS:
        raise ValueError(f"it has {width} x {height} pixels, more than {MAX_PIXELS // 10**6} million; shrink it")
    if max(width, height) > MAX_ASPECT * min(width, height):
        raise ValueError(f"it has {width} x {height} pixels, one side more than {MAX_ASPECT} times the other; crop it")
    if image.mode == "I" and image.format not in _SCALED:
        raise ValueError("its pixels are whole numbers of 32 bits, whose range is not known; save it with 8 or 16 bits")
    return image


def _identified(file: BinaryIO) -> Image.Image:
    """Do as `Image.open` without its check of the size: ours has the lower limit."""
    # PIL warns of large images. Filters of warnings belong to the whole process, and images are decoded on threads.
    Image.init()
    prefix = file.read(16)
    for name in FORMATS:
        factory, accept = Image.OPEN[name]
        if accept is not None and accept(prefix) is True:
            file.seek(0)
            # What PIL takes for a file of another format.
            with suppress(SyntaxError, IndexError, TypeError, struct.error):
                return factory(file, "")
    raise UnidentifiedImageError


def _orientation(image: Image.Image) -> int:
    """Return the EXIF orientation of a decoded image; unreadable EXIF data counts as upright."""
    try:
        return int(image.getexif().get(ExifTags.Base.Orientation, 1))
    except Exception:  # PIL's reader of EXIF fails in more ways than can be listed
        return 1


def _eight_bits(image: Image.Image) -> Image.Image:
    """Return an image of 8 bits per channel: the upper bits of 16, or floats from 0 to 1 times 255."""
    # PIL would clip such values at 255, and nearly all images would be white.
    if image.mode == "F":
        floats = np.asarray(image)
        low, high = floats.min(), floats.max()
        if not (low >= 0 and high <= 1):  # also if one is NaN
            raise ValueError(f"its pixels are floats from {low:g} to {high:g}; scale them to the range from 0 to 1")
        return Image.fromarray(np.rint(255 * floats).astype(np.uint8))
    if not image.mode.startswith("I"):
        return image
    tags = getattr(image, "tag_v2", {})  # of a TIFF
    upper = (np.asarray(image) >> (tags.get(ExifTags.Base.BitsPerSample, (16,))[0] - 8)).clip(0, 255).astype(np.uint8)
    # Up to 8 bits PIL itself inverts TIFFs in which 0 is white, at 16 bits it does not.
    is_inverted = tags.get(ExifTags.Base.PhotometricInterpretation) == 0
    return Image.fromarray(255 - upper if is_inverted else upper)


def _stacked(images: list[Tensor]) -> Pixels:
    return torch.stack(images) if len({image.shape for image in images}) == 1 else images


def _hash_content(path: Path) -> bytes:
    with _reading(path) as file:
        size = os.fstat(file.fileno()).st_size
        # With the size: a longer file may agree in all three samples.
        digest = hashlib.blake2b(str(size).encode() + b"\n", digest_size=16)
        if size <= WHOLE_BYTES:
            digest.update(file.read())
        else:
            for start in (0, (size - SAMPLE_BYTES) // 2, size - SAMPLE_BYTES):
                file.seek(start)
                digest.update(file.read(SAMPLE_BYTES))
    return digest.digest()


@contextmanager
def _reading(path: Path) -> Iterator[BinaryIO]:
    """Open a regular file for reading, and turn whatever goes wrong with it into a `DataError` that names it."""
    try:
        with open_regular(path) as file:
            yield file
    except Exception as error:  # decoders fail in more ways than can be listed
        reason = _REASONS.get(type(error)) or getattr(error, "strerror", None) or str(error).rstrip(".")
        raise DataError(f"Cannot read image {str(path)!r}: {reason or type(error).__name__}.") from error
