"""Data: datasets, streams of tasks, transforms, loading and memories of old images."""

from cflat.data.catalog import DatasetSpec, dataset_spec, list_datasets, load_dataset, locate_dataset, register_dataset
from cflat.data.check import DataReport, check_dataset
from cflat.data.dataset import Dataset
from cflat.data.download import download_dataset
from cflat.data.images import ImageSet, vector_size
from cflat.data.inputs import INPUTS, eval_transform, train_transform
from cflat.data.loader import Batch, BatchLoader
from cflat.data.memory import ExemplarMemory, ReservoirMemory, herding
from cflat.data.outline import Outline
from cflat.data.stream import Split, Stream, Task, build_stream, class_order, with_label_noise
from cflat.data.transforms import Transform

from cflat.data import datasets as _datasets  # isort: skip  # noqa: F401  enters every dataset

__all__ = [
    "INPUTS", "Batch", "BatchLoader", "DataReport", "Dataset", "DatasetSpec", "ExemplarMemory", "ImageSet",
    "Outline", "ReservoirMemory", "Split", "Stream", "Task", "Transform", "build_stream", "check_dataset",
    "class_order", "dataset_spec", "download_dataset", "eval_transform", "herding", "list_datasets", "load_dataset",
    "locate_dataset", "register_dataset", "train_transform", "vector_size", "with_label_noise",
]  # fmt: skip
