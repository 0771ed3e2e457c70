"""ImageNet-A: photographs that networks get wrong, of 200 ImageNet classes, in the split of the field's toolboxes."""

from cflat.data.catalog import DatasetSpec, register_dataset
from cflat.data.datasets.image_folder import load_class_folders

register_dataset(
    DatasetSpec(
        name="imagenet_a",
        title="ImageNet-A",
        layout="imagenet_a/ (or imagenet-a/) with train/<wnid>/ and test/<wnid>/ folders of 200 classes",
        licence="images belong to their authors; research use",
        num_classes=200,
        num_train=5_981,
        num_test=1_519,
        split=(20, 20),
        places=("imagenet_a", "imagenet-a"),
    )
)(load_class_folders)
