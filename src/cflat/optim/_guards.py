"""What a second evaluation of the same batch must not disturb: module buffers and random numbers."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

__all__ = ["BufferGuard", "RandomGuard"]


class BufferGuard:
    """Undo what extra evaluations do to the buffers of a module.

    Guards every buffer (running statistics, their counters, spectral-norm vectors, those of custom layers), not
    BatchNorm's momentum: the first evaluation updates them as in plain training, and after the last one they are
    put back to that state, whether they were changed in place or replaced.

    Args:
        module: The module to guard; None guards nothing.
    """

    def __init__(self, module: nn.Module | None) -> None:
        self.module = module
        self._slots: list[tuple[nn.Module, str, Tensor]] = []
        self._saved: list[Tensor] = []
        self._is_holding = False

    def hold(self) -> None:
        """Remember all buffers as they are now; does nothing when they are held already."""
        if self.module is None or self._is_holding:
            return
        slots = [
            (owner, name, buffer)
            for owner in self.module.modules()
            for name, buffer in owner._buffers.items()
            if buffer is not None
        ]
        if not _same_tensors(slots, self._slots):
            self._saved = [torch.empty_like(buffer) for _, _, buffer in slots]
        self._slots = slots
        if slots:
            torch._foreach_copy_(self._saved, [buffer for _, _, buffer in slots])
        self._is_holding = True

    def release(self) -> None:
        """Put the remembered state back; does nothing when nothing is held."""
        if not self._is_holding:
            return
        for owner, name, buffer in self._slots:
            if owner._buffers.get(name) is not buffer:
                owner._buffers[name] = buffer
        if self._slots:
            torch._foreach_copy_([buffer for _, _, buffer in self._slots], self._saved)
        self._is_holding = False

    def __getstate__(self) -> dict[str, object]:
        return {"module": self.module}

    def __setstate__(self, state: dict[str, nn.Module | None]) -> None:
        self.__init__(state["module"])  # type: ignore[misc]


class RandomGuard:
    """Let every evaluation of a step draw the same random numbers (one dropout mask per step).

    After the step the generators stand where the first evaluation left them, so a step consumes as much randomness
    as in plain training.

    Args:
        is_enabled: Whether to replay at all.
    """

    def __init__(self, is_enabled: bool) -> None:
        self.is_enabled = is_enabled
        self._devices: list[torch.device] = []
        self._before: list[Tensor] = []
        self._after: list[Tensor] = []

    def start(self, devices: Iterable[torch.device]) -> None:
        """Remember the generators before the first evaluation."""
        if self.is_enabled:
            accelerators = {device for device in devices if device.type not in ("cpu", "meta")}
            self._devices = [torch.device("cpu"), *accelerators]
            self._before, self._after = _random_states(self._devices), []

    def replay(self) -> None:
        """Rewind the generators for a further evaluation."""
        if self._before:
            self._after = self._after or _random_states(self._devices)
            _set_random_states(self._devices, self._before)

    def release(self) -> None:
        """Put the generators where the first evaluation left them."""
        if self._after:
            _set_random_states(self._devices, self._after)
        self._before, self._after = [], []


def _same_tensors(left: list[tuple[nn.Module, str, Tensor]], right: list[tuple[nn.Module, str, Tensor]]) -> bool:
    return len(left) == len(right) and all(
        a[2] is b[2] and a[2].shape == b[2].shape for a, b in zip(left, right, strict=True)
    )


def _random_states(devices: list[torch.device]) -> list[Tensor]:
    return [
        torch.get_rng_state() if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)
        for device in devices
    ]


def _set_random_states(devices: list[torch.device], states: list[Tensor]) -> None:
    for device, state in zip(devices, states, strict=True):
        if device.type == "cpu":
            torch.set_rng_state(state)
        else:
            torch.get_device_module(device).set_rng_state(state, device)
