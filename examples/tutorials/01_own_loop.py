"""Forgetting, by hand: two tasks in a bare torch loop, with the base optimizer alone, SAM and C-Flat Turbo.

python examples/tutorials/01_own_loop.py
"""

import torch
from sklearn.datasets import load_digits
from torch import nn

import cflat

images, labels = load_digits(return_X_y=True)
images, labels = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
is_test = torch.arange(len(labels)) % 5 == 0
TASKS = [(labels < 5), (labels >= 5)]  # digits 0 to 4, then 5 to 9


def accuracy(model, task):
    chosen = TASKS[task] & is_test
    answers = model(images[chosen])[:, 5 * task : 5 * task + 5].argmax(dim=1) + 5 * task  # the task is known
    return (answers == labels[chosen]).float().mean().item()


print("optimizer      task 1 when learned   task 1 at the end   task 2   evaluations per step")
for name in ("none", "sam", "c_flat_turbo"):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    base = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    opt = cflat.create_optimizer(name, base, model=model)  # 1: wrap your optimizer

    learned = 0.0
    for task, members in enumerate(TASKS):
        opt.start_task(task, num_tasks=len(TASKS))  # forgets caches and statistics of the task before
        rows = torch.nonzero(members & ~is_test).flatten()
        for _epoch in range(5):
            for batch in rows[torch.randperm(len(rows))].split(32):

                def closure(batch=batch, task=task, model=model):  # forward, backward, return the loss
                    logits = model(images[batch])[:, 5 * task : 5 * task + 5]
                    loss = nn.functional.cross_entropy(logits, labels[batch] - 5 * task)
                    loss.backward()
                    return loss

                opt.step(closure)  # 2: step with a closure
        if task == 0:
            learned = accuracy(model, 0)

    cost = opt.telemetry.evaluations_per_step
    print(f"{name:<14} {learned:19.1%} {accuracy(model, 0):19.1%} {accuracy(model, 1):8.1%} {cost:22.2f}")

print("One seed and one learning rate say nothing about which is better: see the next tutorial.")
