"""A contrastive two-tower loss: two encoders, one optimizer, negatives from the batch.

Both towers move together, so one step perturbs the joint weights; `model=` takes a module that holds both. In-batch
negatives make the loss one of the whole batch: micro-batches would be another objective, with fewer negatives.

python examples/integrations/two_towers.py
"""

import torch
from torch import nn
from torch.nn import functional as F

import cflat


class TwoTowers(nn.Module):
    def __init__(self):
        super().__init__()
        self.image = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 16))
        self.text = nn.Sequential(nn.Linear(24, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 16))
        self.log_scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, images, texts):
        """Return the symmetric InfoNCE loss."""
        images, texts = F.normalize(self.image(images), dim=1), F.normalize(self.text(texts), dim=1)
        logits = self.log_scale.exp() * images @ texts.T
        pairs = torch.arange(len(images))
        return (F.cross_entropy(logits, pairs) + F.cross_entropy(logits.T, pairs)) / 2


def batch(step, size=64):
    """Return views of the same hidden thing through two fixed lenses."""
    fixed, fresh = torch.Generator().manual_seed(1), torch.Generator().manual_seed(100 + step)
    lenses = torch.randn(8, 32, generator=fixed), torch.randn(8, 24, generator=fixed)
    hidden = torch.randn(size, 8, generator=fresh)
    return tuple(hidden @ lens for lens in lenses)


def train(optimizer, model, num_steps):
    losses = []
    for step in range(num_steps):
        images, texts = batch(step)

        def closure(images=images, texts=texts):
            loss = model(images, texts)
            loss.backward()
            return loss

        losses.append(optimizer.step(closure).item())
    return losses


def make():
    torch.manual_seed(0)
    model = TwoTowers()
    return model, cflat.CFlatTurbo(torch.optim.AdamW(model.parameters(), lr=3e-3), model=model, rho=0.05)


if __name__ == "__main__":
    model, optimizer = make()
    losses = train(optimizer, model, 60)
    print(
        f"loss {losses[0]:.2f} -> {losses[-1]:.2f}, {optimizer.telemetry.evaluations_per_step:.2f} evaluations a step"
    )
