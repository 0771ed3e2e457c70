"""Import large packages when they are first used: a list or a typo is answered without them."""

from __future__ import annotations

from importlib import import_module
from typing import Any


class LazyModule:
    """A module that is imported when one of its names is asked for.

    >>> LazyModule("math").floor(1.5)
    1
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(import_module(self._name), attribute)
