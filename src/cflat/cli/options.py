"""The options that several commands share, and what they mean for a configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

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
    "safe_name",
]

Method = Annotated[str | None, typer.Option("--method", "-m", help="Method; see: cflat list methods")]
Data = Annotated[str | None, typer.Option("--data", "-d", help="Dataset, or folder:PATH, npz:PATH, domains:PATH")]
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


def chosen_layer(config: Path | None, overrides: list[str] | None, **named: str | int | None) -> dict[str, Any]:
    """Lay file, named options and overrides over each other; keys of ``named`` are dotted with ``__``."""
    from cflat.experiments.documents import merge, parse_overrides, read_document

    layers: list[dict[str, Any]] = [read_document(config)] if config is not None else []
    for key, value in named.items():
        if value is not None:
            section, _, name = key.partition("__")
            layers.append({section: {name: value} if name else value})
    return merge(*layers, parse_overrides(overrides or []))


def safe_name(*parts: object) -> str:
    """Return a folder name from what was chosen.

    >>> safe_name("icarl", "npz:/data/my file.npz", "none")
    'icarl-npz-my-file-none'
    """
    words = []
    for part in parts:
        kind, _, path = str(part).partition(":")
        words += [kind, *([Path(path).stem] if path else [])]
    return "-".join("".join(c if c.isalnum() or c in "._" else "-" for c in word) for word in words)
