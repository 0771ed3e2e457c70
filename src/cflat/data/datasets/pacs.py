"""PACS: seven classes in four domains, as photographs, paintings, cartoons and sketches."""

from cflat.data.catalog import DatasetSpec, register_dataset
from cflat.data.datasets.domain_folders import load_domain_folders

register_dataset(
    DatasetSpec(
        name="pacs",
        title="PACS",
        layout="pacs/ with <domain>/<class>/ images of 4 domains x 7 classes, and <domain>_train.txt, <domain>_test.txt"
        " lists or none",
        licence="none stated by its authors; research use",
        num_classes=7,
        domains=("art_painting", "cartoon", "photo", "sketch"),
        places=("pacs", "PACS"),
    )
)(load_domain_folders)
