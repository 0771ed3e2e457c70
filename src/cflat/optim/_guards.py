"""What a second evaluation of the same batch must not disturb: module buffers and random numbers.

Both guards know two moments of a step: before its first evaluation, to which `undo` returns when the step is rolled
back, and after it, to which `release` returns when extra evaluations have followed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

import torch
from torch import Tensor, nn

from cflat.optim._vectors import clone_all

_CPU = torch.device("cpu")


class BufferGuard:
    """Undo what extra evaluations do to the buffers of a module.

    Guards every buffer (running statistics, their counters, spectral-norm vectors, those of custom layers), not
    BatchNorm's momentum: the first evaluation updates them as in plain training, and after the last one they are
    put back to that state, whether they were changed in place or replaced. Without a module nothing is guarded.
    """

    def __init__(self, module: nn.Module | None) -> None:
        self.module = module
        self._before, self._after = _Snapshot(), _Snapshot()
        self._is_holding = False

    def start(self) -> None:
        """Remember all buffers before the first evaluation."""
        self._is_holding = False
        self._before.take(self.module)

    def hold(self) -> None:
        """Remember all buffers as the first evaluation left them; does nothing when they are held already."""
        if not self._is_holding:
            self._after.take(self.module)
            self._is_holding = True

    def release(self) -> None:
        """Put back what the first evaluation left."""
        if self._is_holding:
            self._after.put_back()
        self._is_holding = False

    def undo(self) -> None:
        """Put back what was there before the step."""
        self._before.put_back()
        self._is_holding = False

    def __reduce__(self) -> tuple[type[BufferGuard], tuple[nn.Module | None]]:
        return BufferGuard, (self.module,)  # the copies belong to steps that are over


class RandomGuard:
    """Let every evaluation of a step draw the same random numbers (one dropout mask per step).

    After the step the generators stand where the first evaluation left them, so a step consumes as much randomness
    as in plain training.
    """

    def __init__(self, is_enabled: bool) -> None:
        self.is_enabled = is_enabled
        self._before: _States = {}
        self._after: _States = {}

    def start(self, devices: Iterable[torch.device]) -> None:
        """Remember the generators before the first evaluation."""
        self._after = {}
        self._before = _random_states([_CPU, *devices]) if self.is_enabled else {}

    def replay(self) -> None:
        """Rewind the generators for a further evaluation."""
        self._after = self._after or _random_states(self._before)
        _set_random_states(self._before)

    def release(self) -> None:
        """Put the generators where the first evaluation left them; `undo` still leads back to before it."""
        _set_random_states(self._after)

    def undo(self) -> None:
        """Put the generators where they were before the step."""
        _set_random_states(self._before)
        self._before = self._after = {}


class _Snapshot:
    """Copies of all buffers of a module and where they belong; the copies' storage is reused from step to step."""

    def __init__(self) -> None:
        self._slots: list[tuple[nn.Module, str, Tensor | None]] = []
        self._buffers: list[Tensor] = []
        self._copies: list[Tensor] = []
        self._special: list[tuple[Tensor, Tensor]] = []

    def take(self, module: nn.Module | None) -> None:
        self._slots, self._buffers, self._special = [], [], []  # an interrupt in here must not leave an earlier moment
        slots = [] if module is None else _slots_of(module)
        present = [buffer for _, _, buffer in slots if buffer is not None]
        buffers = [buffer for buffer in present if _is_ordinary(buffer)]
        if [_kind_of(copy) for copy in self._copies] != [_kind_of(buffer) for buffer in buffers]:
            self._copies = clone_all(buffers)
        elif buffers:
            torch._foreach_copy_(self._copies, buffers)
        others = [] if len(buffers) == len(present) else [b for b in present if not _is_ordinary(b)]
        self._special = [(buffer, buffer.clone()) for buffer in others if not _overlaps(buffer)]
        self._slots, self._buffers = slots, buffers

    def put_back(self) -> None:
        for owner, name, buffer in self._slots:
            if _buffers_of(owner).get(name) is not buffer:
                setattr(owner, name, buffer)
        if self._buffers:
            torch._foreach_copy_(self._buffers, self._copies)
        if self._special:
            with torch.inference_mode():  # the only mode in which tensors that were made in it may be written
                for buffer, copy in self._special:
                    buffer.copy_(copy)


def _slots_of(module: nn.Module) -> list[tuple[nn.Module, str, Tensor | None]]:
    """Return all buffers and where they are; ``modules()`` would also make up names, which takes as long as copying."""
    slots, seen, pending = [], {module}, [module]
    while pending:
        owner = pending.pop()
        if owner._buffers:
            slots += [(owner, name, buffer) for name, buffer in _buffers_of(owner).items()]
        for child in owner._modules.values():
            if child is not None and child not in seen:
                seen.add(child)
                pending.append(child)
    return slots


def _kind_of(tensor: Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return tensor.shape, tensor.dtype, tensor.device


def _buffers_of(owner: nn.Module) -> dict[str, Tensor | None]:
    """Return its buffers by name; a scripted module has an object in place of the dictionary."""
    buffers = owner._buffers
    return buffers if isinstance(buffers, dict) else dict(buffers.items())


def _is_ordinary(buffer: Tensor) -> bool:
    """Return whether it can be copied in one call with others."""
    return not (buffer.is_nested or buffer.is_inference() or _overlaps(buffer))


def _overlaps(buffer: Tensor) -> bool:
    """Return whether elements share memory, as if expanded: it cannot be written to, only be replaced."""
    return not buffer.is_nested and torch._debug_has_internal_overlap(buffer) == 1


_States: TypeAlias = dict[torch.device, Tensor]


def _random_states(devices: Iterable[torch.device]) -> _States:
    return {
        device: torch.default_generator.get_state()
        if device.type == "cpu"
        else torch.get_device_module(device).get_rng_state(device)
        for device in devices
        if device.type != "meta"
    }


def _set_random_states(states: _States) -> None:
    for device, state in states.items():
        if device.type == "cpu":
            torch.default_generator.set_state(state)
        else:
            torch.get_device_module(device).set_rng_state(state, device)
