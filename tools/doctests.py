"""A griffe extension: doctests anywhere in a docstring are shown as code."""

from __future__ import annotations

from typing import Any

from griffe import Extension

__all__ = ["FencedDoctests"]


class FencedDoctests(Extension):
    """Put fences around stretches of a docstring that begin with ``>>>`` and end with an empty line."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        """Rewrite the docstring of every module, class, function and attribute."""
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)


def fenced(text: str) -> str:
    """Return a docstring with its doctests in fences; those in an ``Examples:`` section are shown well already."""
    lines: list[str] = []
    is_open = False
    for line in text.splitlines():
        if not is_open and line.startswith(">>>"):
            lines.append("```pycon")
            is_open = True
        elif is_open and not line.strip():
            lines.append("```")
            is_open = False
        lines.append(line)
    return "\n".join([*lines, "```"] if is_open else lines)
