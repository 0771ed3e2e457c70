"""An optimizer of your own in one file: write the direction, the engine does the rest.

    python examples/custom_optimizer.py
    cflat run --plugin examples/custom_optimizer.py --optimizer extra_sam --method icarl --data digits

ExtraSAM looks two ascent steps ahead. Each ``yield``, bare or with a name for observers, is one evaluation at the
present weights; restoring, buffers, random numbers, Inf and NaN, several ranks and checkpoints are not your problem.
"""

import torch

import cflat
from cflat.optim import SharpnessAware, register_optimizer


@register_optimizer("extra_sam", summary="two ascent steps", evaluations="3")
class ExtraSAM(SharpnessAware):
    """Descend along the gradient two ascent steps away."""

    def __init__(self, base, *, model=None, rho: float = 0.05, options=None):
        super().__init__(base, model=model, rho=rho, options=options)

    def direction(self, weights):
        """Return the gradient at the second ascent point."""
        g = yield
        weights.jump(g, self.rho / 2)
        g_half = yield
        weights.walk(g_half, self.rho / 2)
        return (yield)


def main():
    """Fit a line."""
    torch.manual_seed(0)
    inputs, targets = torch.randn(64, 5), torch.randn(64, 1)
    model = torch.nn.Linear(5, 1)
    optimizer = cflat.create_optimizer("extra_sam", torch.optim.SGD(model.parameters(), lr=0.1), model=model, rho=0.1)

    def closure():
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(20)]
    cost = optimizer.telemetry.evaluations_per_step
    print(f"{optimizer}: loss {losses[0]:.3f} -> {losses[-1]:.3f}, {cost} evaluations/step")


if __name__ == "__main__":  # as a plug-in, the file only registers
    main()
