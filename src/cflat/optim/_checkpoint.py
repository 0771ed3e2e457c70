"""States of optimizers as they come from files: what does not fit is rejected before anything is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cflat.optim._memory import DirectionMemory

VERSION = 3
"""Format of the wrapper's part of a state."""

_OPEN = ("/memories", "/telemetry/last", "/telemetry/cache_age")  # their keys depend on what has happened


def reject_foreign_state(given: Any, own: dict[str, Any]) -> None:
    """Raise ValueError unless ``given`` is a state like ``own``, which is the present one of the same optimizer."""
    if not isinstance(given, dict) or given.get("version") != VERSION:
        version = given.get("version") if isinstance(given, dict) else None
        raise ValueError(f"This state has the format {version}; this version of cflat reads the format {VERSION}.")
    if (given.get("class"), given.get("num_params")) != (own["class"], own["num_params"]):
        raise ValueError(
            f"This state belongs to a {given.get('class')} over {given.get('num_params')} parameters; this is a "
            f"{own['class']} over {own['num_params']}. Rebuild the same optimizer before loading."
        )
    path = _misfit(given, own, "")
    if path is not None:
        raise ValueError(f"This state is damaged: wrapper{path} is not what a {own['class']} saves there.")


def reject_foreign_tensors(state: Any, params: Sequence[Tensor]) -> None:
    """Raise ValueError if the base optimizer's state holds tensors that cannot belong to their parameters.

    Torch casts them silently: complex numbers lose a part, whole numbers become a momentum.
    """
    try:
        indices = [index for group in state["param_groups"] for index in group["params"]]
        entries = {index: dict(entry) for index, entry in state["state"].items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"This state is damaged: its 'state' or 'param_groups' cannot be read, {error!r}.") from error
    for index, param in zip(indices, params, strict=False):  # their number is checked by torch
        for name, value in entries.get(index, {}).items():
            if isinstance(value, Tensor) and value.shape == param.shape and value.dim() > 0:
                is_quantized = value.dtype in (torch.int8, torch.uint8)  # as 8-bit optimizers keep them
                if value.is_complex() > param.is_complex() or not (
                    value.is_floating_point() or value.is_complex() or is_quantized
                ):
                    raise ValueError(
                        f"This state is damaged: {name} of parameter {index} is {value.dtype}, but the parameter is "
                        f"{param.dtype}."
                    )


def load_memories(states: dict[str, Any], params: Sequence[Tensor]) -> dict[str, DirectionMemory]:
    """Return the remembered directions, moved to the devices of their parameters."""
    try:
        return {name: DirectionMemory.from_state(params, state) for name, state in states.items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f"This state is damaged: a direction in wrapper/memories cannot be loaded, {error}."
        ) from error


def _misfit(given: Any, own: Any, path: str) -> str | None:
    """Return where ``given`` is of another kind than ``own``, or None."""
    if isinstance(own, dict):
        if path in _OPEN:
            return None if isinstance(given, dict) else path
        if not isinstance(given, dict) or given.keys() != own.keys():
            return path
        found = [_misfit(given[key], value, f"{path}/{key}") for key, value in own.items()]
    elif isinstance(own, list | tuple):
        if not isinstance(given, list | tuple) or len(given) != len(own):
            return path
        found = [_misfit(one, value, f"{path}/{i}") for i, (one, value) in enumerate(zip(given, own, strict=True))]
    else:
        found = [None if _is_like(given, own) else path]
    return next(filter(None, found), None)


def _is_like(given: Any, own: Any) -> bool:
    """Return whether it is text where there is text, else a number or None; never a tensor."""
    if given is None or own is None:
        return given is None or isinstance(given, bool | int | float | str)
    return isinstance(given, str) if isinstance(own, str) else isinstance(given, bool | int | float)
