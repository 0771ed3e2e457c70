"""Optimal transport between the means of new and old classes (DUCT's classifier consolidation)."""

from __future__ import annotations

import logging
import warnings
from typing import Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from cflat._ranges import Positive, checked

__all__ = ["Sinkhorn", "transport_plan"]

logger = logging.getLogger(__name__)

Sinkhorn: TypeAlias = Literal["log", "plain"]

METHODS = {"log": "sinkhorn_log", "plain": "sinkhorn"}
"""Names in POT."""
ITERATIONS = (1000, 10_000)
"""As public code has it, and once more if that is too few."""
CLOSE = 1e-4
"""Mass, of 1 in all, that rows and columns may miss without a word."""


@checked
def transport_plan(
    new_means: Tensor, old_means: Tensor, *, regularization: Positive, sinkhorn: Sinkhorn = "log"
) -> Tensor:
    """Return the entropic plan between two sets of class means, (num_new, num_old), uniform marginals.

    ``regularization`` is the entropy weight in units of the Euclidean distance. The Sinkhorn of logarithms is right for
    any; the ``plain`` one is the public code's: where all distances are above 745 times it, its plan is 0.
    """
    import ot

    cost = torch.cdist(new_means.double(), old_means.double()).cpu().numpy()
    num_new, num_old = cost.shape
    marginals = np.full(num_new, 1 / num_new), np.full(num_old, 1 / num_old)
    for iterations in ITERATIONS:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")  # of numbers that underflow; what is missing then is told below
            plan = ot.sinkhorn(*marginals, cost, regularization, METHODS[sinkhorn], numItermax=iterations, warn=False)
        missing = sum(float(np.abs(plan.sum(1 - axis) - wanted).sum()) for axis, wanted in enumerate(marginals))
        if missing <= CLOSE or sinkhorn == "plain":
            break
    if missing > CLOSE:
        logger.warning(
            "Sinkhorn (%s) at regularization %g misses its marginals by %.2g in sum after %d iterations.",
            sinkhorn,
            regularization,
            missing,
            iterations,
        )
    return torch.from_numpy(plan).to(new_means)
