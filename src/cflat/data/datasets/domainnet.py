"""DomainNet (cleaned version): 345 classes in six domains, with the official file lists."""

from __future__ import annotations

from dataclasses import replace

from cflat.data.catalog import DatasetSpec, Source, register_dataset
from cflat.data.dataset import Dataset
from cflat.data.datasets.file_list import DomainLists, Entry, build_domain_dataset, read_domain_lists

LONE_T_SHIRT = Entry("painting/t-shirt/painting_328_000001.jpg", 327)
"""The official painting lists have t-shirts in the test list only; DUCT moves this one to the train list."""


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
    if domain.name != "painting" or not lacking or LONE_T_SHIRT not in domain.test:
        return domain
    test = [entry for entry in domain.test if entry != LONE_T_SHIRT]
    return replace(domain, train=[*domain.train, LONE_T_SHIRT], test=test)
