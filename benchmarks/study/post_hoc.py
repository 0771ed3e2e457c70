"""What was looked at after final runs had been seen: Turbo's trigger, where C-Flat gains, heads. Decides nothing.

    python -m benchmarks.study.post_hoc trigger --features DIR --data-root DATA --weights FILE   minutes
    python -m benchmarks.study.post_hoc head --data-root DATA --weights FILE                     ten minutes
    python -m benchmarks.study.post_hoc write                                                    the page

What was measured lies in docs/results/study/post-hoc.json; streams whose data is not here keep their numbers.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypedDict

from benchmarks.study.analysis import (
    differences,
    final_runs,
    is_speed_limited,
    random_effects,
    rank_correlation,
    row_means,
    stream_correlation,
    stream_effect,
)
from benchmarks.study.configs import Key, Places, Run, config_of
from benchmarks.study.definition import (
    BLOCK_OF,
    BLOCKS,
    CONTRASTS,
    EQUAL_COMPUTE,
    ROWS,
    STREAMS,
    TUNED_BLOCKS,
    Contrast,
)
from benchmarks.study.ledger import Ledger, Line, read
from benchmarks.study.pages import RESULTS, complete_streams, points, table
from torch import nn

from cflat._files import write_atomic
from cflat.optim import SharpnessAware
from cflat.optim.engine import EmaTrigger, Evaluation
from cflat.runs.run import run as train
from cflat.train import Observer
from cflat.train.observer import EpochRecord, StepEvent

MEASURED = RESULTS / "study" / "post-hoc.json"
SCALES = (0.1, 1.0, 10.0)
"""Factors on the loss."""
GAINS = (
    Contrast("c_flat", "sgd"),
    Contrast("c_flat", "sgd_x4"),
    Contrast("sam", "sgd"),
    Contrast("msam", "sgd"),
    Contrast("turbo", "sgd"),
)
_BODY = {"perturb": "body"}
HEAD_RUNS: dict[str, dict[str, tuple[str, Mapping[str, str]]]] = {
    "duct": {
        "plain": ("plain", {}),
        "SAM": ("sam", {}),
        "SAM, head not perturbed": ("sam", _BODY),
        "C-Flat Turbo": ("turbo", {}),
        "C-Flat Turbo, head not perturbed": ("turbo", _BODY),
    },
    "ranpac": {
        "SGD": ("sgd", {}),
        "C-Flat Turbo": ("turbo", {}),
        "C-Flat Turbo, head not perturbed": ("turbo", _BODY),
        "C-Flat Turbo, consistent": ("turbo", {"reading": "consistent"}),
        "C-Flat Turbo, calibrated": ("turbo_calibrated", {}),
    },
}
"""By stream and title: a row of its block, and what its optimizer has otherwise."""
Numbers = dict[str, dict[str, float]]
"""By stream or row, then by what was measured."""


class Measured(TypedDict):
    """What lies in post-hoc.json."""

    trigger: Numbers
    head: dict[str, Numbers]
    """By stream."""


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


def measure_trigger(lines: Sequence[Line], places: Places) -> Numbers:
    """Return what the gradients of Turbo's tuned runs say about its trigger, on streams whose data is here."""
    ledger, found = Ledger(lines), Numbers()
    for stream in (name for block in TUNED_BLOCKS for name in BLOCKS[block].streams):
        choice = ledger.choice(stream, "turbo")
        if choice is None or places.missing(STREAMS[stream]) is not None:
            continue
        observer = GradientNorms()
        train(config_of(Run(Key(stream, "turbo", 0, "tune", 0), choice.settings), places), None, observers=[observer])
        mean = statistics.fmean(square for squares in observer.tasks for square in squares)
        rates = {f"loss x {scale:g}": round(fired(observer.tasks, scale), 3) for scale in SCALES}
        rooted = round(fired(observer.tasks, 1.0, is_rooted=True), 3)
        found[stream] = {"mean of |g|²": float(f"{mean:.2g}"), **rates, "square root, any scale": rooted}
    return found


def trigger_table(measured: Mapping[str, Mapping[str, float]]) -> list[str]:
    streams = [stream for stream in STREAMS if stream in measured]
    names = list(measured[streams[0]])
    rows: list[list[object]] = [["stream", *(name.replace("|", "\\|") for name in names)]]
    for stream in streams:
        mean, *rates = (measured[stream][name] for name in names)
        rows.append([stream, f"{mean:.2g}", *(f"{rate:.1%}" for rate in rates)])
    return table(rows)


class HeadScale(Observer):
    """Keeps the scale of a cosine head, |g| and the losses of a run's first phase."""

    def __init__(self) -> None:
        self.scales: list[float] = []
        self.norms: list[float] = []
        self.losses: list[float] = []
        self._phases = 0
        self._network: nn.Module

    def on_phase_start(self, optimizer: SharpnessAware, network: nn.Module) -> None:
        self._phases += 1
        self._network = network
        optimizer.register_gradient_hook(self._see)

    def _see(self, evaluation: Evaluation) -> None:
        if self._phases == 1 and evaluation.name == "g":
            self.norms.append(evaluation.gradient.norm)

    def on_step(self, event: StepEvent) -> None:
        if self._phases == 1:
            self.scales.append(self._network.head.sigma.item())

    def on_epoch(self, record: EpochRecord) -> None:
        if self._phases == 1:
            self.losses.append(record.loss)


