"""What a step costs besides its evaluations: time, kernel launches, host synchronisations, memory; ours and peers'.

    python benchmarks/step_cost.py --out step_cost.json            # all nets and batch sizes
    python benchmarks/step_cost.py --nets resnet18 --batch 32 --rounds 4

Time is t_step / (evaluations * t_pass), where t_pass is a plain forward and backward pass right before and after it:
1.00 means that a step costs its evaluations and nothing else. A second column divides by the time that the step itself
spent in its evaluations: far less noise. All candidates are interleaved in every round, one thread, CPU time, so that
the ratio survives a noisy machine; read the quartiles. Calls, synchronisations and buffers are counted, not timed.
Peers are left out if absent: `pip install pytorch-optimizer scipy tqdm` and
`pip install --no-deps infty`.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import cflat

NUM_CLASSES = 10


def build_net(name: str) -> nn.Module:
    from timm.models.vision_transformer import VisionTransformer

    from cflat.nn.backbone import create_backbone

    torch.manual_seed(0)
    if name == "resnet18":
        backbone = create_backbone("resnet18_cifar")
        return nn.Sequential(backbone, nn.Linear(backbone.feature_dim, NUM_CLASSES))
    width, depth = (128, 6) if name == "vit" else (32, 24)
    return VisionTransformer(
        img_size=32, patch_size=4, embed_dim=width, depth=depth, num_heads=4, num_classes=NUM_CLASSES
    )


NETS = ("resnet18", "vit", "deep_vit")


@dataclass
class Candidate:
    """An optimizer under test: how to make it and how to call it."""

    name: str
    make: Callable[[nn.Module], object]
    step: Callable[[object, Callable[[], Tensor]], None]


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)


def ours(name: str, registered: str, **settings: object) -> Candidate:
    def make(model: nn.Module) -> object:
        return cflat.create_optimizer(registered, sgd(model), model=model, **settings)

    return Candidate(name, make, lambda optimizer, closure: optimizer.step(closure))


def candidates() -> list[Candidate]:
    mine = [
        Candidate("plain SGD", sgd, _plain_step),
        ours("cflat none", "none"),
        ours("cflat SAM", "sam"),
        ours("cflat ASAM", "asam"),
        ours("cflat GSAM", "gsam"),
        ours("cflat LookSAM(5)", "looksam", k=5),
        ours("cflat FriendlySAM", "friendly_sam"),
        ours("cflat MSAM", "msam"),
        ours("cflat VaSSO", "vasso"),
        ours("cflat AsyncSAM", "async_sam"),
        ours("cflat Random SAM", "random_sam"),
        ours("cflat SS-SAM, p=0.5", "ss_sam", p=0.5),
        ours("cflat AE-SAM", "ae_sam"),
        ours("cflat GAM", "gam"),
        ours("cflat C-Flat", "c_flat"),
        ours("cflat C-Flat++", "c_flat_plus"),
        ours("cflat Turbo reuse only, k=5", "c_flat_turbo", k=5, trigger=False, schedule=False),
        ours("cflat Turbo surrogate steps", "c_flat_turbo", k=10**9, trigger=False, schedule=False),
        ours("cflat Turbo", "c_flat_turbo"),
        ours("cflat Forecast", "c_flat_forecast"),
    ]
    return mine + _pytorch_optimizer() + _infty()


def _plain_step(optimizer: torch.optim.Optimizer, closure: Callable[[], Tensor]) -> None:
    optimizer.zero_grad()
    closure()
    optimizer.step()


def _pytorch_optimizer() -> list[Candidate]:
    try:
        import pytorch_optimizer as peer
    except ImportError:
        return []

    def make(cls: type, **settings: object) -> Callable[[nn.Module], object]:
        return lambda model: cls(model.parameters(), torch.optim.SGD, lr=1e-4, momentum=0.9, **settings)

    def step(optimizer: object, closure: Callable[[], Tensor]) -> None:
        optimizer.zero_grad()
        closure()  # its documented call: the first pass is the caller's

        def again() -> Tensor:
            optimizer.zero_grad()
            return closure()

        optimizer.step(again)
        optimizer.zero_grad()

    return [
        Candidate("pytorch-optimizer SAM", make(peer.SAM), step),
        Candidate("pytorch-optimizer SAM foreach", make(peer.SAM, foreach=True), step),
        Candidate("pytorch-optimizer LookSAM(5)", make(peer.LookSAM, k=5), step),
        Candidate("pytorch-optimizer FriendlySAM", make(peer.FriendlySAM), step),
    ]


def _infty() -> list[Candidate]:
    try:
        from infty.optim.geometry_reshaping.c_flat import C_Flat
        from infty.optim.geometry_reshaping.gam import GAM
        from infty.optim.geometry_reshaping.looksam import LookSAM
        from infty.optim.geometry_reshaping.sam import SAM
    except ImportError:
        return []

    def make(cls: type, **args: object) -> Callable[[nn.Module], object]:
        return lambda model: cls(model.parameters(), sgd(model), model, args)

    def step(optimizer: object, closure: Callable[[], Tensor]) -> None:
        def loss_fn() -> tuple[Tensor, list[Tensor]]:
            optimizer.zero_grad()
            with torch.enable_grad():
                loss = closure()
            return loss, [loss]

        optimizer.step(loss_fn)

    return [
        Candidate("infty SAM", make(SAM), step),
        Candidate("infty LookSAM(5)", make(LookSAM, k=5), step),
        Candidate("infty GAM", make(GAM), step),
        Candidate("infty C-Flat", make(C_Flat), step),
    ]


class Bench:
    """One net with one batch; builds candidates on copies of the same weights."""

    def __init__(self, net: str, batch: int, image_size: int = 32) -> None:
        self.net = net
        generator = torch.Generator().manual_seed(1)
        self.images = torch.randn(batch, 3, image_size, image_size, generator=generator)
        self.labels = torch.randint(0, NUM_CLASSES, (batch,), generator=generator)

    def start(self, candidate: Candidate) -> Running:
        return Running(self, candidate)


class Running:
    """A candidate with its own model, ready to step and to be counted."""

    def __init__(self, bench: Bench, candidate: Candidate) -> None:
        self.bench, self.candidate = bench, candidate
        self.model = build_net(bench.net)
        self.optimizer = candidate.make(self.model)
        self.evaluations = 0
        self.inside = 0.0
        self.counter: Counter | None = None

    def closure(self) -> Tensor:
        self.evaluations += 1
        started = time.process_time()
        if self.counter is not None:
            self.counter.enter_evaluation(self)
        loss = functional.cross_entropy(self.model(self.bench.images), self.bench.labels)
        loss.backward()
        if self.counter is not None:
            self.counter.leave_evaluation()
        self.inside += time.process_time() - started
        return loss

    def step(self) -> None:
        self.candidate.step(self.optimizer, self.closure)

    def bare_pass(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = None
        functional.cross_entropy(self.model(self.bench.images), self.bench.labels).backward()


class Counter(TorchDispatchMode):
    """Count ATen calls and host reads of one step outside its evaluations and the base optimizer's own step."""

    def __init__(self, baseline_bytes: int) -> None:
        super().__init__()
        self.baseline_bytes = baseline_bytes
        self.calls = 0
        self.syncs = 0
        self.buffers: list[float] = []
        self._depth = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if self._depth == 0:
            self.calls += 1
        return func(*args, **(kwargs or {}))

    def enter_evaluation(self, running: Running) -> None:
        self._depth += 1
        self.buffers.append(extra_buffers(running, self.baseline_bytes))

    def leave_evaluation(self) -> None:
        self._depth -= 1

    def host_read(self) -> None:
        if self._depth == 0:
            self.syncs += 1


