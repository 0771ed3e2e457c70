"""CORe50: fifty things filmed in eleven sessions; three sessions are the test, as its authors propose.

This is their scenario of new classes: 50 objects, 10 in the first task and 5 in every later one.
"""

from __future__ import annotations

from collections.abc import Sequence

from cflat.data.catalog import DatasetSpec, Source, register_dataset
from cflat.data.dataset import Dataset
from cflat.data.datasets.image_folder import index_split
from cflat.data.images import ImageSet

SESSIONS = range(1, 12)
TEST_SESSIONS = (3, 7, 10)
KINDS = (
    "plug adapter", "mobile phone", "scissors", "light bulb", "can",
    "glasses", "ball", "marker", "cup", "remote control",
)  # fmt: skip
OF_A_KIND = 5


@register_dataset(
    DatasetSpec(
        name="core50",
        title="CORe50",
        layout="core50_128x128/ (or core50/) with the sessions s1/ to s11/ and in each the objects o1/ to o50/",
        licence="CC BY 4.0",
        num_classes=50,
        num_train=119_894,
        num_test=44_972,
        split=(10, 5),
        places=("core50_128x128", "core50", "core50/core50_128x128"),
    )
)
def load_core50(source: Source) -> Dataset:
    """Index the sessions; labels follow the numbers of the objects."""
    names = tuple(f"{kind} {number + 1}" for kind in KINDS for number in range(OF_A_KIND))
    train = _sessions(source, [session for session in SESSIONS if session not in TEST_SESSIONS])
    test = _sessions(source, TEST_SESSIONS)
    return Dataset("core50", train, test, names)


def _sessions(source: Source, sessions: Sequence[int]) -> ImageSet:
    root = source.find()
    label_of = {f"s{session}/o{label + 1}": label for session in sessions for label in range(len(KINDS) * OF_A_KIND)}
    for name in [name for name in label_of if not (root / name).is_dir()]:
        source.report(f"{str(root / name)!r} is missing. Expected {source.spec.layout}.")
        del label_of[name]
    return index_split(source, root, ".", label_of)
