"""The settings of a training run that are not the method's and not the wrapper's."""

from __future__ import annotations

import inspect
from typing import Annotated, Any, Literal

import torch
from pydantic import BeforeValidator, Field
from torch.optim import Optimizer

from cflat._errors import ConfigError
from cflat._registry import require_known, suggest
from cflat._settings import NEUTRAL, Count, CountOrZero, Flag, Fraction, NotNegative, Positive, settings_class
from cflat.optim import QHM

__all__ = ["BaseSettings", "RuntimeSettings", "TrainSettings"]

Machines = Annotated[Count, Field(le=4096)]
"""Devices, hosts or threads: no machine of today has more."""


Precision = Annotated[
    Literal["32", "bf16", "16"], BeforeValidator(lambda value: str(value) if type(value) is int else value)
]
"""YAML reads 16 without quotes as a number."""


@settings_class
class BaseSettings:
    """The torch optimizer that applies the direction, and its learning rate over a task."""

    name: str = "sgd"
    """Base optimizer: a class of torch.optim in lower case, or qhm."""
    lr: Positive = 0.1
    """Learning rate at the start of each task; above 0."""
    first_lr: Positive | None = None
    """Learning rate of the first task, if it differs."""
    keywords: dict[str, Any] = Field(default_factory=dict)
    """Further keywords of that optimizer; those that are not given have its defaults."""
    weight_decay: NotNegative = 0.0
    """Weight decay; at least 0."""
    first_weight_decay: NotNegative | None = None
    """Weight decay of the first task, if it differs."""
    ema: Fraction | None = None
    """Decay, in [0, 1), of an exponential moving average of the trained weights, which replaces them at the end of
    each training phase; null trains without."""
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

    def __post_init__(self) -> None:
        """Complete the keywords by their defaults: the configuration of a run records all of them."""
        try:
            known = base_keywords(self.name)
        except ConfigError as error:
            raise ValueError(f"name: {error}") from None
        for key in self.keywords:
            if key not in known:
                near = suggest(key, list(known))
                raise ValueError(f"keywords: {self.name} has no {key!r}.{near} It takes: {', '.join(known)}.")
        # Two configurations with the same meaning must be equal: resume and grouping compare them.
        object.__setattr__(self, "keywords", {**known, **self.keywords})  # frozen for everybody else
        check_keywords(self.name, self.keywords)


SHARED_BY_BASES = tuple(name for name in BaseSettings.__annotations__ if name != "keywords")
"""Keys that mean the same for every base optimizer."""


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
    anytime_every: Count | None = None
    """Training images between evaluations on all tasks begun so far, for the anytime accuracy; null: none."""
    clip_norm: Positive | None = None
    """Clip the direction to this global norm; above 0."""
    checkpoint_minutes: Annotated[NotNegative, NEUTRAL] = 10.0
    """Minutes between checkpoints within a task, in addition to one after every task; 0 saves at every step."""
    flatness: Annotated[Flag, NEUTRAL] = False
    """Measure sharpness and the largest Hessian eigenvalue on one training batch (one micro-batch, if
    train.accumulate is above 1) at the end of the stream; costs about 50 evaluations. With base.ema, of the weights
    before they are averaged."""
    check_purity: Annotated[Flag, NEUTRAL] = False
    """Verify on the first batch of every phase that the loss is pure: equal gradients twice, nothing changed."""

    @property
    def images_per_step(self) -> int:
        """Images of all micro-batches of a step, on all devices."""
        return self.batch_size * self.accumulate


