"""Optimizers, methods and datasets from outside: installed packages, and files that a user names.

A plug-in is a module that registers something when it is imported. Installed ones are found by their entry points of
the group ``cflat.plugins``, when a name is looked up that is not here or all names are listed; modules and files are
named on the command line, ``--plugin my_sam.py``, or in ``$CFLAT_PLUGINS``, which processes started from here inherit.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

from cflat._errors import ConfigError

GROUP = "cflat.plugins"
VARIABLE = "CFLAT_PLUGINS"

logger = logging.getLogger(__name__)
_loaded: set[str] = set()


def load_plugins(names: Iterable[str]) -> None:
    """Import modules by their dotted names and files that end in ``.py``, also in processes started from here.

    Raises:
        ConfigError: If one cannot be imported.
    """
    for given in names:
        name = str(Path(given).resolve()) if given.endswith(".py") else given
        if name in _loaded:
            continue
        _loaded.add(name)
        try:
            _import_file(Path(name)) if name.endswith(".py") else import_module(name)
        except Exception as error:  # whatever somebody else's module does
            _loaded.discard(name)
            raise ConfigError(f"The plug-in {given!r} cannot be loaded: {type(error).__name__}: {error}") from error
        known = [one for one in os.environ.get(VARIABLE, "").split(os.pathsep) if one]
        os.environ[VARIABLE] = os.pathsep.join(dict.fromkeys([*known, name]))


def find_plugins() -> None:
    """Import what is installed under our group of entry points and what ``$CFLAT_PLUGINS`` names, each once."""
    _load_installed()
    load_plugins(name for name in os.environ.get(VARIABLE, "").split(os.pathsep) if name)


@cache
def _load_installed() -> None:
    for entry in entry_points(group=GROUP):
        try:
            entry.load()
        except Exception as error:  # noqa: PERF203  # a broken package must not take the others with it
            logger.warning("The plug-in %s (%s) cannot be loaded: %s", entry.name, entry.value, error)


def _import_file(path: Path) -> None:
    if not path.is_file():
        raise FileNotFoundError(f"{str(path)!r} does not exist")
    name = f"cflat_plugin_{path.stem}"
    spec = spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
