"""``cflat features``: compute the features of a frozen backbone once, for all runs that share them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from cflat.cli.options import Json, Quiet, takes_settings
from cflat.cli.output import emit_json, next_command

EXAMPLES = """\
  cflat features --data cifar100 --data-root ~/data --backbone vit_tiny --weights vit_tiny.safetensors --image-size 112
  cflat features --data folder:photos --backbone vit_base --weights timm --out photos.npz data.train_per_class=50
  cflat run --method replay --data features:photos.npz
"""


KEYS = typer.Argument(
    metavar="KEY=VALUE", help="Any key of data, backbone and runtime, for example data.train_per_class=50"
)


@takes_settings("data", "backbone", "weights", "image_size", "data_root", words=KEYS, file=False)
def command(
    layer: dict[str, Any],
    out: Annotated[Path | None, typer.Option(help="Output file; default features/DATA-BACKBONE-KEY.npz")] = None,
    batch_size: Annotated[int, typer.Option(help="Batch size", min=1)] = 64,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Cache the features of a frozen backbone for all images in one file, which runs read as features:PATH."""
    from cflat.cli.progress import count_images
    from cflat.runs.features import features_config, make_features

    config = features_config(layer)
    with count_images("features", is_silent=quiet or json) as report:
        made = make_features(config, out, batch_size=batch_size, tell=report)
    if json:
        emit_json(made.to_dict())
        return
    verb = "Wrote" if made.is_new else "Found"
    print(f"{verb} {made.path}: {made.size} features of {made.num_train} train and {made.num_test} test images")
    next_command(["cflat", "run", "--method", "replay", "--data", f"features:{made.path}"])
