"""CIFAR-10: torchvision's files, or the same arrays as ``cifar10.npz``."""

from cflat.data.catalog import DatasetSpec, Source, register_dataset
from cflat.data.dataset import Dataset
from cflat.data.datasets.cifar100 import load_cifar

__all__ = ["load_cifar10"]


@register_dataset(
    DatasetSpec(
        name="cifar10",
        title="CIFAR-10",
        layout="cifar10.npz, or the folder cifar-10-batches-py/ as torchvision downloads it",
        licence="none stated by its authors; cite Krizhevsky, 2009",
        num_classes=10,
        num_train=50_000,
        num_test=10_000,
        split=(2, 2),
        places=("cifar10.npz", "cifar-10-batches-py", "cifar10/cifar10.npz", "cifar10/cifar-10-batches-py"),
    )
)
def load_cifar10(source: Source) -> Dataset:
    """Load whichever form is there; the npz form may hold a part of the images."""
    return load_cifar(source, "CIFAR10")
