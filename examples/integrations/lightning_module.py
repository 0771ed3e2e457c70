"""PyTorch Lightning: an unchanged module, gradient accumulation, telemetry in the log, two tasks.

python examples/integrations/lightning_module.py
"""

import lightning.pytorch as pl
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import cflat
from cflat.integrations.lightning import FlatCallback


class Classifier(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))

    def configure_optimizers(self):
        base = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        self.flat = cflat.CFlatTurbo(base, model=self, rho=0.05)
        return self.flat

    def training_step(self, batch, batch_idx):
        inputs, labels = batch
        loss = F.cross_entropy(self.net(inputs), labels)
        self.log("loss", loss)  # with the callback: of the first evaluation of each step, not of the perturbed ones
        return loss


torch.manual_seed(0)
module = Classifier()
for task in range(2):
    data = TensorDataset(torch.randn(128, 20) + task, torch.randint(0, 4, (128,)))
    trainer = pl.Trainer(
        max_epochs=1, accelerator="cpu", accumulate_grad_batches=2, gradient_clip_val=1.0,
        callbacks=[FlatCallback(task=task, num_tasks=2)], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(data, batch_size=16))
    telemetry = module.flat.telemetry
    print(f"task {task}: {telemetry.steps} steps, {telemetry.evaluations_per_step:.2f} evaluations each")
