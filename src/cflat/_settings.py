"""Settings: frozen dataclasses whose fields carry their ranges, checked by pydantic wherever they are made."""

from __future__ import annotations

import math
from typing import Annotated, Any, TypeVar

from pydantic import AllowInfNan, BeforeValidator, ConfigDict, Field, Strict
from pydantic.dataclasses import dataclass
from typing_extensions import dataclass_transform

from cflat import _ranges
from cflat._ranges import Fraction, NotNegative, Number, Positive, Share

__all__ = [
    "LARGEST",
    "NEUTRAL",
    "SETTINGS",
    "Count",
    "CountOrZero",
    "Flag",
    "Fraction",
    "Measured",
    "NotNegative",
    "Number",
    "Pixels",
    "Positive",
    "Share",
    "read_flag",
    "settings_class",
]

LARGEST = 2**31 - 1
"""Upper bound of counts and seeds: a typing error must not ask for more than any machine holds."""

NEUTRAL = "neutral"
"""Metadata of a field that does not change the result, ``threads: Annotated[Count, NEUTRAL] = 1``.

A run may be resumed with another value, and runs that differ in it are still compared.
"""

SETTINGS = ConfigDict(extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False, coerce_numbers_to_str=True)
"""How all settings are read."""

C = TypeVar("C")


# Configurations have upper bounds; arguments in code do not need any.
Count = Annotated[_ranges.Count, Field(le=LARGEST)]
CountOrZero = Annotated[_ranges.CountOrZero, Field(le=LARGEST)]
Pixels = Annotated[int, _ranges.Range(at_least=4, at_most=8192, integer=True)]
Measured = Annotated[float, AllowInfNan(True), BeforeValidator(lambda value: math.nan if value is None else value)]
"""A result that may be NaN; JSON holds null then."""
_WORDS = {"yes": True, "on": True, "no": False, "off": False}
"""Text in YAML 1.2; booleans where a key accepts nothing else."""


def read_flag(value: Any) -> Any:
    """Return the boolean that a word such as ``on`` stands for; everything else as it is."""
    return _WORDS.get(str(value).lower(), value)


Flag = Annotated[bool, Strict(), BeforeValidator(read_flag)]


@dataclass_transform(frozen_default=True, kw_only_default=True)
def settings_class(cls: type[C]) -> type[C]:
    """Make a class of annotated fields with defaults into settings: frozen, by keyword, checked, no unknown fields.

    A docstring under a field is its description on the command line and in the documentation.

    >>> @settings_class
    ... class Cooking:
    ...     minutes: Count = 5
    >>> Cooking(minutes=7)
    Cooking(minutes=7)
    """
    # A dataclass, not a model: `replace`, `asdict` and `__post_init__` work as everywhere else.
    made: Any = dataclass(cls, config=SETTINGS, frozen=True, kw_only=True)
    return made  # type: ignore[no-any-return]
