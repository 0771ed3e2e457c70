"""What a step costs beyond its evaluations: calls into ATen, host synchronisations, gradient-sized buffers."""

from __future__ import annotations

import gc
from collections import Counter

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import cflat
from cases import OPTIMIZERS, TURBO_VARIANTS, case
from cflat import StepOptions

WIDTHS = (8, 16, 32, 64)


class Block(nn.Module):
    """The basic block of ResNet-18, thin."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.first_norm = nn.BatchNorm2d(outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.second_norm = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential()
        if stride != 1:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, images: Tensor) -> Tensor:
        hidden = torch.relu(self.first_norm(self.first(images)))
        return torch.relu(self.second_norm(self.second(hidden)) + self.shortcut(images))


def resnet18() -> nn.Sequential:
    """Return a ResNet-18 with its 62 parameter tensors and a sixty-fourth of its weights."""
    layers: list[nn.Module] = [nn.Conv2d(3, WIDTHS[0], 3, 1, 1, bias=False), nn.BatchNorm2d(WIDTHS[0]), nn.ReLU()]
    for previous, width in zip((WIDTHS[0], *WIDTHS), WIDTHS, strict=False):
        layers += [Block(previous, width, 1 if previous == width else 2), Block(width, width, 1)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(WIDTHS[-1], 10))


class CountATen(TorchDispatchMode):
    """Count the calls that reach ATen while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls[str(func)] += 1
        return func(*args, **(kwargs or {}))


class CountReads(TorchFunctionMode):
    """Count the moments at which the host waits for a value."""

    READS = ("tolist", "item", "__float__", "__bool__", "__int__", "cpu", "numpy", "nonzero")

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.number += getattr(func, "__name__", "") in self.READS
        return func(*args, **(kwargs or {}))


class Bench:
    """A ResNet-18 whose steps are counted outside the evaluations and outside the base optimizer's own step."""

    def __init__(self, name: str, **settings) -> None:
        torch.manual_seed(0)
        self.model = resnet18()
        assert len(list(self.model.parameters())) == 62
        self.base = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.optimizer = case(name).make(self.base, model=self.model, **settings)
        self.inputs, self.labels = torch.randn(2, 3, 16, 16), torch.tensor([1, 2])

    def evaluate(self) -> None:
        F.cross_entropy(self.model(self.inputs), self.labels).backward()

    def count(self) -> tuple[Counter[str], int, int]:
        """Take a step; return its calls into ATen, host reads and evaluations."""
        base_calls, real_step = CountATen(), self.base.step
        aten, reads = CountATen(), CountReads()
        self.base.step = lambda: _under(base_calls, real_step)
        passes = self.optimizer.passes()
        index = 0
        while True:
            with aten, reads:
                done = next(passes, None) is None
            if done:
                break
            index += 1
            self.evaluate()
        self.base.step = real_step
        return aten.calls - base_calls.calls, reads.number, index


def _under(mode: TorchDispatchMode, function):
    with mode:
        function()


def test_an_exact_step_is_a_few_calls():
    bench = Bench("c_flat")
    for _ in range(3):
        calls, reads, evaluations = bench.count()
        assert evaluations == 4
        assert calls.total() <= 150, calls
        assert reads <= evaluations


@pytest.mark.parametrize("reading", ["printed", "consistent", "calibrated"])
def test_reused_and_single_steps_are_fewer(reading):
    bench = Bench("c_flat_turbo", k=4, trigger=False, reading=reading)
    kinds = Counter()
    for _ in range(9):
        calls, reads, evaluations = bench.count()
        assert reads <= evaluations + (reading == "calibrated"), bench.optimizer.telemetry.last
        kinds[evaluations] += 1
        if evaluations == 2:
            assert calls.total() <= 80, calls
    assert kinds[2] >= 4

    bench = Bench("c_flat_turbo", threshold=1e9, reading=reading)
    bench.count()
    for _ in range(3):
        calls, reads, evaluations = bench.count()
        assert evaluations == 1
        assert calls.total() <= 20, calls
        assert reads == 1


