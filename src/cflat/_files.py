"""Write files so that a crash leaves the old one or the new one, never half of either."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from cflat._errors import DataError

__all__ = ["plain_values", "write_atomic", "write_json"]


def write_atomic(path: Path, content: bytes | str | Callable[[BinaryIO], object]) -> None:
    """Replace ``path`` in one step: write a temporary file beside it, flush it to the disk, rename it.

    Args:
        path: The file to write; its folder must exist.
        content: Bytes, text, or a function that writes to the open file.

    Raises:
        DataError: If the disk is full or the folder cannot be written; ``path`` is then unchanged.
    """
    # One name per process: two writers never share a temporary file, and a leftover is overwritten, not piled up.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            if callable(content):
                content(file)
            else:
                file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _sync_folder(path.parent)
    except OSError as error:
        raise DataError(f"{str(path)!r} could not be written: {error.strerror or error}.") from error
    finally:
        with suppress(OSError):
            temporary.unlink()


def write_json(path: Path, values: Any) -> None:
    """Replace ``path`` in one step by the values as JSON; numbers that are not finite become null."""
    write_atomic(path, json.dumps(plain_values(values), indent=2, allow_nan=False) + "\n")


def _sync_folder(folder: Path) -> None:
    """Make the rename itself survive a power cut, where the system can (not on Windows)."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def plain_values(value: Any) -> Any:
    """Return what JSON can hold: numbers that are not finite become null, tuples lists, keys text."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): plain_values(member) for key, member in value.items()}
    return [plain_values(member) for member in value] if isinstance(value, list | tuple) else value
