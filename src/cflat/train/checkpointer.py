"""`Checkpointer`: when a run is saved, and how it is restored and stopped.

Everything random is a function of (seed, position). A checkpoint therefore holds weights, optimizer state and a
position, and a run that was killed anywhere ends with the same bits as one that was not. Checkpoints are taken between
steps and at the borders of phases and tasks; what a method does at those borders is repeated on resume, never saved
halfway.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from cflat._errors import CFlatError, DataError
from cflat.train.checkpoint import CheckpointStore, require_same, translate_load_errors
from cflat.train.runtime import Runtime
from cflat.train.shards import gather_whole

logger = logging.getLogger(__name__)

CHEAP_BYTES = 64 << 20
"""A smaller checkpoint is written at every border of a phase or a task."""
SAVING_FRACTION = 0.1
"""Larger ones take no more than this fraction of the time."""


class TrainingInterrupted(CFlatError):
    """The run was asked to stop; its state is saved if it has a folder."""


class StateNotSaved(CFlatError):
    """The run was asked to stop, and what it has trained is lost."""


class Checkpointer:
    """Save the state of a run often enough, restore it, and stop it when its state is safe.

    Args:
        folder: The run directory; None saves nothing.
        runtime: All ranks take part; rank 0 writes.
        minutes: Minutes between checkpoints within a task.
        identity: What decides the result, by dotted key: a checkpoint with another value is rejected.
    """

    def __init__(self, folder: Path | None, runtime: Runtime, minutes: float, identity: Mapping[str, Any]) -> None:
        self.store = CheckpointStore(folder / "checkpoints") if folder is not None else None
        self.runtime = runtime
        self.minutes = minutes
        self.identity = dict(identity)
        self.has_unsaved_steps = False
        """Set by the trainer after each step."""
        self.is_postponed = False
        """Whether the last border was not saved; a stop then waits for the end of the task."""
        self._saved_at = time.monotonic()
        self._saving_seconds = 0.0
        self._problem: str | None = None

    @property
    def is_due(self) -> bool:
        """Whether the last checkpoint is old enough; rank 0 decides."""
        return self.runtime.is_main and time.monotonic() - self._saved_at >= 60 * self.minutes

    def save(self, tensors: Mapping[str, Any], rest: Callable[[], Mapping[str, Any]]) -> Path | None:
        """Write a checkpoint; if that fails, training continues and None is returned.

        All ranks must call it with their ``tensors``, which may be spread over them; rank 0 adds the ``rest``.
        """
        started = time.monotonic()
        path = self._write(tensors, rest)
        # After a failure as well: the next attempt is due after `minutes`, not at the next step.
        self._saved_at = time.monotonic()
        self._saving_seconds = self._saved_at - started
        self.has_unsaved_steps = self.is_postponed = False
        return path

    def should_postpone(self) -> bool:
        """Decide whether the checkpoint of a border can wait, where short tasks would be spent on large checkpoints."""
        # The first checkpoint is never postponed: its size is not known until it is written.
        newest = self.store.newest if self.store is not None else None
        is_large = newest is not None and newest.is_file() and newest.stat().st_size >= CHEAP_BYTES
        elapsed = time.monotonic() - self._saved_at
        # Ranks have clocks of their own, and would have to agree at every border.
        is_alone = self.runtime.world_size == 1
        self.is_postponed = is_large and is_alone and SAVING_FRACTION * elapsed < self._saving_seconds
        return self.is_postponed

    def _write(self, tensors: Mapping[str, Any], rest: Callable[[], Mapping[str, Any]]) -> Path | None:
        if self.store is None:
            return None
        if self.runtime.is_sharded:  # gathers: all ranks take part before the others leave
            tensors = gather_whole(tensors, keep=self.runtime.is_main)
        if not self.runtime.is_main:
            return None
        try:
            path = self.store.save({"identity": self.identity, **tensors, **rest()})
        except DataError as error:
            self._problem = str(error)
            logger.warning("%s Training continues; what is not saved is lost if it stops.", error)
            return None
        self._problem = None
        return path

    def restore(self, load: Callable[[dict[str, Any]], None]) -> None:
        """Give ``load`` the newest checkpoint, if there is one; it must be of this run."""
        if self.store is None:
            return
        with self.runtime.together():
            state = self.store.load() if self.runtime.is_main else None
        # Rank 0 chooses: a file system may show the newest checkpoint to others later.
        name = self.runtime.share(None if self.store.newest is None else self.store.newest.name)
        if name is None:
            return
        with self.runtime.together(), translate_load_errors():
            if state is None:
                state = self.store.read(name)
            else:  # rank 0 alone writes checkpoints, and its identity has all keys
                require_same(state["identity"], self.identity)
            load(state)

    def stop(self) -> NoReturn:
        """End the run, with an exception that is honest about what is saved."""
        if self.store is None:
            raise TrainingInterrupted("The run was asked to stop.")
        problem = self._problem
        # Without a checkpoint nothing was trained yet: a resumed run starts anew, in a directory that must be there.
        if problem is None and not (self.store.newest or self.store.folder.parent).exists():
            problem = f"{str(self.store.folder.parent)!r} was removed."
        problem = self.runtime.share(problem)  # rank 0 has saved; those that wait here end after that
        if problem is not None:
            raise StateNotSaved(f"The run was asked to stop, but what it has trained is lost: {problem}")
        raise TrainingInterrupted("The run was asked to stop; its state is saved.")
