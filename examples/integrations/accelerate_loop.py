"""Hugging Face Accelerate: accumulate over four micro-batches; every evaluation sees all of them.

python examples/integrations/accelerate_loop.py
"""

import torch
from accelerate import Accelerator
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import cflat
from cflat.integrations.accelerate import FlatSteps

torch.manual_seed(0)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
model = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
base = torch.optim.AdamW(model.parameters(), lr=1e-3)
optimizer = cflat.CFlat(base, model=model, options=cflat.StepOptions(max_norm=1.0))
loader = DataLoader(TensorDataset(torch.randn(256, 20), torch.randint(0, 4, (256,))), batch_size=8)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

take_step = FlatSteps(accelerator, model, optimizer)
for inputs, labels in loader:
    with accelerator.accumulate(model):
        loss = take_step(lambda x, y: F.cross_entropy(model(x), y), inputs, labels)
        optimizer.zero_grad()
telemetry = optimizer.optimizer.telemetry
print(f"loss {loss.item():.3f}, {telemetry.steps} steps of 4 micro-batches, {telemetry.evaluations} evaluations")
