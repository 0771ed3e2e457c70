"""What was looked at after block A had been seen: why Turbo is level with SGD, and where C-Flat gains. Decides nothing.

python -m benchmarks.study.post_hoc --features FOLDER     # about a minute; writes docs/results/study/post-hoc.md
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.study.analysis import (
    differences,
    final_runs,
    random_effects,
    rank_correlation,
    row_means,
    stream_effect,
)
from benchmarks.study.configs import Key, Places, Run, config_of
from benchmarks.study.definition import BLOCKS, CONTRASTS, ROWS, STREAMS, Contrast
from benchmarks.study.ledger import Ledger, Line, read
from benchmarks.study.pages import RESULTS, points, table
from torch import nn

from cflat._files import write_atomic
from cflat.optim import SharpnessAware
from cflat.optim.engine import EmaTrigger, Evaluation
from cflat.runs.run import run as train
from cflat.train import Observer

SCALES = (0.1, 1.0, 10.0)
"""Factors on the loss."""
GAINS = (
    Contrast("c_flat", "sgd"),
    Contrast("c_flat", "sgd_x4"),
    Contrast("sam", "sgd"),
    Contrast("msam", "sgd"),
    Contrast("turbo", "sgd"),
)


class GradientNorms(Observer):
    """Keeps |g|^2 of every step, task by task."""

    def __init__(self) -> None:
        self.tasks: list[list[float]] = []

    def on_phase_start(self, optimizer: SharpnessAware, network: nn.Module) -> None:
        self.tasks.append([])
        optimizer.register_gradient_hook(self._see)

    def _see(self, evaluation: Evaluation) -> None:
        if evaluation.name == "g":
            self.tasks[-1].append(evaluation.gradient.norm**2)


def fired(tasks: Sequence[Sequence[float]], scale: float, *, is_rooted: bool = False) -> float:
    """Return the fraction of steps that Turbo's trigger would select if the loss were ``scale`` times as large."""
    found = []
    for squares in tasks:
        trigger = EmaTrigger(0.9, is_rooted)  # statistics begin anew with every task
        found += [trigger.fires(scale**2 * square, 1.0) for square in squares]
    return statistics.fmean(found)


def trigger_table(lines: Sequence[Line], places: Places) -> list[str]:
    ledger = Ledger(lines)
    head = ["stream", "mean of \\|g\\|²", *(f"loss x {scale:g}" for scale in SCALES), "square root, any scale"]
    rows: list[list[object]] = [head]
    for stream in BLOCKS["A"].streams:
        choice = ledger.choice(stream, "turbo")
        assert choice is not None
        observer = GradientNorms()
        train(config_of(Run(Key(stream, "turbo", 0, "tune", 0), choice.settings), places), None, observers=[observer])
        mean = statistics.fmean(square for squares in observer.tasks for square in squares)
        rates = [fired(observer.tasks, scale) for scale in SCALES]
        rows.append(
            [stream, f"{mean:.2g}", *(f"{rate:.1%}" for rate in (*rates, fired(observer.tasks, 1.0, is_rooted=True)))]
        )
    return table(rows)


def gain_table(lines: Sequence[Line]) -> list[str]:
    rows: list[list[object]] = [["stream", "replay", *(contrast.title for contrast in GAINS)]]
    for stream in BLOCKS["A"].streams:
        finals = final_runs(lines, stream)
        method = STREAMS[stream].layer["method"]["name"]
        cells = [points(stream_effect(differences(finals, contrast))) for contrast in GAINS]
        rows.append([stream, "yes" if method == "replay" else "no", *cells])
    return table(rows)


def divergence_sentences(lines: Sequence[Line]) -> Iterator[str]:
    """Yield what a row that diverged does to a stream's rank correlation, and to the verdicts."""
    finals = final_runs(lines, "digits-few")
    losses, accuracies = row_means(finals, "end_loss"), row_means(finals, "avg")
    finite = [name for name, loss in losses.items() if math.isfinite(loss)]
    correlation = rank_correlation([losses[name] for name in finite], [accuracies[name] for name in finite])
    low = sum(rows["turbo_calibrated"].avg < rows["sgd"].avg - 0.05 for rows in finals.values())
    yield (
        f"On `digits-few`, C-Flat Turbo, calibrated ended more than five points below SGD in {low} of {len(finals)} "
        "replicates, and its loss was not finite in some, though the same settings were the best of its trials. The "
        "rank correlation of end loss and Avg is then undefined, and the frozen rule counts the stream as not "
        f"speed-limited. Over the other {len(finite)} rows it is {correlation:+.2f}: beyond 0.6, but with the opposite "
        "sign, as rows with a higher end loss are better there."
    )
    effects = []
    for contrast in CONTRASTS:
        streams = [stream for stream in BLOCKS["A"].streams if stream not in ("digits-few", "digits-noise")]
        own = [stream_effect(differences(final_runs(lines, stream), contrast)) for stream in streams]
        effects.append(f"{contrast.title} {points(random_effects([effect for effect in own if effect is not None]))}")
    yield f"Without `digits-few` and `digits-noise`: {'; '.join(effects)}."


def page(lines: Sequence[Line], places: Places) -> str:
    turbo = [
        line.evaluations_per_step for line in lines if (line.block, line.row, line.stage) == ("A", "turbo", "final")
    ]
    parts = [
        "# Post hoc: what was looked at afterwards",
        "After block A had been seen. Nothing here was part of the definition, and nothing here decides; it says where "
        "to look next. Written by `python -m benchmarks.study.post_hoc`.",
        "## Why C-Flat Turbo is level with SGD",
        f"Its trigger hardly fires: {min(turbo):.2f} to {max(turbo):.2f} evaluations per step over the final runs of "
        f"block A, {statistics.fmean(turbo):.2f} on average. A step that does not trigger is a step of SGD. "
        "As printed, a step triggers if |g|² reaches its moving mean plus the moving mean of its *squared* deviation: "
        "the first scales with the square of the loss, the second with its fourth power. Where |g|² varies by more "
        "than about 1, the trigger is off, and a smaller loss switches it on. The table has the fraction of steps that "
        "trigger, from the gradients of a tuning replicate at the tuned settings. With the square root of sigma, as "
        '`reading="calibrated"` has it, the scale does not matter.',
        "\n".join(trigger_table(lines, places)),
        "## Where C-Flat gains",
        "Differences of Avg in points with 95 % intervals over 24 replicates, not corrected for looking.",
        "\n".join(gain_table(lines)),
        f"{ROWS['msam'].title} takes one evaluation per step and was in no contrast of the study. A second study with "
        "fresh replicates could ask: does flatness pay without replay, and is MSAM better than SGD?",
        "## A row that diverged",
        *divergence_sentences(lines),
    ]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--features", type=Path, required=True, help="folder of `python -m benchmarks.study features`")
    places = Places(features=parser.parse_args().features)
    write_atomic(RESULTS / "study" / "post-hoc.md", page(read(), places))


if __name__ == "__main__":
    main()
