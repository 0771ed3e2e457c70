"""The sections of a configuration that no other package defines: backbone, data and stream."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from cflat._settings import NEUTRAL, Count, CountOrZero, Flag, Fraction, Pixels, Share, settings_class
from cflat.data.pixels import DEFAULT_CACHE_BYTES
from cflat.data.stream import DomainLabels, Scenario


@settings_class
class BackboneSettings:
    """The network that a method starts from, and the images it is fed."""

    name: str = "vit_base"
    """Backbone, see ``cflat list backbones``, or timm:NAME."""
    weights: str = "random"
    """random, timm (download the published weights), or the path of a file."""
    image_size: Pixels | None = None
    """Side of the input in pixels; null takes the size of the weights."""
    inputs: str = "pilot"
    """Kind of inputs: crops, augmentation and normalization; normalize: timm or pilot is short for the kind."""
    drop_path_rate: Fraction = 0.0
    """Stochastic depth, in [0, 1)."""
    checkpointing: Annotated[Flag, NEUTRAL] = False
    """Keep the inputs of the blocks of a ViT or ResNet for the backward pass and compute the rest again: less memory,
    a third more time, the same gradients."""
    width: Annotated[Count, Field(le=1 << 20)] | None = None
    """Units of each hidden layer of mlp; null takes 256."""
    depth: Annotated[Count, Field(le=1000)] | None = None
    """Hidden layers of mlp; null takes 2."""


@settings_class
class DataSettings:
    """The images."""

    name: str = "digits"
    """Dataset, see ``cflat list datasets``, or folder:PATH, npz:PATH, domains:PATH, features:PATH."""
    root: Annotated[str | None, NEUTRAL] = None
    """Folder that holds the datasets; null takes $CFLAT_DATA."""
    train_per_class: Count | None = None
    """Number of training images to keep per class (and domain)."""
    test_per_class: Count | None = None
    """Number of test images to keep per class (and domain)."""
    validation: Fraction = 0.0
    """Fraction of the training images of each class (and domain) kept aside to choose settings by; in [0, 1)."""
    validation_per_class: Count | None = None
    """Number of validation images to keep per class (and domain)."""
    evaluate: Literal["all", "test", "validation"] = "all"
    """Images to measure accuracy on; validation never looks at a test image, all is test, and validation if any."""
    label_noise: Fraction = 0.0
    """Fraction of each class's training labels replaced by another class of the task; in [0, 1)."""
    subsample_seed: CountOrZero = 0
    """Seed of these choices."""
    short_side: Pixels | None = None
    """Shrink image files to this shorter side when they are decoded; saves memory and time."""
    workers: Annotated[CountOrZero, Field(le=4096), NEUTRAL] = 0
    """Worker processes that decode image files ahead, for tasks that do not fit into memory; the training thread then
    augments, and runtime.prefetch has no effect. 0 decodes on access."""
    cache_mib: Annotated[CountOrZero, NEUTRAL] = DEFAULT_CACHE_BYTES >> 20
    """Memory for decoded image files in MiB; what does not fit is decoded again in every epoch."""


@settings_class
class StreamSettings:
    """How the images are cut into tasks."""

    scenario: Scenario = "class"
    """class: new classes per task; task: the same, task known at test time; domain: same classes, new domain; blurry:
    new classes per task whose images are partly spread over all tasks."""
    initial: CountOrZero | None = None
    """Classes of the first task, 0 for as many as increment; null takes the dataset's usual split."""
    increment: Count | None = None
    """Classes of every later task; null takes the dataset's usual split."""
    # PILOT's seed, for the class order of published results.
    order_seed: CountOrZero | None = 1993
    """Seed of the class order; null keeps the dataset's."""
    task_order_seed: CountOrZero | None = None
    """Shuffle whole tasks (or domains) with this seed."""
    max_tasks: Count | None = None
    """End the stream after this number of tasks; null uses all."""
    labels: DomainLabels = "shared"
    """Domain streams: one label per class (shared), or new labels with every domain (growing)."""
    domain_order: tuple[str, ...] | None = None
    """Domain streams: the domains to use, in order."""
    disjoint: Share = 0.5
    """Blurry streams: fraction of the classes whose images are all in one task; in [0, 1]."""
    blur: Share = 0.1
    """Blurry streams: fraction of the images of every other class that is spread over all tasks; in [0, 1]."""
    online: Flag = False
    """One pass: every batch is seen once, and only what a method's memory has stored is seen again."""
