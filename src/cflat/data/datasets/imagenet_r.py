"""ImageNet-R: renditions of 200 ImageNet classes, in the 80/20 split that was made for L2P."""

from cflat.data.catalog import DatasetSpec, register_dataset
from cflat.data.datasets.image_folder import load_class_folders

register_dataset(
    DatasetSpec(
        name="imagenet_r",
        title="ImageNet-R",
        layout="imagenet_r/ (or imagenet-r/) with train/<wnid>/ and test/<wnid>/ folders of 200 classes",
        licence="images belong to their authors; research use",
        num_classes=200,
        num_train=24_000,
        num_test=6_000,
        split=(20, 20),
        places=("imagenet_r", "imagenet-r"),
    )
)(load_class_folders)
