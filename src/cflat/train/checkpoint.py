"""Checkpoints that are whole and unchanged or not used at all, and load without running code.

The name of a file holds the hash of its content, ``000012-9f86d081884c7d65.pt``: whatever happens to a byte of it is
noticed before anything is loaded, and name and content appear together when the finished file is renamed.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from cflat._errors import CFlatError, DataError
from cflat._files import open_regular, require_unpacked, sync_folder
from cflat._machine import is_out_of_memory

logger = logging.getLogger(__name__)

VERSION = 3
KEPT = 2
BLOCK_BYTES = 1 << 20
_NAME = re.compile(r"(\d{6,18})-([0-9a-f]{16})\.pt", re.ASCII)
_SHAPES: dict[str, Callable[[torch.Size], torch.Size]] = {
    # One number; mu_product is NAdam's, eta and mu are ASGD's.
    **dict.fromkeys(("step", "mu_product", "eta", "mu"), lambda shape: torch.Size()),
    # Adafactor's second moments, over the last dimension and over the one before.
    "row_var": lambda shape: torch.Size((*shape[:-1], 1)),
    "col_var": lambda shape: torch.Size((*shape[:-2], 1, shape[-1])),
}
"""What torch's optimizers keep of a parameter in a shape that is not the parameter's, with that shape."""
_TEMPORARY = re.compile(r"\d+\.tmp-\d+", re.ASCII)


class _DamagedError(DataError):
    """Corrupt checkpoint; fall back to the previous one."""


class _Found(NamedTuple):
    number: int
    digest: str
    path: Path


class CheckpointStore:
    """The checkpoints of one run, numbered; the newest two that are good are kept.

    A file appears under its name only when it is complete and on disk, so a kill at any moment leaves the last good
    one in place; should it be damaged later, the one before is used. Other files in the folder are left alone. It is
    made when the first is saved, in a folder that must exist.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.newest: Path | None = None
        """What was saved or loaded last."""
        self._damaged: set[Path] = set()

    def save(self, state: dict[str, Any]) -> Path:
        """Write a checkpoint, then remove those that it replaces; if a full disk rejects it, the old ones are kept."""
        before = self._found()
        number = before[-1].number + 1 if before else 1
        temporary = self.folder / f"{number:06d}.tmp-{os.getpid()}"
        try:
            # Without parents: a run directory that was removed during the run must not be made again.
            self.folder.mkdir(exist_ok=True)
            self._remove(temporary)
            with temporary.open("xb") as file:  # never through a link
                # torch.save only appends to a file object, so the running hash is that of the finished file.
                writer = _HashingWriter(file)
                torch.save({"version": VERSION, **state}, writer)  # type: ignore[arg-type]
                file.flush()
                os.fsync(file.fileno())
            path = self.folder / f"{number:06d}-{writer.digest.hexdigest()}.pt"
            temporary.replace(path)
            sync_folder(self.folder)
        except (OSError, RuntimeError) as error:
            self._remove(temporary)
            reason = getattr(error, "strerror", None) or str(error).partition("\n")[0]
            raise DataError(f"A checkpoint in {str(self.folder)!r} cannot be written: {reason}.") from error
        good = [found.path for found in before if found.path not in self._damaged]
        for old in (*good[: len(good) + 1 - KEPT], *self._damaged):
            self._remove(old)
        self._damaged.clear()
        self.newest = path
        return path

    def load(self) -> dict[str, Any] | None:
        """Return the newest checkpoint that is unchanged, or None if there never was one."""
        found = self._found()
        for one in reversed(found):
            try:
                state = _read(one)
            except _DamagedError as error:
                self._damaged.add(one.path)
                logger.warning("%s The one before is used, if there is one.", error)
                continue
            self.newest = one.path
            return state
        if found:
            raise DataError(
                f"No checkpoint in {str(self.folder)!r} can be used: all are damaged; restart the run from scratch."
            )
        return None

    def read(self, name: str) -> dict[str, Any]:
        """Return the checkpoint of this name, which another rank has chosen."""
        for one in self._found():
            if one.path.name == name:
                self.newest = one.path
                return _read(one)
        raise DataError(
            f"Rank 0 resumes from the checkpoint {name!r}, which this rank does not find in {str(self.folder)!r}; all "
            "ranks must see the same run directory."
        )

    def remove_leftovers(self) -> None:
        """Remove what writers that were killed have left; for the owner of the folder, before the first save."""
        for name in self._names():
            if _TEMPORARY.fullmatch(name):
                self._remove(self.folder / name)

    def _found(self) -> list[_Found]:
        matches = [match for match in map(_NAME.fullmatch, self._names()) if match]
        found = (_Found(int(match[1]), match[2], self.folder / match[0]) for match in matches)
        return sorted(one for one in found if one.path.is_file())

    def _names(self) -> list[str]:
        try:
            return os.listdir(self.folder)
        except (FileNotFoundError, NotADirectoryError):
            return []

    def _remove(self, path: Path) -> None:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            logger.warning("%s cannot be removed: %s.", path, error.strerror)


