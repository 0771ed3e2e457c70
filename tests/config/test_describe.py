"""Keys described from the code, and the documentation that holds them."""

from __future__ import annotations

import inspect
from dataclasses import field, make_dataclass
from pathlib import Path

import pytest

from cflat import ConfigError
from cflat.config.choices import _argument_docstrings
from cflat.config.describe import describe_keys, keys_of_settings, markdown_keys
from cflat.config.validation import parse_section
from cflat.methods import list_methods
from cflat.optim import list_optimizers
from cflat.train.settings import list_bases

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "configuration.md"


@pytest.mark.parametrize("name", [None, *list_methods(), *list_optimizers(), *list_bases()])
def test_every_key_says_what_it_means(name: str | None) -> None:
    assert [key.path for key in describe_keys(name) if not key.meaning] == []


@pytest.mark.parametrize("is_frozen", [True, False])
def test_plain_dataclasses_of_plug_ins_are_described_and_read(is_frozen: bool) -> None:
    plain = make_dataclass("Plain", [("width", int, field(default=3))], frozen=is_frozen)
    (key,) = keys_of_settings("method", plain)
    assert (key.path, key.type, key.default) == ("method.width", "int", 3)
    assert parse_section(plain, {"width": 5}, "method") == plain(5)
    with pytest.raises(ConfigError, match=r"Unknown key 'method.widht'. Did you mean 'width'"):
        parse_section(plain, {"widht": 5}, "method")


class Indented:
    """A class of a plug-in.

    Args:
            size: Its entries are indented as deeply
                as their author likes.
            depth (int, optional): Another.
    """

    def __init__(self, size: int = 1, depth: int = 2) -> None: ...


def test_meanings_of_keywords_are_found_at_any_indentation() -> None:
    meanings = _argument_docstrings(inspect.getdoc(Indented) or "")
    assert meanings == {"size": "Its entries are indented as deeply as their author likes.", "depth": "Another."}
    assert _argument_docstrings("Args:\n        odd\n    size: A size.") == {"size": "A size."}


def test_the_documentation_holds_the_present_keys() -> None:
    assert markdown_keys() in DOCUMENT.read_text(), "paste markdown_keys() into docs/configuration.md"
