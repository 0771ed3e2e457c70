"""`GradientRecorder`: what the gradients of C-Flat do during training, as the paper's figures show them.

Symbols follow the paper: g at the weights, g_s at theta + eps_0, g_0 at the proxy theta_p, g_f the flatness gradient,
g_vs and g_vf the components of g_s and g_f orthogonal to g and g_0.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from numbers import Real
from typing import Annotated, Any

import torch
from torch import Tensor

from cflat._ranges import Count, Range, checked
from cflat.optim import SharpnessAware
from cflat.optim.engine import EPS, Evaluation, Vector

__all__ = ["DRIFTING", "RATIO_EDGES", "GradientRecorder", "StepRecord", "derived_vectors", "ratio_histogram"]

DRIFTING = ("g", "g_s - g", "g_0", "g_f", "g_vs", "g_vf")
"""The vectors that are compared with what they were some steps earlier."""
RATIO_EDGES = torch.linspace(-16.0, 8.0, 97)
"""Bins of log |m / n|; what lies outside is counted in the first and the last."""
MAX_RATIOS = 2**20
# The pairs of the paper's Figure 3, left.
_RATIOS = {"g_s - g, g": ("g_s - g", "g"), "g_f, g_s": ("g_f", "g_s")}
_ANGLES = {"g_s, g": ("g_s", "g"), "g_0, g": ("g_0", "g"), "g_f, g_s": ("g_f", "g_s"), "g_f, g_0": ("g_f", "g_0")}


@dataclass(frozen=True)
class StepRecord:
    """One recorded step; what the optimizer did not compute in it is absent."""

    task: int
    epoch: int
    step: int
    """Steps of this task before it."""
    loss: float | None
    """None if the closure returned something else than one number."""
    sharpness: float | None
    """L(theta + eps_0) - L(theta): the paper's R^0 to first order."""
    flatness: float | None
    """rho |g_0|: the paper's R^1 to first order."""
    norms: dict[str, float]
    cosines: dict[str, float]
    distances: dict[str, float] = field(default_factory=dict)
    """By vector, the Euclidean distance to itself ``lag`` steps earlier."""
    turns: dict[str, float] = field(default_factory=dict)
    """By vector, the cosine with itself ``lag`` steps earlier."""


