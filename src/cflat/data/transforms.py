"""From uint8 pixels to a float batch: random crops, flips, brightness, resizing and normalisation.

A transform is a pure function of pixels and of uniform numbers in [0, 1), ``num_draws`` per image. A loader
can therefore replay any step, and an image is augmented alike whether it is transformed alone, in a batch,
or on another rank. `RandomResizedCrop` and the resizing stages follow torchvision's antialiased versions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from cflat._lazy import LazyModule
from cflat._ranges import check
from cflat.data.pixels import Pixels

tv = LazyModule("torchvision.transforms.v2.functional")

CROP_ATTEMPTS = 10
"""Shapes that torchvision tries before it falls back to a central crop."""

DENSE_RESAMPLE_PIXELS = 48 * 48
"""Above this image area, cropping and resizing one by one beats the dense products of `resample` on a CPU."""


class Stage(Protocol):
    """One part of a transform; the first stage gets uint8 pixels, later ones float images in [0, 1]."""

    @property
    def num_draws(self) -> int:
        """Uniform numbers that the stage consumes per image."""

    def __call__(self, images: Pixels, draws: Tensor) -> Tensor:
        """Transform a batch, given ``draws`` of shape (B, num_draws)."""


@dataclass(frozen=True)
class Transform:
    """Stages applied one after the other."""

    stages: tuple[Stage, ...]

    @property
    def num_draws(self) -> int:
        """Uniform numbers per image; 0 for a deterministic transform."""
        return sum(stage.num_draws for stage in self.stages)

    def __call__(self, pixels: Pixels, generator: torch.Generator | None = None) -> Tensor:
        """Return the float batch (B, 3, H, W), with randomness from ``generator`` alone."""
        if generator is None and self.num_draws:
            raise ValueError("A random transform needs a generator, got None.")
        return self.apply(pixels, self.draw(len(pixels), generator))

    def draw(self, count: int, generator: torch.Generator | None) -> Tensor:
        """Return the uniform numbers for ``count`` images."""
        # float64: a float32 draw just below 1, times a range, can round up to the range itself.
        return torch.rand(count, self.num_draws, generator=generator, dtype=torch.float64)

    def apply(self, pixels: Pixels, draws: Tensor) -> Tensor:
        """Return the float batch for given uniform numbers, (B, num_draws)."""
        images = pixels
        for stage, part in zip(self.stages, draws.split([s.num_draws for s in self.stages], dim=1), strict=True):
            images = stage(images, part)
        assert isinstance(images, Tensor)
        return images


@dataclass(frozen=True)
class ResizeCrop:
    """Resize the shorter side to ``resize``, then cut the central square of ``size``."""

    resize: int
    size: int
    interpolation: Literal["bicubic", "bilinear"] = "bicubic"
    num_draws: int = 0

    def __call__(self, images: Pixels, draws: Tensor) -> Tensor:
        """Return floats in [0, 1]."""
        return unit_range(self.fit(images))

    def fit(self, images: Pixels) -> Tensor:
        """Return uint8 images of the final size."""
        if isinstance(images, list):
            return torch.cat([self.fit(image[None]) for image in images])
        resized: Tensor = images
        if min(images.shape[-2:]) != self.resize:
            resized = tv.resize(
                images, [self.resize], interpolation=tv.InterpolationMode(self.interpolation), antialias=True
            )
        fits = resized.shape[-2:] == (self.size, self.size)
        return resized if fits else tv.center_crop(resized, [self.size])  # type: ignore[no-any-return]


@dataclass(frozen=True)
class PaddedCrop:
    """Pad with black and cut a window of the original size at a random place (CIFAR's augmentation)."""

    size: int
    padding: int
    num_draws: int = 2

    def __call__(self, images: Pixels, draws: Tensor) -> Tensor:
        """Return floats in [0, 1]; images of another size are resized first."""
        square = ResizeCrop(self.size, self.size).fit(images)
        padded = torch.nn.functional.pad(square, [self.padding] * 4)
        # Floor of a draw in [0, 1) times the number of places: all are equally likely.
        top, left = (draws.to(padded.device) * (2 * self.padding + 1)).long().unbind(1)
        windows = padded.unfold(2, self.size, 1).unfold(3, self.size, 1)  # a view: (B, 3, tops, lefts, size, size)
        return unit_range(windows[torch.arange(len(padded), device=padded.device), :, top, left])


@dataclass(frozen=True)
class RandomResizedCrop:
    """Cut a window of random area and aspect and resize it to a square, bilinear and antialiased."""

    size: int
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    num_draws: int = 2 * CROP_ATTEMPTS + 2

    def __call__(self, images: Pixels, draws: Tensor) -> Tensor:
        """Return floats in [0, 1]."""
        # Boxes are computed on the CPU: their bits must not depend on the device.
        shapes = torch.tensor([image.shape[-2:] for image in images]).reshape(-1, 2)
        boxes = crop_boxes(shapes, draws, self.scale, self.ratio)
        if isinstance(images, Tensor) and _is_dense(images):
            return resample(unit_range(images), boxes.to(images.device), self.size)
        return torch.cat([self._crop(*pair) for pair in zip(images, boxes, strict=True)])

    def _crop(self, image: Tensor, box: Tensor) -> Tensor:
        if _is_dense(image):
            return resample(unit_range(image[None]), box[None].to(image.device), self.size)
        size = [self.size, self.size]
        return unit_range(tv.resized_crop(image[None], *box.tolist(), size=size, antialias=True))


@dataclass(frozen=True)
class Flip:
    """Mirror half of the images left to right."""

    num_draws: int = 1

    def __call__(self, images: Pixels, draws: Tensor) -> Tensor:
        """Mirror where the draw is below one half."""
        assert isinstance(images, Tensor)
        mirrored = (draws[:, 0] < 0.5).to(images.device)
        return torch.where(mirrored[:, None, None, None], images.flip(-1), images)


@dataclass(frozen=True)
class Brightness:
    """Scale each image by a random factor from 1 - delta to 1 + delta."""

    delta: float
    num_draws: int = 1

    def __call__(self, images: Pixels, draws: Tensor) -> Tensor:
        """Return images that stay in [0, 1]."""
        assert isinstance(images, Tensor)
        factors = (1 + self.delta * (2 * draws[:, 0] - 1)).to(images)
        # Clamped, as torchvision's ColorJitter does.
        return (images * factors[:, None, None, None]).clamp_(0, 1)


@dataclass(frozen=True)
class Normalize:
    """Subtract the channel means and divide by the channel deviations."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    num_draws: int = 0

    def __post_init__(self) -> None:
        for name, values in (("mean", self.mean), ("std", self.std)):
            if len(values) != 3:
                raise ValueError(f"{name} must have three channels, got {values!r}.")
        check("std", min(self.std), above=0)

    def __call__(self, images: Pixels, draws: Tensor) -> Tensor:
        """Return normalised images."""
        return tv.normalize(images, list(self.mean), list(self.std))  # type: ignore[no-any-return]


def _is_dense(images: Tensor) -> bool:
    """Whether to crop by matrix products: a matter of device and size alone, lest the batch changes an image.

    On a GPU always: a call for each image would take longer. Products return floats; a CPU rounds crops of larger
    images to 8 bits, as torchvision does, hence the devices differ by up to one of the 255 levels.
    """
    return images.is_cuda or images.shape[-1] * images.shape[-2] <= DENSE_RESAMPLE_PIXELS


def unit_range(images: Tensor) -> Tensor:
    """Return uint8 images as floats in [0, 1]."""
    # In place is safe: converting uint8 always makes a copy, never a view of the cached pixels.
    return images.float().div_(255)


def crop_boxes(shapes: Tensor, draws: Tensor, scale: Sequence[float], ratio: Sequence[float]) -> Tensor:
    """Return a random (top, left, height, width) per image: torchvision's rule for `RandomResizedCrop`.

    Area (a fraction of the image) and aspect (width / height, log-uniform) are drawn up to `CROP_ATTEMPTS` times; the
    first pair that fits is taken, else the largest central crop with an allowed aspect. ``shapes`` are heights and
    widths, (B, 2); ``draws`` are areas, aspects, then the place, (B, 2 * CROP_ATTEMPTS + 2).
    """
    height, width = shapes.double().unsqueeze(-1).unbind(1)  # (B, 1) each
    area_draws, ratio_draws, place = draws.split([CROP_ATTEMPTS, CROP_ATTEMPTS, 2], dim=1)
    # All attempts at once, then the first that fits: no loop over images, and a fixed number of draws for each.
    area = height * width * (scale[0] + (scale[1] - scale[0]) * area_draws)
    low, high = math.log(ratio[0]), math.log(ratio[1])
    aspect = torch.exp(low + (high - low) * ratio_draws)
    crop_width, crop_height = (area * aspect).sqrt().round(), (area / aspect).sqrt().round()
    fits = (crop_width > 0) & (crop_width <= width) & (crop_height > 0) & (crop_height <= height)
    # Of equal maxima argmax returns the first.
    first = fits.int().argmax(dim=1, keepdim=True)
    found = fits.any(dim=1, keepdim=True)
    fallback_width = torch.minimum(width, (height * ratio[1]).round())
    fallback_height = torch.minimum(height, (width / ratio[0]).round())
    crop_height = torch.where(found, crop_height.gather(1, first), fallback_height)
    crop_width = torch.where(found, crop_width.gather(1, first), fallback_width)
    room = torch.cat([height - crop_height, width - crop_width], dim=1)
    corner = torch.where(found, place * (room + 1), room / 2).floor()
    return torch.cat([corner, crop_height, crop_width], dim=1).long()


def resample(images: Tensor, boxes: Tensor, size: int) -> Tensor:
    """Cut one box (top, left, height, width) out of each float image and resize it to ``size``, all images at once.

    Equal to torchvision's antialiased bilinear resize of each crop: a separable filter, here as one weight
    matrix per image and axis: a batch costs two batched matrix products.
    """
    top, left, height, width = boxes.unbind(1)
    rows = _filter_weights(top, height, images.shape[2], size, images.dtype)
    columns = _filter_weights(left, width, images.shape[3], size, images.dtype)
    return rows.unsqueeze(1) @ (images @ columns.transpose(1, 2).unsqueeze(1))


def _filter_weights(start: Tensor, length: Tensor, extent: int, size: int, dtype: torch.dtype) -> Tensor:
    """Return (B, size, extent): the weight of each input pixel in each output pixel along one axis."""
    step = (length.double() / size)[:, None, None]
    support = step.clamp(min=1)  # wider than one pixel only when shrinking: that is the antialiasing
    output = torch.arange(size, device=start.device).double()[None, :, None]
    offset = torch.arange(extent, device=start.device).double()[None, None, :] - start[:, None, None]
    # Pixel centers lie at halves, as in torch with align_corners=False.
    distance = (offset + 0.5 - (output + 0.5) * step).abs()
    inside = (offset >= 0) & (offset < length[:, None, None])
    weights = (1 - distance / support).clamp(min=0) * inside
    # Normalized within the box: torchvision resizes the crop and never sees the pixels around it.
    return (weights / weights.sum(dim=2, keepdim=True)).to(dtype)