def live_bytes(model: nn.Module) -> int:
    """Bytes of all live tensors, counted by storage, gradients of the model excluded."""
    gc.collect()
    gradients = {p.grad.untyped_storage().data_ptr() for p in model.parameters() if p.grad is not None}
    storages = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), Tensor) and thing.device.type == "cpu":  # isinstance would run foreign properties
            storage = thing.untyped_storage()
            if storage.data_ptr() not in gradients:
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def extra_buffers(running: Running, baseline_bytes: int) -> float:
    size = sum(p.nbytes for p in running.model.parameters())
    return (live_bytes(running.model) - baseline_bytes) / size


@contextmanager
def counted_host_reads(counter: Counter) -> Iterator[None]:
    """Count what makes the host wait for a device: item, tolist, float, bool of tensors."""
    names = ("item", "tolist", "__float__", "__bool__", "__int__")
    originals = {name: getattr(Tensor, name) for name in names}

    def wrap(name: str) -> Callable:
        def reading(self, *args):
            counter.host_read()
            return originals[name](self, *args)

        return reading

    for name in names:
        setattr(Tensor, name, wrap(name))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(Tensor, name, original)


def base_of(optimizer: object) -> torch.optim.Optimizer:
    for attribute in ("base", "base_optimizer"):
        base = getattr(optimizer, attribute, None)
        if base is not None:
            return base
    return optimizer


@dataclass
class Counts:
    """Counted costs of one kind of step."""

    evaluations: float
    aten_calls: float
    host_syncs: float
    buffers_in_pass: float
    buffers_kept: float


