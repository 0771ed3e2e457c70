"""The settings of a training run that are not the method's and not the wrapper's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["BaseSettings", "RuntimeSettings", "TrainSettings"]


@dataclass(frozen=True, kw_only=True)
class BaseSettings:
    """The torch optimizer that applies the direction, and its learning rate over a task."""

    name: Literal["sgd", "adam", "adamw"] = "sgd"
    """Torch optimizer."""
    lr: float = 0.1
    """Learning rate at the start of each task; above 0."""
    first_lr: float | None = None
    """Learning rate of the first task, if it differs."""
    momentum: float = 0.9
    """Momentum of SGD, in [0, 1); ignored by Adam."""
    weight_decay: float = 0.0
    """Weight decay; at least 0."""
    first_weight_decay: float | None = None
    """Weight decay of the first task, if it differs."""
    schedule: Literal["constant", "cosine", "multistep"] = "constant"
    """How the learning rate changes over the epochs of a task."""
    milestones: tuple[int, ...] = ()
    """Epochs after which a multistep schedule multiplies the learning rate by gamma."""
    gamma: float = 0.1
    """Factor of a multistep schedule; in (0, 1]."""
    warmup_epochs: int = 0
    """Epochs over which the learning rate rises linearly to its value; at least 0."""


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """How long and in which portions a task is trained."""

    epochs: int = 20
    """Epochs per task; at least 0."""
    first_epochs: int | None = None
    """Epochs of the first task, if they differ."""
    batch_size: int = 32
    """Images per step and device; at least 1."""
    eval_batch_size: int | None = None
    """Images per batch at test time; None takes batch_size."""
    clip_norm: float | None = None
    """Clip the direction to this global norm; above 0."""
    checkpoint_minutes: float = 10.0
    """Minutes between checkpoints within a task, besides one at every task; 0 saves at every step."""
    check_purity: bool = False
    """Verify on the first batch of every phase that the loss is pure: equal gradients twice, nothing changed."""


@dataclass(frozen=True, kw_only=True)
class RuntimeSettings:
    """Where a run takes place."""

    accelerator: str = "auto"
    """cpu, cuda, mps or auto."""
    devices: int = 1
    """Devices per host; more than one trains with DistributedDataParallel."""
    num_nodes: int = 1
    """Hosts."""
    strategy: str = "auto"
    """auto, ddp, ddp_find_unused_parameters_true: how several devices share the work."""
    precision: Literal["32", "bf16", "16"] = "32"
    """32: full precision; bf16, 16: mixed precision of the forward pass, 16 with loss scaling."""
    threads: int | None = None
    """CPU threads of torch; None leaves torch's choice."""
    prefetch: int = 0
    """Batches to prepare ahead on a thread."""
