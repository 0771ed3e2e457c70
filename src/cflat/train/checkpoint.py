"""Checkpoints that are whole and unchanged or not used at all, and load without running code.

The name of a file holds the hash of its content, ``000012-9f86d081884c7d65.pt``: whatever happens to a byte of it is
noticed before anything is loaded, and name and content appear together when the finished file is renamed.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from cflat._errors import DataError
from cflat._files import sync_folder

logger = logging.getLogger(__name__)

VERSION = 2
KEPT = 2
BLOCK_BYTES = 1 << 20
_NAME = re.compile(r"(\d{6,18})-([0-9a-f]{16})\.pt", re.ASCII)
_FIRST_RELEASE = re.compile(r"\d{6}\.pt", re.ASCII)
_TEMPORARY = re.compile(r"\d+\.tmp-\d+", re.ASCII)


class _DamagedError(DataError):
    """The one before may be good."""


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
        """Write a checkpoint, then remove those that it replaces; if a full disk refuses it, the old ones are kept."""
        before = self._found()
        number = before[-1].number + 1 if before else 1
        temporary = self.folder / f"{number:06d}.tmp-{os.getpid()}"
        try:
            self.folder.mkdir(exist_ok=True)
            with temporary.open("wb") as file:
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
            raise DataError(f"No checkpoint in {str(self.folder)!r} can be used: all are damaged; start the run anew.")
        if any(_FIRST_RELEASE.fullmatch(name) for name in self._names()):
            raise DataError(
                f"The checkpoints in {str(self.folder)!r} were written by the first release of cflat, which this one "
                "cannot go on from; start the run anew, or finish it with cflat 0.1."
            )
        return None

    def read(self, name: str) -> dict[str, Any]:
        """Return the checkpoint of this name, which another rank has chosen."""
        for one in self._found():
            if one.path.name == name:
                self.newest = one.path
                return _read(one)
        raise DataError(
            f"Rank 0 goes on from the checkpoint {name!r}, which this rank does not find in {str(self.folder)!r}; all "
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
    """Refuse to go on with another run than the one that was begun, by what decides it, under dotted keys.

    Settings that are newer than the checkpoint are not compared here.
    """
    for key in before:
        if before[key] != now.get(key):
            raise DataError(
                f"This run was begun with {key} = {before.get(key)!r:.200}, but now it is {now.get(key)!r:.200}: going "
                "on would mix two runs. Change it back, or start a run of its own."
            )


def require_finite(state: Mapping[str, Any]) -> None:
    """Refuse weights that training cannot go on with."""
    for name, value in state.items():
        if isinstance(value, Tensor) and value.is_floating_point() and not value.isfinite().all():
            raise DataError(
                f"The checkpoint holds NaN or infinity in {name}: the training has diverged. Start it anew with a "
                "smaller base.lr."
            )


def _read(found: _Found) -> dict[str, Any]:
    """Return a checkpoint whose content is what was written; another is damaged."""
    name = f"The checkpoint {str(found.path)!r}"
    try:
        digest = _hash()
        with found.path.open("rb") as file:
            while block := file.read(BLOCK_BYTES):
                digest.update(block)
            if digest.hexdigest() != found.digest:
                raise _DamagedError(f"{name} is damaged: its content is not what was written.")
            file.seek(0)
            state = torch.load(file, map_location="cpu", weights_only=True)
    except _DamagedError:
        raise
    except Exception as error:  # what torch cannot load fails in many ways
        raise _DamagedError(f"{name} cannot be read ({type(error).__name__}).") from error
    if not isinstance(state, dict) or not isinstance(state.get("version"), int):
        raise _DamagedError(f"{name} holds no state of a run.")
    if state["version"] != VERSION:
        raise DataError(f"{name} was written by another version of cflat; start the run anew.")
    return state


def _hash() -> hashlib.blake2b:
    return hashlib.blake2b(digest_size=8)


class _HashingWriter:
    """A file that hashes what is written to it."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.digest = _hash()

    def write(self, block: bytes) -> int:
        self.digest.update(block)
        return self.file.write(block)

    def flush(self) -> None:
        self.file.flush()
