"""Read untrusted files, and write files in one step: a crash leaves the old one or the new one, never half."""

from __future__ import annotations

import csv
import errno
import io
import json
import math
import os
import re
import stat
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from cflat._errors import CFlatError, DataError, shortened

MAX_TEXT_BYTES = 256 << 20
"""Upper bound of a text file; a larger one is a mistake, or would not fit into memory once it is parsed."""
_LEFTOVER = re.compile(r"\..+\.(\d+)\.tmp|.+\.tmp-(\d+)", re.ASCII)
"""Temporary files with the process that wrote them, as `write_atomic` and checkpoints name them."""


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading; all else, such as a pipe, could block for ever and raises an ``OSError``."""
    return os.fdopen(_open(path, os.O_RDONLY), "rb")


def open_in_place(path: Path) -> int:
    """Return the descriptor of a file that is changed where it lies, and made if it is not there.

    Links, symbolic or hard, raise an ``OSError``, as pipes do: their targets are not ours to change.
    """
    if path.is_symlink():
        raise OSError(errno.ELOOP, "it is a link, which cflat did not make", str(path))
    handle = _open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0))
    if os.fstat(handle).st_nlink > 1:
        os.close(handle)
        raise OSError(errno.EMLINK, "it is a hard link, which cflat did not make", str(path))
    return handle


def _open(path: Path, flags: int) -> int:
    # Without O_NONBLOCK, opening a pipe waits for its writer before anything can be checked.
    handle = os.open(path, flags | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0), 0o666)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return handle


def reject_links(*folders: Path) -> None:
    """Raise a `DataError` for a link among the entries of folders that cflat writes to."""
    for path in (path for folder in folders if folder.is_dir() for path in folder.iterdir()):
        if path.is_symlink():
            raise DataError(
                f"{str(path)!r} is a link, which cflat did not make: writing there would change files elsewhere. Put a "
                "copy in its place, or remove it."
            )


@contextmanager
def translate_read_errors(path: str | Path, what: str) -> Iterator[None]:
    """Turn whatever goes wrong inside into a `DataError`: the file at ``path`` is not ``what`` it should be.

    For untrusted files, which can be wrong in more ways than can be listed.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, DataError) and str(path) in str(error):  # it names the file already
            raise
        reason = str(error) if isinstance(error, CFlatError) else f"{type(error).__name__}: {error}".rstrip(": ")
        reason = shortened(" ".join(reason.split()), 300).rstrip(".")
        raise DataError(f"{str(path)!r} is not {what} ({reason}).") from error


def require_unpacked(file: BinaryIO) -> None:
    """Raise a ``ValueError`` for a file that ``torch.save`` has not written, or that holds more than its own size.

    Torch compresses nothing: members that are packed, or that share their bytes, could grow without limit.
    """
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    if not zipfile.is_zipfile(file):
        raise ValueError("it is no archive of torch.save")
    with zipfile.ZipFile(file) as archive:
        if sum(member.file_size for member in archive.infolist()) > size:
            raise ValueError("it is packed, which torch.save never does")
    file.seek(0)


def read_text(path: Path, max_bytes: int = MAX_TEXT_BYTES) -> str:
    """Return the text of a regular UTF-8 file; one that is too large raises an ``OSError``."""
    with open_regular(path) as file:
        content = file.read(max_bytes + 1)  # st_size is 0 for files of /proc, and others may grow
    if len(content) > max_bytes:  # read one byte more to find out
        raise OSError(errno.EFBIG, f"it is larger than {max_bytes >> 20} MiB", str(path))
    return content.decode("utf-8")


def write_atomic(path: Path, content: bytes | str | Callable[[BinaryIO], object]) -> None:
    """Replace ``path`` in one step: write a temporary file beside it, flush it to the disk, rename it.

    ``content`` is bytes, text, or a function that writes to the open file. The folder must exist; if it cannot be
    written, or the disk is full, a `DataError` is raised and ``path`` is unchanged.
    """
    # One name per process: two writers never share a temporary file, and a leftover is overwritten, not piled up.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.unlink(missing_ok=True)
        with temporary.open("xb") as file:  # never through a link
            if callable(content):
                content(file)
            else:
                # File names may hold bytes that are no UTF-8, which Python keeps as lone surrogates.
                file.write(content.encode(errors="backslashreplace") if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())  # before the rename: else a power cut may leave an empty file
        os.replace(temporary, path)
        sync_folder(path.parent)
    except (OSError, RuntimeError) as error:  # torch's writer raises RuntimeError on a full disk
        reason = getattr(error, "strerror", None) or str(error).partition("\n")[0].rstrip(".")
        raise DataError(f"{str(path)!r} could not be written: {reason}.") from error
    finally:
        with suppress(OSError):
            temporary.unlink()


def make_folder(folder: Path) -> None:
    """Make a folder and its parents unless it exists; raises a `DataError` with the reason."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"The folder {str(folder)!r} cannot be made: {error.strerror}.") from error


def write_json(path: Path, values: Any) -> None:
    """Replace ``path`` in one step by the values as JSON; numbers that are not finite become null."""
    # Strict: NaN is no JSON, and other languages reject it.
    write_atomic(path, json.dumps(plain_values(values), indent=2, allow_nan=False) + "\n")


def remove_leftovers(folder: Path) -> None:
    """Remove the temporary files of writers that were killed; those of living processes stay.

    Call it before the first write: a file with the number of this process is then of an earlier one that had it, too.
    """
    with suppress(OSError):
        for path in folder.iterdir():
            match = _LEFTOVER.fullmatch(path.name)
            if match and _is_gone(int(match[1] or match[2])):
                with suppress(OSError):
                    path.unlink()


def _is_gone(process: int) -> bool:
    """Whether this machine has no such process, apart from this one."""
    if process == os.getpid():
        return True
    if os.name == "nt":  # there, signal 0 would end it
        return False
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return True
    except OSError:
        pass  # it belongs to another user
    return False


def sync_folder(folder: Path) -> None:
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


def csv_text(rows: Iterable[Iterable[object]]) -> str:
    r"""Return rows of cells as CSV; None is an empty cell.

    >>> csv_text([["name", "avg"], ["a, b", None]])
    'name,avg\n"a, b",\n'
    """
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()