class GradientRecorder:
    """Keep numbers about the gradients of chosen steps; attach it to an optimizer of the C-Flat family.

    It uses the evaluations that the optimizer makes anyway. `CFlat` computes everything in every step; `CFlatTurbo`
    computes some of it in some steps, and what is missing is absent from the record. To watch an optimizer that
    computes less, attach the recorder to a `Shadow` of C-Flat, for four more evaluations in each recorded step.

    Holds 6 * lag / every vectors of at most ``max_coordinates`` numbers between recorded steps, eight more during one,
    and ``max_records`` records: then every other one is dropped. Costs nothing when not attached, and one comparison
    per evaluation in steps that are not recorded.

    Args:
        every: Record the steps every, 2 * every, ... of each task.
        lag: Compare vectors with those of this many steps earlier; a multiple of ``every``.
        max_coordinates: Larger models are looked at through this many coordinates, drawn once; norms and cosines
            are then estimates.
        max_records: At least 2.
    """

    @checked
    def __init__(
        self,
        every: Count = 5,
        lag: Count = 5,
        max_coordinates: Count = 2**24,
        max_records: Annotated[int, Range(at_least=2, integer=True)] = 20_000,
    ) -> None:
        if lag % every:
            raise ValueError(f"lag must be a multiple of every ({every}), got {lag}.")
        self.every, self.lag = every, lag
        self.max_coordinates, self.max_records = max_coordinates, max_records
        self.epoch = 0
        self.records: list[StepRecord] = []
        self.ratios: dict[tuple[int, int, str], Tensor] = {}
        self._seen: dict[str, Tensor] = {}
        self._losses: dict[str, float] = {}
        self._seen_at = (0, 0)  # task and step
        self._earlier: deque[dict[str, Tensor]] = deque(maxlen=lag // every)
        self._context = (-1, 0)
        self._numel = 0
        self._chosen: list[Tensor] | None = None

    def attach(self, optimizer: SharpnessAware) -> Callable[[], None]:
        """Record the steps of ``optimizer`` from now on; the returned function ends it."""

        def see(evaluation: Evaluation) -> None:
            # task_step counts completed steps, and this one is under way.
            if (optimizer.task_step + 1) % self.every == 0:
                self._see(evaluation, (optimizer.task_index, optimizer.task_step))

        def end(*_: object) -> None:
            if self._seen:
                self._end(optimizer)

        handles = ExitStack()
        for handle in (optimizer.register_gradient_hook(see), optimizer.register_step_post_hook(end)):
            handles.callback(handle.remove)
        return handles.close

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain JSON values; `load` reads it back."""
        return {
            "every": self.every,
            "lag": self.lag,
            "records": [asdict(record) for record in self.records],
            "ratio_edges": RATIO_EDGES.tolist(),
            "ratios": [
                {"task": task, "epoch": epoch, "pair": pair, "counts": counts.tolist()}
                for (task, epoch, pair), counts in self.ratios.items()
            ],
        }

    def load(self, state: dict[str, Any]) -> None:
        """Take over what `to_dict` returned; comparisons with earlier steps begin afresh."""
        self.records = [StepRecord(**record) for record in state["records"]]
        self.ratios = {
            (entry["task"], entry["epoch"], entry["pair"]): torch.tensor(entry["counts"]) for entry in state["ratios"]
        }
        self._earlier.clear()

    def _see(self, evaluation: Evaluation, step: tuple[int, int]) -> None:
        name = evaluation.name
        if name is None:
            return
        if name == "g" or step != self._seen_at:  # a discarded step may have left some
            self._seen, self._losses = {}, {}
        self._seen_at = step
        self._seen[name] = self._flat(evaluation.gradient)
        loss = evaluation.loss
        if loss.numel() == 1 if isinstance(loss, Tensor) else isinstance(loss, Real):
            self._losses[name] = float(loss)

    def _end(self, optimizer: SharpnessAware) -> None:
        seen, self._seen = self._seen, {}
        if optimizer.telemetry.last.get("nonfinite") or "g" not in seen:  # the optimizer took no step
            return
        # The step was counted before its hook runs; what was seen may be of another one, which was discarded.
        if self._seen_at != (optimizer.task_index, optimizer.task_step - 1):
            return
        if self._context != (optimizer.task_index, self._numel):  # a new task, or parameters came or went
            self._earlier.clear()
        self._context = (optimizer.task_index, self._numel)
        vectors = derived_vectors(seen, optimizer.rho, getattr(optimizer, "rho_fd", None))
        # Norms of a random choice of coordinates are scaled up to all of them.
        scale = math.sqrt(self._numel / max(1, len(seen["g"])))
        norms = {name: scale * _norm(vector) for name, vector in vectors.items()}
        for pair, (m, n) in _RATIOS.items():
            if {m, n} <= vectors.keys():
                key = (optimizer.task_index, self.epoch, pair)
                self.ratios[key] = self.ratios.get(key, 0) + ratio_histogram(vectors[m], vectors[n])
        distances, turns = self._drift(vectors, scale)
        record = StepRecord(
            task=optimizer.task_index,
            epoch=self.epoch,
            step=optimizer.task_step - 1,
            loss=self._losses.get("g"),
            sharpness=self._losses["g_s"] - self._losses["g"] if {"g", "g_s"} <= self._losses.keys() else None,
            flatness=optimizer.rho * norms["g_0"] if "g_0" in norms else None,
            norms=norms,
            cosines={n: _cosine(vectors[a], vectors[b]) for n, (a, b) in _ANGLES.items() if {a, b} <= vectors.keys()},
            distances=distances,
            turns=turns,
        )
        self.records.append(record)
        if len(self.records) > self.max_records:
            self.records = self.records[::2]  # evenly thinned, however long the run is

    def _drift(self, vectors: dict[str, Tensor], scale: float) -> tuple[dict[str, float], dict[str, float]]:
        """Compare with the vectors of ``lag`` steps earlier, and remember these."""
        # Only the oldest entry of a full queue is `lag` steps old.
        past = self._earlier[0] if len(self._earlier) == self._earlier.maxlen else {}
        self._earlier.append({name: vectors[name] for name in DRIFTING if name in vectors})
        both = [name for name in DRIFTING if name in vectors and name in past]
        distances = {name: scale * _norm(vectors[name] - past[name]) for name in both}
        return distances, {name: _cosine(vectors[name], past[name]) for name in both}

    def _flat(self, gradient: Vector) -> Tensor:
        """Return a copy of the gradient as one tensor, of a fixed choice of its coordinates if there are too many."""
        if gradient.numel != self._numel:
            self._numel = gradient.numel
            self._chosen = _choose([tensor.numel() for tensor in gradient.tensors], self.max_coordinates)
        parts = [tensor.detach().reshape(-1) for tensor in gradient.tensors]
        if self._chosen is not None:
            parts = [part[chosen.to(part.device)] for part, chosen in zip(parts, self._chosen, strict=True)]
        dtype = torch.float64 if any(part.dtype == torch.float64 for part in parts) else torch.float32
        return torch.cat([part.to(parts[0].device, dtype) for part in parts])


def derived_vectors(seen: dict[str, Tensor], rho: float, rho_fd: float | None = None) -> dict[str, Tensor]:
    """Return the paper's vectors that follow from the gradients of one step, as far as these were computed.

    ``rho_fd`` is the step of the finite difference in g_f; None means ``rho``, the radius of the perturbation.
    """
    vectors = {name: vector for name, vector in seen.items() if name in ("g", "g_s", "g_0")}
    if "g_s" in seen:
        vectors["g_s - g"] = seen["g_s"] - seen["g"]
        # The orthogonal part of g_s - g equals that of g_s, with less cancellation.
        vectors["g_vs"] = _orthogonal(vectors["g_s - g"], seen["g"])
    if "g_1" in seen:
        vectors["g_f"] = (seen["g_1"] - seen["g_0"]).mul_(1.0 if rho_fd is None else rho / rho_fd)
        vectors["g_vf"] = _orthogonal(vectors["g_f"], seen["g_0"])
    return vectors


def ratio_histogram(m: Tensor, n: Tensor) -> Tensor:
    """Count the gradient correction ratios log |m / (n + 1e-12)|, coordinate by coordinate, in `RATIO_EDGES`.

    Of more than a million coordinates every n-th is counted: the shape of a distribution needs no more.
    """
    step = math.ceil(len(m) / MAX_RATIOS)
    m, n = m[::step], n[::step]
    low, high = float(RATIO_EDGES[0]), float(RATIO_EDGES[-1])
    # EPS is the epsilon of the paper's definition, too.
    ratios = (m / (n + EPS)).abs_().log_().clamp_(low, high)
    ratios = ratios[m != 0]  # coordinates without a correction have no ratio
    return torch.histc(ratios.cpu(), bins=len(RATIO_EDGES) - 1, min=low, max=high).to(torch.int64)


def _choose(sizes: list[int], limit: int) -> list[Tensor] | None:
    """Draw ``limit`` coordinates of tensors of these sizes; None means all of them."""
    if sum(sizes) <= limit:
        return None
    ends = torch.tensor([0, *sizes]).cumsum(0)
    # A generator of its own: recording must not change the random numbers of the training.
    drawn = torch.randint(0, int(ends[-1]), (limit,), generator=torch.Generator().manual_seed(0)).sort().values
    cuts = torch.searchsorted(drawn, ends)
    return [drawn[a:b] - end for a, b, end in zip(cuts[:-1], cuts[1:], ends[:-1], strict=True)]


def _orthogonal(v: Tensor, reference: Tensor) -> Tensor:
    return v - (_dot(v, reference) / (_dot(reference, reference) + EPS**2)) * reference


def _dot(left: Tensor, right: Tensor) -> float:
    return float(torch.dot(left, right))


def _norm(vector: Tensor) -> float:
    return float(torch.linalg.vector_norm(vector))


def _cosine(left: Tensor, right: Tensor) -> float:
    return _dot(left, right) / (_norm(left) * _norm(right) + EPS**2)
