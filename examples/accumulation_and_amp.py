"""The second door: the evaluations of a step as a loop, for gradient accumulation, mixed precision, foreign trainers.

python examples/accumulation_and_amp.py
"""

import torch

import cflat

torch.manual_seed(0)
inputs, labels = torch.randn(128, 20), torch.randint(0, 4, (128,))
model = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
optimizer = cflat.CFlat(torch.optim.AdamW(model.parameters(), lr=1e-3), model=model, rho=0.05, lam=0.2)

micro_batches = list(zip(inputs.split(32), labels.split(32), strict=True))
for _step in range(10):
    with optimizer.passes() as passes:
        for _ in passes:  # four times for C-Flat, at four points; the weights are back afterwards
            for images, targets in micro_batches:
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = torch.nn.functional.cross_entropy(model(images), targets)
                (loss / len(micro_batches)).backward()
print(f"loss {loss.item():.3f}, {optimizer.telemetry.evaluations} evaluations in {optimizer.telemetry.steps} steps")
