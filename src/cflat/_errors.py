"""The errors that cflat raises for wrong input.

Argument mistakes in code raise ``ValueError`` or ``TypeError``; what a user typed into a configuration file or
on the command line raises `ConfigError`; what lies wrong on a disk raises `DataError`. The command line turns
every `CFlatError` into one sentence and exit code 2.
"""

from __future__ import annotations

MAX_MESSAGE = 2000
"""Characters of a message; longer ones, which quote a file or an argument, are cut in the middle."""


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
    """Base class of the errors whose message is shown to the user, shortened if it is long."""

    def __str__(self) -> str:
        return shortened(super().__str__())


class ConfigError(CFlatError):
    """A configuration key or value is wrong; the message names its path, for example ``optimizer.rho``."""


class UnknownName(ConfigError, ValueError):
    """A name that is not in the table; the message has the nearest one and all others."""


class DataError(CFlatError):
    """Files on disk are missing, broken or not laid out as expected."""


class OtherRankFailed(CFlatError):
    """Another of the processes that train together cannot continue, and has reported why."""


class RankLost(CFlatError):
    """Another of the processes that train together has ended, or does not answer."""


class ClosureError(CFlatError, RuntimeError):
    """An optimizer step was called in a way that cannot evaluate the objective."""
