"""The errors that cflat raises for wrong input, and the argument check that words them alike.

Argument mistakes in code raise ``ValueError`` or ``TypeError``; what a user typed into a configuration file or
on the command line raises `ConfigError`; what lies wrong on a disk raises `DataError`. The command line turns
every `CFlatError` into one sentence and exit code 2.
"""

from __future__ import annotations

import math

__all__ = [
    "CFlatError",
    "ClosureError",
    "ConfigError",
    "DataError",
    "OtherRankFailed",
    "RankLost",
    "check",
    "shortened",
]

MAX_MESSAGE = 2000
"""Characters of a message; what a user typed or a file holds may be longer and is then cut in the middle."""


def shortened(text: str, length: int = MAX_MESSAGE) -> str:
    """Return ``text`` with its middle left out if it is longer than ``length`` characters.

    >>> shortened("a name that is far too long", 11)
    'a name t ... ong'
    """
    if len(text) <= length:
        return text
    end = length // 3
    return f"{text[: length - end].rstrip()} ... {text[-end:].lstrip()}" if end else text[:length]


class CFlatError(Exception):
    """Base class of the errors whose message is meant for the user as it stands, but for its length."""

    def __str__(self) -> str:
        return shortened(super().__str__())


class ConfigError(CFlatError):
    """A configuration key or value is wrong; the message names its path, for example ``optimizer.rho``."""


class DataError(CFlatError):
    """Files on disk are missing, broken or laid out differently from what was promised."""


class OtherRankFailed(CFlatError):
    """Another of the processes that train together cannot go on, and has said why."""


class RankLost(CFlatError):
    """Another of the processes that train together has ended, or does not answer."""


class ClosureError(CFlatError, RuntimeError):
    """An optimizer step was called in a way that cannot evaluate the objective."""


def check(
    name: str,
    value: float,
    *,
    above: float | None = None,
    at_least: float | None = None,
    below: float | None = None,
    at_most: float | None = None,
    integer: bool = False,
) -> None:
    """Raise a ``ValueError`` that names the argument, the rule and the value unless the rule holds.

    >>> check("rho", 0.05, above=0)
    >>> check("rho", -1.0, above=0)
    Traceback (most recent call last):
    ...
    ValueError: rho must be above 0, got -1.0.
    """
    rules = []
    if integer:
        rules.append("a whole number")
    rules += [
        f"{word} {bound}"
        for word, bound in (("above", above), ("at least", at_least), ("below", below), ("at most", at_most))
        if bound is not None
    ]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    holds = (
        is_number
        and not math.isnan(value)
        and math.isfinite(value)
        and (not integer or float(value).is_integer())
        and (above is None or value > above)
        and (at_least is None or value >= at_least)
        and (below is None or value < below)
        and (at_most is None or value <= at_most)
    )
    if not holds:
        raise ValueError(f"{name} must be {' and '.join(rules) or 'a finite number'}, got {value!r}.")
