"""What watching gradients costs: a C-Flat step with and without a recorder, interleaved, in CPU time.

    python benchmarks/recorder.py                       # ResNet-18 at 32 px, recorded every 5th step
    python benchmarks/recorder.py --net vit --every 1

One round takes ``--every`` steps of each lane, so that each recorded round holds exactly one recorded step. "off" is an
optimizer that never had a recorder, "detached" one whose recorder was taken off: their ratio shows the noise. The last
line has less of it: the time that the recorder itself took, over the rest of the same steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from step_cost import NETS, NUM_CLASSES, build_net
from torch.nn import functional

import cflat
from cflat.analysis.recorder import GradientRecorder


class TimedRecorder(GradientRecorder):
    """A recorder that knows how long it took."""

    seconds = 0.0

    def _see(self, evaluation) -> None:
        started = time.process_time()
        super()._see(evaluation)
        self.seconds += time.process_time() - started

    def _end(self, optimizer) -> None:
        started = time.process_time()
        super()._end(optimizer)
        self.seconds += time.process_time() - started


def make_lane(net: str, images, labels, recorder: GradientRecorder | None, detaches: bool):
    model = build_net(net)
    optimizer = cflat.CFlat(torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9), model=model)
    if recorder is not None:
        detach = recorder.attach(optimizer)
        if detaches:
            detach()

    def closure():
        loss = functional.cross_entropy(model(images), labels)
        loss.backward()
        return loss

    return lambda: optimizer.step(closure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--net", choices=NETS, default="resnet18")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--every", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="write the numbers to this JSON file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(arguments.batch, 3, 32, 32, generator=generator)
    labels = torch.randint(0, NUM_CLASSES, (arguments.batch,), generator=generator)
    recorders = [TimedRecorder(arguments.every, arguments.every) for _ in range(2)]
    lanes = {
        "off": make_lane(arguments.net, images, labels, None, False),
        "detached": make_lane(arguments.net, images, labels, recorders[0], True),
        "on": make_lane(arguments.net, images, labels, recorders[1], False),
    }
    seconds: dict[str, list[float]] = {name: [] for name in lanes}
    for index in range(arguments.rounds + 1):
        for name, step in lanes.items():
            started = time.process_time()
            for _ in range(arguments.every):
                step()
            if index:  # the first round warms up
                seconds[name].append(time.process_time() - started)
        if index == 0:
            recorders[1].seconds = 0.0
    ratios = {
        name: sorted(a / b for a, b in zip(seconds[name], seconds["off"], strict=True)) for name in ("detached", "on")
    }
    assert len(recorders[1].records) == arguments.rounds + 1
    print(
        f"{arguments.net}, batch {arguments.batch}, recorded every {arguments.every} steps, {arguments.rounds} rounds"
    )
    for name, values in ratios.items():
        print(f"{name:<9} over off: median {statistics.median(values):.3f} ({values[0]:.3f} to {values[-1]:.3f})")
    own = recorders[1].seconds / (sum(seconds["on"]) - recorders[1].seconds)
    print(f"the recorder's own time over that of the steps: {own:.3f}")
    ratios["own"] = [own]
    if arguments.out:
        arguments.out.write_text(json.dumps(ratios, indent=1))


if __name__ == "__main__":
    main()
