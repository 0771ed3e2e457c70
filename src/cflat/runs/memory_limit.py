"""Reject what cannot fit into memory before it is allocated: fail early instead of being OOM-killed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from cflat._errors import ConfigError
from cflat._machine import free_memory, gib
from cflat.data import Stream
from cflat.nn.backbone import Backbone
from cflat.train import RuntimeSettings, TrainSettings
from cflat.train.runtime import choose_accelerator

_MAKERS = (torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn, torch.eye, torch.arange)


class MemoryLimit(TorchFunctionMode):
    """Reject new tensors, inside of ``with``, that need more than the free memory all together.

    ``keys`` are the settings that decide their size, for the message.
    """

    def __init__(self, keys: str) -> None:
        super().__init__()
        self.keys = keys
        self.free = free_memory()
        self.used = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # Networks allocate by these functions; views and copies of them are not counted.
        if func in _MAKERS:
            self.used += _bytes_of(func, args, kwargs)
            if self.free is not None and self.used > self.free:
                raise ConfigError(
                    f"The network needs at least {gib(self.used)} of memory, {gib(self.free)} are free here; "
                    f"lower {self.keys}."
                )
        return func(*args, **kwargs)


def require_batch(backbone: Backbone, train: TrainSettings, runtime: RuntimeSettings, stream: Stream) -> None:
    """Reject a batch that does not fit even once: images, before and after their transform, and two layers.

    A lower bound: training needs far more.
    """
    largest = max(len(task.train) for task in stream.tasks)
    most_tested = max(len(task.test) for task in stream.tasks)
    size = max(min(train.batch_size, largest), min(train.eval_batch_size or train.batch_size, most_tested))
    # On a GPU a batch takes the GPU's memory, wherever the network was built.
    is_cuda = choose_accelerator(runtime) == "cuda" and torch.cuda.is_available()
    free = torch.cuda.get_device_properties(0).total_memory if is_cuda else free_memory()
    needed = _forward_bytes(backbone, size)
    if free is not None and needed > free:
        raise ConfigError(
            f"A batch of {size} images of {backbone.image_size} x {backbone.image_size} pixels needs at least "
            f"{gib(needed)} of memory in {backbone.name}, {gib(free)} are free here; lower backbone.image_size, "
            "train.batch_size or train.eval_batch_size."
        )


def _bytes_of(func: Callable[..., Tensor], args: Any, kwargs: dict[str, Any]) -> int:
    """Return the size of what a function would make, without making it."""
    shape = {key: value for key, value in kwargs.items() if key not in ("generator", "device", "pin_memory")}
    try:
        # A TorchFunctionMode is off inside of its own handler, so this call is not counted.
        made = func(*args, **shape, device="meta")
    except (TypeError, RuntimeError, OverflowError):  # the real call reports what is wrong
        return 0
    return made.numel() * made.element_size()


def _forward_bytes(backbone: Backbone, batch_size: int) -> int:
    outputs: list[int] = [0]

    def note(module: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            outputs.append(output.numel() * output.element_size())

    hooks = [module.register_forward_hook(note) for module in backbone.modules() if not any(module.children())]
    # Meta tensors have shapes and no memory: the forward pass costs nothing.
    state = {name: value.to("meta") for name, value in backbone.state_dict().items()}
    size = backbone.image_size
    images = torch.empty(batch_size, backbone.num_channels, size, size, device="meta")
    try:
        with torch.no_grad():
            functional_call(backbone, state, (images,))
    except (RuntimeError, NotImplementedError):  # some models of timm look at values on their way
        pass
    finally:
        for hook in hooks:
            hook.remove()
    return 2 * images.numel() * images.element_size() + sum(sorted(outputs)[-2:])