def require_same(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise a `DataError` if a run is to be resumed as another one; compares what decides the result, by dotted key."""
    for key in {**before, **now}:
        if before.get(key) != now.get(key):
            raise DataError(
                f"This run was begun with {key} = {before.get(key)!r:.200}, but now it is {now.get(key)!r:.200}: going "
                "on would mix two runs. Change it back, or start a run of its own."
            )


@contextmanager
def translate_load_errors() -> Iterator[None]:
    """Translate errors while a state is loaded into a `DataError`: the checkpoint is not of this run."""
    try:
        yield
    except CFlatError:
        raise
    except Exception as error:  # an edited file can be wrong in more ways than can be listed
        has_ranks = torch.distributed.is_available() and torch.distributed.is_initialized()
        has_lost_rank = has_ranks and isinstance(error, RuntimeError)  # as collectives fail when a rank has ended
        if is_out_of_memory(error) or has_lost_rank:
            raise
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise DataError(
            f"The checkpoint does not fit this run ({reason:.200}); restart the run from scratch."
        ) from error


def require_plain(state: Any, *, is_finite: bool = False, name: str = "", seen: set[int] | None = None) -> None:
    """Reject tensors that are not plain numbers in memory, or that training cannot continue with, at any depth.

    One that is spread over fewer numbers than it shows would fill the memory as soon as something is computed with it.
    """
    seen = set() if seen is None else seen
    if id(state) in seen:  # a file can refer to one value any number of times
        return
    seen.add(id(state))
    if isinstance(state, Mapping | list | tuple):
        members = state.items() if isinstance(state, Mapping) else enumerate(state)
        for key, member in members:
            require_plain(member, is_finite=is_finite, name=f"{name}.{key}".lstrip("."), seen=seen)
    if not isinstance(state, Tensor):
        return
    if state.layout != torch.strided or state.is_meta or state.is_quantized or state.is_complex():
        raise DataError(f"{name} is no tensor of plain numbers; restart the run from scratch.")
    if state.nbytes > state.untyped_storage().nbytes():
        raise DataError(f"{name} shows more numbers than it holds; restart the run from scratch.")
    if is_finite and state.is_floating_point() and not state.isfinite().all():
        raise DataError(
            f"The checkpoint holds NaN or infinity in {name}: the training has diverged. Restart the run from "
            "scratch with a smaller base.lr."
        )


def require_state_of(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Raise a ``ValueError`` unless ``state`` could be a later one of this new optimizer: torch takes over anything.

    Groups have the settings of the optimizer's own, of the same kinds, and what is kept for a parameter has its shape:
    another shape might be broadcast silently.
    """
    groups, entries = state["param_groups"], state["state"]
    for own, group in zip(optimizer.param_groups, groups, strict=True):
        for key in own.keys() - {"params"}:
            if _kind(own[key]) != _kind(group[key]):
                raise ValueError(f"{key} of a group of parameters is {group[key]!r:.80} instead of {own[key]!r:.80}")
        for index, param in zip(group["params"], own["params"], strict=True):
            for key, value in entries.get(index, {}).items():
                shape = _SHAPES.get(key, torch.Size)(param.shape)
                if value is not None and (not isinstance(value, Tensor) or value.shape != shape):
                    raise ValueError(f"{key} of a parameter of shape {tuple(param.shape)} is {value!r:.80}")
                if value is not None and not value.isfinite().all():
                    raise ValueError(f"{key} of a parameter holds NaN or infinity")
    if not set(entries) <= {index for group in groups for index in group["params"]}:
        raise ValueError("something is kept for parameters that are in no group")


def _kind(value: Any) -> Any:
    """Return what must not change about a setting whose value may."""
    if isinstance(value, Tensor):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [_kind(member) for member in value]
    is_number = isinstance(value, float | int) and not isinstance(value, bool)
    return math.isfinite(value) if is_number else value


def _read(found: _Found) -> dict[str, Any]:
    """Return a checkpoint whose content is what was written; another is damaged."""
    name = f"The checkpoint {str(found.path)!r}"
    try:
        digest = content_hash()
        with open_regular(found.path) as file:
            while block := file.read(BLOCK_BYTES):
                digest.update(block)
            if digest.hexdigest() != found.digest:
                raise _DamagedError(f"{name} is damaged: its content is not what was written.")
            require_unpacked(file)
            state = torch.load(file, map_location="cpu", weights_only=True)
    except _DamagedError:
        raise
    except Exception as error:  # what torch cannot load fails in many ways
        raise _DamagedError(f"{name} cannot be read ({type(error).__name__}).") from error
    if not isinstance(state, dict) or not isinstance(state.get("version"), int):
        raise _DamagedError(f"{name} holds no state of a run.")
    # No `_DamagedError`: `load` would pass over it and resume from an older state.
    if state["version"] != VERSION:
        raise DataError(f"{name} was written by another version of cflat; restart the run from scratch.")
    return state


def content_hash() -> hashlib.blake2b:
    """Return the hash whose digest is part of a checkpoint's name."""
    # It finds damage, not forgery: eight bytes are enough, and keep names short.
    return hashlib.blake2b(digest_size=8)


class _HashingWriter:
    """A file that hashes what is written to it."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.digest = content_hash()

    def write(self, block: bytes) -> int:
        self.digest.update(block)
        return self.file.write(block)

    def flush(self) -> None:
        self.file.flush()
