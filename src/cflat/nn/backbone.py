"""Backbones: a timm model without its head, with the input size and normalisation its weights expect.

Nothing is downloaded unless ``weights="timm"`` asks for it. ViT names stand for explicit timm tags, because a
bare timm name changes its weights between timm versions.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn

from cflat._errors import DataError
from cflat._lazy import LazyModule
from cflat._ranges import Count, Fraction, check, checked
from cflat._registry import Registry
from cflat._statistics import CIFAR_MEAN, CIFAR_STD
from cflat.nn.blocks import host_
from cflat.nn.small import MLP, Identity, ResNet8, ResNet32, SmallCNN
from cflat.nn.weights import load_weights_

timm, models = LazyModule("timm"), LazyModule("timm.models")
logger = logging.getLogger(__name__)

Family = Literal["vit", "resnet", "other"]

_CIFAR: dict[str, Any] = {"image_size": 32, "mean": CIFAR_MEAN, "std": CIFAR_STD}
_HALF = (0.5, 0.5, 0.5)
_RESNET: dict[str, Any] = {"zero_init_last": False}
"""Residual branches start as in torchvision and PyCIL, not at zero as in timm."""


class Backbone(nn.Module):
    """Map images to features with a headless timm model.

    Attributes:
        name: The name it was created by.
        model: The timm model (or one of `cflat.nn.small`), unchanged.
        family: ``"vit"``, ``"resnet"`` or ``"other"``: what adapters, prompts and splits can rely on.
        feature_dim: Width of the features. A ViT gives the CLS token after the final norm.
        image_size: Height and width of the expected images.
        num_channels: Number of image channels; a vector is an image of one pixel with a channel for each number.
        mean: Per-channel mean that the weights expect to be subtracted from images in [0, 1].
        std: Per-channel deviation to divide by.

    >>> import torch
    >>> backbone = create_backbone("resnet32")
    >>> backbone(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 64])
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        name: str,
        image_size: int,
        num_channels: int,
        mean: tuple[float, ...],
        std: tuple[float, ...],
    ) -> None:
        super().__init__()
        self.model = model
        self.name = name
        self.family: Family = "other"
        if isinstance(model, models.VisionTransformer):
            self.family = "vit"
        elif isinstance(model, models.ResNet | ResNet32):
            self.family = "resnet"
        self.feature_dim = int(model.num_features)  # type: ignore[arg-type]
        self.image_size = image_size
        self.num_channels = num_channels
        self.mean = _per_channel(mean, num_channels)
        self.std = _per_channel(std, num_channels)

    def forward(self, images: Tensor) -> Tensor:
        """Return features of shape (B, feature_dim)."""
        return self.model(images)


@dataclass(frozen=True)
class BackboneSpec:
    """One row of the table of names."""

    description: str
    family: Family = "other"
    patch_size: int = 1
    """The image size must be a multiple of it."""
    timm_name: str = ""
    """Name with its tag; empty for networks that are not in timm or have no published weights."""
    build: Callable[..., nn.Module] | None = None
    """Makes the model from image size, channels and drop-path rate when timm's factory does not."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """For timm's factory."""
    has_sizes: bool = False
    """Whether it also takes a width and a depth."""
    image_size: int = 224
    mean: tuple[float, ...] = _HALF
    std: tuple[float, ...] = _HALF


