"""Optimal transport of classifier rows from new classes to old ones (DUCT's classifier consolidation)."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from cflat._errors import check

__all__ = ["transport_plan", "transport_rows"]


def transport_plan(new_means: Tensor, old_means: Tensor, *, regularization: float) -> Tensor:
    """Return the entropic plan between two sets of class means, (num_new, num_old), uniform marginals.

    Args:
        new_means: Mean features of the new classes, (num_new, D).
        old_means: Mean features of the old classes, (num_old, D).
        regularization: Entropy weight of Sinkhorn in units of the Euclidean distance; must be positive.
    """
    import ot

    check("regularization", regularization, above=0)
    cost = torch.cdist(new_means.double(), old_means.double()).cpu().numpy()
    num_new, num_old = cost.shape
    # In the log domain: distances of tens against a regularization of 0.02 underflow otherwise.
    plan = ot.sinkhorn(
        np.full(num_new, 1 / num_new),
        np.full(num_old, 1 / num_old),
        cost,
        regularization,
        method="sinkhorn_log",
        warn=False,
    )
    return torch.from_numpy(plan).to(new_means)


def transport_rows(
    old_rows: Tensor,
    new_rows: Tensor,
    old_means: Tensor,
    new_means: Tensor,
    *,
    regularization: float = 0.02,
    ratio: float = 0.25,
    normalize_plan: bool = True,
) -> Tensor:
    """Return ``(1 - ratio) * old_rows + ratio * plan.T @ new_rows``: old rows that know new classes.

    Args:
        old_rows: Head rows of the old classes, (num_old, D).
        new_rows: Head rows of the new classes, (num_new, D).
        old_means: Mean features of the old classes under the pretrained backbone.
        new_means: Mean features of the new classes under the pretrained backbone.
        regularization: See `transport_plan`.
        ratio: Share of the transported rows, in [0, 1].
        normalize_plan: Scale the plan by num_old, so that each old row mixes in a true average of new rows.
            The authors' code does not: its plan has mass 1/num_old per old class and changes almost nothing.
    """
    check("ratio", ratio, at_least=0, at_most=1)
    plan = transport_plan(new_means, old_means, regularization=regularization)
    if normalize_plan:
        plan = plan * len(old_rows)
    return (1 - ratio) * old_rows + ratio * plan.T @ new_rows
