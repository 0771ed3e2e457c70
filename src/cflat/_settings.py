"""Settings: frozen dataclasses whose fields carry their ranges, checked by pydantic wherever they are made."""

from __future__ import annotations

import math
from typing import Annotated, Any, TypeVar

from pydantic import AllowInfNan, BeforeValidator, ConfigDict, Field, Strict
from pydantic.dataclasses import dataclass
from pydantic_core import PydanticCustomError
from typing_extensions import dataclass_transform

__all__ = [
    "LARGEST",
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
    "settings_class",
]

LARGEST = 2**31 - 1
"""No count or seed is larger; keeps a slip of the finger from asking for more than any machine holds."""

_CONFIG = ConfigDict(extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False, coerce_numbers_to_str=True)

C = TypeVar("C")


def _refuse_truth(value: Any) -> Any:
    """Keep ``epochs: true`` from meaning one epoch."""
    if isinstance(value, bool):
        raise PydanticCustomError("truth_value", "Input should be a number")
    return value


_NOT_BOOL = BeforeValidator(_refuse_truth)

Count = Annotated[int, Field(ge=1, le=LARGEST), _NOT_BOOL]
CountOrZero = Annotated[int, Field(ge=0, le=LARGEST), _NOT_BOOL]
Pixels = Annotated[int, Field(ge=4, le=8192), _NOT_BOOL]
Number = Annotated[float, _NOT_BOOL]
Positive = Annotated[float, Field(gt=0), _NOT_BOOL]
NotNegative = Annotated[float, Field(ge=0), _NOT_BOOL]
Fraction = Annotated[float, Field(ge=0, lt=1), _NOT_BOOL]
Share = Annotated[float, Field(ge=0, le=1), _NOT_BOOL]
Measured = Annotated[float, AllowInfNan(True), BeforeValidator(lambda value: math.nan if value is None else value)]
"""A result that may be NaN; JSON holds null then."""
Flag = Annotated[bool, Strict()]


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
    made: Any = dataclass(cls, config=_CONFIG, frozen=True, kw_only=True)
    return made  # type: ignore[no-any-return]
