"""Load backbone weights from a file: safetensors or a state dict, never arbitrary pickles."""

from __future__ import annotations

import zipfile
from pathlib import Path

import torch
from torch import Tensor, nn

from cflat._errors import DataError
from cflat._files import open_regular, require_unpacked
from cflat._lazy import LazyModule

models, layers = LazyModule("timm.models"), LazyModule("timm.layers")

# Classifier parts under the names that timm and torchvision give them; a backbone has none of these.
_HEAD_PREFIXES = ("head.", "head_dist.", "fc.", "classifier.", "pre_logits.")
_NUM_NAMED = 3
_WIDTHS = {192: "vit_tiny", 768: "vit_base", 1024: "vit_large"}
"""Backbones by the width of their tokens."""


def load_weights_(model: nn.Module, path: str | Path) -> None:
    """Fill ``model`` (a headless timm model) from ``path``; the classifier in the file is ignored.

    Position embeddings of a ViT are resampled when the file was made for another input size.

    Raises:
        DataError: The file is missing or unreadable, or its tensors do not fit; the message names some.
    """
    own = model.state_dict()
    read = _read(Path(path))
    given = {name: value for name, value in read.items() if name in own or not name.startswith(_HEAD_PREFIXES)}
    if isinstance(model, models.VisionTransformer) and "pos_embed" in given and "pos_embed" in own:
        num_prefix_tokens = 0 if model.no_embed_class else model.num_prefix_tokens
        given["pos_embed"] = _fit_positions(given["pos_embed"], num_prefix_tokens, list(model.patch_embed.grid_size))
    # BatchNorm's step counters are absent from old files and used by no forward pass.
    counters = {name for name in own if name.endswith("num_batches_tracked")}
    misshapen = [
        f"{name} {tuple(given[name].shape)} instead of {tuple(own[name].shape)}"
        for name in sorted(given.keys() & own.keys())
        if given[name].shape != own[name].shape
    ]
    problems = [
        *_listed("missing", sorted(own.keys() - given.keys() - counters)),
        *_listed("unexpected", sorted(given.keys() - own.keys())),
        *_listed("of another shape", misshapen),
    ]
    if problems:
        width = read["cls_token"].shape[-1] if "cls_token" in read and read["cls_token"].ndim else 0
        likely = f", perhaps backbone.name={_WIDTHS[width]}" if width in _WIDTHS else ""
        raise DataError(
            f"The weights in {path} do not fit this backbone: {'; '.join(problems)}. "
            f"Choose the backbone that the file was made for{likely}."
        )
    # Not strict, for the counters alone: all else was compared above.
    model.load_state_dict(given, strict=False)


def _read(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise DataError(f"No weights file at {path}. Give the path of a .safetensors file or a state dict.")
    try:
        with open_regular(path) as file:
            if zipfile.is_zipfile(file):  # or of another kind, which torch and safetensors do not unpack
                require_unpacked(file)
        # timm's reader also finds the weights in checkpoints that hold them as "state_dict", "model" or EMA.
        state = models.load_state_dict(str(path), weights_only=True)
        tensors = {str(name): value for name, value in state.items() if isinstance(value, Tensor)}
    except Exception as error:  # a foreign file can be broken in more ways than can be listed
        reason = str(error).split("\n", 1)[0]
        raise DataError(
            f"The weights file {path} cannot be read ({type(error).__name__}: {reason}). "
            "It must be a safetensors file or a state dict of plain tensors."
        ) from error
    odd = [
        name
        for name, value in tensors.items()
        if value.layout != torch.strided or value.is_meta or value.is_quantized or value.is_complex()
    ]
    if odd:
        raise DataError(
            f"The weights file {path} holds tensors without plain numbers ({', '.join(odd[:_NUM_NAMED])}): sparse, "
            "quantized, complex or without values. Save the dense state dict of the model."
        )
    # A saved `Backbone` keeps its timm model under this name.
    if tensors and all(name.startswith("model.") for name in tensors):
        tensors = {name.removeprefix("model."): value for name, value in tensors.items()}
    return tensors


def _fit_positions(positions: Tensor, num_prefix_tokens: int, grid_size: list[int]) -> Tensor:
    num_patches = positions.shape[1] - num_prefix_tokens if positions.ndim == 3 else 0
    if num_patches < 1 or round(num_patches**0.5) ** 2 != num_patches:
        return positions  # no square grid to resample from: reported as a wrong shape
    return layers.resample_abs_pos_embed(positions, grid_size, num_prefix_tokens=num_prefix_tokens)


def _listed(kind: str, names: list[str]) -> list[str]:
    if not names:
        return []
    more = f" and {len(names) - _NUM_NAMED} more" if len(names) > _NUM_NAMED else ""
    return [f"{len(names)} {kind} ({', '.join(names[:_NUM_NAMED])}{more})"]
