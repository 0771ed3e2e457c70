"""Named inputs: which transform a backbone is trained and tested with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from cflat._ranges import Count, checked
from cflat._registry import Registry
from cflat._statistics import CIFAR_MEAN, CIFAR_STD
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

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class InputKind:
    """One way to make inputs of images."""

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
                raise ValueError(f"Inputs {self.name!r} need the mean and std of the backbone's data config.")
            last = Normalize(tuple(mean), tuple(std))
        return Transform(stages if last == "none" else (*stages, last))


def _pilot_train(size: int) -> tuple[Stage, ...]:
    # PILOT's range of areas; torchvision's default begins at 0.08.
    return RandomResizedCrop(size, scale=(0.05, 1.0)), Flip()


def _central(size: int) -> tuple[Stage, ...]:
    return (ResizeCrop(size * 256 // 224, size),)  # truncated as PILOT does: 109 pixels for 96


def _whole(size: int) -> tuple[Stage, ...]:
    return (ResizeCrop(size, size, "bilinear"),)


def _untouched(size: int) -> tuple[Stage, ...]:
    return ()


INPUTS: Registry[InputKind] = Registry("kind of inputs")
# PILOT feeds [0, 1] to ViTs that were pretrained on [-1, 1]. Published numbers depend on it, hence the default; "timm"
# is what the weights expect.
for _kind in (
    InputKind("paper", "inputs in [0, 1], large random crops and flips: the paper's setting", _pilot_train, _central),
    InputKind("pilot", "the same as paper; named after the PILOT toolbox", _pilot_train, _central),
    InputKind("timm", "as pilot, normalised as the backbone's weights expect", _pilot_train, _central, "backbone"),
    InputKind(
        "imagenet",
        "random crops from 8 % of the area, flips, ImageNet statistics: ResNets on photographs",
        lambda size: (RandomResizedCrop(size), Flip()),
        _central,
        Normalize(IMAGENET_MEAN, IMAGENET_STD),
    ),
    InputKind(
        "cifar",
        "padded crops, flips, brightness, CIFAR statistics: ResNets at 32 px",
        # PyCIL pads by 4 at 32 px, and jitters the brightness by 63 / 255.
        lambda size: (PaddedCrop(size, padding=max(1, size // 8)), Flip(), Brightness(63 / 255)),
        _whole,
        Normalize(CIFAR_MEAN, CIFAR_STD),
    ),
    InputKind("none", "inputs in [0, 1], resized if the size differs, no augmentation", _whole, _whole),
    InputKind("vectors", "vectors unchanged; the only kind for features:PATH", _untouched, _untouched),
):
    INPUTS.add(_kind.name, _kind)


@checked
def train_transform(
    kind: str, image_size: Count, mean: Sequence[float] | None = None, std: Sequence[float] | None = None
) -> Transform:
    """Return the training transform of a kind.

    ``mean`` and ``std`` are of the backbone's data config, for kinds that normalize with them.

    >>> train_transform("cifar", 32).num_draws
    4
    """
    return INPUTS[kind].finish(INPUTS[kind].train(image_size), mean, std)


@checked
def eval_transform(
    kind: str, image_size: Count, mean: Sequence[float] | None = None, std: Sequence[float] | None = None
) -> Transform:
    """Return the test transform of a kind; the arguments are those of `train_transform`."""
    return INPUTS[kind].finish(INPUTS[kind].evaluate(image_size), mean, std)