@checked
def create_backbone(
    name: str,
    *,
    weights: str | Path | None = None,
    image_size: Count | None = None,
    num_channels: Count = 3,
    drop_path_rate: Fraction = 0.0,
    width: int | None = None,
    depth: int | None = None,
    checkpointing: bool = False,
    is_filled_later: bool = False,
) -> Backbone:
    """Create a backbone by name; `list_backbones` has the names, ``timm:NAME`` is any other timm model.

    Args:
        name: A listed name or ``timm:NAME``.
        weights: `None` for random weights, ``"timm"`` to let timm download the published ones (or find them
            in its cache), else the path of a safetensors file or a state dict.
        image_size: Input height and width; `None` takes the size that the weights were made for.
        num_channels: Channels of the images.
        drop_path_rate: Stochastic depth of the residual blocks, in [0, 1). timm models only.
        width: Units of each hidden layer of ``mlp``; `None` takes 256.
        depth: Hidden layers of ``mlp``; `None` takes 2.
        checkpointing: Keep only the inputs of its blocks for the backward pass and recompute the rest there.
        is_filled_later: Whether the caller will load trained weights: random ones need no warning then.

    Raises:
        ValueError: The name is unknown or an argument does not suit the backbone.
        DataError: The weights cannot be found or do not fit.
    """
    is_pretrained = weights == "timm"
    spec = BackboneSpec("", timm_name=name[5:]) if name.startswith("timm:") else _BACKBONES[name]
    sizes = {key: value for key, value in (("width", width), ("depth", depth)) if value is not None}
    if sizes and not spec.has_sizes:
        raise ValueError(f"{' and '.join(sizes)} can be chosen for mlp only; {name} has its own.")
    mean, std = spec.mean, spec.std
    if spec.build is None:
        # Not every timm model takes a drop-path rate, not even 0.
        options = {**spec.options, **({"drop_path_rate": drop_path_rate} if drop_path_rate else {})}
        model, config = _from_timm(spec.timm_name, is_pretrained, image_size, num_channels, options)
        image_size, mean, std = image_size or int(config.input_size[-1]), config.mean, config.std
        _require_whole_patches(name, model, image_size)
    elif is_pretrained:
        raise ValueError(f"{name} has no published weights; leave weights out or give the path of a file.")
    else:
        image_size = image_size or spec.image_size
        model = spec.build(image_size, num_channels, drop_path_rate, **sizes)
    backbone = Backbone(model, name=name, image_size=image_size, num_channels=num_channels, mean=mean, std=std)
    if weights is None and backbone.family == "vit" and not is_filled_later:
        logger.warning(
            "%s starts from random weights: methods for pretrained models run, but their accuracy means "
            'little. Give a weights file, or weights="timm" when online.',
            name,
        )
    elif weights is not None and not is_pretrained:
        load_weights_(backbone.model, weights)
    if checkpointing:
        _forget_activations_(backbone)
    return backbone


def get_backbone_spec(name: str) -> BackboneSpec | None:
    """Return what is known of a backbone before it is built; None for ``timm:NAME`` and for unknown names."""
    return _BACKBONES.get(name)


def list_backbones(pattern: str = "*") -> dict[str, str]:
    """Return the names that match a shell pattern, each with a one-line description."""
    return {name: _BACKBONES[name].description for name in _BACKBONES.names(pattern)}


def _from_timm(
    timm_name: str, pretrained: bool, image_size: int | None, num_channels: int, options: dict[str, Any]
) -> tuple[nn.Module, Any]:
    """Return a headless model and timm's description of its weights."""
    try:
        config = timm.get_pretrained_cfg(timm_name)
    except RuntimeError as error:  # of an unknown tag
        raise ValueError(f"timm {timm.__version__} has no model {timm_name!r}: {error}.") from error
    if config is None:
        raise ValueError(f"timm {timm.__version__} has no model {timm_name!r}; see timm.list_models().")
    # Models without position embeddings take any size and reject the argument.
    if image_size is not None and config.fixed_input_size:
        options = {**options, "img_size": image_size}
    try:
        model = timm.create_model(timm_name, pretrained=pretrained, num_classes=0, in_chans=num_channels, **options)
    except OSError as error:
        raise DataError(
            f"The published weights of {timm_name} could not be fetched. "
            "Go online once, or give the path of a downloaded file as weights."
        ) from error
    return model, config


def _require_whole_patches(name: str, model: nn.Module, image_size: int) -> None:
    if isinstance(model, models.VisionTransformer) and image_size % model.patch_embed.patch_size[0]:
        patch = model.patch_embed.patch_size[0]
        raise ValueError(f"image_size must be a multiple of {name}'s patch size {patch}, got {image_size}.")


def _forget_activations_(backbone: Backbone) -> None:
    """Recompute the activations of the blocks of a ViT or a ResNet in the backward pass."""
    if backbone.family == "other":
        raise ValueError(
            f"backbone.checkpointing is for the blocks of ViTs and ResNets, {backbone.name} has none; leave it out."
        )
    stages = (getattr(backbone.model, name, ()) for name in ("blocks", "layer1", "layer2", "layer3", "layer4"))
    for stage in stages:
        for block in stage:
            host_(block).forgets = True


