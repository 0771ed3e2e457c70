"""Features of a frozen backbone, computed once, kept in a file, and shared by all runs on ``features:PATH``.

The file remembers what it was made from: images, network, weights (by content, not by name), test transform and
precision. Asked again for the same, `make_features` finds it; asked for something else under the same path, it raises
DataError.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from cflat._errors import ConfigError, DataError
from cflat._files import make_folder, write_atomic
from cflat.config.checks import backbone_family
from cflat.config.documents import merge
from cflat.config.run_config import RunConfig, parse_config
from cflat.data import BatchLoader, Dataset, eval_transform, load_dataset, vector_size
from cflat.data.datasets.npz import read_arrays
from cflat.runs.folder import require_writable
from cflat.runs.run import check_devices, make_backbone, open_dataset
from cflat.train import Runtime

VERSION = 2
"""Of the layout of the file, and of how images are decoded."""
SECTIONS = ("data", "backbone", "runtime")
_DEFAULTS = {"method": {"name": "simplecil"}, "optimizer": {"name": "none"}, "backbone": {"inputs": "timm"}}


@dataclass(frozen=True)
class FeaturesOrigin:
    """What decides the numbers in a file of features."""

    data: str
    images: str
    """Hash of images, labels and their order."""
    backbone: str
    weights: str
    """Hash of every weight and buffer."""
    inputs: str
    """The test transform."""
    precision: str
    """Of the forward pass."""
    version: int = VERSION

    @property
    def key(self) -> str:
        """A short name that no other origin has."""
        return hashlib.blake2b(json.dumps(asdict(self), sort_keys=True).encode(), digest_size=4).hexdigest()


@dataclass(frozen=True)
class Features:
    """A file of features."""

    path: Path
    origin: FeaturesOrigin
    num_train: int
    num_test: int
    size: int
    """Numbers per image."""
    is_new: bool
    """Whether they were computed now, and not found."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {**asdict(self), "path": str(self.path), "key": self.origin.key}


def features_config(chosen: Mapping[str, Any]) -> RunConfig:
    """Complete and check the sections ``data``, ``backbone`` and ``runtime`` that a user has chosen.

    Inputs are normalised as the weights expect unless ``backbone.inputs`` is given.
    """
    for key in chosen:
        # A setting without effect would be ignored silently.
        if key not in SECTIONS:
            raise ConfigError(f"Features depend on {', '.join(SECTIONS)} alone; leave {key} out.")
    for section, example in (("data", "--data cifar100"), ("backbone", "--backbone vit_tiny")):
        if not isinstance(chosen.get(section), Mapping) or "name" not in chosen[section]:
            raise ConfigError(f"{section}.name must be given, for example {example}.")
    config = parse_config(merge(_DEFAULTS, chosen))
    if config.data.validation or config.data.label_noise:
        raise ConfigError("Features are those of all images; give data.validation and data.label_noise to the runs.")
    if backbone_family(config.backbone.name) == "vit" and "weights" not in chosen["backbone"]:
        raise ConfigError("backbone.weights must be given: --weights FILE, timm to download them, or random.")
    return config


def make_features(
    config: RunConfig,
    out: Path | None = None,
    *,
    batch_size: int = 64,
    tell: Callable[[int, int], None] = lambda done, total: None,
) -> Features:
    """Compute the features of all images of a dataset, or find them if that was done before.

    The sections ``data``, ``backbone`` and ``runtime`` of the configuration decide, the rest is ignored. Without
    ``out`` the file is named after its origin, below ``features``. ``tell`` is called with the images done and all.
    """
    check_devices(config.runtime)
    runtime = Runtime(config.runtime)
    data, dataset = config.data, open_dataset(config.data)
    try:
        backbone = make_backbone(config.backbone)
        transform = eval_transform(config.backbone.inputs, backbone.image_size, backbone.mean, backbone.std)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    # By content: the same name can stand for other images or weights tomorrow.
    origin = FeaturesOrigin(
        data=data.name,
        images=_hash_images(dataset),
        backbone=config.backbone.name,
        weights=_hash_weights(backbone),
        inputs=repr(transform.stages),
        precision=config.runtime.precision,
    )
    plain_name = data.name.replace(":", "-").replace("/", "-").strip("-.")
    path = out or Path("features") / f"{plain_name}-{config.backbone.name}-{origin.key}.npz"
    if path.exists():  # features are a pure function of their origin
        _require_origin(path, origin)
        return _found_in(path, origin, is_new=False)
    make_folder(path.parent)
    require_writable(path.parent)  # before anything is computed for it
    backbone.to(runtime.device).eval()
    num_done, total = 0, len(dataset.train) + len(dataset.test)
    arrays: dict[str, Any] = {}
    for split, images in (("train", dataset.train), ("test", dataset.test)):
        arrays[f"x_{split}"] = features = np.empty((len(images), backbone.feature_dim), dtype=np.float32)
        position = 0
        for batch in BatchLoader(images, transform, batch_size, shuffle=False, device=runtime.device):
            with torch.no_grad(), runtime.autocast():
                features[position : position + len(batch)] = backbone(batch.images).float().cpu().numpy()
            position += len(batch)
            tell(num_done + position, total)
        num_done += len(images)
        arrays[f"y_{split}"] = images.labels
        arrays |= {} if images.domains is None else {f"domain_{split}": images.domains}
    arrays["class_names"] = np.asarray(dataset.class_names)
    arrays |= {} if dataset.domain_names is None else {"domain_names": np.asarray(dataset.domain_names)}
    arrays |= {} if dataset.split is None else {"split": np.asarray(dataset.split)}
    # In the file itself: a second file could get lost.
    arrays["origin"] = np.asarray(json.dumps(asdict(origin)))
    write_atomic(path, lambda file: np.savez(file, **arrays))
    return _found_in(path, origin, is_new=True)


def _found_in(path: Path, origin: FeaturesOrigin, *, is_new: bool) -> Features:
    dataset = load_dataset(f"features:{path}")
    size = vector_size(dataset.train)
    assert size is not None
    return Features(path, origin, len(dataset.train), len(dataset.test), size, is_new)


def _hash_images(dataset: Dataset) -> str:
    digest = hashlib.blake2b(repr((dataset.class_names, dataset.domain_names)).encode(), digest_size=16)
    for images in (dataset.train, dataset.test):
        digest.update(images.store.fingerprint().encode())
        for column in (images.rows, images.labels, images.domains):
            digest.update(b"-" if column is None else column.astype("<i8").tobytes())
    return digest.hexdigest()


def _hash_weights(network: nn.Module) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name, value in sorted(network.state_dict().items()):
        digest.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
        # Flattened: a tensor without dimensions, as BatchNorm's counter, cannot be viewed as bytes.
        digest.update(value.contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _require_origin(path: Path, origin: FeaturesOrigin) -> None:
    """Reject a file that holds other features."""
    try:
        before = dict(json.loads(str(read_arrays(path, ["origin"])["origin"])))
    except (DataError, ValueError, TypeError, RecursionError) as error:
        raise DataError(f"{str(path)!r} is not a features file; choose another --out.") from error
    changed = [name for name, value in asdict(origin).items() if value != before.get(name)]
    if changed:
        raise DataError(
            f"{str(path)!r} holds other features (not the same: {', '.join(changed)}); "
            "choose another --out, or delete it."
        )
