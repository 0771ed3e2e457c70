"""PILOT and PyCIL with INFTY: a learner that calls set_closure and step() keeps its code; the optimizer is another.

python examples/integrations/infty_learner.py
"""

import torch
from torch.nn import functional as F

import cflat
from cflat.integrations.infty import InftyAdapter


class Learner:
    """The part of a PILOT learner that INFTY asks for: `create_loss_fn` returns logits and a list of losses."""

    def __init__(self):
        self.network = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))

    def create_loss_fn(self, inputs, targets):
        def loss_fn():
            logits = self.network(inputs)
            return logits, [F.cross_entropy(logits, targets), 1e-4 * logits.square().mean()]

        return loss_fn

    def train(self, loader, optimizer):
        for inputs, targets in loader:
            optimizer.set_closure(self.create_loss_fn(inputs, targets))
            _logits, losses = optimizer.step()
        return sum(loss.item() for loss in losses)


torch.manual_seed(0)
learner = Learner()
base = torch.optim.SGD(learner.network.parameters(), lr=0.05, momentum=0.9)
# was: infty.optim.C_Flat(learner.network.parameters(), base, learner.network, {"rho": 0.05, "lamb": 0.2})
optimizer = InftyAdapter(cflat.CFlat(base, model=learner.network, rho=0.05, lam=0.2))
scheduler = torch.optim.lr_scheduler.StepLR(optimizer.optimizer, step_size=1, gamma=0.5)
loader = [(torch.randn(16, 20), torch.randint(0, 4, (16,))) for _ in range(8)]
for task in range(2):
    optimizer.start_task(task, num_tasks=2)
    loss = learner.train(loader, optimizer)
    scheduler.step()
print(f"loss {loss:.3f}, {optimizer.telemetry.evaluations} evaluations in {optimizer.telemetry.steps} steps")
