"""cflat: train continual learners toward flat minima.

``import cflat`` needs torch alone and gives the optimizers; the continual-learning bench around them lives in
`cflat.data`, `cflat.nn`, `cflat.methods`, `cflat.train`, in `cflat.bench`, which runs it from Python, and in the
``cflat`` command (``pip install cflat[bench]``).
"""

from typing import Any

from cflat._errors import CFlatError, ClosureError, ConfigError, DataError
from cflat.optim import *  # noqa: F403
from cflat.optim import __all__ as _optimizers

__version__ = "0.1.0"
__all__ = ["CFlatError", "ClosureError", "ConfigError", "DataError", "__version__", *_optimizers]


def __getattr__(name: str) -> Any:
    """Import ``cflat.bench`` when it is first asked for, so that ``import cflat`` needs torch alone."""
    if name != "bench":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    try:
        return import_module("cflat.bench")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("cflat"):
            raise
        raise ModuleNotFoundError(
            f"cflat.bench needs the package {error.name!r}; run: pip install 'cflat[bench]'", name=error.name
        ) from error
