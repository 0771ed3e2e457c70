"""``cflat check-data``: everything that is wrong with a dataset on disk, in one go."""

from __future__ import annotations

from typing import Annotated

import typer

from cflat.cli.options import Download, Json, download_data
from cflat.cli.output import emit_json, next_command

EXAMPLES = """\
  cflat check-data cub200 --root ~/data
  cflat check-data npz:photos.npz
  cflat check-data imagenet_r --root ~/data --fast
  cflat check-data cifar100 --root ~/data --download
"""


def command(
    name: Annotated[str, typer.Argument(help="Dataset, or folder:PATH, npz:PATH, domains:PATH")],
    root: Annotated[str | None, typer.Option("--root", "--data-root", help="Data root; default $CFLAT_DATA")] = None,
    fast: Annotated[bool, typer.Option("--fast", help="Do not decode the images")] = False,
    download: Download = False,
    json: Json = False,
) -> None:
    """Check a dataset for wrong counts, layout or labels, unreadable images and duplicates."""
    from cflat.data import check_dataset

    if download:
        download_data({"data": {"name": name, "root": root}})
    report = check_dataset(name, root, read_images=not fast)
    if json:
        emit_json(report.to_dict())
    else:
        print(report.render())
        if report.ok:
            place = ["--data-root", root] if root else []
            next_command(["cflat", "run", "--method", "icarl", "--data", name, "--preset", "smoke", *place])
    if not report.ok:
        # 1, not 2: the command was right, the data is not.
        raise typer.Exit(1)
