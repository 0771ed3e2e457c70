"""torch.compile and gradient checkpointing: nothing to do, the graph reads the weights anew at every evaluation.

python examples/integrations/compile_and_checkpointing.py
"""

import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import cflat


class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(20, 20), torch.nn.GELU(), torch.nn.Dropout(0.1)) for _ in range(3)
        )
        self.head = torch.nn.Linear(20, 4)

    def forward(self, inputs):
        for block in self.blocks:
            inputs = inputs + checkpoint(block, inputs, use_reentrant=False)
        return self.head(inputs)


torch.manual_seed(0)
model = Network()
compiled = torch.compile(model, backend="aot_eager")  # leave the backend out where a C++ compiler is at hand
optimizer = cflat.CFlat(torch.optim.AdamW(model.parameters(), lr=1e-3), model=model, rho=0.05)
inputs, labels = torch.randn(64, 20), torch.randint(0, 4, (64,))


def closure():
    loss = F.cross_entropy(compiled(inputs), labels)
    loss.backward()
    return loss


losses = [optimizer.step(closure).item() for _ in range(10)]
print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, {optimizer.telemetry.evaluations} evaluations")
