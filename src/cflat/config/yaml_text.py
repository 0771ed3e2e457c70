"""YAML 1.2 (core schema) in bounded time and memory.

PyYAML reads YAML 1.1, in which ``1:2:3`` is 3723, ``on`` is true, ``010`` is 8 and ``1e-3`` is text. Here a plain
scalar is a number only if it looks like one, and true and false are the only truth values. Documents are trees: an
alias stands for a copy, so that aliases of aliases can mean far more than they hold; they are counted before they are
built.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

import yaml
from yaml.nodes import MappingNode, Node, SequenceNode

MAX_VALUES = 50_000
"""Keys and values of a document, aliases counted as often as they are used."""

_TAG = "tag:yaml.org,2002:"
_SCALARS: tuple[tuple[str, str, str], ...] = (
    ("null", r"~|null|Null|NULL|", "~nN"),
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", "-+.0123456789"),
    ("float", r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", "-+."),
)
"""Tag, what a plain scalar must look like as a whole, and the characters that it can start with."""


def load_yaml(text: str) -> Any:
    """Return the value of a document.

    >>> load_yaml("[1e-3, 1:2:3, off, 010, ~]")
    [0.001, '1:2:3', 'off', 10, None]

    Raises:
        yaml.YAMLError: If it is no YAML, contains itself, or holds more than `MAX_VALUES` values.
        ValueError: If a tag and its value disagree.
        RecursionError: If it is nested too deeply.
    """
    return yaml.load(text, _Loader)


def dump_yaml(values: Mapping[str, Any]) -> str:
    """Return the text of a mapping, in the order of its keys; `load_yaml` reads the same values back."""
    return yaml.dump(dict(values), Dumper=_Dumper, sort_keys=False, default_flow_style=False, allow_unicode=True)


class _Loader(yaml.SafeLoader):
    """Plain values only: no dates, sets or bytes."""

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}  # type: ignore[misc]
    yaml_constructors: ClassVar[dict[str | None, Any]] = {}

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self.num_nodes = 0

    def compose_node(self, parent: Node | None, index: Any) -> Node | None:
        """Stop a long document early: building its nodes is what takes time."""
        self.num_nodes += 1
        if self.num_nodes > MAX_VALUES:
            raise _too_many()
        return super().compose_node(parent, index)

    def get_single_node(self) -> Node | None:
        """Return the document, if what it stands for is finite and not too much."""
        node = super().get_single_node()
        if node is not None and _num_values(node, {}) > MAX_VALUES:
            raise _too_many()
        return node


class _Dumper(yaml.SafeDumper):
    """Quotes what `_Loader` would take for something else than text, and never writes aliases."""

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}  # type: ignore[misc]

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _num_values(node: Node, known: dict[int, int]) -> int:
    """Return how many keys and values a node stands for; ``known`` has those that are counted, 0 for open ones."""
    if id(node) in known:
        if not known[id(node)]:
            raise yaml.YAMLError("it contains itself: an alias stands inside of what it names")
        return known[id(node)]
    known[id(node)] = 0
    children = node.value if isinstance(node, SequenceNode) else ()
    if isinstance(node, MappingNode):
        children = [child for pair in node.value for child in pair]
    known[id(node)] = 1 + sum(_num_values(child, known) for child in children)
    return known[id(node)]


def _too_many() -> yaml.YAMLError:
    return yaml.YAMLError(f"it holds more than {MAX_VALUES:,} values, those behind aliases counted as often as used")


def _number(text: str) -> int:
    base = {"0o": 8, "0x": 16}.get(text[:2], 10)
    return int(text[2:], base) if base != 10 else int(text)


def _truth(text: str) -> bool:
    return ["false", "true"].index(text.lower()) == 1  # a ValueError for others


def _real(text: str) -> float:
    return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))


_VALUES = {"null": lambda text: None, "bool": _truth, "int": _number, "float": _real}
for _name, _pattern, _starts in _SCALARS:
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(
            f"{_TAG}{_name}", re.compile(f"^(?:{_pattern})$"), [*_starts, *([""] if _name == "null" else [])]
        )
_constructors: Any = _Loader  # the stubs know constructors of the class that is extended, but not of its base
for _name, _read in _VALUES.items():
    _constructors.add_constructor(f"{_TAG}{_name}", lambda self, node, read=_read: read(self.construct_scalar(node)))
for _name in ("str", "seq", "map"):
    _constructors.add_constructor(f"{_TAG}{_name}", getattr(yaml.SafeLoader, f"construct_yaml_{_name}"))
_constructors.add_constructor(None, yaml.SafeLoader.construct_undefined)
