"""`owned`: one process at a time writes to a folder.

The lock is filelock's, on a file in the folder: it ends with its owner, however that ends, and holds between hosts
wherever the file system passes locks on (NFS does). A second file names the owner, for the message that others get.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

from filelock import FileLock, Timeout

from cflat._errors import CFlatError, DataError
from cflat._files import make_folder, open_in_place, read_text, remove_leftovers, write_json

logger = logging.getLogger(__name__)

LOCK, OWNER = ".lock", ".owner"
MAX_COMMAND = 200
"""Characters of a command line that a message repeats."""


class FolderInUse(DataError):
    """Another process works in the folder."""


@contextmanager
def owned(folder: Path, patience: float = 0.0) -> Iterator[None]:
    """Own a folder, and clear away what killed writers have left in it; `FolderInUse` names another owner.

    ``patience`` is how many seconds to wait for it: another host may notice a crash late. A folder that did not exist
    is made, and removed if it stays empty.
    """
    # Two processes may both find it absent; the lock decides.
    is_new = not folder.exists()
    make_folder(folder)
    lock = _acquired(folder, patience)
    since = datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
    with suppress(CFlatError):  # only a message needs the name: a full disk is no reason to stop
        owner = {"process": os.getpid(), "host": platform.node(), "since": since, "command": _command()}
        write_json(folder / OWNER, owner)
    remove_leftovers(folder)
    try:
        yield
    finally:
        with suppress(OSError):
            (folder / OWNER).unlink(missing_ok=True)
            # A rejected command leaves no folder behind.
            if is_new and os.listdir(folder) == [LOCK]:
                (folder / LOCK).unlink()
                folder.rmdir()
        lock.release()  # after the files: they are ours only while it is held


def reject_if_owned(folder: Path) -> None:
    """Raise if another process owns a folder; nothing is made or changed."""
    if (folder / LOCK).is_file():
        _acquired(folder, 0.0).release()


def _acquired(folder: Path, patience: float) -> FileLock:
    """Return the lock of a folder, taken; where the file system has no locks, log that and continue without."""
    path = folder / LOCK
    try:
        os.close(open_in_place(path))  # raises for links and pipes, which older versions of filelock follow
    except OSError as error:
        place = f" ({path.name})" if error.filename == str(path) else ""
        raise DataError(f"The folder {str(folder)!r} cannot be made or written: {error.strerror}{place}.") from error
    lock = FileLock(path, timeout=patience, poll_interval=0.2)
    try:
        lock.acquire()
    except Timeout:
        raise FolderInUse(
            f"{str(folder)!r} is in use by {_owner(folder / OWNER)}; wait until it is done, or stop it first."
        ) from None
    except (OSError, NotImplementedError) as error:
        text = "The file system of %s has no locks (%s): make sure that only one process uses the folder."
        logger.warning(text, folder, getattr(error, "strerror", None) or error)
    return lock


def _command() -> str:
    """Return the command line if it is ours; those of other programs may hold secrets."""
    program = Path(sys.argv[0]).name if sys.argv else ""
    is_ours = program in ("cflat", "cflat.exe") or (program == "__main__.py" and "cflat" in Path(sys.argv[0]).parts)
    return shlex.join(["cflat", *sys.argv[1:]])[:MAX_COMMAND] if is_ours else program or "python"


def _owner(path: Path) -> str:
    try:
        owner = json.loads(read_text(path))
        return f"process {owner['process']} on {owner['host']} since {owner['since']} ({owner['command']})"
    except (OSError, ValueError, KeyError, TypeError):  # it has just begun or ended
        return "another process"
