"""Find the processes that work in a folder: workers change into the folder of the command that uses them."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def processes_in(folder: Path) -> list[int]:
    """Return the processes whose working folder this is, apart from this one; Linux only."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended meanwhile, or belongs to somebody else
            if (entry / "cwd").samefile(folder) and int(entry.name) != os.getpid():
                found.append(int(entry.name))
    return found
