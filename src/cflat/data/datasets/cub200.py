"""CUB-200-2011 in the class folders that the field's toolboxes distribute (not the official split)."""

from cflat.data.catalog import DatasetSpec, register_dataset
from cflat.data.datasets.image_folder import load_class_folders

register_dataset(
    DatasetSpec(
        name="cub200",
        title="CUB-200",
        layout="cub200/ (or cub/) with train/<class>/ and test/<class>/ folders of 200 bird species",
        licence="images for non-commercial research and education only",
        num_classes=200,
        num_train=9_430,
        num_test=2_358,
        split=(10, 10),
        places=("cub200", "cub"),
    )
)(load_class_folders)
