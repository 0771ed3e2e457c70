"""Keys described from the code, and the documentation that holds them."""

from __future__ import annotations

from pathlib import Path

import pytest

from cflat.config.describe import describe_keys, markdown_keys
from cflat.methods import list_methods
from cflat.optim import list_optimizers

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "configuration.md"


@pytest.mark.parametrize("name", [None, *list_methods(), *list_optimizers()])
def test_every_key_says_what_it_means(name: str | None) -> None:
    assert [key.path for key in describe_keys(name) if not key.meaning] == []


def test_the_documentation_holds_the_present_keys() -> None:
    assert markdown_keys() in DOCUMENT.read_text(), "paste markdown_keys() into docs/configuration.md"
