"""The settings of a training run that are not the method's and not the wrapper's."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from cflat._settings import Count, CountOrZero, Flag, Fraction, NotNegative, Positive, settings_class

__all__ = ["BaseSettings", "RuntimeSettings", "TrainSettings"]

Machines = Annotated[Count, Field(le=4096)]
"""Devices, hosts or threads: no machine of today has more."""


Precision = Annotated[
    Literal["32", "bf16", "16"], BeforeValidator(lambda value: str(value) if type(value) is int else value)
]
"""A file may say 16 without quotes."""


@settings_class
class BaseSettings:
    """The torch optimizer that applies the direction, and its learning rate over a task."""

    name: Literal["sgd", "adam", "adamw"] = "sgd"
    """Torch optimizer."""
    lr: Positive = 0.1
    """Learning rate at the start of each task; above 0."""
    first_lr: Positive | None = None
    """Learning rate of the first task, if it differs."""
    momentum: Fraction = 0.9
    """Momentum of SGD, in [0, 1); ignored by Adam."""
    nesterov: Flag = False
    """Nesterov's momentum instead of the classical one; SGD with momentum only."""
    weight_decay: NotNegative = 0.0
    """Weight decay; at least 0."""
    first_weight_decay: NotNegative | None = None
    """Weight decay of the first task, if it differs."""
    schedule: Literal["constant", "cosine", "multistep"] = "constant"
    """How the learning rate changes over the epochs of a task."""
    milestones: tuple[Count, ...] = ()
    """Epochs after which a multistep schedule multiplies the learning rate by gamma."""
    first_milestones: tuple[Count, ...] | None = None
    """Milestones of the first task, if they differ."""
    gamma: Annotated[Positive, Field(le=1)] = 0.1
    """Factor of a multistep schedule; in (0, 1]."""
    warmup_epochs: CountOrZero = 0
    """Epochs over which the learning rate rises linearly to its value; at least 0."""


@settings_class
class TrainSettings:
    """How long and in which portions a task is trained."""

    epochs: CountOrZero = 20
    """Epochs per task; at least 0."""
    first_epochs: CountOrZero | None = None
    """Epochs of the first task, if they differ."""
    batch_size: Count = 32
    """Images per step, or per micro-batch if train.accumulate is above 1, on all devices together; at least 1."""
    accumulate: Count = 1
    """Micro-batches per step, in each of its evaluations: the step of a batch so many times as large, with the memory
    of one. BatchNorm takes its statistics, and dropout its masks, from each micro-batch by itself."""
    eval_batch_size: Count | None = None
    """Batch size at test time; None uses batch_size."""
    clip_norm: Positive | None = None
    """Clip the direction to this global norm; above 0."""
    checkpoint_minutes: NotNegative = 10.0
    """Minutes between checkpoints within a task, in addition to one after every task; 0 saves at every step."""
    check_purity: Flag = False
    """Verify on the first batch of every phase that the loss is pure: equal gradients twice, nothing changed."""

    @property
    def images_per_step(self) -> int:
        """Images of all micro-batches of a step, on all devices."""
        return self.batch_size * self.accumulate


@settings_class
class RuntimeSettings:
    """Where a run takes place."""

    accelerator: str = "auto"
    """cpu, cuda, mps or auto."""
    devices: Machines = 1
    """Devices per host, or as many ranks as torchrun has started there; several train one model together."""
    num_nodes: Machines = 1
    """Number of hosts; set automatically under torchrun."""
    strategy: str = "auto"
    """auto, ddp, ddp_find_unused_parameters_true, fsdp: how several devices share the work. fsdp spreads the blocks
    of a ViT over them, each device keeping its part; the others have a copy of the network on each."""
    sync_batchnorm: Flag = True
    """With several devices, compute BatchNorm statistics over the global batch; false: per device."""
    timeout_seconds: Annotated[Positive, Field(le=10_000_000)] = 600.0
    """Timeout in seconds when a device waits for the others; above 0."""
    precision: Precision = "32"
    """32: full precision; bf16, 16: mixed precision of the forward pass, 16 with loss scaling."""
    threads: Machines | None = None
    """Number of CPU threads for torch; None keeps torch's default."""
    channels_last: Flag = False
    """Keep the weights and outputs of convolutions in channels-last order: faster for small ResNets on a CPU."""
    exact_times: Flag = True
    """Synchronize with the GPU several times per step for exact timings; false trains slightly faster."""
    prefetch: Annotated[CountOrZero, Field(le=4096)] = 0
    """Number of batches to prepare ahead on a background thread."""

    @property
    def num_ranks(self) -> int:
        """Processes that these settings ask for."""
        return self.devices * self.num_nodes
