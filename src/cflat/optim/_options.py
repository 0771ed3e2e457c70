"""How a step is taken, whatever the algorithm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from cflat._ranges import Positive, checked

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@checked
@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """How a step is taken; the same for every algorithm.

    Args:
        max_norm: Clip gradients to this global norm; None does not clip.
        clip: Clip the ``"final"`` direction only, or ``"each"`` gradient as well as it is computed.
        replay_rng: Let all evaluations of a step see the same dropout masks.
        guard_buffers: Undo what extra evaluations do to the buffers of ``model``.
        perturbation: ``"synced"``: all ranks perturb alike, by the averaged gradient (equals one large batch).
            ``"local"``: each rank perturbs by its own gradient (m-sharpness) and only the direction is averaged;
            needs ``model`` to be wrapped in DistributedDataParallel.
        process_group: The ranks that must take the same decisions. ``"auto"``: all of them if torch.distributed is
            initialized; None: this process decides alone.
    """

    max_norm: Positive | None = None
    clip: Literal["final", "each"] = "final"
    replay_rng: bool = True
    guard_buffers: bool = True
    perturbation: Literal["synced", "local"] = "synced"
    process_group: ProcessGroup | Literal["auto"] | None = "auto"

    def __post_init__(self) -> None:
        if isinstance(self.process_group, str) and self.process_group != "auto":
            raise ValueError(f"process_group must be a ProcessGroup, 'auto' or None, got {self.process_group!r}.")
