"""``cflat demo``: SGD, C-Flat, C-Flat Turbo and Forecast on the embedded digits."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cflat.cli.commands.compare import show_comparison
from cflat.cli.executors import job_executor
from cflat.cli.options import Json, Quiet
from cflat.cli.output import console, emit_json, next_command

if TYPE_CHECKING:
    from cflat.studies.sweep import SweepResult, SweepRow

EXAMPLES = """\
  cflat demo
  cflat demo --out /tmp/demo --json
"""

# Four: two minutes on two cores, and enough for a paired test.
SEEDS = (0, 1, 2, 3)
DEMO: dict[str, Any] = {
    "method": {"name": "finetune", "classes": "new"},
    "data": {"name": "digits"},
    "stream": {"scenario": "task"},
    "preset": "cpu",
    "base": {"momentum": 0.9, "schedule": "constant"},
    "train": {"epochs": 5, "batch_size": 16, "eval_batch_size": 256},
    "runtime": {"threads": 1},
}
TUNED: dict[str, dict[str, Any]] = {
    "none": {"base.lr": 0.00199},
    "c_flat": {"base.lr": 0.00501, "optimizer.rho": 0.206},
    "c_flat_turbo": {"base.lr": 0.00199, "optimizer.rho": 0.0389},
    "c_flat_forecast": {"base.lr": 0.00501, "optimizer.rho": 0.206},
}
"""Learning rate and radius that equal budgets on validation images chose (docs/results/exploration.md).

Forecast was not searched: it has those of C-Flat, which it approximates.
"""


def command(
    out: Annotated[Path, typer.Option(help="Folder for the runs, the figure and the page")] = Path("runs/demo"),
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Compare SGD, C-Flat, C-Flat Turbo and Forecast on digits, two classes at a time, over four seeds."""
    from cflat.studies.compare import compare, comparison_values, write_comparison

    with job_executor("local", out, quiet or json) as (executor, _):
        # In the order of `TUNED`: differences are to the first, the base optimizer alone.
        result = compare(DEMO, tuple(TUNED), SEEDS, out, executor, tuned=TUNED)
        sentences = story(result)
        picture, page = write_comparison(out, result, headlines=sentences)
    if json:
        values = {"out": str(out), "figure": str(picture), "page": str(page), "story": sentences}
        emit_json({**values, **comparison_values(result)})
        return
    show_comparison(result)
    console().print()
    for sentence in sentences:
        console().print(sentence, soft_wrap=True)
    console().print(f"\nFigure: {picture}\nPage:   {page}")
    next_command("cflat probe --method finetune --data digits stream.scenario=task")


def story(result: SweepResult) -> list[str]:
    """Return what was compared, how flat it ended, and which differences are significant."""
    what = (
        "Ten digits are learned two at a time with no image kept; the task is known at test time. SGD, C-Flat and "
        "C-Flat Turbo have the learning rate and radius that an equal search on validation images chose for each, with "
        "ten epochs a task; here they train five. C-Flat Turbo is Algorithm 1 of the paper. Forecast is our own "
        "approximation of C-Flat; it was not searched and has C-Flat's settings."
    )
    ends = ", ".join(f"{_title(row)} {row.spreads['eigenvalue'].text(digits=0)}" for row in result.rows)
    flat = f"Largest eigenvalue of the Hessian at the end of the stream, lower is flatter: {ends}."
    return [what, flat, _verdict(result)]


def _verdict(result: SweepResult) -> str:
    """Name the significant differences in average accuracy (paired t-tests, Holm)."""
    reference, *others = result.rows
    gains = [(row.difference(reference, "avg"), _title(row)) for row in others]
    # NaN last: every comparison with it is False, which would leave the order undefined.
    gains.sort(key=lambda gain: (math.isnan(gain[0].p), gain[0].p))
    # Holm: the smallest p times the number of tests, the next times one less, until one fails.
    significant = []
    for place, (gain, title) in enumerate(gains):
        if not gain.p * (len(gains) - place) < 0.05:  # nor is NaN, where all seeds agree
            break
        significant.append(f"{title} {100 * gain.mean:+.1f} points (p = {gain.p:.2g})")
    seeds = f"with {len(result.seeds)} seeds (paired t-tests, Holm over {len(gains)} rows)"
    more = (
        "With ten epochs and one class order, C-Flat gained 0.4 ± 0.1 points of average accuracy here (64 seeds), and "
        "Turbo was level with SGD (16 seeds). On other streams it differs: docs/results/README.md."
    )
    if not significant:
        return f"No difference in average accuracy to SGD is significant {seeds}. {more}"
    rest = "" if len(significant) == len(gains) else ", and no other"
    return f"Significantly different from SGD in average accuracy {seeds}: {'; '.join(significant)}{rest}. {more}"


def _title(row: SweepRow) -> str:
    from cflat.studies.compare import row_title

    return row_title(row)
