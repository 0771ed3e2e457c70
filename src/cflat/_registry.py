"""A table of names that suggests the nearest one for a wrong name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, Generic, TypeVar

from cflat._errors import UnknownName, shortened
from cflat._plugins import find_plugins

T = TypeVar("T")

MAX_NAME = 100
"""Characters of a name that is compared with others; longer ones would take too long."""


def suggest(name: str, known: list[str]) -> str:
    """Return ``" Did you mean 'x'?"`` for the nearest known name, or an empty string.

    >>> suggest("eese", ["ease", "l2p"])
    " Did you mean 'ease'?"
    """
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5) if len(name) <= MAX_NAME else []
    return f" Did you mean {near[0]!r}?" if near else ""


def require_known(kind: str, name: Any, known: Iterable[str], *besides: str) -> None:
    """Reject a name that is not known; ``besides`` is what else may be written in its place.

    >>> require_known("method", "eese", ["ease", "l2p"])
    Traceback (most recent call last):
    ...
    cflat._errors.UnknownName: Unknown method 'eese'. Did you mean 'ease'? Known: ease, l2p.
    """
    names = list(known)
    if name not in names:
        given = shortened(repr(name), MAX_NAME)
        raise UnknownName(f"Unknown {kind} {given}.{suggest(str(name), names)} Known: {', '.join([*names, *besides])}.")


def import_modules(package: str, path: Iterable[str]) -> None:
    """Import every public module of a package; each registers itself."""
    for module in iter_modules(path):
        if not module.name.startswith("_"):
            import_module(f"{package}.{module.name}")


class Registry(Generic[T]):
    """Map canonical names (snake_case; ``-`` is accepted for ``_``) to registered values.

    >>> shapes = Registry("shape")
    >>> shapes.add("round_one", 1)
    >>> shapes["round-one"]
    1
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, T] = {}

    def add(self, name: str, value: T) -> None:
        """Register ``value``; a name may be taken only once."""
        # A plug-in that replaced a method silently would change results.
        if name in self._entries:
            raise ValueError(f"{self.kind} {name!r} is registered already; choose another name.")
        self._entries[name] = value

    def __getitem__(self, name: str) -> T:
        found = self.get(name)
        if found is None:
            require_known(self.kind, name, self.names())
        assert found is not None
        return found

    def get(self, name: str) -> T | None:
        """Return what has this name, here or in a plug-in; None if nothing has."""
        key = name.replace("-", "_").lower() if isinstance(name, str) else ""
        # Plug-ins are searched only for unknown names: finding them takes time.
        if key not in self._entries:
            find_plugins()
        return self._entries.get(key)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def names(self, pattern: str = "*") -> list[str]:
        """Return the names that match a shell pattern, those of plug-ins among them, in alphabetical order."""
        find_plugins()
        return sorted(name for name in self._entries if fnmatchcase(name, pattern))
