"""Flatter minima in an existing loop: wrap the optimizer, hand it a closure. Needs torch alone.

python examples/bare_loop.py
"""

import torch

import cflat

torch.manual_seed(0)
inputs, labels = torch.randn(512, 20), torch.randint(0, 4, (512,))
model = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.BatchNorm1d(64), torch.nn.ReLU(), torch.nn.Linear(64, 4))

base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
optimizer = cflat.CFlatTurbo(base, model=model, rho=0.05, lam=0.2, k=5)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)

for task in range(2):
    optimizer.start_task(task, num_tasks=2)
    for _epoch in range(5):
        for rows in torch.randperm(512).split(64):

            def closure():
                loss = torch.nn.functional.cross_entropy(model(inputs[rows]), labels[rows])  # noqa: B023
                loss.backward()
                return loss

            loss = optimizer.step(closure)
        scheduler.step()
    print(f"task {task}: loss {loss.item():.3f}, {optimizer.telemetry.evaluations_per_step:.2f} evaluations per step")
