"""Office-Home: 65 everyday things in four domains; it has no official split."""

from cflat.data.catalog import DatasetSpec, register_dataset
from cflat.data.datasets.domain_folders import load_domain_folders

register_dataset(
    DatasetSpec(
        name="office_home",
        title="Office-Home",
        layout="office_home/ (or OfficeHomeDataset_10072016/) with Art/, Clipart/, Product/, Real World/ and in each"
        " <class>/ folders of 65 classes; <domain>_train.txt, <domain>_test.txt lists or none",
        licence="non-commercial research and education only",
        num_classes=65,
        domains=("Art", "Clipart", "Product", "Real World"),
        places=("office_home", "office-home", "OfficeHomeDataset_10072016"),
    )
)(load_domain_folders)
