"""The sections of a configuration that no other package defines: backbone, data and stream."""

from __future__ import annotations

from dataclasses import dataclass

from cflat.data.stream import DomainLabels, Scenario

__all__ = ["BackboneSettings", "DataSettings", "StreamSettings"]


@dataclass(frozen=True, kw_only=True)
class BackboneSettings:
    """The network that a method starts from, and the images it is fed."""

    name: str = "vit_base"
    """Backbone, see ``cflat list backbones``, or timm:NAME."""
    weights: str = "random"
    """random, timm (download the published weights), or the path of a file."""
    image_size: int | None = None
    """Side of the input in pixels; null takes the size of the weights."""
    inputs: str = "pilot"
    """Input recipe: crops, augmentation and normalisation; normalize: timm or pilot is short for that recipe."""
    drop_path_rate: float = 0.0
    """Stochastic depth, in [0, 1)."""
    width: int | None = None
    """Units of each hidden layer of mlp; null takes 256."""
    depth: int | None = None
    """Hidden layers of mlp; null takes 2."""


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """The images."""

    name: str = "digits"
    """Dataset, see ``cflat list datasets``, or folder:PATH, npz:PATH, domains:PATH, features:PATH."""
    root: str | None = None
    """Folder that holds the datasets; null takes $CFLAT_DATA."""
    train_per_class: int | None = None
    """Keep so many training images of each class (and domain)."""
    test_per_class: int | None = None
    """Keep so many test images of each class (and domain)."""
    subsample_seed: int = 0
    """Seed of that choice."""
    short_side: int | None = None
    """Shrink image files to this shorter side when they are decoded; saves memory and time."""


@dataclass(frozen=True, kw_only=True)
class StreamSettings:
    """How the images are cut into tasks."""

    scenario: Scenario = "class"
    """class: new classes per task; task: the same, task known at test time; domain: same classes, new domain."""
    initial: int | None = None
    """Classes of the first task, 0 for as many as increment; null takes the dataset's usual split."""
    increment: int | None = None
    """Classes of every later task; null takes the dataset's usual split."""
    order_seed: int | None = 1993
    """Seed of the class order; null keeps the dataset's."""
    task_order_seed: int | None = None
    """Shuffle the finished tasks (or domains) with this seed."""
    max_tasks: int | None = None
    """End the stream after so many tasks; null goes through all."""
    labels: DomainLabels = "shared"
    """Domain streams: one label per class (shared), or new labels with every domain (growing)."""
    domain_order: tuple[str, ...] | None = None
    """Domain streams: the domains to use, in order."""
