"""Translate errors that users can mend into one sentence: the key to change, and where the details are."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import torch

from cflat._errors import CFlatError, ConfigError, RankLost
from cflat._files import write_atomic
from cflat._machine import is_out_of_memory
from cflat._plugins import place_in_plugin
from cflat.config.run_config import RunConfig
from cflat.methods import Method
from cflat.optim.engine import NonFiniteError

LOG = "error.log"
NO_ANSWER = ("gloo", "nccl", "connection closed by peer", "connection reset by peer")
"""What torch's process groups speak of when another rank is gone."""


class TrainingDiverged(ConfigError):
    """Weights or features are no longer finite, or too large."""


@contextmanager
def translate_errors(config: RunConfig, method: Method, folder: Path | None) -> Iterator[None]:
    """Turn errors that users can mend into a `ConfigError`; the traceback goes to ``error.log`` in ``folder``."""
    try:
        yield
    except CFlatError:
        raise
    except Exception as error:
        # `report_lost_ranks` translates it, around this one.
        if _is_of_ranks(error):
            raise
        log = None if folder is None else folder / LOG
        if log is not None:
            with suppress(CFlatError):
                write_atomic(log, traceback.format_exc())
        # Logged even if it is a bug: runs on a cluster may keep no terminal.
        kind, sentence = _sentence(error, config, method)
        if sentence is None:
            raise
        raise kind(f"{sentence}{'' if log is None else f' Details: {log}'}") from error


@contextmanager
def report_lost_ranks(config: RunConfig) -> Iterator[None]:
    """Raise `RankLost` if another rank has ended or stalled; the reason is not known here."""
    try:
        yield
    except Exception as error:
        if not _is_of_ranks(error):
            raise
        is_late = "time" in str(error).lower()  # "timed out" or "timeout", by backend
        what = (
            f"has waited {config.runtime.timeout_seconds:g} seconds (runtime.timeout_seconds) for another rank"
            if is_late
            else "has lost the connection to another rank, which has ended"
        )
        rank: int | str = os.environ.get("RANK", "?")
        world: int | str = os.environ.get("WORLD_SIZE", "?")
        if torch.distributed.is_initialized():  # or they have not found each other
            rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
        raise RankLost(f"Rank {rank} of {world} {what}; the run can be resumed from its last checkpoint.") from error


def _is_of_ranks(error: Exception) -> bool:
    distributed = torch.distributed
    if not distributed.is_available():
        return False
    return isinstance(error, distributed.DistError) or (
        isinstance(error, RuntimeError)
        and distributed.is_initialized()
        and any(words in str(error).lower() for words in NO_ANSWER)
    )


def _sentence(error: Exception, config: RunConfig, method: Method) -> tuple[type[ConfigError], str | None]:
    text = " ".join(str(error).split())
    if is_out_of_memory(error):
        return ConfigError, (
            "The run ran out of memory; lower train.batch_size (with train.accumulate raised as much, "
            "steps stay what they are) or backbone.image_size, or set backbone.checkpointing=true."
        )
    if _has_diverged(error, method):
        first = "" if config.base.first_lr is None else f" and base.first_lr, now {config.base.first_lr:g}"
        return TrainingDiverged, (
            f"The training has diverged: weights or features are no longer finite, or too large. "
            f"Lower base.lr, now {config.base.lr:g}{first}."
        )
    if isinstance(error, ValueError) and "more than 1 value per channel" in text:  # torch has no type for it
        return ConfigError, "BatchNorm cannot be trained on a single value per channel; raise train.batch_size."
    if (place := place_in_plugin(error)) is not None:
        return ConfigError, f"{type(error).__name__} in the plug-in {place}: {text.rstrip('.')}."
    return ConfigError, f"The run cannot continue: {text.rstrip('.')}." if isinstance(error, ValueError) else None


def _has_diverged(error: Exception, method: Method) -> bool:
    """Whether an error comes of numbers that are not finite: by its type, or because the weights are not."""
    # Not every ArithmeticError: dividing by zero is a bug of whoever divides.
    overflows = (NonFiniteError, OverflowError, FloatingPointError)
    if isinstance(error, (np.linalg.LinAlgError, torch.linalg.LinAlgError, *overflows)):  # type: ignore[attr-defined]
        return True
    if not isinstance(error, ValueError | RuntimeError):
        return False
    # Libraries word it in many ways, so the weights decide.
    values = [value for value in method.state_dict().values() if value.is_floating_point()]
    return "overflow" in str(error) or not all(bool(value.isfinite().all()) for value in values)
