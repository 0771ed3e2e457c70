"""Optimizers, methods and datasets from outside: installed packages, and files that a user names.

A plug-in is a module that registers something when it is imported. Installed ones are found by their entry points of
the group ``cflat.plugins``, when a name is looked up that is not here or all names are listed; modules and files are
named on the command line, ``--plugin my_sam.py``, or in ``$CFLAT_PLUGINS``, which processes started from here inherit.

Runs record the names and hashes of theirs, which are then loaded without being named again. A record may come from
anywhere, so it loads only plug-ins that this user has named before, with the same content.
"""

from __future__ import annotations

import hashlib
import logging
import os
import sys
import traceback
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from cflat._errors import ConfigError, DataError

GROUP = "cflat.plugins"
VARIABLE = "CFLAT_PLUGINS"

logger = logging.getLogger(__name__)
_loaded: dict[str, str] = {}
"""By dotted name or absolute path: the hash of the file."""
_files: set[str] = set()
"""Where the code of plug-ins lies, installed ones among them."""


def load_plugins(names: Iterable[str]) -> None:
    """Import modules by their dotted names and files that end in ``.py``, also in processes started from here.

    Raises:
        ConfigError: If one cannot be imported.
    """
    for given in names:
        name = str(Path(given).resolve()) if given.endswith(".py") else given
        if name in _loaded:
            continue
        # Before the import: a plug-in may look up names, which loads plug-ins.
        _loaded[name] = ""
        try:
            module = _import_file(Path(name)) if name.endswith(".py") else import_module(name)
        except Exception as error:  # a module can raise anything
            del _loaded[name]
            place = place_in_plugin(error)
            at = "" if place is None else f" ({place})"
            raise ConfigError(f"The plug-in {given!r} cannot be loaded{at}: {type(error).__name__}: {error}") from error
        _files.add(module.__file__ or name)
        _loaded[name] = _hash(module.__file__ or name)
        # Workers and Ray jobs are other processes, which inherit the environment.
        known = [one for one in os.environ.get(VARIABLE, "").split(os.pathsep) if one]
        os.environ[VARIABLE] = os.pathsep.join(dict.fromkeys([*known, name]))
        _remember(name)


def find_plugins() -> None:
    """Import what is installed under our group of entry points and what ``$CFLAT_PLUGINS`` names, each once."""
    _load_installed()
    load_plugins(name for name in os.environ.get(VARIABLE, "").split(os.pathsep) if name)


def loaded_plugins() -> list[dict[str, str]]:
    """Return names and hashes of the plug-ins that were named, for the record of a run."""
    return [{"name": name, "hash": digest} for name, digest in _loaded.items()]


def require_recorded(records: Any, where: str | Path) -> None:
    """Load the plug-ins that the run or file at ``where`` was made with, unless they are here already.

    Raises:
        DataError: If one is missing, has changed, or was never named by this user; the message has the reason.
    """
    for record in records if isinstance(records, list) else ():
        if not isinstance(record, Mapping) or not all(isinstance(record.get(key), str) for key in ("name", "hash")):
            raise DataError(f"{str(where)!r} has a record of plug-ins that cannot be read.")
        name, digest = record["name"], record["hash"]
        if digest in _loaded.values():
            continue
        if Path(name).name in {Path(one).name for one in _loaded}:  # without the folder: a file may have moved
            logger.warning("The plug-in %s is not the one that %s was made with; it is used as it is.", name, where)
            continue
        problem = _problem(name, digest)
        if problem is not None:
            raise DataError(f"{str(where)!r} was made with the plug-in {name!r}, which {problem}: --plugin FILE.py")
        load_plugins([name])


def _problem(name: str, digest: str) -> str | None:
    """Return why a recorded plug-in must be named to be loaded, if it must."""
    is_known = f"{digest} {name}" in _remembered()
    # A module only if it is known: finding it imports the packages around it.
    if is_known or name.endswith(".py"):
        file = _find(name)
        if file is None:
            return "does not exist; name the file where it is now"
        if _hash(file) != digest:
            return "has changed since; restore it, or name it to use it as it is"
    return None if is_known else "was never named on this account; look at it, then name it"


def _find(name: str) -> str | None:
    """Return the file of a plug-in, given by its path or as a module, or None if there is none."""
    if name.endswith(".py"):
        return name if Path(name).is_file() else None
    with suppress(Exception):  # the packages around it can raise anything
        spec = find_spec(name)
        return None if spec is None else spec.origin
    return None


def plugin_options() -> list[str]:
    """Return the options of a command line that needs the plug-ins of this one."""
    return [word for name in _loaded for word in ("--plugin", name)]


def is_from_plugin(cls: type) -> bool:
    """Whether a class was defined by a plug-in."""
    return getattr(sys.modules.get(cls.__module__), "__file__", None) in _files


def place_in_plugin(error: BaseException) -> str | None:
    """Return file and line of a plug-in that an error comes from, or None if it comes from elsewhere."""
    if isinstance(error, SyntaxError) and error.filename in _files:
        return f"{error.filename}, line {error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    places = [f"{frame.filename}, line {frame.lineno}" for frame in frames if frame.filename in _files]
    return places[-1] if places else None


@cache
def _load_installed() -> None:
    for entry in entry_points(group=GROUP):
        try:
            entry.load()
            _files.add(str(sys.modules[entry.module].__file__))
        except Exception as error:  # noqa: PERF203  # a broken package must not take the others with it
            logger.warning("The plug-in %s (%s) cannot be loaded: %s", entry.name, entry.value, error)


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise FileNotFoundError(f"{str(path)!r} does not exist")
    _files.add(str(path))  # before it is run, to locate errors in it
    name = f"cflat_plugin_{path.stem}"
    spec = spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look modules up there
    spec.loader.exec_module(module)
    return module


def _hash(path: str) -> str:
    with suppress(OSError):
        return hashlib.blake2b(Path(path).read_bytes(), digest_size=16).hexdigest()
    return ""


def _memory() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cflat" / "plugins.txt"


def _remembered() -> list[str]:
    with suppress(OSError, RuntimeError, UnicodeDecodeError):  # there may be no home
        return _memory().read_text(encoding="utf-8").splitlines()
    return []


def _remember(name: str) -> None:
    """Record what the user has named; where that cannot be written, it must be named every time."""
    line = f"{_loaded[name]} {name}"
    if line not in _remembered():
        with suppress(OSError, RuntimeError, UnicodeEncodeError):
            _memory().parent.mkdir(parents=True, exist_ok=True)
            with _memory().open("a", encoding="utf-8") as file:
                file.write(f"{line}\n")
