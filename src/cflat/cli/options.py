"""The options that several commands share, and what they mean for a configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from cflat._errors import ConfigError

__all__ = [
    "Config",
    "Data",
    "DataRoot",
    "Json",
    "Method",
    "Overrides",
    "Preset",
    "Quiet",
    "Weights",
    "chosen_layer",
    "comma_names",
    "comma_numbers",
    "safe_name",
]

MAX_WORD = 40
"""Characters of a part of a folder's name; file systems allow 255 bytes in all."""

Method = Annotated[str | None, typer.Option("--method", "-m", help="Method; see: cflat list methods")]
Data = Annotated[
    str | None, typer.Option("--data", "-d", help="Dataset, or folder:PATH, npz:PATH, domains:PATH, features:PATH")
]
DataRoot = Annotated[str | None, typer.Option(help="Folder that holds the datasets; default $CFLAT_DATA")]
Weights = Annotated[str | None, typer.Option(help="Weights of the backbone: a file, timm (download), or random")]
Preset = Annotated[str | None, typer.Option(help="paper, pilot, cpu or smoke; default: paper, and cpu for digits")]
Config = Annotated[Path | None, typer.Option("--config", "-c", help="YAML or JSON file with any of the keys")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Any key, for example train.epochs=5 optimizer.rho=0.1"),
]

KEYS = {
    "data": "data.name",
    "data_root": "data.root",
    "backbone": "backbone.name",
    "weights": "backbone.weights",
    "image_size": "backbone.image_size",
}
"""What options set that are not called like a key."""


def chosen_layer(config: Path | None, overrides: list[str] | None, **options: str | int | None) -> dict[str, Any]:
    """Lay file, options and overrides over each other; an option that is None was not given."""
    from cflat.config.documents import merge, nested, parse_overrides, read_document

    layers: list[dict[str, Any]] = [read_document(config)] if config is not None else []
    layers += [nested(KEYS.get(name, name), value) for name, value in options.items() if value is not None]
    return merge(*layers, parse_overrides(overrides or []))


def comma_names(text: str) -> list[str]:
    """Return the words of a list with commas.

    >>> comma_names("none, sam,")
    ['none', 'sam']
    """
    return [name.strip() for name in text.split(",") if name.strip()]


def comma_numbers(option: str, text: str) -> list[int]:
    """Return the whole numbers of a list with commas.

    Raises:
        ConfigError: Naming the option.
    """
    try:
        return [int(number) for number in comma_names(text)]
    except ValueError:
        raise ConfigError(f"{option} must be whole numbers separated by commas, got {text!r}.") from None


def safe_name(*parts: object) -> str:
    """Return a folder name from what was chosen.

    >>> safe_name("icarl", "npz:/data/my file.npz", "none")
    'icarl-npz-my-file-none'
    """
    words = []
    for part in parts:
        kind, _, path = str(part).partition(":")
        words += [kind, *([Path(path).stem] if path else [])]
    return "-".join("".join(c if c.isalnum() or c in "._" else "-" for c in word[:MAX_WORD]) for word in words)
