"""A report of runs: what was gained and what it cost, from run directories to one page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import cflat
from cflat._errors import DataError
from cflat._files import make_folder, write_atomic
from cflat.config.commands import reproduce_command
from cflat.config.documents import flatten
from cflat.figures.model import FigureData
from cflat.figures.palette import optimizer_colors
from cflat.figures.runs import (
    COSTS,
    SweepPoint,
    Timeline,
    accuracy_curves,
    accuracy_heatmap,
    cache_ages,
    evaluation_timeline,
    loss_curves,
    sensitivity,
    speed_front,
    surrogate_errors,
    trigger_timeline,
)
from cflat.report.build import build_page
from cflat.report.groups import Group, differing_keys, group_records, plain_text, title_of
from cflat.report.headlines import headlines
from cflat.report.model import Cell, Choices, Command, Folded, Problem, ReportData, Section, Table
from cflat.report.records import RunRecord, read_records
from cflat.report.tables import accuracy_table, cost_table, runs_table, surrogate_words, tasks_table

MAX_HEADLINES = 4
FIGURE_POINTS = 12_000
"""Points of all curves of a chart of histories; more curves get fewer points each."""


@dataclass(frozen=True)
class Report:
    """What was found, and the page's content."""

    data: ReportData
    groups: tuple[Group, ...]

    @property
    def num_runs(self) -> int:
        """Runs that are shown."""
        return sum(len(group.records) for group in self.groups)

    @property
    def num_unfinished(self) -> int:
        """Runs among them that have no result yet."""
        return self.num_runs - sum(len(group.finished) for group in self.groups)

    @property
    def problems(self) -> tuple[Problem, ...]:
        """What could not be read."""
        return self.data.problems


def write_report(
    roots: Sequence[str | Path],
    out: str | Path,
    title: str | None = None,
    *,
    lead: Section | None = None,
    sentences: Sequence[str] = (),
) -> Report:
    """Write one self-contained page about all runs at or below some folders.

    Args:
        roots: The folders.
        out: The page.
        title: Its title; None makes one of methods and datasets.
        lead: What to show before everything else.
        sentences: What to say at the top instead of the page's own.

    Raises:
        DataError: If there is no run that can be read, or the page cannot be written.
    """
    report = collect_report(roots, title)
    sections = report.data.sections if lead is None else (lead, *report.data.sections)
    said = tuple(sentences) or report.data.headlines
    report = replace(report, data=replace(report.data, sections=sections, headlines=said))
    write_page(report.data, Path(out))
    return report


def write_page(data: ReportData, out: Path) -> None:
    """Write a page.

    Raises:
        DataError: If it cannot be written.
    """
    make_folder(out.parent)
    # Names of folders need not be valid text.
    write_atomic(out, build_page(data, cflat.__version__).encode("utf-8", errors="replace"))


def collect_report(roots: Sequence[str | Path], title: str | None = None) -> Report:
    """Read all runs and say what the page shows.

    Raises:
        DataError: If there is no run that can be read.
    """
    records, problems = read_records(Path(root) for root in roots)
    if not records:
        reasons = " ".join(dict.fromkeys(problem.message for problem in problems))
        raise DataError(f"There is no run to report. {reasons}".rstrip())
    groups = group_records(records)
    scenarios = list(dict.fromkeys(group.scenario for group in groups))
    said = [(scenario, headlines([g for g in groups if g.scenario == scenario])) for scenario in scenarios]
    sentences = [text if len(scenarios) == 1 else f"{scenario}: {text}" for scenario, texts in said for text in texts]
    if len(sentences) > MAX_HEADLINES:
        sentences[MAX_HEADLINES:] = [f"{len(sentences) - MAX_HEADLINES} more below."]
    variants = dict.fromkeys(group.variant for group in groups)
    sections = (
        _curves(groups),
        _front(groups),
        _cost(groups),
        _sweeps(groups),
        _timelines(groups),
        _matrices(groups),
        _gradients(records),
        _configurations(groups),
        _environments(records),
        _runs(records),
    )
    data = ReportData(
        title or (scenarios[0] if len(scenarios) == 1 else f"{len(scenarios)} methods and datasets compared"),
        tuple(sentences),
        tuple(section for section in sections if section is not None),
        _facts(groups),
        tuple(problems),
        optimizer_colors(variants),
    )
    return Report(data, tuple(groups))