def test_forecasts_are_nearly_free():
    bench = Bench("c_flat_forecast")
    kinds = Counter()
    for _ in range(16):
        calls, reads, evaluations = bench.count()
        kinds[evaluations] += 1
        assert reads <= evaluations, bench.optimizer.telemetry.last
        if evaluations == 1:
            assert calls.total() <= 20, calls
            assert reads == 1
    assert kinds[1] >= 5


@pytest.mark.parametrize("name", cflat.list_optimizers())
@pytest.mark.parametrize("clip", [None, "final", "each"])
def test_the_host_waits_once_per_evaluation_and_once_to_clip(name, clip):
    options = StepOptions() if clip is None else StepOptions(max_norm=0.1, clip=clip)
    bench = Bench(name, options=options)
    for _ in range(5):
        calls, reads, evaluations = bench.count()
        assert reads <= evaluations + {None: 0, "final": 1, "each": 2}[clip]
        assert calls["aten._local_scalar_dense.default"] == 0
        assert calls.total() <= 400


AS_THE_PAPER = [row for row in TURBO_VARIANTS if "calibrated" not in row.id and "ema" not in row.id]


@pytest.mark.parametrize("row", [*OPTIMIZERS, *AS_THE_PAPER], ids=str)
@pytest.mark.parametrize("owner", ["optimizer", "base", "model", "by hand"])
def test_the_host_waits_once_per_evaluation_however_gradients_were_cleared(row, owner):
    """Zeros that a step finds may be what is left over or what was accumulated: its first read tells, no other."""
    bench = Bench(row.name, **row.settings)
    for _ in range(7):
        if owner == "by hand":
            for param in bench.model.parameters():
                param.grad = torch.zeros_like(param)
        else:
            getattr(bench, owner).zero_grad(set_to_none=False)
        _, reads, evaluations = bench.count()
        assert reads <= evaluations, bench.optimizer.telemetry.last


def test_a_loss_scale_is_not_read():
    bench, scaler = Bench("sam"), torch.amp.GradScaler("cpu")
    reads = CountReads()
    scaler.step = lambda optimizer: None  # its own read before it steps is not ours
    for _ in range(2):
        passes = bench.optimizer.passes(scaler=scaler)
        while True:
            with reads:
                done = next(passes, None) is None
            if done:
                break
            scaler.scale(F.cross_entropy(bench.model(bench.inputs), bench.labels)).backward()
    assert reads.number == 4


@pytest.fixture
def only_new_objects():
    """Let the collector forget what exists already, so that looking at all objects is quick."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("only_new_objects")
@pytest.mark.parametrize("name", cflat.list_optimizers())
@pytest.mark.parametrize("guarded", [True, False])
def test_few_gradient_sized_buffers_are_held(name, guarded):
    """Counted as live bytes of tensors, beyond weights, momentum and gradients;."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(200, 250), nn.BatchNorm1d(250), nn.Tanh(), nn.Linear(250, 200))
    optimizer = case(name).make(
        torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), model=model if guarded else None
    )
    size = sum(param.numel() * param.element_size() for param in model.parameters())
    spec = cflat.get_optimizer_spec(name)
    inputs = torch.randn(4, 200)

    def evaluate():
        model(inputs).square().mean().backward()

    evaluate()
    optimizer.zero_grad()
    optimizer.step(evaluate)
    optimizer.start_task(0)
    optimizer.zero_grad()
    idle = _live_bytes()
    most = 0.0
    for _ in range(10):
        for _ in optimizer.passes():
            assert all(param.grad is None for param in model.parameters())
            most = max(most, (_live_bytes() - idle) / size)
            evaluate()
        optimizer.zero_grad()
        assert round((_live_bytes() - idle) / size) <= spec.persistent_buffers
    assert round((_live_bytes() - idle) / size) == spec.persistent_buffers
    assert round(most) <= spec.peak_buffers
    optimizer.start_task(1)
    assert round((_live_bytes() - idle) / size) == 0


def _live_bytes() -> int:
    storages = {}
    for item in gc.get_objects():
        if type(item) in (Tensor, nn.Parameter):
            storage = item.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())
