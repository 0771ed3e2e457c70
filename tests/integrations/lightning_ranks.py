"""Two ranks of Lightning's DDP over gloo, and one process with both shares; results go to files."""

from __future__ import annotations

import sys

import lightning.pytorch as pl
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import cflat
from cflat.integrations.lightning import FlatCallback

ACCUMULATE, NUM_BATCHES = 2, 8


def share(index: int, rank: int):
    generator = torch.Generator().manual_seed(100 * index + rank)
    inputs = torch.randn(6, 5, generator=generator, dtype=torch.float64)
    return inputs, inputs.argmax(dim=1) % 3


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()

    def configure_optimizers(self):
        base = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        self.flat = cflat.CFlatTurbo(base, model=self, rho=0.1, k=3)
        return self.flat

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def train_dataloader(self):
        rank = self.trainer.global_rank
        if self.trainer.world_size == 1:
            pairs = [[share(index, rank) for rank in (0, 1)] for index in range(NUM_BATCHES)]
            whole = [tuple(torch.cat(parts) for parts in zip(*pair, strict=True)) for pair in pairs]
            return DataLoader(whole, batch_size=None)
        return DataLoader([share(index, rank) for index in range(NUM_BATCHES)], batch_size=None)


def fit(folder: str, devices: int) -> None:
    module = Module()
    strategy = pl.strategies.DDPStrategy(start_method="fork", process_group_backend="gloo") if devices > 1 else "auto"
    trainer = pl.Trainer(
        accelerator="cpu", devices=devices, strategy=strategy, accumulate_grad_batches=ACCUMULATE, max_epochs=1,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False, callbacks=[FlatCallback(0, 2), Save(folder)],
    )  # fmt: skip
    trainer.fit(module)


class Save(pl.Callback):
    def __init__(self, folder):
        self.folder = folder

    def on_train_end(self, trainer, module):
        name = "alone" if trainer.world_size == 1 else f"rank{trainer.global_rank}"
        result = {"weights": dict(module.net.state_dict()), "evaluations": module.flat.telemetry.evaluations}
        torch.save(result, f"{self.folder}/{name}.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    fit(sys.argv[1], devices=2)
    fit(sys.argv[1], devices=1)
