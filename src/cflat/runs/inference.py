"""Inference: load a trained method from a run directory or an exported file, and classify new images."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cflat._errors import ConfigError, DataError, shortened
from cflat._files import make_folder, open_regular, require_unpacked, translate_read_errors, write_atomic
from cflat._plugins import loaded_plugins, require_recorded
from cflat._registry import require_known
from cflat.config.run_config import CLASSES, IMAGES, RunConfig, parse_config
from cflat.data import BatchLoader, ImageSet, Outline, eval_transform
from cflat.data.dataset import refuse
from cflat.data.datasets.image_folder import SUFFIXES, image_files
from cflat.data.pixels import ArrayPixels, ArrayVectors, DecodedCache, FilePixels, PixelStore
from cflat.methods import Method, StreamInfo, create_method
from cflat.runs.folder import RunFolder
from cflat.runs.memory_limit import MemoryLimit
from cflat.runs.run import make_backbone
from cflat.train.checkpoint import CheckpointStore, require_plain

Images: TypeAlias = str | Path | Sequence[str | Path] | npt.NDArray[Any]
"""A folder, files, uint8 pixels (N, H, W, 3), or the vectors that a run on features has learned from."""

_MAGIC = b"cflat method 2\n"
"""First line of an exported file; the second one is the hash of all that follows."""
_DIGEST_BYTES = 16
_TRAINED = "a trained method of this version of cflat"


@dataclass(frozen=True)
class Prediction:
    """The classes that a method finds in one image."""

    image: str
    """Its path, or its row in an array."""
    label: int
    """Position of the class among `Predictor.class_names`."""
    name: str
    """The class."""
    score: float
    """The method's own measure, a logit, a cosine or a negative distance: larger is better, and no probability."""
    top: tuple[tuple[str, float], ...]
    """The best classes with their scores, the answer first."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        top = [{"class": name, "score": score} for name, score in self.top]
        return {"image": self.image, "class": self.name, "label": self.label, "score": self.score, "top": top}


class Predictor:
    """A trained method, ready for new images; no training image is needed.

    Made by `load_predictor` from the configuration of a run, the tasks of its stream, and what its checkpoint holds of
    the method. Without a device, it takes a GPU if there is one.
    """

    def __init__(
        self,
        config: RunConfig,
        outline: Outline,
        num_tasks: int,
        state: dict[str, Any],
        extra: dict[str, Any],
        *,
        device: str | torch.device | None = None,
    ) -> None:
        self.config = config
        self.outline = outline
        self.num_tasks = num_tasks
        self._extra = extra
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        require_plain(state, is_finite=True)
        require_plain(extra)
        info = StreamInfo(outline.scenario, len(outline.class_names), len(outline.tasks), outline.label_modulus)
        # The file may come from anywhere, and may ask for a network of any size.
        with MemoryLimit("the sizes in its configuration"):
            backbone = make_backbone(config.backbone, outline.vector_size, is_filled_later=True)
            self.method: Method = create_method(config.method.name, backbone, info, config.method.settings)
            for task in outline.empty_tasks(num_tasks):
                self.method.grow(task)
        # The transform of the test images: no augmentation.
        inputs = config.backbone.inputs
        self.transform = eval_transform(inputs, backbone.image_size, backbone.mean, backbone.std)
        self.method.load_state_dict(state)
        self.method.load_answers(extra)
        self.method.to(self.device).eval()

    @property
    def class_names(self) -> tuple[str, ...]:
        """The classes learned so far."""
        seen = self.outline.tasks[self.num_tasks - 1][1].stop
        return self.outline.answers[:seen]

    def predict(
        self, images: Images, *, top: int = 1, task: int | None = None, score: str | None = None
    ) -> list[Prediction]:
        """Return the class of each image.

        Args:
            images: A folder, files, or uint8 pixels of shape (N, H, W, 3).
            top: Best classes to name for each image.
            task: Of a task-incremental run, the task that the images belong to, from 0.
            score: Which of the method's scores decides; None takes its headline.

        Raises:
            ConfigError: If the task or the score does not exist, or ``top`` is not positive.
            DataError: If an image cannot be read.
        """
        if top < 1:
            raise ConfigError(f"top must be a whole number from 1, got {top}.")
        chosen = _image_set(images, self.config.data.short_side, self.outline.vector_size)
        labels = self._labels(task)
        own = self.scores(chosen, score)[:, labels.start : labels.stop]
        best = own.topk(min(top, own.shape[1]), dim=1)
        names = self.class_names
        found = []
        for row, (places, values) in enumerate(zip(best.indices.tolist(), best.values.tolist(), strict=True)):
            answers = [labels[place] for place in places]
            ranked = tuple((names[answer], value) for answer, value in zip(answers, values, strict=True))
            found.append(Prediction(chosen.store.describe(row), answers[0], *ranked[0], ranked))
        return found

    @torch.no_grad()
    def scores(self, images: ImageSet, score: str | None = None) -> Tensor:
        """Return the scores of all classes so far, (images, classes), on the CPU.

        Of a stream whose domains have labels of their own, a class has the best score among its labels.
        """
        name = self.method.scores[0] if score is None else score
        require_known(f"score of {self.config.method.name}", name, self.method.scores)
        size = self.config.train.eval_batch_size or self.config.train.batch_size
        loader = BatchLoader(images, self.transform, size, shuffle=False, device=self.device)
        found = torch.cat([self.method.predict(batch)[name].float().cpu() for batch in loader])
        # topk would rank NaN first.
        if found.isnan().any():
            raise DataError("The scores are not numbers: the method, or one of the images, holds NaN or infinity.")
        modulus = self.outline.label_modulus
        return found if modulus is None else found.unflatten(1, (-1, modulus)).amax(dim=1)

    def save(self, path: str | Path) -> Path:
        """Write all that `load_predictor` needs into one file, with a hash of it, that loads without running code."""
        values = {
            "config": self.config.to_dict(),
            "stream": self.outline.to_dict(),
            "num_tasks": self.num_tasks,
            "method": self.method.state_dict(),
            "extra": self._extra,
            "plugins": loaded_plugins(),
        }
        path, content = Path(path), io.BytesIO()
        torch.save(values, content)  # into memory: its hash goes before it
        make_folder(path.parent)
        write_atomic(path, _MAGIC + _hash(content.getbuffer()) + content.getbuffer())
        return path

    def _labels(self, task: int | None) -> range:
        """Return the labels to choose from."""
        if self.outline.scenario != "task":
            if task is not None:
                raise ConfigError(
                    f"A task is named in task-incremental runs only; this one is {self.outline.scenario}-"
                    "incremental and chooses among all classes."
                )
            return range(len(self.class_names))
        if task is None or not 0 <= task < self.num_tasks:
            raise ConfigError(
                f"This run is task-incremental: give the task that the images belong to with task (--task), "
                f"one of its {self.num_tasks} learned tasks from 0 to {self.num_tasks - 1}; got {task!r}."
            )
        return self.outline.tasks[task][1]


def load_predictor(path: str | Path, *, device: str | torch.device | None = None) -> Predictor:
    """Load a trained method from a run directory, or from the file that `Predictor.save` wrote.

    A run that has stopped between two tasks answers with those that it has learned; one that has stopped within a task
    must be resumed first.

    Raises:
        DataError: If there is no trained method at ``path``, or weights, settings and class names are not those that
            were written together.
    """
    path = Path(path)
    if not path.exists():
        raise DataError(f"{str(path)!r} does not exist; give a run directory, or a file that Predictor.save wrote.")
    folder = RunFolder(path)
    with translate_read_errors(path, _TRAINED):
        return Predictor(*(_from_run(folder) if path.is_dir() else _from_file(path)), device=device)


def _from_file(path: Path) -> tuple[RunConfig, Outline, int, dict[str, Any], dict[str, Any]]:
    with open_regular(path) as file:
        is_ours, digest = file.readline(len(_MAGIC)) == _MAGIC, file.readline(2 * _DIGEST_BYTES + 1)
        content = file.read() if is_ours else b""
    if not is_ours or _hash(content) != digest:
        problem = "has changed since it was written; export it anew" if is_ours else f"is not {_TRAINED}"
        raise DataError(f"{str(path)!r} {problem}.")
    # The hash protects from accidents, not from an attacker, who can compute it.
    require_unpacked(io.BytesIO(content))
    values = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    require_recorded(values["plugins"], path)
    outline = Outline.from_dict(values["stream"])
    if not 0 < values["num_tasks"] <= len(outline.tasks):
        raise ValueError(f"{values['num_tasks']} of {len(outline.tasks)} tasks")
    return parse_config(values["config"]), outline, values["num_tasks"], values["method"], values["extra"]


def _from_run(folder: RunFolder) -> tuple[RunConfig, Outline, int, dict[str, Any], dict[str, Any]]:
    config, outline = folder.load_config(), folder.load_outline()
    state = CheckpointStore(folder.checkpoints).load()
    num_tasks = 0 if state is None else int(state["position"][0])
    # Within a task the network has grown for classes that it has not learned.
    if state is None or num_tasks == 0 or state["is_grown"]:
        lack = "has no checkpoint yet" if state is None else f"was stopped within task {num_tasks + 1}"
        raise DataError(f"The run in {str(folder.path)!r} {lack}. Resume it: cflat run --resume {folder.path}")
    # The images are not needed to predict, so their hash is taken as it is.
    now = {**config.identity(), CLASSES: outline.fingerprint(), IMAGES: state["identity"].get(IMAGES)}
    changed = [key for key in {**now, **state["identity"]} if now.get(key) != state["identity"].get(key)]
    if changed:
        raise DataError(
            f"The files in {str(folder.path)!r} do not belong together: {shortened(', '.join(changed), 300)} of "
            "config.yaml or stream.json are not those of the checkpoint. Change them back."
        )
    return config, outline, num_tasks, state["method"], state["extra"]


def _hash(content: bytes | memoryview) -> bytes:
    return hashlib.blake2b(content, digest_size=_DIGEST_BYTES).hexdigest().encode() + b"\n"


def find_images(places: Sequence[str | Path]) -> list[Path]:
    """Return the image files at or below some places, in order."""
    found: list[Path] = []
    for place in map(Path, places):
        if not place.exists():
            raise DataError(f"{str(place)!r} does not exist; give image files, or folders that hold some.")
        below = list(image_files(place, refuse)) if place.is_dir() else [place]
        if not below:
            endings = ", ".join(sorted(SUFFIXES))
            raise DataError(f"{str(place)!r} holds no image; files that end in {endings} are read.")
        found += below
    return found


def _image_set(images: Images, short_side: int | None, vector_size: int | None) -> ImageSet:
    store: PixelStore
    if vector_size is not None:
        if not isinstance(images, np.ndarray) or images.ndim != 2 or images.shape[1] != vector_size:
            raise ConfigError(
                f"This run was trained on vectors of {vector_size} numbers, such as features of a frozen network; "
                f"give an array of shape (images, {vector_size})."
            )
        store = ArrayVectors(images)
    elif isinstance(images, np.ndarray):
        store = ArrayPixels(images)
    else:
        places = [images] if isinstance(images, str | Path) else images
        paths = [str(path) for path in find_images(places)]
        # Each image is read once: nothing to cache.
        store = FilePixels(Path(), paths, short_side=short_side, cache=DecodedCache(0))
    if len(store) == 0:
        raise DataError("There are no images.")
    return ImageSet(store, np.zeros(len(store), np.int64))
