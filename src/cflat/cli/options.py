"""The options that several commands share, and what they mean for a configuration."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast

import typer

from cflat._errors import ConfigError
from cflat.cli.output import world_size

Command = TypeVar("Command", bound=Callable[..., None])
N = TypeVar("N", int, float)
MAX_WORD = 40
"""Characters of a part of a folder's name; file systems allow 255 bytes in all."""

DataRoot = Annotated[str | None, typer.Option(help="Folder that holds the datasets; default $CFLAT_DATA")]
Download = Annotated[bool, typer.Option("--download", help="Download the dataset if torchvision can and it is absent")]
Weights = Annotated[str | None, typer.Option(help="Weights of the backbone: a file, timm (download), or random")]
Score = Annotated[
    str | None, typer.Option("--score", help="Score to judge by, such as nme; default: the one its paper reports")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Do not show progress")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Any key of a configuration, such as train.epochs=5")
]
RUN = typer.Argument(metavar="DIR|KEY=VALUE", help="A run directory, or the settings of a new run")


def _key(*names: str, help: str, kind: Any = str) -> Any:
    return Annotated[kind | None, typer.Option(*names, help=help)]


SETTINGS: dict[str, tuple[str, Any]] = {
    "method": ("method", _key("--method", "-m", help="Method; see: cflat list methods")),
    "data": ("data.name", _key("--data", "-d", help="Dataset, or folder:PATH, npz:PATH, domains:PATH, features:PATH")),
    "optimizer": ("optimizer", _key("--optimizer", "-o", help="Optimizer; see: cflat list optimizers")),
    "backbone": ("backbone.name", _key(help="Frozen network; see: cflat list backbones")),
    "weights": ("backbone.weights", Weights),
    "image_size": ("backbone.image_size", _key(help="Input size in pixels; default: that of the weights", kind=int)),
    "preset": ("preset", _key(help="paper, pilot, cpu or smoke; default: paper, or cpu for digits and features")),
    "seed": ("seed", _key(help="Random seed of the whole run", kind=int)),
    "data_root": ("data.root", DataRoot),
}
"""Options that set keys of a configuration: the key, and how the option is written."""
_CONFIG = Annotated[Path | None, typer.Option("--config", "-c", help="YAML or JSON file with any configuration keys")]


def takes_settings(*names: str, words: Any = None, file: bool = True) -> Callable[[Command], Command]:
    """Let a command take some of `SETTINGS`, ``--config`` and ``KEY=VALUE`` words; its first argument is their layer.

    A command with a parameter ``folders`` gets there the words that are no ``KEY=VALUE``. ``words`` replaces the help
    of the words. With ``data_root`` comes ``--download``: it happens before the command, and no run records it.
    """

    def decorate(command: Command) -> Command:
        # Commands postpone their annotations, which would be strings without eval_str.
        own = inspect.signature(command, eval_str=True).parameters
        annotations = {
            "overrides": Overrides if words is None else Annotated[list[str] | None, words],
            **{name: SETTINGS[name][1] for name in names},
            **({"download": Download} if "data_root" in names else {}),
            **({"config": _CONFIG} if file else {}),
        }
        shared = [
            inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None, annotation=annotation)
            for name, annotation in annotations.items()
        ]
        others = [parameter for parameter in list(own.values())[1:] if parameter.name != "folders"]

        @wraps(command)
        def call(**given: Any) -> None:
            keys = given.pop("overrides") or []
            if "folders" in own:
                # A folder may have an equals sign in its name.
                given["folders"] = [word for word in keys if "=" not in word or Path(word).is_dir()]
                keys = [word for word in keys if word not in given["folders"]]
            chosen = {name: given.pop(name) for name in names}
            layer = chosen_layer(given.pop("config", None), keys, **chosen)
            if given.pop("download", None):
                download_data(layer)
            command(layer, **given)

        made: Any = call
        # Typer reads both, and wraps() would leave it those of the command without the shared options.
        made.__signature__ = inspect.Signature([*shared, *others])
        made.__annotations__ = {parameter.name: parameter.annotation for parameter in [*shared, *others]}
        return cast(Command, made)

    return decorate


def chosen_layer(config: Path | None, overrides: list[str] | None, **options: str | int | None) -> dict[str, Any]:
    """Lay file, options and overrides over each other; an option that is None was not given."""
    from cflat.config.documents import merge, nested, parse_overrides, read_document

    layers: list[dict[str, Any]] = [read_document(config)] if config is not None else []
    # Later layers win: file, options, then KEY=VALUE.
    layers += [nested(SETTINGS[name][0], value) for name, value in options.items() if value is not None]
    return merge(*layers, parse_overrides(overrides or []))


def download_data(layer: dict[str, Any]) -> None:
    """Download the dataset that a layer names, unless it is there."""
    from cflat.data import download_dataset

    data = layer.get("data")
    name, root = (data.get("name"), data.get("root")) if isinstance(data, dict) else (data, None)
    if not isinstance(name, str) or not isinstance(root, str | None):
        raise ConfigError("--download needs the dataset: add --data NAME, and --data-root DIR or $CFLAT_DATA.")
    if world_size() > 1:  # every rank would write the same files
        raise ConfigError(f"--download is for one process; before the ranks start: cflat check-data {name} --download")
    download_dataset(name, root)


def comma_names(text: str) -> list[str]:
    """Return the words of a list with commas.

    >>> comma_names("none, sam,")
    ['none', 'sam']
    """
    return [name.strip() for name in text.split(",") if name.strip()]


def comma_numbers(option: str, text: str, kind: type[N] = int) -> list[N]:
    """Return the numbers of a list with commas, by default whole ones."""
    try:
        return [kind(number) for number in comma_names(text)]
    except ValueError:
        what = "whole numbers" if kind is int else "numbers"
        raise ConfigError(f"{option} must be {what} separated by commas, got {text!r}.") from None


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


def usual_folder(study: str, layer: dict[str, Any]) -> Path:
    """Return the default folder of a study, ``runs/STUDY-METHOD-DATA``."""
    chosen = (layer.get(key) for key in ("method", "data"))
    return Path("runs") / safe_name(study, *(one.get("name") if isinstance(one, dict) else one for one in chosen))
