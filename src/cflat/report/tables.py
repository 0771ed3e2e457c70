"""The tables of a report: accuracy by group, cost by group, and every run."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from cflat.config.run_config import RunConfig
from cflat.data import Outline
from cflat.figures.runs import OUTCOMES
from cflat.metrics import HEADLINES, METRICS, metric_title, spread
from cflat.report.groups import Group, differing_keys, families, flat_settings, plain_text, subject_of, title_of
from cflat.report.headlines import Pair
from cflat.report.page import Cell, Table
from cflat.report.records import RunRecord
from cflat.runs.folder import RunSummary


def accuracy_table(groups: Sequence[Group]) -> Table:
    """Return mean and deviation of each group, the best of each subject set apart, and differences to the reference."""
    done = [group for group in groups if group.finished]
    # Best and difference mean something only among groups that differ in the optimizer alone.
    family_of = {group.name: family for family in families(done) for group in family}
    further = tuple(dict.fromkeys(name for group in done for name in group.further))
    titles = [metric_title(name) for name in (*HEADLINES, *further)]
    rows = []
    for group in done:
        rivals = family_of[group.name]
        shown = (*HEADLINES, *(name for name in further if name in group.further))
        found = {name: _accuracy(group, name, rivals) for name in shown}
        cells = [found.get(name, Cell("-")) for name in (*HEADLINES, *further)]
        change = Cell("-" if len(rivals) == 1 else "reference")
        if group is not rivals[0]:
            gain = Pair(group, rivals[0]).difference("avg")
            change = Cell("no common seed") if gain is None else Cell(gain.text(scale=100), 100 * gain.mean)
        seeds = len(group.finished)
        rows.append((Cell(group.name), Cell(group.score), Cell(str(seeds), seeds), *cells, change))
    definitions = "; ".join(f"{METRICS[name].title}: {METRICS[name].definition}" for name in HEADLINES)
    splits = {group.split for group in done}
    images = "On test images." if splits == {"test"} else "On test or validation images, depending on data.evaluate."
    if splits == {"validation"}:
        images = "On validation images; no test image was looked at."
    note = (
        f"In percent, ± standard deviation over seeds. {images} Accuracies and the difference are of the named score; "
        "columns with another one's name are of that. "
        f"{definitions}. The difference is to the base optimizer alone with the same settings (or each tuned by "
        "the same search), paired by seed (t-test)."
    )
    columns = ("runs", "score", "seeds", *titles, "Avg against reference")
    return Table("Accuracy", columns, tuple(rows), note, num_text=2)


def cost_table(groups: Sequence[Group]) -> Table:
    """Return the cost of each finished group: speed, evaluations by kind, memory, arithmetic, time."""
    references = {group.name: family[0] for family in families(groups) for group in family}

    def against_reference(group: Group) -> Cell:
        speed, usual = (of.spread("images_per_second").mean for of in (group, references[group.name]))
        ratio = speed / max(usual, 1e-12)
        return Cell(f"{ratio:.2f} x", ratio)

    columns: dict[str, Callable[[Group], Cell]] = {
        "runs": lambda group: Cell(group.name),
        "images/s": lambda group: _spread(group, "images_per_second", 0),
        "against reference": against_reference,
        "evaluations per step": lambda group: _spread(group, "evaluations_per_step", 2),
        "sharpness": lambda group: _flatness(group, "sharpness"),
        "largest eigenvalue": lambda group: _flatness(group, "eigenvalue"),
        "evaluations": lambda group: _mean(group, lambda summary: summary.cost.evaluations, 0),
        "sharpness steps": lambda group: _kinds(group, "sharpness"),
        "flatness steps": lambda group: _kinds(group, "flatness"),
        "surrogate error": _surrogate,
        "non-finite": lambda group: _mean(group, lambda summary: summary.cost.nonfinite_steps, 0),
        "peak memory (MiB)": lambda group: _mean(group, lambda summary: summary.cost.peak_memory_bytes / 2**20, 0),
        "TFLOP": lambda group: _mean(group, lambda summary: summary.cost.flops / 1e12, 3),
        "seconds": lambda group: _mean(group, lambda summary: summary.seconds, 1),
    }
    rows = tuple(tuple(cell_of(group) for cell_of in columns.values()) for group in groups)
    note = (
        "Means over seeds. Sharpness (at radius 0.05) and largest eigenvalue of the Hessian: of the training loss at "
        "the end of the last trained task; small is flat (train.flatness). Steps by kind: refreshed (the direction was "
        "computed exactly) / reused (rebuilt from its cache) / skipped (left out by the trigger or as useless). "
        "Surrogate error: distance of what stood in for "
        "C-Flat's increment, relative to it, at refreshes; in brackets the part orthogonal to the gradient. At 1 or "
        "more, plain training is nearer to C-Flat. TFLOP: estimated from matrix products and convolutions."
    )
    return Table("Cost", tuple(columns), rows, note)


def _flatness(group: Group, name: str) -> Cell:
    # NaN where flatness was not requested, or could not be measured: several ranks, or a loss scale.
    known = [value for value in group.values(name) if math.isfinite(value)]
    return Cell(spread(known).text(digits=3), spread(known).mean) if known else Cell("-")


def runs_table(records: Sequence[RunRecord]) -> Table:
    """Return one row for each run, the unfinished ones with what is known."""
    columns = ("run", "method", "data", "optimizer", "state", "score", "seed", "Avg", "Last", "Forgetting", "images/s")
    return Table("Runs", columns, tuple(map(_run_row, records)), num_text=6, is_filtered=True)


def tasks_table(records: Sequence[RunRecord]) -> Table | None:
    """Return one row for each task of each stream with its classes; None if no run has recorded them."""
    outlines: dict[Outline, RunRecord] = {}
    for record in records:
        # Seeds and optimizers share a stream, which is listed once.
        if record.outline is not None:
            outlines.setdefault(record.outline, record)
    names = _stream_names([record.config for record in outlines.values()])
    rows = tuple(
        (
            *([Cell(name)] if len(outlines) > 1 else []),
            Cell(str(task + 1), task + 1),
            Cell(outline.title_of(task)),
            Cell(str(len(labels)), len(labels)),
        )
        for name, outline in zip(names, outlines, strict=True)
        for task, (_, labels) in enumerate(outline.tasks)
    )
    columns = (*(["runs"] if len(outlines) > 1 else []), "task", "about", "classes")
    return Table("Tasks", columns, rows, num_text=len(columns) - 1) if rows else None


def _stream_names(configs: Sequence[RunConfig]) -> list[str]:
    """Return method and dataset of runs with different streams, and the keys that tell the streams of one apart."""
    names = []
    for config in configs:
        kin = [flat_settings(other) for other in configs if subject_of(other) == subject_of(config)]
        own, keys = flat_settings(config), [key for key in differing_keys(kin) if key.startswith("stream.")]
        names.append(", ".join([subject_of(config), *(f"{key}={plain_text(own.get(key))}" for key in keys)]))
    return names


def _run_row(record: RunRecord) -> tuple[Cell, ...]:
    config, summary = record.config, record.summary
    names = (record.name, config.method.name, config.data.name, title_of(config.optimizer.name, config.base.name))
    if summary is not None:
        values = [100 * summary.value(name) for name in HEADLINES]
        numbers = [Cell(f"{value:.2f}", value) for value in values]
        numbers.append(Cell(f"{summary.value('images_per_second'):.0f}", summary.value("images_per_second")))
        state = "finished"
    else:
        state = f"unfinished, {len(record.stage_accuracy)} tasks learned"
        known = [100 * value for value in record.stage_accuracy]
        so_far = [sum(known) / len(known), known[-1]] if known else []
        numbers = [Cell(f"{value:.2f} so far", value) for value in so_far]
        numbers += [Cell("-")] * (len(HEADLINES) + 1 - len(numbers))
    texts = (*names, state, record.score)
    return (*(Cell(text) for text in texts), Cell(str(config.seed), config.seed), *numbers)


def _accuracy(group: Group, name: str, rivals: Sequence[Group]) -> Cell:
    value = group.spread(name)
    means = [other.spread(name).mean for other in rivals]
    best = max(means) if METRICS[name.partition("@")[0]].is_gain else min(means)  # forgetting is better if it is lower
    # No best among equals, and none without a rival.
    return Cell(value.text(scale=100), 100 * value.mean, is_best=len(set(means)) > 1 and value.mean == best)


def _kinds(group: Group, branch: str) -> Cell:
    by_run = [summary.cost.evaluations_by_kind for summary in group.summaries]
    means = [spread([counts.get(f"{branch}.{kind}", 0) for counts in by_run]).mean for kind in OUTCOMES]
    return Cell(" / ".join(f"{mean:.0f}" for mean in means), means[0]) if any(means) else Cell("-")


def surrogate_words(group: Group) -> str:
    """Return what the error of a group's surrogates means; empty if it has none."""
    error = _surrogate(group).value
    if error is None:
        return ""
    if error >= 1:
        return (
            f"What {group.name} reuses is farther from C-Flat than plain training is (surrogate error {error:.2f}; "
            "plain training has 1): whatever it gains or loses, it does not do so by following C-Flat."
        )
    return f"What {group.name} puts in C-Flat's place is {1 - error:.0%} nearer to it than plain training."


def _surrogate(group: Group) -> Cell:
    """Return the mean error of a group's surrogates, and in brackets that across the gradient."""
    costs = [summary.cost for summary in group.summaries]
    errors = [cost.surrogate_error for cost in costs if cost.surrogate_error is not None]
    if not errors:
        return Cell("-")
    across = [cost.surrogate_error_orthogonal for cost in costs if cost.surrogate_error_orthogonal is not None]
    mean = spread(errors).mean
    return Cell(f"{mean:.2f} ({spread(across).mean:.2f})" if across else f"{mean:.2f}", mean)


def _spread(group: Group, name: str, digits: int) -> Cell:
    value = group.spread(name)
    return Cell(value.text(digits), value.mean)


def _mean(group: Group, value: Callable[[RunSummary], float], digits: int) -> Cell:
    mean = spread([value(summary) for summary in group.summaries]).mean
    return Cell(f"{mean:.{digits}f}", mean)
