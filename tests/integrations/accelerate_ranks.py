"""One of two ranks of Accelerate's DDP over gloo, or one process with both shares; results go to files."""

from __future__ import annotations

import os
import sys

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional as F

import cflat
from cflat.integrations.accelerate import FlatSteps


def share(index: int, rank: int):
    generator = torch.Generator().manual_seed(100 * index + rank)
    inputs = torch.randn(6, 5, generator=generator, dtype=torch.float64)
    return inputs, inputs.argmax(dim=1) % 3


if __name__ == "__main__":
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    is_alone = accelerator.num_processes == 1
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    flat = cflat.CFlatTurbo(torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), model=net, rho=0.1, k=3)
    model, optimizer = accelerator.prepare(net, flat)
    assert is_alone or isinstance(model, nn.parallel.DistributedDataParallel)
    take_step = FlatSteps(accelerator, model, optimizer)

    def take_steps(model, batch, num=1):
        for _ in range(num):
            with accelerator.accumulate(model):
                take_step(lambda inputs, labels: F.cross_entropy(model(inputs), labels), *batch)

    for index in range(8):
        shares = [share(index, rank) for rank in ((0, 1) if is_alone else (accelerator.process_index,))]
        take_steps(model, tuple(torch.cat(parts) for parts in zip(*shares, strict=True)))
    if not is_alone:
        flat.options = cflat.StepOptions(perturbation="local")  # needs the wrapped network, which is made after it
        with pytest.raises(cflat.ClosureError, match="needs model= to be the network as DistributedDataParallel"):
            take_steps(model, share(8, accelerator.process_index), 2)
    name = "alone" if is_alone else f"rank{os.environ['RANK']}"
    result = {"weights": dict(net.state_dict()), "evaluations": flat.telemetry.evaluations}
    torch.save(result, f"{sys.argv[1]}/{name}.pt")
    accelerator.end_training()