def _facts(groups: Sequence[Group]) -> tuple[tuple[str, str], ...]:
    runs = [record for group in groups for record in group.records]
    unfinished = sum(not record.is_finished for record in runs)
    facts = [("runs", f"{len(runs)}" + (f", {unfinished} unfinished" if unfinished else ""))]
    done = [group for group in groups if group.finished]
    if len({group.scenario for group in groups}) == 1 and len(done) > 1:
        best = max(done, key=lambda group: group.spread("avg").mean)
        fastest = max(done, key=lambda group: group.spread("images_per_second").mean)
        facts += [
            ("best average accuracy", f"{100 * best.spread('avg').mean:.2f} %, {best.variant}"),
            ("fastest", f"{fastest.spread('images_per_second').mean:.0f} images/s, {fastest.variant}"),
        ]
    return tuple(facts)


def _curves(groups: Sequence[Group]) -> Section | None:
    having = [group for group in groups if any(record.stage_accuracy for record in group.records)]
    if not having:
        return None
    text = "Accuracy on the test images of every task seen so far, after each task."
    return Section(
        "accuracy",
        "Accuracy",
        text,
        **_by_scenario(having, "Accuracy over the stream", lambda own: accuracy_curves([g.numbers() for g in own])),
        tables=(accuracy_table(groups),) if any(group.finished for group in groups) else (),
    )


def _front(groups: Sequence[Group]) -> Section | None:
    done = [group for group in groups if group.finished]
    if len(done) < 2:
        return None
    scenarios = list(dict.fromkeys(group.scenario for group in done))
    options = []
    for scenario in scenarios:
        numbers = [group.numbers() for group in done if group.scenario == scenario]
        for cost in COSTS:
            name = f"accuracy and {cost.replace('_', ' ')}"
            options.append((name if len(scenarios) == 1 else f"{name}, {scenario}", speed_front(numbers, cost)))
    text = "Images per second depend on the machine and on what else it does; evaluations per step are counted."
    return Section("front", "Trade-off", text, choices=(Choices("Trade-off", tuple(options)),))


def _cost(groups: Sequence[Group]) -> Section | None:
    done = [group for group in groups if group.finished]
    if not done:
        return None
    text = (
        "An evaluation is one forward and backward pass; it is counted. Images per second are wall time: compare them "
        "only between runs on a machine that was equally busy. Memory is the peak of the process: on a processor "
        "without GPU, runs that shared a process share their peak."
    )
    said = " ".join([text, *(words for group in done if (words := surrogate_words(group)))])
    return Section("cost", "Cost", said, tables=(cost_table(done),))


def _sweeps(groups: Sequence[Group]) -> Section | None:
    """Show accuracy and speed against a numeric key, where groups of one optimizer differ in it alone."""
    figures = []
    kin: dict[tuple[str, str], list[Group]] = {}
    for group in groups:
        if group.finished:
            kin.setdefault((group.scenario, group.config.optimizer.name), []).append(group)
    for (scenario, optimizer), members in kin.items():
        keys = differing_keys([group.settings for group in members])
        values = [group.settings.get(keys[0]) for group in members] if len(keys) == 1 else []
        if len(values) > 1 and all(isinstance(v, int | float) and not isinstance(v, bool) for v in values):
            name = f"{title_of(optimizer)}, {scenario}"
            figures.append(sensitivity(keys[0], [_sweep_point(name, group, keys[0]) for group in members]))
    return Section("sensitivity", "Sensitivity", figures=tuple(figures)) if figures else None


def _sweep_point(name: str, group: Group, key: str) -> SweepPoint:
    return SweepPoint(name, group.settings[key], group.values("avg"), group.values("images_per_second"))