def _per_channel(values: tuple[float, ...], num_channels: int) -> tuple[float, ...]:
    # Published statistics are of RGB images; images of other channels take their mean.
    if len(values) == num_channels:
        return tuple(values)
    return (sum(values) / len(values),) * num_channels


def _cifar_resnet(timm_name: str, image_size: int, num_channels: int, drop_path: float) -> nn.Module:
    """Replace the ImageNet stem, which would shrink 32x32 images to 8x8 before the first block."""
    del image_size  # fully convolutional
    options = {**_RESNET, "drop_path_rate": drop_path}
    model: nn.Module = timm.create_model(timm_name, num_classes=0, in_chans=num_channels, **options)
    model.conv1 = nn.Conv2d(num_channels, 64, 3, padding=1, bias=False)
    # As timm has initialized the other convolutions.
    nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
    model.maxpool = nn.Identity()
    return model


def _small(network: Callable[..., nn.Module], *, flattens: bool = False) -> Callable[..., nn.Module]:
    def build(image_size: int, num_channels: int, drop_path: float, **sizes: int) -> nn.Module:
        check("drop_path_rate", drop_path, at_most=0)
        return network(num_channels * image_size**2 if flattens else num_channels, **sizes)

    return build


def _smoke_vit(image_size: int, num_channels: int, drop_path: float) -> nn.Module:
    """Build a ViT of 6 blocks and width 64 with the largest patch that leaves at least 4x4 of them."""
    check("image_size", image_size, at_least=4)
    patch_size = max(side for side in range(1, image_size // 4 + 1) if image_size % side == 0)
    return models.VisionTransformer(
        img_size=image_size,
        patch_size=patch_size,
        in_chans=num_channels,
        num_classes=0,
        embed_dim=64,
        depth=6,
        num_heads=4,
        mlp_ratio=2.0,
        drop_path_rate=drop_path,
    )


_BACKBONES: Registry[BackboneSpec] = Registry("backbone")

for _name, _spec in {
    "resnet8": BackboneSpec(
        "CIFAR ResNet-8, 64 features: from scratch in a minute on a CPU", "resnet", build=_small(ResNet8), **_CIFAR
    ),
    "resnet32": BackboneSpec("CIFAR ResNet-32, 64 features", "resnet", build=_small(ResNet32), **_CIFAR),
    "small_cnn": BackboneSpec("four convolutions, 64 features, for digits", build=_small(SmallCNN), image_size=8),
    "vit_smoke": BackboneSpec(
        "tiny random ViT for small images: smoke runs and tests", "vit", build=_smoke_vit, image_size=8
    ),
    "mlp": BackboneSpec(
        "hidden layers on vectors (features:PATH) or flattened images; width and depth can be chosen",
        build=_small(MLP, flattens=True),
        image_size=8,
        has_sizes=True,
    ),
    "identity": BackboneSpec(
        "vectors (features:PATH) as they are: what lies above learns",
        build=_small(Identity, flattens=True),
        image_size=1,
    ),
}.items():
    _BACKBONES.add(_name, _spec)
for _depth in (18, 34):
    _name = f"resnet{_depth}"
    _spec = BackboneSpec(f"ResNet-{_depth}, ImageNet stem", "resnet", timm_name=f"{_name}.tv_in1k", options=_RESNET)
    _BACKBONES.add(_name, _spec)
    _text = f"ResNet-{_depth}, 3x3 stem without pooling for 32x32 images"
    _BACKBONES.add(f"{_name}_cifar", BackboneSpec(_text, "resnet", build=partial(_cifar_resnet, _name), **_CIFAR))
for _size in ("tiny", "base", "large"):
    for _suffix, _tag, _source in (
        ("", "augreg_in21k_ft_in1k", "ImageNet-21k, fine-tuned on ImageNet-1k"),
        ("_in21k", "augreg_in21k", "ImageNet-21k"),
    ):
        _text = f"ViT-{_size.capitalize()}/16; published weights: {_source}"
        _spec = BackboneSpec(_text, "vit", patch_size=16, timm_name=f"vit_{_size}_patch16_224.{_tag}")
        _BACKBONES.add(f"vit_{_size}{_suffix}", _spec)
