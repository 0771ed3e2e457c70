"""What one of two gloo ranks does for `tests/optim/test_distributed.py`; run as a script, results go to a file."""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from cases import BASES, CONV, MLP, Case, case, closure_of, flat_weights, loss_of, train
from cflat import StepOptions
from faults import EVERY

LONG, SHORT = 25, 5


def share_of(step: int, rank: int):
    """Return the half of a batch that one rank sees."""
    inputs, labels = MLP.batch(step)
    return inputs[rank::2], labels[rank::2]


def train_ddp(row: Case, rank: int, num_steps: int, options: StepOptions | None = None, base: str = "sgd", **ddp: Any):
    """Train a replica; return its weights and the evaluations of each step."""
    model = DistributedDataParallel(MLP.model(), **ddp)
    optimizer = row.make(BASES[base](model), model=model, **({} if options is None else {"options": options}))
    counts = []
    for step in range(num_steps):
        log: list[float] = []
        optimizer.step(closure_of(model, share_of(step, rank), log))
        counts.append(len(log))
    return flat_weights(model), counts


def train_alone(row: Case, rank: int) -> tuple[list[int], int]:
    """Train a model of this rank's own on data that would trigger differently: ranks still step alike."""
    model = MLP.model(seed=rank)
    optimizer = row.make(BASES["sgd"](model), model=model)
    counts = [len(closures) for closures in _scaled_steps(optimizer, model, rank)]
    return counts, optimizer.telemetry.nonfinite


def _scaled_steps(optimizer, model, rank):
    for step in range(8):
        log: list[int] = []

        def closure(step=step, log=log):
            log.append(1)
            (loss_of(model, MLP.batch(100 * rank + step)) * (1 + 3 * ((step + rank) % 2))).backward()

        optimizer.step(closure)
        yield log


def poison_one_rank(row: Case, rank: int, perturbation: str):
    """Let rank 1 meet an Inf in pass 1 and in pass 2, after its own gradient was computed."""
    model = DistributedDataParallel(MLP.model())
    optimizer = row.make(BASES["sgd"](model), model=model, options=StepOptions(perturbation=perturbation))
    weights = [flat_weights(model)]
    for number in (1, 2):
        for index, _ in enumerate(optimizer.passes(), start=1):
            loss_of(model, share_of(0, rank)).backward()
            if rank == 1 and index == number:
                next(model.parameters()).grad[0, 0] = float("inf")
        weights.append(flat_weights(model))
    skipped = optimizer.telemetry.nonfinite
    train_on = [optimizer.step(closure_of(model, share_of(step, rank))) for step in range(2)]
    assert len(train_on) == 2
    return weights, skipped, flat_weights(model)


def train_sharded(row: Case, rank: int, base: str = "sgd"):
    """Train with FSDP2: parameters and gradients are DTensors, of which each rank holds a half."""
    model = MLP.model()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    optimizer = row.make(BASES[base](model), model=model)
    assert all(isinstance(param, DTensor) for param in model.parameters())
    log: list[float] = []
    for step in range(SHORT):
        optimizer.step(closure_of(model, share_of(step, rank), log))
    weights = torch.cat([param.full_tensor().detach().reshape(-1) for param in model.parameters()])
    return weights, len(log), optimizer.telemetry.last


class Heads(nn.Module):
    """A body with heads of equal and of other sizes, of which a forward pass uses one; one is never used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(6, 8)
        self.heads = nn.ModuleList([nn.Linear(8, 3), nn.Linear(8, 3), nn.Linear(8, 3, bias=False), nn.Linear(8, 3)])
        self.double()

    def forward(self, inputs: torch.Tensor, head: int) -> torch.Tensor:
        return self.heads[head](torch.tanh(self.body(inputs)))


def train_heads(row: Case, rank: int):
    """Train with local perturbations where each rank uses another head in each step."""
    net = Heads()
    model = DistributedDataParallel(net)
    base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-3)
    optimizer = row.make(base, model=model, options=StepOptions(perturbation="local"))
    for step in range(SHORT):
        inputs, labels = share_of(step, rank)
        optimizer.step(
            lambda x=inputs, y=labels, h=(step + rank) % 3: functional.cross_entropy(model(x, h), y).backward()
        )
    return flat_weights(net), torch.equal(net.heads[3].weight, Heads().heads[3].weight), optimizer.telemetry.evaluations


def train_heads_once(rank: int) -> torch.Tensor:
    """Take one plain step with local gradients: the mean over ranks, with zeros where a head was not used."""
    net = Heads()
    model = DistributedDataParallel(net)
    optimizer = case("none").make(
        torch.optim.SGD(model.parameters(), lr=0.1), model=model, options=StepOptions(perturbation="local")
    )
    inputs, labels = share_of(0, rank)
    optimizer.step(lambda: functional.cross_entropy(model(inputs, rank), labels).backward())
    return flat_weights(net)


def train_convolution(row: Case) -> torch.Tensor:
    """Train the same unwrapped model on the same data on both ranks: nothing but the decisions is shared."""
    model = CONV.model()
    optimizer = row.make(BASES["sgd"](model), model=model)
    train(optimizer, model, CONV, SHORT)
    return flat_weights(model)


def run(rank: int) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for row in EVERY:
        results[row.id] = {
            "ddp": train_ddp(row, rank, LONG),
            "bucket_view": train_ddp(row, rank, SHORT, gradient_as_bucket_view=True),
            "local": train_ddp(row, rank, SHORT, StepOptions(perturbation="local")),
            "clipped": train_ddp(row, rank, SHORT, StepOptions(perturbation="local", max_norm=0.1, clip="each")),
            "heads": train_heads(row, rank),
            "alone": train_alone(row, rank),
            "unwrapped": train_convolution(row),
            "poisoned": [poison_one_rank(row, rank, kind) for kind in ("synced", "local")],
            "sharded": train_sharded(row, rank),
            "ddp_qhm": train_ddp(row, rank, SHORT, base="qhm"),
            "sharded_qhm": train_sharded(row, rank, "qhm"),
        }
    results["heads_step"] = train_heads_once(rank)
    results["local_step"] = train_ddp(case("sam"), rank, 1, StepOptions(perturbation="local"))[0]
    return results


if __name__ == "__main__":
    own_rank, folder = int(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    patience = timedelta(seconds=120)  # ranks that disagree wait for each other
    dist.init_process_group("gloo", init_method=store, rank=own_rank, world_size=2, timeout=patience)
    torch.save(run(own_rank), f"{folder}/rank{own_rank}.pt")
    dist.destroy_process_group()
