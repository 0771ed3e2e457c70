"""Slow, obvious versions of all optimizers, written from the specification in the paper's notation.

Nothing here imports cflat. theta and all gradients are flat float64 vectors; an algorithm asks an oracle for the
gradient of the present minibatch at any point, keeps its own state, and returns the direction of descent.
"""

from reference.flatness import GAM, CFlat, CFlatPlus
from reference.forecast import CFlatForecast
from reference.sharpness import (
    AESAM,
    ASAM,
    GSAM,
    MSAM,
    SAM,
    SSSAM,
    AsyncSAM,
    FriendlySAM,
    LookSAM,
    Plain,
    RandomSAM,
    VaSSO,
)
from reference.space import Algorithm
from reference.trainer import ReferenceTrainer
from reference.turbo import CFlatTurbo

REFERENCES: dict[str, type[Algorithm]] = {
    "none": Plain,
    "sam": SAM,
    "asam": ASAM,
    "gsam": GSAM,
    "looksam": LookSAM,
    "gam": GAM,
    "ss_sam": SSSAM,
    "ae_sam": AESAM,
    "friendly_sam": FriendlySAM,
    "msam": MSAM,
    "vasso": VaSSO,
    "async_sam": AsyncSAM,
    "random_sam": RandomSAM,
    "c_flat": CFlat,
    "c_flat_plus": CFlatPlus,
    "c_flat_turbo": CFlatTurbo,
    "c_flat_forecast": CFlatForecast,
}

__all__ = ["REFERENCES", "Algorithm", "ReferenceTrainer"]
