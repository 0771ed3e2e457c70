"""The study in one picture: every contrast on every stream, and its mean over streams."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from benchmarks.study.analysis import NOT_YET, Verdict, streams_of, verdicts
from benchmarks.study.definition import (
    BLOCK_OF,
    BLOCKS,
    CONTRASTS,
    PAPER_CONTRASTS,
    ROWS,
    TUNED_BLOCKS,
    Claim,
    Contrast,
)
from benchmarks.study.ledger import Line
from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

COLORS = {"A": "#4477aa", "B": "#228833", "C": "#aa3377", "P": "#cc6611"}
STYLE: Any = {"svg.fonttype": "none", "svg.hashsalt": "cflat", "font.size": 8, "text.parse_math": False}


def draw_contrasts(lines: Sequence[Line], path: Path) -> None:
    """Draw one panel for each contrast of the tuned blocks that has pairs, and one for block P."""
    tuned = [pair for pair in verdicts(lines, CONTRASTS, TUNED_BLOCKS).items() if pair[1].streams]
    paper = [pair for pair in verdicts(lines, PAPER_CONTRASTS, ("P",)).items() if pair[1].streams]
    rows = math.ceil(len(tuned) / 4)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(11, 2.9 * (rows + 1)), layout="constrained")
        # Two parts: long names of contrasts on the left of the lower one must not narrow the panels above it.
        upper, lower = figure.subfigures(2, 1, height_ratios=[max(rows, 0.01), 1])
        for number, (contrast, verdict) in enumerate(tuned, 1):
            _draw(upper.add_subplot(rows, 4, number), contrast, verdict, streams_of(contrast, TUNED_BLOCKS))
        if tuned:
            upper.legend(handles=_key(tuned), loc="outside lower center", ncols=6, frameon=False)
        if paper:
            _draw_paper(lower.add_subplot(), paper)
        figure.savefig(path, metadata={"Date": None})


def _key(found: Sequence[tuple[Contrast, Verdict]]) -> list[Artist]:
    """Return what colors and shades mean, of those that are drawn."""
    blocks = dict.fromkeys(BLOCK_OF[stream] for _, verdict in found for stream in verdict.streams)
    marks: list[Artist] = [
        Line2D([], [], marker="o", markersize=3, color=COLORS[name], label=f"block {name}") for name in blocks
    ]
    if any(verdict.left_out for _, verdict in found):
        marks.append(Line2D([], [], marker="o", markersize=3, color="#555555", alpha=0.35, label="speed-limited"))
    if any(verdict.text != NOT_YET for _, verdict in found):
        marks.append(Patch(color="#000000", alpha=0.12, label="mean over streams, 95 % interval"))
    return marks


def _draw_paper(axes: Any, found: Sequence[tuple[Contrast, Verdict]]) -> None:
    """Draw all contrasts of block P into one panel, a mark for each of its streams."""
    axes.axvline(0, color="#999999", linewidth=0.8)
    streams = [stream for stream in BLOCKS["P"].streams if any(stream in verdict.streams for _, verdict in found)]
    for number, stream in enumerate(streams):
        shift = 0.2 * (number - (len(streams) - 1) / 2)
        for place, (_, verdict) in enumerate(found):
            if stream in verdict.streams:
                effect = verdict.streams[stream]
                axes.plot(effect.interval(), [place + shift] * 2, color=COLORS["P"])
                axes.plot(effect.mean, place + shift, "os^"[number], markersize=4, color=COLORS["P"])
        axes.plot([], [], "os^"[number], markersize=4, color=COLORS["P"], label=stream)
    axes.set_yticks(range(len(found)), [f"{contrast.title}: {verdict.text}" for contrast, verdict in found])
    axes.set_ylim(len(found) - 0.5, -0.5)
    axes.set_title("Block P: the paper's settings", fontsize=8)
    axes.set_xlabel("points of Avg")
    axes.legend(loc="lower right", frameon=False)


def draw_claim(claim: Claim, found: Mapping[Contrast, Verdict], path: Path) -> None:
    """Draw one panel for each contrast of a claim; nothing while there are no pairs."""
    if not any(verdict.streams for verdict in found.values()):
        return
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(4.5 * len(found), 3), layout="constrained")
        for axes, (contrast, verdict) in zip(
            figure.subplots(1, len(found), squeeze=False).flat, found.items(), strict=True
        ):
            _draw(axes, contrast, verdict, streams_of(contrast, claim.blocks, claim.scenarios))
        figure.savefig(path, metadata={"Date": None})


def _draw(axes: Any, contrast: Contrast, verdict: Verdict, streams: Sequence[str]) -> None:
    axes.axvline(0, color="#999999", linewidth=0.8)
    streams = [stream for stream in streams if stream in verdict.streams]
    for place, stream in enumerate(streams):
        effect = verdict.streams[stream]
        low, high = effect.interval()
        style = {"alpha": 0.35} if stream in verdict.left_out else {}
        axes.plot([low, high], [place, place], color=COLORS[BLOCK_OF[stream]], **style)
        axes.plot(effect.mean, place, "o", markersize=3, color=COLORS[BLOCK_OF[stream]], **style)
    if verdict.effect is not None and verdict.text != NOT_YET:
        low, high = verdict.effect.interval()
        axes.axvspan(low, high, color="#000000", alpha=0.12, linewidth=0)
        axes.axvline(verdict.effect.mean, color="#000000", linewidth=1)
    axes.set_yticks(range(len(streams)), streams)
    axes.set_ylim(len(streams) - 0.5, -0.5)
    row, reference = ROWS[contrast.row].title, ROWS[contrast.reference].title
    axes.set_title(f"{row}\n- {reference}\n{verdict.text}", fontsize=8)
    axes.set_xlabel("points of Avg")
