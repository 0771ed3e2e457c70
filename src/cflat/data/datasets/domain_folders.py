"""PACS, Office-Home, DomainNet: ``<domain>/<class>/`` folders, with file lists or (but for the last) without."""

from __future__ import annotations

from pathlib import Path

from cflat._errors import DataError
from cflat.data.catalog import DatasetSpec, Source, register_dataset
from cflat.data.dataset import Dataset, Report
from cflat.data.datasets.file_list import TRAIN_LIST, DomainLists, Entry, build_domain_dataset, read_domain_lists
from cflat.data.datasets.image_folder import class_folders, image_files

TEST_EVERY = 5
"""Without lists: in each class of a domain, in alphabetical order, every fifth image is a test image."""
LONE_T_SHIRT = Entry("painting/t-shirt/painting_328_000001.jpg", 327)
"""The official painting lists have t-shirts in the test list only; DUCT moves this one to the train list."""


def load_domain_folders(source: Source) -> Dataset:
    """Load the domains of the catalogue entry: by their lists if there are any, else with our own split."""
    root, names = source.find(), source.spec.domains
    if any((root / f"{name}{TRAIN_LIST}").is_file() for name in names):
        return build_domain_dataset(source, root, read_domain_lists(root, names, source.report))
    folders = {name: _folder(root, name, source) for name in names}
    classes = sorted({label for folder in folders.values() for label in class_folders(folder, source.report)})
    label_of = {name: label for label, name in enumerate(classes)}
    domains = [_split(root, name, folder, label_of, source.report) for name, folder in folders.items()]
    return build_domain_dataset(source, root, domains)


def _folder(root: Path, domain: str, source: Source) -> Path:
    """Return the folder of a domain; distributions differ in how they write a space and capitals."""
    wanted = _plain(domain)
    found = [path for path in sorted(root.iterdir()) if path.is_dir() and _plain(path.name) == wanted]
    if not found:
        raise DataError(f"{str(root)!r} has no folder of the domain {domain!r}. Expected {source.spec.layout}.")
    return found[0]


def _plain(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())


def _split(root: Path, name: str, folder: Path, label_of: dict[str, int], report: Report) -> DomainLists:
    train: list[Entry] = []
    test: list[Entry] = []
    for label in class_folders(folder, report):
        for index, path in enumerate(image_files(folder / label, report)):
            entry = Entry(path.relative_to(root).as_posix(), label_of[label])
            (test if index % TEST_EVERY == TEST_EVERY - 1 else train).append(entry)
    return DomainLists(name, train, test)


for _spec in (
    DatasetSpec(
        name="pacs",
        title="PACS",
        layout="pacs/ with <domain>/<class>/ images of 4 domains x 7 classes, and <domain>_train.txt, <domain>_test.txt"
        " lists or none",
        licence="none stated by its authors; research use",
        num_classes=7,
        domains=("art_painting", "cartoon", "photo", "sketch"),
        places=("pacs", "PACS"),
    ),
    DatasetSpec(
        name="office_home",
        title="Office-Home",
        layout="office_home/ (or OfficeHomeDataset_10072016/) with Art/, Clipart/, Product/, Real World/ and in each"
        " <class>/ folders of 65 classes; <domain>_train.txt, <domain>_test.txt lists or none",
        licence="non-commercial research and education only",
        num_classes=65,
        domains=("Art", "Clipart", "Product", "Real World"),
        places=("office_home", "office-home", "OfficeHomeDataset_10072016"),
    ),
):
    register_dataset(_spec)(load_domain_folders)


@register_dataset(
    DatasetSpec(
        name="domainnet",
        title="DomainNet",
        layout="domainnet/ with <domain>/<class>/ images and <domain>_train.txt, <domain>_test.txt lists",
        licence="images belong to their authors; non-commercial research only",
        num_classes=345,
        num_train=409_832,
        num_test=176_743,
        split=(69, 69),
        domains=("clipart", "infograph", "painting", "quickdraw", "real", "sketch"),
        places=("domainnet", "DomainNet"),
    )
)
def load_domainnet(source: Source) -> Dataset:
    """Load the six domains in the order of the literature."""
    root = source.find()
    lists = read_domain_lists(root, source.spec.domains, source.report)
    return build_domain_dataset(source, root, [with_t_shirt(domain) for domain in lists])


def with_t_shirt(domain: DomainLists) -> DomainLists:
    """Give the painting domain a training image of the class that its official train list lacks."""
    lacking = all(entry.label != LONE_T_SHIRT.label for entry in domain.train)
    # Lists in which it was moved already are left alone.
    if domain.name != "painting" or not lacking or LONE_T_SHIRT not in domain.test:
        return domain
    test = [entry for entry in domain.test if entry != LONE_T_SHIRT]
    return domain._replace(train=[*domain.train, LONE_T_SHIRT], test=test)
