"""The features of block A's photographs: computed once on a machine, read by all runs."""

from __future__ import annotations

from benchmarks.study.configs import Places

from cflat.runs.features import features_config, make_features

FILES = {
    "cifar100": {"image_size": 112, "data": {"test_per_class": 50}},
    "cub200": {"image_size": 224, "data": {}},
    "pacs": {"image_size": 224, "data": {}},
}
"""All training images; of CIFAR-100, 50 test images per class."""


def make_all(places: Places) -> None:
    """Write the files that are missing; about ten minutes of one thread."""
    assert places.features is not None
    places.features.mkdir(parents=True, exist_ok=True)
    for name, values in FILES.items():
        path = places.features / f"{name}.npz"
        if path.exists():
            continue
        config = features_config(
            {
                "data": {"name": name, "root": str(places.data_root), **values["data"]},
                "backbone": {
                    "name": "vit_tiny",
                    "weights": str(places.weights),
                    "image_size": values["image_size"],
                },
                "runtime": {"accelerator": "cpu"},
            }
        )
        made = make_features(config, path, batch_size=64)
        print(f"{made.path}: {made.num_train} train and {made.num_test} test images")
