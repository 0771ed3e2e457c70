"""Sharpness- and flatness-aware optimizers that wrap any `torch.optim` optimizer; needs torch alone."""

from cflat._registry import import_modules
from cflat.optim._base import SharpnessAware, StepOptions
from cflat.optim._catalog import (
    OptimizerSpec,
    create_optimizer,
    get_optimizer_spec,
    list_optimizers,
    optimizer_settings,
    register_optimizer,
)
from cflat.optim._schedules import InverseSqrt, TiedToLR
from cflat.optim._telemetry import SurrogateError, Telemetry
from cflat.optim.ae_sam import AESAM
from cflat.optim.asam import ASAM
from cflat.optim.async_sam import AsyncSAM
from cflat.optim.c_flat import CFlat
from cflat.optim.c_flat_forecast import CFlatForecast
from cflat.optim.c_flat_plus import CFlatPlus
from cflat.optim.c_flat_turbo import CFlatTurbo
from cflat.optim.friendly_sam import FriendlySAM
from cflat.optim.gam import GAM
from cflat.optim.gsam import GSAM
from cflat.optim.looksam import LookSAM
from cflat.optim.msam import MSAM
from cflat.optim.plain import Plain
from cflat.optim.qhm import QHM
from cflat.optim.random_sam import RandomSAM
from cflat.optim.sam import SAM
from cflat.optim.ss_sam import SSSAM
from cflat.optim.vasso import VaSSO

__all__ = [
    "AESAM", "ASAM", "GAM", "GSAM", "MSAM", "QHM", "SAM", "SSSAM", "AsyncSAM", "CFlat", "CFlatForecast",
    "CFlatPlus", "CFlatTurbo", "FriendlySAM", "InverseSqrt", "LookSAM", "OptimizerSpec", "Plain", "RandomSAM",
    "SharpnessAware", "StepOptions", "SurrogateError", "Telemetry", "TiedToLR", "VaSSO", "create_optimizer",
    "get_optimizer_spec", "list_optimizers", "optimizer_settings", "register_optimizer",
]  # fmt: skip

import_modules(__name__, __path__)