def _timelines(groups: Sequence[Group]) -> Section | None:
    lines = {group.name: line for group in groups if (line := group.timeline()) is not None}
    if not lines:
        return None
    having = [group for group in groups if group.name in lines]
    limit = max(60, min(1000, FIGURE_POINTS // len(having)))

    def of(make: Callable[[Sequence[Timeline], int], FigureData], own: Sequence[Group]) -> FigureData:
        return make([lines[group.name] for group in own], limit)

    # Those that reuse or skip something first: the others are flat lines.
    eventful = sorted(lines.items(), key=lambda item: not _has_events(item[1]))
    triggered = tuple((name, trigger_timeline(line, limit)) for name, line in eventful if line.shares)
    cached = [group for group in having if lines[group.name].cache_age]
    predicted = [group for group in having if len(lines[group.name].surrogate_error)]
    parts = [
        _by_scenario(having, "Evaluations per step", lambda own: of(evaluation_timeline, own)),
        _by_scenario(having, "Training loss", lambda own: of(loss_curves, own)),
        _by_scenario(cached, "Age of the caches", lambda own: of(cache_ages, own)) if cached else {},
        _by_scenario(predicted, "Surrogate error", lambda own: of(surrogate_errors, own)) if predicted else {},
    ]
    choices = [Choices("Triggers", triggered)] if triggered else []
    return Section(
        "timelines",
        "Over the run",
        "One point for each epoch, mean over seeds; long histories are thinned out so that peaks stay.",
        figures=tuple(figure for part in parts for figure in part.get("figures", ())),
        choices=tuple(choice for part in parts for choice in part.get("choices", ())) + tuple(choices),
    )


def _has_events(line: Timeline) -> bool:
    return any(any(shares) for key, shares in line.shares.items() if not key.endswith(".refreshed"))


def _matrices(groups: Sequence[Group]) -> Section | None:
    options = tuple((g.name, accuracy_heatmap(g.numbers())) for g in groups if g.finished)
    if not options:
        return None
    text = "Accuracy on each task after each task, mean over seeds."
    tasks = tasks_table([record for group in groups for record in group.records])
    choices = (Choices("Accuracy", options),)
    return Section("matrices", "Task by task", text, choices=choices, tables=() if tasks is None else (tasks,))


def _gradients(records: Sequence[RunRecord]) -> Section | None:
    by_name: dict[str, list[tuple[str, FigureData]]] = {}
    for record in records:
        for figure in record.figures:
            by_name.setdefault(figure.name, []).append((record.name, figure))
    choices = tuple(Choices(options[0][1].title, tuple(options)) for options in by_name.values())
    text = "What cflat analyze found in the gradients and around the minima of these runs."
    return Section("gradients", "Gradient dynamics and landscapes", text, choices=choices) if choices else None


def _configurations(groups: Sequence[Group]) -> Section:
    keys = differing_keys([group.settings for group in groups])
    rows = tuple(
        (Cell(group.name), *(_setting(group.settings[key]) if key in group.settings else Cell("-") for key in keys))
        for group in groups
    )
    tables = (Table("Configuration differences", ("runs", *keys), rows),) if keys else ()
    folded = tuple(Folded(f"Full configuration: {group.name}", group.config.to_yaml()) for group in groups)
    text = "Only the keys that differ." if keys else "All runs share one configuration."
    return Section("configurations", "Configuration differences", text, tables=tables, folded=folded)


def _setting(value: Any) -> Cell:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return Cell(plain_text(value), float(value) if is_number else None)


def _environments(records: Sequence[RunRecord]) -> Section | None:
    known = [(record, flatten(record.environment)) for record in records if record.environment]
    if not known:
        return None
    differing = differing_keys([values for _, values in known])
    shared = {key: value for key, value in known[0][1].items() if key not in differing}
    facts = tuple((key.removeprefix("packages."), plain_text(value)) for key, value in shared.items())
    tables = []
    if differing:
        distinct: dict[str, list[str]] = {}
        cells: dict[str, tuple[Cell, ...]] = {}
        for record, values in known:
            own = tuple(_setting(values.get(key)) for key in differing)
            distinct.setdefault(repr(own), []).append(record.name)
            cells[repr(own)] = own
        apart = tuple((Cell(_names(names)), *cells[key]) for key, names in distinct.items())
        tables.append(Table("Differences", ("runs", *differing), apart))
    return Section("environment", "Environment", "What all runs share:" if facts else "", facts, tables=tuple(tables))


def _names(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _runs(records: Sequence[RunRecord]) -> Section:
    commands = tuple(
        Command(record.name, reproduce_command(record.config) or "no command line gives this configuration")
        for record in records
    )
    text = "Every run, and the command that repeats it."
    return Section("runs", "Runs and commands", text, tables=(runs_table(records),), commands=commands)


def _by_scenario(groups: Sequence[Group], title: str, make: Callable[[Sequence[Group]], FigureData]) -> dict[str, Any]:
    """Return one figure, or a chart with a choice of scenarios if there are several."""
    scenarios = list(dict.fromkeys(group.scenario for group in groups))
    figures = [(name, make([group for group in groups if group.scenario == name])) for name in scenarios]
    return {"figures": (figures[0][1],)} if len(figures) == 1 else {"choices": (Choices(title, tuple(figures)),)}
