"""What a second evaluation of the same batch must not disturb: module buffers and random numbers.

Both guards know two moments of a step: before its first evaluation, to which `undo` returns when the step is discarded,
and after it, to which `release` returns when extra evaluations have followed.
"""

from __future__ import annotations

from collections.abc import Iterable

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
        self._before = _Snapshot()
        self._after = _Snapshot()
        self._is_holding = False

    def start(self) -> None:
        """Remember all buffers before the first evaluation."""
        self._is_holding = False
        if self.module is not None:
            self._before.take(self.module)

    def hold(self) -> None:
        """Remember all buffers as the first evaluation left them; does nothing when they are held already."""
        if self.module is not None and not self._is_holding:
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

    def __getstate__(self) -> dict[str, object]:
        return {"module": self.module}

    def __setstate__(self, state: dict[str, nn.Module | None]) -> None:
        self.__init__(state["module"])  # type: ignore[misc]


class RandomGuard:
    """Let every evaluation of a step draw the same random numbers (one dropout mask per step).

    After the step the generators stand where the first evaluation left them, so a step consumes as much randomness
    as in plain training.
    """

    def __init__(self, is_enabled: bool) -> None:
        self.is_enabled = is_enabled
        self._devices: list[torch.device] = []
        self._before: list[Tensor] = []
        self._after: list[Tensor] = []

    def start(self, devices: Iterable[torch.device]) -> None:
        """Remember the generators before the first evaluation."""
        self._before = []
        if self.is_enabled:
            # The meta device has no generator.
            self._devices = [_CPU, *{device for device in devices if device.type not in ("cpu", "meta")}]
            self._before, self._after = _random_states(self._devices), []

    def replay(self) -> None:
        """Rewind the generators for a further evaluation."""
        if self._before:
            self._after = self._after or _random_states(self._devices)
            _set_random_states(self._devices, self._before)

    def release(self) -> None:
        """Put the generators where the first evaluation left them; `undo` still leads back to before it."""
        if self._before and self._after:
            _set_random_states(self._devices, self._after)

    def undo(self) -> None:
        """Put the generators where they were before the step."""
        if self._before:
            _set_random_states(self._devices, self._before)
        self._before, self._after = [], []


class _Snapshot:
    """Copies of all buffers of a module and where they belong; the copies' storage is reused from step to step."""

    def __init__(self) -> None:
        self._slots: list[tuple[nn.Module, str, Tensor | None]] = []
        self._buffers: list[Tensor] = []
        self._copies: list[Tensor] = []
        self._special: list[tuple[Tensor, Tensor]] = []

    def take(self, module: nn.Module) -> None:
        # Emptied first: an interrupt below must not leave buffers of this moment beside copies of an earlier one.
        self._slots, self._buffers, self._special = [], [], []
        owners = _buffer_owners(module)
        if not owners:
            return
        slots = [(owner, *item) for owner in owners for item in owner._buffers.items()]
        present = [buffer for _, _, buffer in slots if buffer is not None]
        buffers = [buffer for buffer in present if _is_ordinary(buffer)]
        if not _can_hold(self._copies, buffers):
            self._copies = clone_all(buffers)
        elif buffers:
            torch._foreach_copy_(self._copies, buffers)
        if len(buffers) < len(present):
            others = [buffer for buffer in present if not _is_ordinary(buffer) and not _overlaps(buffer)]
            self._special = [(buffer, buffer.clone()) for buffer in others]
        self._slots, self._buffers = slots, buffers

    def put_back(self) -> None:
        if not self._slots:
            return
        for owner, name, buffer in self._slots:
            if _buffer_of(owner, name) is not buffer:
                setattr(owner, name, buffer)
        if self._buffers:
            torch._foreach_copy_(self._buffers, self._copies)
        if self._special:
            with torch.inference_mode():  # the only mode in which tensors that were made in it may be written
                for buffer, copy in self._special:
                    buffer.copy_(copy)


def _is_ordinary(buffer: Tensor) -> bool:
    """Return whether it can be copied in one call with others."""
    return not (buffer.is_nested or buffer.is_inference() or _overlaps(buffer))


def _overlaps(buffer: Tensor) -> bool:
    """Return whether elements share memory, as if expanded: it cannot be written to, only be replaced."""
    return not buffer.is_nested and torch._debug_has_internal_overlap(buffer) == 1


def _buffer_of(owner: nn.Module, name: str) -> Tensor | None:
    buffers = owner._buffers
    return buffers.get(name) if isinstance(buffers, dict) else getattr(owner, name)  # of a scripted module


def _buffer_owners(module: nn.Module) -> list[nn.Module]:
    """Return the modules that have buffers; ``modules()`` also makes up names, which is felt in every step."""
    owners, seen, pending = [], {module}, [module]
    while pending:
        present = pending.pop()
        if present._buffers:
            owners.append(present)
        for child in present._modules.values():
            if child is not None and child not in seen:
                seen.add(child)
                pending.append(child)
    return owners


def _can_hold(copies: list[Tensor], buffers: list[Tensor]) -> bool:
    return len(copies) == len(buffers) and all(
        a.shape == b.shape and a.dtype == b.dtype and a.device == b.device for a, b in zip(copies, buffers, strict=True)
    )


def _random_states(devices: list[torch.device]) -> list[Tensor]:
    return [
        torch.default_generator.get_state()
        if device.type == "cpu"
        else torch.get_device_module(device).get_rng_state(device)
        for device in devices
    ]


def _set_random_states(devices: list[torch.device], states: list[Tensor]) -> None:
    for device, state in zip(devices, states, strict=True):
        if device.type == "cpu":
            torch.default_generator.set_state(state)
        else:
            torch.get_device_module(device).set_rng_state(state, device)
