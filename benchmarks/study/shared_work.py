"""What runs of block C have in common is computed once.

RanPAC and APER train the same adapters under the same head in the first task, from the same seeds, and train nothing
afterwards. Where a row has the same rate and radius on both streams, the second run takes over the weights of the first
and what was counted while they were trained. APER joins features of the plain and of the adapted network, and those of
the plain one are the same in all runs on the same images.

The line of a run that takes something over is that of a run of its own, bit for bit (a test compares them). Its CPU
seconds contain those of the training, but not those of plain features.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from cflat._files import write_atomic
from cflat.config.run_config import RunConfig
from cflat.data import Task
from cflat.methods import Phase
from cflat.methods._adapted import FirstTaskAdapted
from cflat.methods.aper import APER
from cflat.nn import forward_adapters
from cflat.nn.vit import embed
from cflat.optim import SharpnessAware
from cflat.train import Observer
from cflat.train.meter import Cost
from cflat.train.observer import EpochRecord, TaskRecord

SHARING = ("ranpac", "aper")
TRAINED = ("method.bottleneck", "method.dropout", "method.scale")
"""Settings of these methods that their training depends on."""


@dataclass(frozen=True)
class FirstSession:
    """What the training of the first task leaves behind."""

    weights: dict[str, Tensor]
    """Of what was trained."""
    record: dict[str, Any]
    """State of the study's recorder after the last step."""
    steps: int
    evaluations: int
    nonfinite_steps: int


class FirstSessions:
    """First sessions in a folder, by all settings that training depends on."""

    def __init__(self, folder: Path, code: str) -> None:
        self.folder = folder
        self.code = code

    def file(self, config: RunConfig) -> Path:
        """Return where the first session of a configuration lies, if it is there."""
        identity = config.identity()
        trained = {key: value for key, value in identity.items() if not key.startswith("method.") or key in TRAINED}
        text = json.dumps({**trained, "code": self.code}, sort_keys=True)
        return self.folder / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.pt"

    def find(self, config: RunConfig) -> FirstSession | None:
        path = self.file(config)
        return FirstSession(**torch.load(path, weights_only=True)) if path.is_file() else None

    def keep(self, config: RunConfig, session: FirstSession) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomic(self.file(config), lambda file: torch.save(vars(session), file))


class Keeper(Observer):
    """Holds the weights that the first task has trained, and what a recorder had seen by then."""

    def __init__(self, record: Callable[[], dict[str, Any]]) -> None:
        self._record = record
        self._network: nn.Module | None = None
        self._weights: dict[str, Tensor] = {}
        self._seen: dict[str, Any] = {}

    def on_phase_start(self, optimizer: SharpnessAware, network: nn.Module) -> None:
        self._network = network

    def on_epoch(self, record: EpochRecord) -> None:
        self._seen = self._record()

    def on_task_end(self, record: TaskRecord) -> None:
        # Not after the last epoch: an average replaces the weights behind it.
        if record.task == 0 and self._network is not None:
            self._weights = {
                name: param.detach().clone() for name, param in self._network.named_parameters() if param.requires_grad
            }

    def session(self, cost: Cost) -> FirstSession | None:
        """Return what was trained, or None if a run that was stopped went on behind its training."""
        if not self._weights:
            return None
        return FirstSession(self._weights, self._seen, cost.steps, cost.evaluations, cost.nonfinite_steps)


@contextmanager
def taken_over(session: FirstSession) -> Iterator[None]:
    """Let methods begin with the weights of a first session instead of training them."""

    def phases(method: FirstTaskAdapted, task: Task) -> tuple[Phase, ...]:
        if task.index == 0:
            missing, unexpected = method.network.load_state_dict(session.weights, strict=False)
            if unexpected or any(not name.startswith("backbone.") for name in missing):
                raise ValueError(f"A first session does not fit: {missing} missing, {unexpected} unexpected.")
        return ()

    with patch.object(FirstTaskAdapted, "phases", phases):
        yield


@contextmanager
def plain_features_kept(folder: Path) -> Iterator[None]:
    """Let APER compute the features of the plain network only for batches whose features are not in a folder yet."""
    compute = APER.features

    def features(method: APER, images: Tensor) -> Tensor:
        path = folder / f"{hashlib.sha256(images.numpy().tobytes()).hexdigest()[:24]}.pt"
        if not path.is_file():
            both = compute(method, images)
            folder.mkdir(parents=True, exist_ok=True)
            plain = both[:, : both.shape[1] // 2].clone()
            write_atomic(path, lambda file: torch.save(plain, file))
            return both
        backbone = method.network.backbone
        # Half of what two sets stack: then matrix products have the same images as in `compute`, and the same bits.
        adapted = forward_adapters(backbone, embed(backbone, images), [method.network.adapters], max_tokens=1024)
        return torch.cat([torch.load(path, weights_only=True), adapted[0]], dim=1)

    with patch.object(APER, "features", features):
        yield
