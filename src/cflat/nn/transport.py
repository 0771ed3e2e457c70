"""Optimal transport of classifier rows from new classes to old ones (DUCT's classifier consolidation)."""

from __future__ import annotations

import logging
import warnings
from typing import Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from cflat._ranges import Positive, Share, checked

logger = logging.getLogger(__name__)

Sinkhorn: TypeAlias = Literal["log", "plain"]

METHODS = {"log": "sinkhorn_log", "plain": "sinkhorn"}
"""Names in POT."""
ITERATIONS = (1000, 10_000)
"""The public code's limit, and a second attempt where it does not converge."""
CLOSE = 1e-4
"""Mass, of 1 in all, that rows and columns may miss without a warning."""


@checked
def transport_plan(
    new_means: Tensor, old_means: Tensor, *, regularization: Positive, sinkhorn: Sinkhorn = "log"
) -> Tensor:
    """Return the entropic plan between two sets of class means, (num_new, num_old), uniform marginals.

    The arguments are those of `transport_rows`.
    """
    import ot

    # Double precision on the CPU: the kernel exp(-cost / regularization) spans hundreds of decades.
    cost = torch.cdist(new_means.double(), old_means.double()).cpu().numpy()
    num_new, num_old = cost.shape
    marginals = np.full(num_new, 1 / num_new), np.full(num_old, 1 / num_old)
    for iterations in ITERATIONS:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")  # about underflow; mass that is lost is reported below
            plan = ot.sinkhorn(*marginals, cost, regularization, METHODS[sinkhorn], numItermax=iterations, warn=False)
        missing = sum(float(np.abs(plan.sum(1 - axis) - wanted).sum()) for axis, wanted in enumerate(marginals))
        # The plain solver is there to match public numbers, hence stops where public code does.
        if missing <= CLOSE or sinkhorn == "plain":
            break
    if not missing <= CLOSE:  # nor if it is NaN
        text = "Sinkhorn (%s) at regularization %g misses its marginals by %.2g in sum after %d iterations."
        logger.warning(text, sinkhorn, regularization, missing, iterations)
    return torch.from_numpy(plan).to(new_means)


@checked
def transport_rows(
    old_rows: Tensor,
    new_rows: Tensor,
    old_means: Tensor,
    new_means: Tensor,
    *,
    regularization: Positive = 0.02,
    ratio: Share = 0.25,
    normalize_plan: bool = True,
    sinkhorn: Sinkhorn = "log",
) -> Tensor:
    """Return ``(1 - ratio) * old_rows + ratio * plan.T @ new_rows``: old rows that know new classes.

    Args:
        old_rows: Head rows of the old classes, (num_old, D).
        new_rows: Head rows of the new classes, (num_new, D).
        old_means: Mean features of the old classes under the pretrained backbone, (num_old, D).
        new_means: Mean features of the new classes under the pretrained backbone, (num_new, D).
        regularization: Entropy weight of Sinkhorn in units of the Euclidean distance; must be positive.
        ratio: Fraction of the transported rows, in [0, 1].
        normalize_plan: Scale the plan by num_old: each old row then mixes in a true average of new rows.
            The authors' code does not: its plan has mass 1/num_old per old class.
        sinkhorn: ``log`` works with logarithms and is right for any regularization. ``plain`` is the public code's:
            where all distances are above 745 times the regularization its kernel is 0, and so is its plan.
    """
    plan = transport_plan(new_means, old_means, regularization=regularization, sinkhorn=sinkhorn)
    if normalize_plan:
        plan = plan * len(old_rows)
    return (1 - ratio) * old_rows + ratio * plan.T @ new_rows
