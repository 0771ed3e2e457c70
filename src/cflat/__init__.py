"""cflat: train continual learners toward flat minima.

``import cflat`` needs torch alone and gives the optimizers; the continual-learning bench around them lives in
`cflat.data`, `cflat.nn`, `cflat.methods`, `cflat.train`, in `cflat.bench`, which runs it from Python, and in the
``cflat`` command (``pip install cflat[bench]``).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from cflat._errors import CFlatError as CFlatError
from cflat._errors import ClosureError as ClosureError
from cflat._errors import ConfigError as ConfigError
from cflat._errors import DataError as DataError

if TYPE_CHECKING:
    from cflat.optim import *  # noqa: F403

__version__ = "0.2.0"
_OWN = ("CFlatError", "ClosureError", "ConfigError", "DataError", "__version__")
_MODULES = ("bench", "optim")  # imported on first use: both need torch


def __dir__() -> list[str]:
    """List what is public, and nothing else."""
    return sorted([*__getattr__("__all__"), "bench"])


def __getattr__(name: str) -> Any:
    """Import the optimizers, and with them torch, when they are first asked for; the same for ``cflat.bench``."""
    if name in _MODULES:
        return _import(name)
    if name != "__all__" and name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    optim = import_module("cflat.optim")
    if name == "__all__":
        return [*_OWN, *optim.__all__]
    if name not in optim.__all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = getattr(optim, name)  # __getattr__ is not called for it again
    return globals()[name]


def _import(name: str) -> Any:
    try:
        return import_module(f"cflat.{name}")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("cflat"):  # a bug of ours, not a missing package
            raise
        extra = "cflat[bench]" if name == "bench" else "cflat"
        raise ModuleNotFoundError(
            f"cflat.{name} needs the package {error.name!r}; run: pip install '{extra}'", name=error.name
        ) from error
