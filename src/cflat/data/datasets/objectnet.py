"""ObjectNet: the subset of 200 classes that the field's class-incremental benchmarks use."""

from cflat.data.catalog import DatasetSpec, register_dataset
from cflat.data.datasets.image_folder import load_class_folders

register_dataset(
    DatasetSpec(
        name="objectnet",
        title="ObjectNet",
        layout="objectnet/ (or objnet/) with train/<class>/ and test/<class>/ folders of 200 classes",
        licence="CC BY 4.0; its authors also ask that no model be tuned on it, which this benchmark does",
        num_classes=200,
        num_train=26_509,
        num_test=6_628,
        split=(10, 10),
        places=("objectnet", "objnet"),
    )
)(load_class_folders)
