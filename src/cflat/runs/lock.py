"""`owned`: one process at a time writes to a folder.

The lock is the operating system's, on a file in the folder: it ends with its owner, however that ends, and holds
between hosts wherever the file system passes locks on (NFS does). The file itself stays; it says who the owner is.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import platform
import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

from cflat._errors import DataError
from cflat._files import remove_leftovers

logger = logging.getLogger(__name__)

NAME = ".lock"
POLL_SECONDS = 0.2
MAX_COMMAND = 200
"""Characters of a command line that a message repeats."""
FAR = 1 << 30
"""Windows locks bytes against reading, too: one that is never written leaves the content readable."""
_HELD = (errno.EACCES, errno.EAGAIN, errno.EDEADLK)


class FolderInUse(DataError):
    """Another process works in the folder."""


@contextmanager
def owned(folder: Path, patience: float = 0.0) -> Iterator[None]:
    """Own a folder, and clear away what killed writers have left in it; `FolderInUse` names another owner.

    ``patience`` is how many seconds to wait for that one to go: after a crash, another host may hear of it late.
    A folder that was not there is made, and goes again if it stays empty.
    """
    path = folder / NAME
    try:
        is_new = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o666)
    except OSError as error:
        raise DataError(f"The folder {str(folder)!r} cannot be made or written: {error.strerror}.") from error
    try:
        _acquire(handle, folder, patience)
        _require_in_place(handle, path)
        since = datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
        told = {"process": os.getpid(), "host": platform.node(), "since": since, "command": _command()}
        _write(handle, json.dumps(told))
        remove_leftovers(folder)
        try:
            yield
        finally:
            _write(handle, "")
            with suppress(OSError):
                if is_new and os.listdir(folder) == [NAME]:
                    path.unlink()
                    folder.rmdir()
    finally:
        os.close(handle)  # ends the lock, too


def refuse_if_owned(folder: Path) -> None:
    """Raise if another process owns a folder; nothing is made or changed."""
    with suppress(OSError):
        handle = os.open(folder / NAME, os.O_RDWR | getattr(os, "O_CLOEXEC", 0))
        try:
            _acquire(handle, folder, 0.0)
        finally:
            os.close(handle)


def _acquire(handle: int, folder: Path, patience: float) -> None:
    give_up = time.monotonic() + patience
    while not _try_lock(handle, folder):
        if time.monotonic() >= give_up:
            raise FolderInUse(
                f"{str(folder)!r} is in use by {_owner(folder / NAME)}; wait until it is done, or stop it first."
            )
        time.sleep(POLL_SECONDS)


def _try_lock(handle: int, folder: Path) -> bool:
    """Take the lock, or return False if another has it; where there are no locks, say so and go on."""
    try:
        if sys.platform == "win32":
            import msvcrt

            os.lseek(handle, FAR, os.SEEK_SET)
            msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _HELD:
            return False
        text = "The file system of %s has no locks (%s): see to it that only one process uses the folder."
        logger.warning(text, folder, error.strerror)
    return True


def _require_in_place(handle: int, path: Path) -> None:
    """Refuse a lock on a file that is no longer the folder's: somebody removed the folder while we waited."""
    with suppress(OSError):
        if os.path.samestat(os.fstat(handle), path.stat()):
            return
    raise DataError(f"The folder {str(path.parent)!r} was removed while we waited for it; try again.")


def _write(handle: int, text: str) -> None:
    """Replace the content of the file; nobody depends on it, so a full disk is no reason to stop."""
    with suppress(OSError):
        os.ftruncate(handle, 0)
        os.lseek(handle, 0, os.SEEK_SET)
        os.write(handle, text.encode(errors="replace"))


def _command() -> str:
    """Return the command line if it is ours; those of others may hold what is nobody's business."""
    program = Path(sys.argv[0]).name if sys.argv else ""
    is_ours = program in ("cflat", "cflat.exe") or (program == "__main__.py" and "cflat" in Path(sys.argv[0]).parts)
    return shlex.join(["cflat", *sys.argv[1:]])[:MAX_COMMAND] if is_ours else program or "python"


def _owner(path: Path) -> str:
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        return f"process {told['process']} on {told['host']} since {told['since']} ({told['command']})"
    except (OSError, ValueError, KeyError, TypeError):  # it has begun, or ended, this very moment
        return "another process"
