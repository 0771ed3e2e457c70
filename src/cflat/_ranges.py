"""Ranges on annotations: ``lam: NotNegative = 0.2`` declares what a keyword accepts, and `checked` enforces it.

Needs Python alone, because ``import cflat`` needs torch alone. Pydantic enforces the same annotations in files.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, wraps
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Range:
    """Finite numbers within bounds; metadata of an annotation."""

    above: float | None = None
    at_least: float | None = None
    below: float | None = None
    at_most: float | None = None
    integer: bool = False

    def __str__(self) -> str:
        bounds = {"above": self.above, "at least": self.at_least, "below": self.below, "at most": self.at_most}
        rules = ["a whole number"] if self.integer else []
        rules += [f"{word} {bound}" for word, bound in bounds.items() if bound is not None]
        return " and ".join(rules) or "a finite number"

    def holds(self, value: Any) -> bool:
        """Whether it is a finite number within the bounds; booleans are rejected."""
        return (
            isinstance(value, int | float)
            and not isinstance(value, bool)
            and _is_finite(value)
            and (not self.integer or float(value).is_integer())
            and (self.above is None or value > self.above)
            and (self.at_least is None or value >= self.at_least)
            and (self.below is None or value < self.below)
            and (self.at_most is None or value <= self.at_most)
        )

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        """Let pydantic enforce the same range."""
        from pydantic_core import PydanticCustomError, core_schema

        def reject_booleans(value: Any) -> Any:
            if isinstance(value, bool):  # ``epochs: true`` is not one epoch
                raise PydanticCustomError("truth_value", "Input should be a number")
            return value

        def reject_huge(value: Any) -> Any:
            if not _is_finite(value):
                raise PydanticCustomError("too_large", "Input should be at most 1.8e308 in magnitude")
            return value

        bounds = {"gt": self.above, "ge": self.at_least, "lt": self.below, "le": self.at_most}
        schema = {**handler(source), **{name: bound for name, bound in bounds.items() if bound is not None}}
        finite = core_schema.no_info_after_validator_function(reject_huge, schema)
        return core_schema.no_info_before_validator_function(reject_booleans, finite)


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer that no float can hold
        return False


Number = Annotated[float, Range()]
Positive = Annotated[float, Range(above=0)]
NotNegative = Annotated[float, Range(at_least=0)]
Fraction = Annotated[float, Range(at_least=0, below=1)]
Share = Annotated[float, Range(at_least=0, at_most=1)]
Whole = Annotated[int, Range(integer=True)]
Count = Annotated[int, Range(at_least=1, integer=True)]
CountOrZero = Annotated[int, Range(at_least=0, integer=True)]


def check(name: str, value: Any, **bounds: Any) -> None:
    """Raise a ``ValueError`` that names the argument, the rule and the value unless the value is within a `Range`.

    >>> check("rho", 0.05, above=0)
    >>> check("rho", -1.0, above=0)
    Traceback (most recent call last):
    ...
    ValueError: rho must be above 0, got -1.0.
    """
    _require(name, value, (Range(**bounds),))


def checked(function: F) -> F:
    """Reject arguments that the annotations rule out: by a `Range`, a ``Literal`` or ``bool``, and None besides these.

    Of a class, such as a dataclass, its ``__init__`` is checked.

    >>> @checked
    ... def bake(minutes: Count, mode: Literal["fan", "grill"] | None = None) -> None: ...
    >>> bake(5, mode="oven")
    Traceback (most recent call last):
    ...
    ValueError: mode must be 'fan' or 'grill', got 'oven'.
    """
    if isinstance(function, type):
        function.__init__ = checked(function.__init__)  # type: ignore[misc]
        return function
    # Annotations are resolved at the first call (`_rules_of`): they may name what is defined later.
    signature = inspect.signature(function)

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError:
            given = {}  # the call itself raises
        for name, rules in _rules_of(function).items():
            if name in given:
                _require(name, given[name], rules)
        return function(*args, **kwargs)

    return call  # type: ignore[return-value]


def _require(name: str, value: Any, rules: tuple[Any, ...]) -> None:
    if not any(_admits(rule, value) for rule in rules):
        texts = [text for rule in rules for text in _texts(rule)]
        raise ValueError(f"{name} must be {' or '.join(texts)}, got {value!r}.")


@cache
def _rules_of(function: Callable[..., Any]) -> dict[str, tuple[Any, ...]]:
    """Return the parameters whose annotations are complete rules, each with the rules of which one must hold."""
    hints: dict[str, Any] = {}
    for name, hint in function.__annotations__.items():
        with suppress(NameError):  # one of the names that exist for type checkers only
            # typing.get_type_hints resolves all names or none.
            hints[name] = eval(hint, inspect.unwrap(function).__globals__) if isinstance(hint, str) else hint
    rules = {name: tuple(_rule(member) for member in _members(hint)) for name, hint in hints.items()}
    return {name: own for name, own in rules.items() if None not in own and any(map(_texts, own))}


def _members(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _rule(hint: Any) -> Any:
    """Return the rule of a member of a union: a range, the allowed values, ``NoneType`` or ``Callable``."""
    kind = get_origin(hint)
    if kind is Annotated:
        return next((extra for extra in get_args(hint)[1:] if isinstance(extra, Range)), None)
    if kind is Literal or hint is bool:
        return get_args(hint) or (True, False)
    return kind if kind is Callable else hint if hint is NoneType else None


def _admits(rule: Any, value: Any) -> bool:
    if isinstance(rule, Range):
        return rule.holds(value)
    if isinstance(rule, tuple):
        return any(type(value) is type(known) and value == known for known in rule)  # 1 == True, but is not a flag
    return value is None if rule is NoneType else callable(value)


def _texts(rule: Any) -> list[str]:
    if isinstance(rule, Range):
        return [str(rule)]
    return [repr(value) for value in rule] if isinstance(rule, tuple) else []
