"""Measure how long a step takes relative to one of SGD, at the evaluations that its trigger or budget chooses.

    python benchmarks/step_time.py                       # MLP, ResNet-18 at 32 px, ViT-Tiny at 64 px; minutes
    python benchmarks/step_time.py --nets mlp --rounds 4

Every round takes a few steps with each optimizer in turn, on the same fresh batches: one thread, CPU time. Ratios are
taken within a round, which cancels drifts of the machine's speed; printed are the median and the quartiles.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from torch import Tensor, nn
from torch.nn import functional

import cflat
from cflat.nn.backbone import create_backbone

NUM_CLASSES = 10
SHAPES = {"mlp": (784,), "resnet18": (3, 32, 32), "vit_tiny": (3, 64, 64)}
BATCH = {"mlp": 64, "resnet18": 8, "vit_tiny": 32}
STEPS = {"mlp": 100, "resnet18": 10, "vit_tiny": 10}
OPTIMIZERS = {
    "SGD": ("none", {}),
    "C-Flat Turbo": ("c_flat_turbo", {"reading": "calibrated"}),  # its trigger does not depend on the scale of the loss
    "C-Flat Forecast": ("c_flat_forecast", {"evaluations": 1.4}),
    "C-Flat": ("c_flat", {}),
}


def build_net(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name == "mlp":
        layers = (nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, NUM_CLASSES))
        return nn.Sequential(*layers)
    names = {"resnet18": "resnet18_cifar", "vit_tiny": "vit_tiny"}
    backbone = create_backbone(names[name], image_size=SHAPES[name][-1])
    return nn.Sequential(backbone, nn.Linear(backbone.feature_dim, NUM_CLASSES))


class Running:
    """An optimizer with its own copy of the network."""

    def __init__(self, net: str, registered: str, settings: dict) -> None:
        self.model = build_net(net)
        base = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.optimizer = cflat.create_optimizer(registered, base, model=self.model, **settings)

    def seconds_per_step(self, batches: list[tuple[Tensor, Tensor]]) -> float:
        started = time.process_time()
        for images, labels in batches:

            def closure(images: Tensor = images, labels: Tensor = labels) -> Tensor:
                loss = functional.cross_entropy(self.model(images), labels)
                loss.backward()
                return loss

            self.optimizer.step(closure)
        return (time.process_time() - started) / len(batches)


def make_batches(net: str, teacher: Tensor, count: int) -> list[tuple[Tensor, Tensor]]:
    """Return images whose labels a noisy linear teacher chose: there is something to learn, and batches differ."""
    made = []
    for _ in range(count):
        images = torch.randn(BATCH[net], *SHAPES[net])
        scores = images.flatten(1) @ teacher
        made.append((images, (scores + 0.5 * torch.randn_like(scores)).argmax(1)))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nets", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--rounds", type=int, default=10)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for net in arguments.nets:
        runners = {name: Running(net, *made) for name, made in OPTIMIZERS.items()}
        torch.manual_seed(1)
        features = torch.Size(SHAPES[net]).numel()
        teacher = torch.randn(features, NUM_CLASSES) / features**0.5
        ratios: dict[str, list[float]] = {name: [] for name in runners}
        for turn in range(arguments.rounds + 1):
            batches = make_batches(net, teacher, STEPS[net])
            seconds = {name: running.seconds_per_step(batches) for name, running in runners.items()}
            for name, spent in seconds.items():
                if turn:  # the first round fills caches
                    ratios[name].append(spent / seconds["SGD"])
        print(f"{net}, batch {BATCH[net]}, {arguments.rounds} x {STEPS[net]} steps; SGD {1e3 * seconds['SGD']:.1f} ms")
        for name, values in ratios.items():
            low, middle, high = statistics.quantiles(values, n=4)
            cost = runners[name].optimizer.telemetry.evaluations_per_step
            print(f"  {name:<16} {cost:.2f} evaluations, {middle:.2f} ({low:.2f} to {high:.2f}) times SGD's time")


if __name__ == "__main__":
    main()
