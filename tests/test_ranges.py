"""Ranges on annotations: callers and configuration files are held to the same ones."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import pytest
from pydantic import TypeAdapter, ValidationError

from cflat._ranges import Count, CountOrZero, Fraction, NotNegative, Positive, Range, Share, checked

if TYPE_CHECKING:
    from decimal import Decimal

VALUES = (-1, 0, 1, 2, 2.5, 0.5, 1.0, 5, 10**400, -(10**400), math.nan, math.inf, True, False, "1", None, [1])
KINDS = {
    "positive": Positive,
    "not negative": NotNegative,
    "fraction": Fraction,
    "share": Share,
    "count": Count,
    "count or zero": CountOrZero,
    "between": Annotated[float, Range(above=1, at_most=4)],
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", VALUES, ids=lambda value: repr(value)[:20])
def test_functions_and_files_accept_the_same_numbers(kind: str, value: object) -> None:
    @checked
    def function(number):
        pass

    function.__wrapped__.__annotations__["number"] = KINDS[kind]
    adapter = TypeAdapter(KINDS[kind], config={"allow_inf_nan": False, "strict": isinstance(value, str)})
    try:
        adapter.validate_python(value)
    except ValidationError:
        with pytest.raises(ValueError, match=rf"^number must be .*, got {re.escape(repr(value))}\.$"):
            function(value)
    else:
        function(value)


@checked
@dataclass(frozen=True)
class Oven:
    """Everything that an annotation can say."""

    heat: Positive | Callable[[int], float]
    mode: Literal["fan", "grill"] = "fan"
    light: bool = False
    minutes: Count | None = None
    name: str | int = ""  # nothing to check
    price: Decimal | None = None  # a name for type checkers alone


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"heat": 0}, "heat must be above 0, got 0."),
        ({"heat": None}, "heat must be above 0, got None."),
        ({"heat": 1, "mode": "oven"}, "mode must be 'fan' or 'grill', got 'oven'."),
        ({"heat": 1, "light": 1}, "light must be True or False, got 1."),
        ({"heat": 1, "minutes": 1.5}, "minutes must be a whole number and at least 1, got 1.5."),
    ],
)
def test_what_is_wrong_is_said(settings: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError) as caught:
        Oven(**settings)
    assert str(caught.value) == sentence


def test_what_is_right_passes() -> None:
    oven = Oven(lambda step: 200.0, "grill", True, minutes=None, name=3, price="free")
    assert (oven.mode, oven.light, oven.price) == ("grill", True, "free")
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'heat'"):
        Oven()
