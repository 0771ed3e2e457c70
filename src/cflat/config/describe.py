"""Every key of a configuration with its type, default and meaning, read from the code that defines it."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields
from typing import Any

from cflat._errors import ConfigError
from cflat._registry import suggest
from cflat.config.choices import optimizer_config
from cflat.config.run_config import SECTIONS
from cflat.methods import get_method_spec, list_methods
from cflat.optim import get_optimizer_spec, list_optimizers

__all__ = ["Key", "describe_keys", "markdown_keys"]


@dataclass(frozen=True)
class Key:
    """One key."""

    path: str
    type: str
    default: Any
    meaning: str


def describe_keys(of: str | None = None) -> list[Key]:
    """Return the keys that all runs share, or those of one method or optimizer.

    Raises:
        ConfigError: If there is no method or optimizer of that name.
    """
    if of is None:
        return [key for section, cls in SECTIONS.items() for key in _of_dataclass(section, cls)]
    methods, optimizers = list_methods(), list_optimizers()
    name = of.replace("-", "_").lower()
    if name in methods:
        return list(_of_dataclass("method", get_method_spec(name).config))
    if name in optimizers:
        return list(_of_optimizer(name))
    raise ConfigError(f"No method or optimizer is called {of!r}.{suggest(name, methods + optimizers)}")


def markdown_keys() -> str:
    """Return the keys that all runs share as a Markdown table; ``docs/configuration.md`` holds it."""
    lines = ["| key | default | meaning |", "|---|---|---|"]
    for key in describe_keys():
        default = (
            "null"
            if key.default is None
            else str(key.default).lower()
            if isinstance(key.default, bool)
            else key.default
        )
        lines.append(f"| `{key.path}` | `{default}` | {key.meaning.replace('``', '`').replace('|', '/')} |")
    return "\n".join(lines) + "\n"


def _of_dataclass(section: str, cls: type[Any]) -> Iterator[Key]:
    meanings = {name: text for base in reversed(cls.__mro__[:-1]) for name, text in _field_docstrings(base).items()}
    for field in fields(cls):
        default = None if field.default is MISSING else field.default
        yield Key(f"{section}.{field.name}", _type_name(field.type), _plain(default), meanings.get(field.name, ""))


def _of_optimizer(name: str) -> Iterator[Key]:
    meanings = _argument_docstrings(inspect.getdoc(get_optimizer_spec(name).cls) or "")
    for field in fields(optimizer_config(name)):
        yield Key(
            f"optimizer.{field.name}", _type_name(field.type), _plain(field.default), meanings.get(field.name, "")
        )


def _field_docstrings(cls: type[Any]) -> dict[str, str]:
    """Return the docstring under each field of a class."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(body, ast.ClassDef)
    found = {}
    for node, after in zip(body.body, body.body[1:], strict=False):
        is_field = isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        if is_field and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            found[node.target.id] = " ".join(str(after.value.value).split())  # type: ignore[attr-defined]
    return found


def _argument_docstrings(text: str) -> dict[str, str]:
    """Return the entries of the ``Args:`` section of a Google docstring."""
    found: dict[str, str] = {}
    name = ""
    for line in text.partition("Args:\n")[2].splitlines():
        if not line.startswith("    "):
            break
        if line.startswith("     "):
            found[name] += " " + line.strip()
        else:
            name, _, meaning = line.strip().partition(": ")
            found[name] = meaning
    return found


def _type_name(hint: Any) -> str:
    text = hint if isinstance(hint, str) else getattr(hint, "__name__", None) if isinstance(hint, type) else str(hint)
    return str(text).replace("typing.", "").replace("None", "null")


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