def count(net: str, candidate: Candidate) -> Counts:
    """Count over one interval of steps, after two that fill states and caches; image size does not matter here."""
    running = Bench(net, batch=2, image_size=8 if net == "resnet18" else 32).start(candidate)
    steps = steps_per_round(candidate)
    if candidate.name == "plain SGD":
        running.optimizer.step()
    base = base_of(running.optimizer)
    for parameter in running.model.parameters():
        base.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    baseline = live_bytes(running.model)
    running.step()
    running.step()
    running.evaluations = 0
    totals, in_pass = [], []
    for _ in range(steps):
        counter = Counter(baseline)
        running.counter = counter
        handles = [
            base.register_step_pre_hook(lambda *_, c=counter: c.__dict__.__setitem__("_depth", c._depth + 1)),
            base.register_step_post_hook(lambda *_, c=counter: c.__dict__.__setitem__("_depth", c._depth - 1)),
        ]
        with counted_host_reads(counter), counter:
            running.step()
        running.counter = None
        for handle in handles:
            handle.remove()
        totals.append((counter.calls, counter.syncs))
        in_pass.append(max(counter.buffers))
    for parameter in running.model.parameters():
        parameter.grad = None
    kept = extra_buffers(running, baseline)
    return Counts(
        evaluations=running.evaluations / steps,
        aten_calls=statistics.mean(calls for calls, _ in totals),
        host_syncs=statistics.mean(syncs for _, syncs in totals),
        buffers_in_pass=max(in_pass),
        buffers_kept=kept,
    )


def steps_per_round(candidate: Candidate) -> int:
    """A whole interval for optimizers whose steps differ."""
    if "Forecast" in candidate.name:
        return 30  # its budget is a mean
    differing = ("LookSAM", "Turbo", "SS-SAM", "AE-SAM", "C-Flat++")
    return 5 if any(name in candidate.name for name in differing) else 1


def measure(bench: Bench, chosen: list[Candidate], rounds: int) -> dict[str, dict[str, float]]:
    """Interleave all candidates in every round, each between two bare passes of its own model; return ratio quartiles.

    The two passes next to a step see the same machine as the step does, so drifts of its speed cancel in the ratio.
    """
    runners = [bench.start(candidate) for candidate in chosen]
    for running in runners:
        running.step()
        running.step()
    ratios: dict[str, list[float]] = {candidate.name: [] for candidate in chosen}
    shares: dict[str, list[float]] = {candidate.name: [] for candidate in chosen}
    for _ in range(rounds):
        for running in runners:
            running.evaluations, running.inside = 0, 0.0
            before = _cpu_seconds(running.bare_pass)
            seconds = sum(_cpu_seconds(running.step) for _ in range(steps_per_round(running.candidate)))
            after = _cpu_seconds(running.bare_pass)
            ratios[running.candidate.name].append(seconds / (running.evaluations * (before + after) / 2))
            shares[running.candidate.name].append(seconds / running.inside)
    return {name: {**quartiles(ratios[name]), "inside": quartiles(shares[name])} for name in ratios}


def quartiles(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        "median": statistics.median(ordered),
        "q25": ordered[len(ordered) // 4],
        "q75": ordered[(3 * len(ordered)) // 4],
        "rounds": len(ordered),
    }


def _cpu_seconds(function: Callable[[], object]) -> float:
    start = time.process_time()
    function()
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nets", nargs="+", choices=NETS, default=list(NETS))
    parser.add_argument("--batch", nargs="+", type=int, default=[4, 32])
    parser.add_argument("--rounds", type=int, default=7, help="timing rounds; 0 only counts")
    parser.add_argument("--timed", default="", help="time only candidates whose name contains one of these, by comma")
    parser.add_argument("--no-counts", action="store_true", help="only time")
    parser.add_argument("--out", type=Path, help="write all numbers to this JSON file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)

    results: dict[str, object] = {"torch": torch.__version__, "cflat": cflat.__version__}
    for net in arguments.nets:
        counted = {} if arguments.no_counts else {c.name: asdict(count(net, c)) for c in candidates()}
        chosen = [c for c in candidates() if any(part in c.name for part in arguments.timed.split(","))]
        timed = {b: measure(Bench(net, b), chosen, arguments.rounds) for b in arguments.batch if arguments.rounds}
        results[net] = {"counts": counted, "ratios": timed}
        print_table(net, counted, timed)
        if arguments.out:
            arguments.out.write_text(json.dumps(results, indent=1))


def print_table(net: str, counted: dict, timed: dict) -> None:
    if counted:
        print(f"\n{net}: counted, besides evaluations and the base optimizer's step")
        print(f"{'optimizer':<32} {'evals':>6} {'ATen':>7} {'syncs':>6} {'in pass':>8} {'kept':>5}")
    for name, row in counted.items():
        numbers = f"{row['evaluations']:>6.2f} {row['aten_calls']:>7.0f} {row['host_syncs']:>6.1f}"
        print(f"{name:<32} {numbers} {row['buffers_in_pass']:>8.2f} {row['buffers_kept']:>5.2f}")
    for batch, ratios in timed.items():
        print(f"\n{net}, batch {batch}: time of a step over that of its evaluations, median (q25-q75)")
        print(f"{'optimizer':<32} {'against bare passes':>21} {'against its own':>21}")
        for name, entry in ratios.items():
            print(f"{name:<32} {_spread(entry):>21} {_spread(entry['inside']):>21}, {entry['rounds']} rounds")


def _spread(entry: dict[str, float]) -> str:
    return f"{entry['median']:.3f} ({entry['q25']:.3f}-{entry['q75']:.3f})"


if __name__ == "__main__":
    main()
