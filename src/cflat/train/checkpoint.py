"""Checkpoints that are either whole or absent, and load without running code."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import torch

from cflat._errors import DataError

__all__ = ["CheckpointStore"]

logger = logging.getLogger(__name__)

_VERSION = 1
_KEPT = 2


class CheckpointStore:
    """The checkpoints of one run, numbered; the newest two are kept.

    A file appears under its name only when it is complete and on disk, so a kill at any moment leaves the last good
    one in place; should it be damaged later, the one before is used.

    Args:
        folder: Where the files lie; made when the first is saved.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def save(self, state: dict[str, Any]) -> Path | None:
        """Write a checkpoint; on a full or failing disk say so, keep the old ones and return None."""
        numbers = self._numbers()
        path = self.folder / f"{(numbers[-1] if numbers else 0) + 1:06d}.pt"
        temporary = path.with_suffix(f".tmp-{os.getpid()}")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with temporary.open("wb") as file:
                torch.save({"version": _VERSION, **state}, file)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
            self._sync_folder()
        except (OSError, RuntimeError) as error:
            temporary.unlink(missing_ok=True)
            logger.warning("Could not save checkpoint %s (%s); training goes on with the one before.", path, error)
            return None
        for number in numbers[: 1 - _KEPT] if len(numbers) >= _KEPT else []:
            (self.folder / f"{number:06d}.pt").unlink(missing_ok=True)
        return path

    def load(self) -> dict[str, Any] | None:
        """Return the newest checkpoint that can be read, or None if there never was one.

        Raises:
            DataError: If there are checkpoints but none can be read.
        """
        numbers = self._numbers()
        problems = []
        for number in reversed(numbers):
            path = self.folder / f"{number:06d}.pt"
            try:
                state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
            except Exception as error:  # a damaged file can fail in many ways; the one before may be good
                problems.append(f"{path.name}: {type(error).__name__}")
                logger.warning("Checkpoint %s cannot be read (%s); trying the one before.", path, error)
                continue
            if state.get("version") != _VERSION:
                raise DataError(f"{path} was written by another version of cflat; start the run anew.")
            return state
        if problems:
            raise DataError(f"No checkpoint in {self.folder} can be read ({'; '.join(problems)}); start the run anew.")
        return None

    def _numbers(self) -> list[int]:
        return sorted(int(path.stem) for path in self.folder.glob("*.pt") if path.stem.isdigit())

    def _sync_folder(self) -> None:
        """Make the new name itself durable."""
        handle = os.open(self.folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
