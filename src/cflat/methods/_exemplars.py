"""What methods with a memory share: its budget, its place in a task and in checkpoints."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from cflat._settings import Count, settings_class
from cflat.data import Batch, ExemplarMemory, ImageSet, ReservoirMemory, Task
from cflat.methods import Extract, Method, StreamInfo
from cflat.nn import NearestMeanHead


@settings_class
class BudgetConfig:
    """Size of a memory."""

    memory_total: Count | None = None
    """Total number of exemplars, divided among the classes seen so far; mutually exclusive with memory_per_class."""
    memory_per_class: Count | None = None
    """Exemplars of each class; 20 if neither budget is given."""

    def __post_init__(self) -> None:
        if self.memory_total is not None and self.memory_per_class is not None:
            raise ValueError("memory_total and memory_per_class exclude each other; set one of them to null.")

    @property
    def budget(self) -> tuple[int | None, int | None]:
        """The total and the number per class, one of them None."""
        is_open = self.memory_total is None and self.memory_per_class is None
        return self.memory_total, 20 if is_open else self.memory_per_class


@settings_class
class MemoryConfig(BudgetConfig):
    """Settings of the exemplar memory."""

    selection: Literal["herding", "random"] = "herding"
    """How exemplars are chosen."""

    def make_memory(self, info: StreamInfo) -> ExemplarMemory:
        """Return an empty memory; raise, before anything is trained, if classes of the stream will find no room."""
        total, per_class = self.budget
        # Where domains share labels, every task brings every class, and in blurry streams every task may: the quota of
        # a class is divided among them.
        is_blurry = info.scenario == "blurry"
        is_shared = is_blurry or (info.scenario == "domain" and info.label_modulus is None)
        least, part = (info.num_tasks or 1) if is_shared else 1, "task" if is_blurry else "domain"
        if per_class is not None and per_class < least:
            raise ValueError(
                f"method.memory_per_class must be at least {least}, one image for each {part}, got {per_class}."
            )
        if total is not None and total // info.num_classes < least:
            least *= info.num_classes
            each = f"class and {part}" if is_shared else "class"
            raise ValueError(f"method.memory_total must be at least {least}, one image for each {each}, got {total}.")
        return ExemplarMemory(total=total, per_class=per_class, selection=self.selection)


class Remembering(Method):
    """A method with a memory, whose rows are part of its checkpoints."""

    memory: ExemplarMemory | ReservoirMemory

    def extra_state(self) -> dict[str, Any]:
        """Return the rows of the stored images and what belongs to them."""
        return {"memory": self.memory.state()}

    def load_extra_state(self, state: dict[str, Any], train: ImageSet) -> None:
        """Find the stored images again."""
        self.memory.load_state(state["memory"], train)


class Rehearsal(Remembering):
    """A method that trains on exemplars of earlier tasks besides the present one."""

    memory: ExemplarMemory

    def train_images(self, task: Task) -> ImageSet:
        """Return the task's images and all exemplars."""
        return self.memory.rehearse(task.train)

    def skip_task(self, task: Task) -> None:
        """Keep as many exemplars as the task would leave."""
        # Which ones does not matter for the cost: random features select quickly.
        self.memory.update(task.train, torch.rand(len(task.train), 2))


class RehearsalWithMeans(Rehearsal):
    """Classify by the network (the score ``cnn``), or by the class means of the exemplars (``nme``)."""

    scores = ("cnn", "nme")
    network: Any  # a module with ``features`` and a ``head`` on them
    means: NearestMeanHead

    def finish_task(self, task: Task, extract: Extract) -> None:
        """Choose exemplars of the new classes and compute the class means of all exemplars anew."""
        self.memory.update(task.train, extract(task.train, self.network.features))
        # Means of the stored exemplars, for the new classes too, under the network as it is now: as in PILOT and PyCIL.
        exemplars = self.memory.images()
        features = extract(exemplars, self.network.features)
        self.means.reset()
        self.means.update(features, torch.from_numpy(exemplars.labels).to(features.device))

    def predict(self, batch: Batch) -> dict[str, Tensor]:
        """Return the network's logits and the closeness to each class mean, from one feature pass."""
        features = self.network.features(batch.images)
        return {"cnn": self.network.head(features), "nme": self.means(features)}
