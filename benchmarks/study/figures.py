"""The study in one picture: every contrast on every stream, and its mean over streams."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from benchmarks.study.analysis import NOT_YET, Verdict, streams_of, verdicts
from benchmarks.study.definition import BLOCK_OF, CONTRASTS, PAPER_CONTRASTS, TUNED_BLOCKS, Claim, Contrast
from benchmarks.study.ledger import Line
from matplotlib.figure import Figure

COLORS = {"A": "#4477aa", "B": "#228833", "C": "#aa3377", "P": "#cc6611"}
STYLE: Any = {"svg.fonttype": "none", "svg.hashsalt": "cflat", "font.size": 8, "text.parse_math": False}


def draw_contrasts(lines: Sequence[Line], path: Path) -> None:
    """Draw one panel for each contrast of the tuned blocks and of block P that has pairs."""
    families = [
        *((contrast, verdict, TUNED_BLOCKS) for contrast, verdict in verdicts(lines, CONTRASTS, TUNED_BLOCKS).items()),
        *((contrast, verdict, ("P",)) for contrast, verdict in verdicts(lines, PAPER_CONTRASTS, ("P",)).items()),
    ]
    shown = [family for family in families if family[1].streams]  # no empty panels while runs are missing
    rows = max(1, math.ceil(len(shown) / 4))
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(11, 2.75 * rows), layout="constrained")
        panels = figure.subplots(rows, 4, squeeze=False).flat
        for axes, (contrast, verdict, blocks) in zip(panels, shown, strict=False):
            _draw(axes, contrast, verdict, streams_of(contrast, blocks))
        for axes in panels[len(shown) :]:
            axes.set_axis_off()
        figure.savefig(path, metadata={"Date": None})


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
    axes.set_title(f"{contrast.title}\n{verdict.text}", fontsize=8)
    axes.set_xlabel("points of Avg")