def measure_head(stream: str, lines: Sequence[Line], places: Places) -> Numbers:
    """Return how the scale of a cosine head grows in the first task, in an order that no final run has."""
    ledger, found = Ledger(lines), Numbers()
    stage = "tune" if BLOCKS[BLOCK_OF[stream]].trials else "final"
    for title, (row, changes) in HEAD_RUNS[stream].items():
        choice = ledger.choice(stream, row) if stage == "tune" else None
        config = config_of(Run(Key(stream, row, 0, stage, 0), choice and choice.settings), places)
        settings = config.optimizer.settings.model_copy(update=changes)
        seen = HeadScale()
        optimizer, one_task = replace(config.optimizer, settings=settings), replace(config.stream, max_tasks=1)
        summary = train(replace(config, optimizer=optimizer, stream=one_task), None, observers=[seen])
        found[title] = {
            "sigma half-way": round(seen.scales[len(seen.scales) // 2], 2),
            "sigma at the end": round(seen.scales[-1], 2),
            "mean of |g|": float(f"{statistics.fmean(seen.norms):.3g}"),
            "end loss": round(seen.losses[-1], 2),
            "accuracy, %": round(100 * summary.value("avg"), 1),
        }
    return found


def head_table(measured: Mapping[str, Mapping[str, float]]) -> str:
    names = list(next(iter(measured.values())))
    rows: list[list[object]] = [["row", *(name.replace("|", "\\|") for name in names)]]
    rows += [[row, *(f"{numbers[name]:g}" for name in names)] for row, numbers in measured.items()]
    return "\n".join(table(rows))


def head_sections(measured: Mapping[str, Numbers]) -> Iterator[str]:
    """Yield why sharpness-aware rows lose with a cosine head."""
    if "ranpac" in measured:
        yield "## Why C-Flat Turbo is far below SGD with RanPAC and APER"
        yield (
            "There its trigger fires, and a reused step adds a direction of the norm beta |g|, about ten times what "
            "C-Flat adds ([the surrogate error](../surrogate.md)). Their adapters are trained under a cosine head, "
            "sigma cos(feature, row), whose scale sigma begins at 1. With reused steps sigma grows half as fast, "
            "gradients stay small and the loss falls slowly; without perturbing the head it is the same, and with "
            '`reading="consistent"`, too. `reading="calibrated"`, which gives the component the norm that it had when '
            "it was computed and fires less often, is near SGD. One run each of RanPAC's first task (CIFAR-100 at "
            "64 px, ViT-Tiny) in a tuning replicate, rate 0.381, radius 0.1:"
        )
        yield head_table(measured["ranpac"])
    if "duct" in measured:
        yield "## Why everything that perturbs loses with DUCT's settings"
        yield (
            "DUCT has a cosine head, too, whose sigma begins at 1 in every domain, and takes 45 steps in each before "
            "the head is retrained. At perturbed weights the cosine with the right class is smaller, so their gradient "
            "holds sigma back; with a small sigma the gradients of everything else are small, too, and the loss falls "
            "slowly. That is training speed, and a higher rate repairs it. It is not the perturbation of the head: "
            "without it SAM is the same. One run each of the first domain, 280 training images, in an order that no "
            "final run has:"
        )
        yield head_table(measured["duct"])


def complete(lines: Sequence[Line]) -> list[str]:
    """Return the streams of the tuned blocks of which every final run is there."""
    return [stream for block in TUNED_BLOCKS for stream in complete_streams(block, lines)]


def gain_table(lines: Sequence[Line]) -> list[str]:
    rows: list[list[object]] = [["stream", "exemplars", *(contrast.title for contrast in GAINS)]]
    for stream in complete(lines):
        finals = final_runs(lines, stream)
        has_memory = "memory_per_class" in STREAMS[stream].layer["method"]
        cells = [points(stream_effect(differences(finals, contrast))) for contrast in GAINS]
        limited = ", speed-limited" if is_speed_limited(stream_correlation(finals)) else ""
        rows.append([f"{stream}{limited}", "yes" if has_memory else "no", *cells])
    return table(rows)


def speed_section(lines: Sequence[Line]) -> Iterator[str]:
    """Yield what training longer is worth where the end loss orders the rows."""
    finals = {stream: final_runs(lines, stream) for stream in complete(lines)}
    limited = {stream: own for stream, own in finals.items() if is_speed_limited(stream_correlation(own))}
    if not limited:
        return
    rows: list[list[object]] = [
        ["stream", "rank correlation", "end loss of SGD", *(f"{ROWS[row].title} - SGD" for row in EQUAL_COMPUTE)]
    ]
    for stream, own in limited.items():
        cells = [points(stream_effect(differences(own, Contrast(row, "sgd")))) for row in EQUAL_COMPUTE]
        loss = row_means(own, "end_loss")["sgd"]
        rows.append([stream, f"{stream_correlation(own):+.2f}", f"{loss:.2g}", *cells])
    yield "## What speed-limited streams measure"
    yield (
        "There the end loss orders the rows. With a negative rank correlation, who ends at a lower loss is better: "
        "what an optimizer gains or loses may be that it trains faster or slower, and the table says what training "
        "longer is worth."
    )
    yield "\n".join(table(rows))


def collapse_section(lines: Sequence[Line]) -> Iterator[str]:
    """Yield what the runs of block C that learned nothing do to its differences."""
    rows: list[list[object]] = [
        ["stream", "row", "rate", "replicates in which it learned nothing", "Avg to SGD", "without such replicates"]
    ]
    for stream in complete_streams("C", lines):
        finals = final_runs(lines, stream)
        lost = {
            row: [number for number, runs in finals.items() if runs[row].end_loss > 0.99 * math.log(10)]
            for row in BLOCKS["C"].rows
        }
        for row, numbers in lost.items():
            if not numbers:
                continue
            contrast = Contrast(row, "sgd")
            trained = {number: runs for number, runs in finals.items() if number not in {*numbers, *lost["sgd"]}}
            effects = [points(stream_effect(differences(own, contrast))) for own in (finals, trained)]
            effects = ["-", "-"] if row == "sgd" else effects
            count = f"{len(numbers)} of {len(finals)}"
            rows.append([stream, ROWS[row].title, f"{finals[numbers[0]][row].lr:g}", count, *effects])
    if len(rows) == 1:
        return
    yield "## Runs of block C that learned nothing"
    yield (
        "Ten classes are learned in the first task, so an end loss of log 10 = 2.30 is that of guessing. Tuning saw "
        "two replicates and chose rates at the upper edge for many rows; in some final replicates training collapsed "
        "there, for SGD as for others. These runs make the intervals of block C wide, and they count: a rate that "
        "works in most replicates is what tuning gave."
    )
    yield "\n".join(table(rows))


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


def page(lines: Sequence[Line], measured: Measured) -> str:
    streams = complete(lines)
    by_block = {
        block: [
            line.evaluations_per_step
            for line in lines
            if (line.row, line.stage) == ("turbo", "final") and line.stream in streams and line.block == block
        ]
        for block in TUNED_BLOCKS
    }
    costs = "; ".join(
        f"block {block} {min(own):.2f} to {max(own):.2f}, {statistics.fmean(own):.2f} on average"
        for block, own in by_block.items()
        if own
    )
    parts = [
        "# Post hoc: what was looked at afterwards",
        "After final runs had been seen. Nothing here was part of the definition, and nothing here decides; it says "
        "where to look next. Written by `python -m benchmarks.study.post_hoc`.",
        "## Why C-Flat Turbo is so near to SGD on most streams",
        f"Its trigger hardly fires where gradients are large. Evaluations per step over the final runs: {costs}. A "
        "step that does not trigger is a step of SGD. As printed, a step triggers if |g|² reaches its moving mean plus "
        "the moving mean of its *squared* deviation: the first scales with the square of the loss, the second with its "
        "fourth power. Where |g|² varies by more than about 1, the trigger is off, and a smaller loss switches it on; "
        "adapters under a cosine head have small gradients, and there it fires. The table has the fraction of steps "
        "that trigger, from the gradients of a tuning replicate at the tuned settings. With the "
        'square root of sigma, as `reading="calibrated"` has it, the scale does not matter.',
        "\n".join(trigger_table(measured["trigger"])),
        "## Where C-Flat gains",
        "Differences of Avg in points with 95 % intervals over replicates, not corrected for looking.",
        "\n".join(gain_table(lines)),
        f"{ROWS['msam'].title} takes one evaluation per step, was run in block A alone and was in no contrast of the "
        "study. A second study with fresh replicates could ask: does flatness pay without exemplars, and is MSAM "
        "better than SGD?",
        *speed_section(lines),
        *collapse_section(lines),
        *head_sections(measured["head"]),
        "## A row that diverged",
        *divergence_sentences(lines),
    ]
    return "\n\n".join(parts) + "\n"


def read_measured() -> Measured:
    found: Measured = json.loads(MEASURED.read_text())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["trigger", "head", "write"])
    for name in ("features", "data-root", "weights"):
        parser.add_argument(f"--{name}", type=Path, help="as of `python -m benchmarks.study run`")
    arguments = parser.parse_args()
    places = Places(arguments.features, arguments.data_root, arguments.weights)
    measured, lines = read_measured(), read()
    if arguments.command == "trigger":
        measured["trigger"] |= measure_trigger(lines, places)
    elif arguments.command == "head":
        here = [stream for stream in HEAD_RUNS if places.missing(STREAMS[stream]) is None]
        measured["head"] |= {stream: measure_head(stream, lines, places) for stream in here}
    write_atomic(MEASURED, json.dumps(measured, indent=2, ensure_ascii=False) + "\n")
    write_atomic(RESULTS / "study" / "post-hoc.md", page(lines, measured))


if __name__ == "__main__":
    main()
