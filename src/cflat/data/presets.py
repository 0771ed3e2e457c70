"""Named input recipes: which transform a backbone is trained and tested with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from cflat._ranges import Count, checked
from cflat._registry import Registry
from cflat.data.transforms import (
    Brightness,
    Flip,
    Normalize,
    PaddedCrop,
    RandomResizedCrop,
    ResizeCrop,
    Stage,
    Transform,
)

CIFAR_MEAN, CIFAR_STD = (0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class Preset:
    """One input recipe."""

    name: str
    description: str
    train: Callable[[int], tuple[Stage, ...]]
    """Stages for training at an image size, without normalisation."""
    evaluate: Callable[[int], tuple[Stage, ...]]
    """Stages for testing at an image size, without normalisation."""
    normalization: Normalize | Literal["none", "backbone"] = "none"
    """Fixed statistics, inputs left in [0, 1], or the statistics of the backbone's weights."""

    def finish(self, stages: tuple[Stage, ...], mean: Sequence[float] | None, std: Sequence[float] | None) -> Transform:
        """Return the transform of these stages, with the normalisation behind them."""
        last = self.normalization
        if last == "backbone":
            if mean is None or std is None:
                raise ValueError(f"Preset {self.name!r} needs the mean and std of the backbone's data config.")
            last = Normalize(tuple(mean), tuple(std))
        return Transform(stages if last == "none" else (*stages, last))


def _pilot_train(size: int) -> tuple[Stage, ...]:
    return RandomResizedCrop(size, scale=(0.05, 1.0)), Flip()


def _central(size: int) -> tuple[Stage, ...]:
    return (ResizeCrop(size * 256 // 224, size),)  # truncated as PILOT does: 109 pixels for 96


def _whole(size: int) -> tuple[Stage, ...]:
    return (ResizeCrop(size, size, "bilinear"),)


def _untouched(size: int) -> tuple[Stage, ...]:
    return ()


PRESETS: Registry[Preset] = Registry("input preset")
for _preset in (
    Preset("paper", "inputs in [0, 1], large random crops and flips: the paper's setting", _pilot_train, _central),
    Preset("pilot", "the same as paper; named after the PILOT toolbox", _pilot_train, _central),
    Preset("timm", "as pilot, normalised as the backbone's weights expect", _pilot_train, _central, "backbone"),
    Preset(
        "imagenet",
        "random crops from 8 % of the area, flips, ImageNet statistics: ResNets on photographs",
        lambda size: (RandomResizedCrop(size), Flip()),
        _central,
        Normalize(IMAGENET_MEAN, IMAGENET_STD),
    ),
    Preset(
        "cifar",
        "padded crops, flips, brightness, CIFAR statistics: ResNets at 32 px",
        lambda size: (PaddedCrop(size, padding=max(1, size // 8)), Flip(), Brightness(63 / 255)),
        _whole,
        Normalize(CIFAR_MEAN, CIFAR_STD),
    ),
    Preset("none", "inputs in [0, 1], resized if the size differs, no augmentation", _whole, _whole),
    Preset("vectors", "vectors unchanged; the only recipe for features:PATH", _untouched, _untouched),
):
    PRESETS.add(_preset.name, _preset)


@checked
def train_transform(
    preset: str, image_size: Count, mean: Sequence[float] | None = None, std: Sequence[float] | None = None
) -> Transform:
    """Return the training transform of a preset.

    ``mean`` and ``std`` are of the backbone's data config, for presets that normalise with them.

    >>> train_transform("cifar", 32).num_draws
    4
    """
    return PRESETS[preset].finish(PRESETS[preset].train(image_size), mean, std)


@checked
def eval_transform(
    preset: str, image_size: Count, mean: Sequence[float] | None = None, std: Sequence[float] | None = None
) -> Transform:
    """Return the test transform of a preset; the arguments are those of `train_transform`."""
    return PRESETS[preset].finish(PRESETS[preset].evaluate(image_size), mean, std)
