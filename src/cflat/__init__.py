"""cflat: train continual learners toward flat minima.

``import cflat`` needs torch alone and gives the optimizers; the continual-learning bench around them lives in
`cflat.data`, `cflat.nn`, `cflat.methods`, `cflat.train` and the ``cflat`` command (``pip install cflat[bench]``).
"""

from cflat._errors import CFlatError, ClosureError, ConfigError, DataError
from cflat.optim import *  # noqa: F403
from cflat.optim import __all__ as _optimizers

__version__ = "0.1.0"
__all__ = ["CFlatError", "ClosureError", "ConfigError", "DataError", "__version__", *_optimizers]