@settings_class
class RuntimeSettings:
    """Where a run takes place."""

    accelerator: Annotated[str, NEUTRAL] = "auto"
    """cpu, cuda, or auto: cuda if there is a CUDA device. Apple GPUs (mps) lack float64, which runs need."""
    devices: Annotated[Machines, NEUTRAL] = 1
    """Devices per host, or as many ranks as torchrun has started there; several train one model together."""
    num_nodes: Annotated[Machines, NEUTRAL] = 1
    """Number of hosts; set automatically under torchrun."""
    strategy: Annotated[str, NEUTRAL] = "auto"
    """auto, ddp, ddp_find_unused_parameters_true, fsdp: how several devices share the work. fsdp spreads the blocks
    of a ViT over them, each device keeping its part; the others have a copy of the network on each."""
    sync_batchnorm: Flag = True
    """With several devices, compute BatchNorm statistics over the global batch; false: per device."""
    timeout_seconds: Annotated[Positive, Field(le=10_000_000), NEUTRAL] = 600.0
    """Timeout in seconds when a device waits for the others; above 0."""
    precision: Precision = "32"
    """32: full precision; bf16, 16: mixed precision of the forward pass, 16 with loss scaling."""
    threads: Annotated[Machines | None, NEUTRAL] = None
    """Number of CPU threads for torch; None keeps torch's default."""
    channels_last: Annotated[Flag, NEUTRAL] = False
    """Keep the weights and outputs of convolutions in channels-last order: faster for small ResNets on a CPU."""
    exact_times: Annotated[Flag, NEUTRAL] = True
    """Synchronize with the GPU several times per step for exact timings; false trains slightly faster."""
    prefetch: Annotated[CountOrZero, Field(le=4096), NEUTRAL] = 0
    """Number of batches to prepare ahead on a background thread; no effect where data.workers decode image files."""

    @property
    def num_ranks(self) -> int:
        """Processes that these settings ask for."""
        return self.devices * self.num_nodes


# -- base optimizers by name: those of torch that can apply a direction, and QHM -------------------------------------

UNFIT = {
    "lbfgs": "evaluates the loss itself",
    "muon": "updates matrices alone, and networks have biases",
    "sparseadam": "takes sparse gradients alone",
}
"""Classes of torch that cannot serve, and why."""

DEFAULTS = {"sgd": {"momentum": 0.9}}
"""Where the bench differs from torch."""

NOT_SETTINGS = ("self", "params", "lr", "weight_decay", "maximize", "foreach", "fused", "capturable", "differentiable")
"""Keywords that every base has in the configuration already, or that must not change the result."""


def list_bases() -> list[str]:
    """Return the names of all base optimizers."""
    return sorted(set(_classes()) - set(UNFIT))


def base_class(name: str) -> type[Optimizer]:
    """Return the class of a base optimizer: torch's, in lower case, or ``qhm``."""
    if name in UNFIT:
        raise ConfigError(
            f"{name} cannot be a base optimizer: it {UNFIT[name]}. Choose among {', '.join(list_bases())}."
        )
    require_known("base optimizer", name, list_bases())
    return _classes()[name]


def base_keywords(name: str) -> dict[str, Any]:
    """Return the keywords of a base optimizer with their defaults, without those that all of them share.

    >>> base_keywords("qhm")
    {'momentum': 0.9, 'nu': 0.7}
    """
    parameters = inspect.signature(base_class(name).__init__).parameters
    defaults = {key: p.default for key, p in parameters.items() if key not in NOT_SETTINGS}
    return {**defaults, **DEFAULTS.get(name, {})}


def has_weight_decay(name: str) -> bool:
    """Whether a base optimizer has weight decay."""
    return "weight_decay" in inspect.signature(base_class(name).__init__).parameters


def check_keywords(name: str, keywords: dict[str, Any]) -> None:
    """Let the class itself validate its keywords: torch has ranges that no annotation holds."""
    make: Any = base_class(name)
    try:
        make([torch.nn.Parameter(torch.zeros(1))], lr=1.0, **keywords)
    except (ValueError, TypeError, RuntimeError) as error:
        raise ValueError(f"name={name} rejects its keywords: {str(error).rstrip('.')}.") from None


def _classes() -> dict[str, type[Optimizer]]:
    found = {name.lower(): value for name, value in vars(torch.optim).items() if inspect.isclass(value)}
    torchs = {name: cls for name, cls in found.items() if issubclass(cls, Optimizer) and cls is not Optimizer}
    return {**torchs, "qhm": QHM}
