"""The memory of this machine."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def free_memory() -> int | None:
    """Return the bytes that this process can still allocate; None if the system does not report it."""
    limits: list[int] = []
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        limits.append(1024 * int(next(line for line in lines if line.startswith("MemAvailable")).split()[1]))
    with suppress(OSError, ValueError):  # in a container
        limits.append(free_in_container(Path("/sys/fs/cgroup")))
    return min(limits) if limits else all_memory()


def free_in_container(cgroup: Path) -> int:
    """Return the bytes that a container may still allocate; raises ``ValueError`` if it has no limit ("max")."""
    limit, current = (int((cgroup / f"memory.{name}").read_text(encoding="ascii")) for name in ("max", "current"))
    counts = dict(line.split() for line in (cgroup / "memory.stat").read_text(encoding="ascii").splitlines())
    # Files that were read stay in memory until something else needs it, and count as used all the while.
    return limit - current + int(counts.get("inactive_file", 0))


def all_memory() -> int | None:
    """Return the bytes of memory of this machine; None if the system does not report it."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # not on Windows
        return None


def gib(size: int) -> str:
    """Return a number of bytes in GiB.

    >>> gib(3 << 29)
    '1.5 GiB'
    """
    return f"{size / (1 << 30):.1f} GiB"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error of Python or torch means that memory ran out."""
    # Torch raises RuntimeError with these words; only CUDA has a type of its own.
    words = ("can't allocate memory", "cannot allocate memory", "not enough memory", "out of memory")
    return isinstance(error, MemoryError) or any(text in str(error).lower() for text in words)
