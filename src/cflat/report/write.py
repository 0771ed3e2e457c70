"""A report of runs: what was gained and what it cost, from run directories to one page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import cflat
from cflat._files import make_folder, write_atomic
from cflat.config.commands import reproduce_command
from cflat.config.documents import flatten
from cflat.figures import runs as charts
from cflat.figures.figure import FigureData, is_number
from cflat.figures.palette import optimizer_colors
from cflat.report.build import build_page
from cflat.report.groups import Group, differing_keys, group_records, grouped, plain_text, title_of
from cflat.report.headlines import headlines
from cflat.report.page import Cell, Choices, Problem, ReportData, Section, Table
from cflat.report.records import RunRecord, require_records
from cflat.report.tables import accuracy_table, cost_table, runs_table, surrogate_words, tasks_table

MAX_HEADLINES = 4
FIGURE_POINTS = 12_000
"""Points of all curves of a chart of histories; more curves get fewer points each."""


@dataclass(frozen=True)
class Report:
    """What was found, and the page's content."""

    data: ReportData
    groups: tuple[Group, ...]
    records: tuple[RunRecord, ...]
    """The runs in the order in which they were found."""

    @property
    def num_runs(self) -> int:
        """Runs that are shown."""
        return len(self.records)

    @property
    def num_unfinished(self) -> int:
        """Runs among them that have no result yet."""
        return sum(not record.is_finished for record in self.records)

    @property
    def problems(self) -> tuple[Problem, ...]:
        """What could not be read."""
        return self.data.problems


def write_report(
    roots: Sequence[str | Path],
    out: str | Path,
    title: str | None = None,
    *,
    score: str | None = None,
    lead: Section | None = None,
    sentences: Sequence[str] = (),
) -> Report:
    """Write one self-contained page about all runs at or below some folders.

    Without a title, one is made of methods and datasets. ``score`` is what runs are judged by where their method has
    it; None takes the headline of each. ``lead`` is shown before everything else, and ``sentences`` replace the
    page's own headlines.

    Raises:
        DataError: If there is no run that can be read, or the page cannot be written.
    """
    report = collect_report(roots, title, score)
    data = report.data
    sections = data.sections if lead is None else (lead, *data.sections)
    data = replace(data, sections=sections, headlines=tuple(sentences) or data.headlines)
    write_page(data, Path(out))
    return replace(report, data=data)


def write_page(data: ReportData, out: Path) -> None:
    """Write a page; raises `DataError` if it cannot be written."""
    make_folder(out.parent)
    # Folder names come from the file system and need not be valid text.
    write_atomic(out, build_page(data, cflat.__version__).encode("utf-8", errors="replace"))


def collect_report(roots: Sequence[str | Path], title: str | None = None, score: str | None = None) -> Report:
    """Read all runs and return the content of the page; raises `DataError` if there is no run."""
    records, problems = require_records(roots, "report", score)
    groups = group_records(records)
    subjects = _by_subject(groups)
    sentences = [
        text if len(subjects) == 1 else f"{subject}: {text}"
        for subject, own in subjects.items()
        for text in headlines(own)
    ]
    if len(sentences) > MAX_HEADLINES:
        sentences[MAX_HEADLINES:] = [f"{len(sentences) - MAX_HEADLINES} more below."]
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
        title or (next(iter(subjects)) if len(subjects) == 1 else f"{len(subjects)} methods and datasets compared"),
        tuple(sentences),
        tuple(section for section in sections if section is not None),
        _facts(groups),
        tuple(problems),
        optimizer_colors(group.variant for group in groups),
    )
    return Report(data, tuple(groups), tuple(records))


def _facts(groups: Sequence[Group]) -> tuple[tuple[str, str], ...]:
    runs = [record for group in groups for record in group.records]
    unfinished = sum(not record.is_finished for record in runs)
    facts = [("runs", f"{len(runs)}" + (f", {unfinished} unfinished" if unfinished else ""))]
    done = [group for group in groups if group.finished]
    if len({group.subject for group in groups}) == 1 and len(done) > 1:
        best = max(done, key=lambda group: group.spread("avg").mean)  # a fact about this page, not a recommendation
        fastest = max(done, key=lambda group: group.spread("images_per_second").mean)
        facts += [
            (f"highest Avg, score {best.score}", f"{100 * best.spread('avg').mean:.2f} %, {best.variant}"),
            ("fastest", f"{fastest.spread('images_per_second').mean:.0f} images/s, {fastest.variant}"),
        ]
    return tuple(facts)


def _curves(groups: Sequence[Group]) -> Section | None:
    having = [group for group in groups if any(record.stage_accuracy for record in group.records)]
    if not having:
        return None
    chart = _chart(
        "Accuracy over the stream", having, lambda own: charts.accuracy_curves([group.numbers() for group in own])
    )
    images = " or ".join(sorted({group.split for group in having}))
    text = f"Accuracy on the {images} images of every task seen so far, after each task. {_scores(having)}"
    tables = (accuracy_table(groups),) if any(group.finished for group in groups) else ()
    return Section("accuracy", "Accuracy", text, charts=(chart,), tables=tables)


def _scores(groups: Sequence[Group]) -> str:
    """Return a sentence on the score that the accuracies are of."""
    found = {group.config.method.name: group.records[0].score for group in groups}
    if len(set(found.values())) == 1:
        return f"Score: {next(iter(found.values()))}."
    return "Scores: " + ", ".join(f"{score} ({method})" for method, score in found.items()) + "."


def _front(groups: Sequence[Group]) -> Section | None:
    done = [group for group in groups if group.finished]
    if len(done) < 2:
        return None
    subjects = _by_subject(done)
    options = []
    for subject, own in subjects.items():
        for cost in charts.COSTS:
            name = f"accuracy and {cost.replace('_', ' ')}" + (f", {subject}" if len(subjects) > 1 else "")
            options.append((name, charts.speed_front([group.numbers() for group in own], cost)))
    text = "Images per second depend on the machine and on what else it does; evaluations per step are counted."
    text = f"{text} {_scores(done)}"
    return Section("front", "Trade-off", text, charts=(Choices("Trade-off", tuple(options)),))


def _cost(groups: Sequence[Group]) -> Section | None:
    done = [group for group in groups if group.finished]
    if not done:
        return None
    text = (
        "An evaluation is one forward and backward pass; it is counted. Images per second are wall time: compare them "
        "only between runs on a machine that was equally busy. Memory is the peak of the process: on a processor "
        "without GPU, runs that shared a process share their peak."
    )
    text = " ".join([text, *(words for group in done if (words := surrogate_words(group)))])
    return Section("cost", "Cost", text, tables=(cost_table(done),))


def _sweeps(groups: Sequence[Group]) -> Section | None:
    """Show accuracy and speed against a numeric key, where groups of one optimizer differ in it alone."""
    figures = []
    done = [group for group in groups if group.finished]
    kin = grouped(done, lambda group: (group.subject, group.config.optimizer.name))
    for (subject, optimizer), members in kin.items():
        keys = differing_keys([group.settings for group in members])
        # A curve over one key means nothing if others change along with it.
        values: list[Any] = [group.settings.get(keys[0]) for group in members] if len(keys) == 1 else []
        if len(values) > 1 and all(map(is_number, values)):
            name = f"{title_of(optimizer, members[0].config.base.name)}, {subject}"
            points = [
                charts.SweepPoint(name, value, group.values("avg"), group.values("images_per_second"))
                for group, value in zip(members, values, strict=True)
            ]
            figures.append(charts.sensitivity(keys[0], points))
    return Section("sensitivity", "Sensitivity", charts=tuple(map(Choices.only, figures))) if figures else None


def _timelines(groups: Sequence[Group]) -> Section | None:
    lines = {group.name: line for group in groups if (line := group.timeline()) is not None}
    if not lines:
        return None
    having = [group for group in groups if group.name in lines]
    limit = max(60, min(1000, FIGURE_POINTS // len(having)))  # the page stays small with a hundred curves

    def over(make: Callable[[Sequence[charts.Timeline], int], FigureData]) -> Callable[[Sequence[Group]], FigureData]:
        return lambda own: make([lines[group.name] for group in own], limit)

    def is_eventful(line: charts.Timeline) -> bool:
        return any(any(shares) for key, shares in line.shares.items() if not key.endswith(".refreshed"))

    cached = [group for group in having if lines[group.name].cache_age]
    predicted = [group for group in having if len(lines[group.name].surrogate_error)]
    wanted = [
        ("Evaluations per step", having, charts.evaluation_timeline),
        ("Training loss", having, charts.loss_curves),
        ("Age of the caches", cached, charts.cache_ages),
        ("Surrogate error", predicted, charts.surrogate_errors),
    ]
    drawn = [_chart(title, own, over(make)) for title, own, make in wanted if own]
    drawn.sort(key=lambda chart: len(chart.options) > 1)  # those without a choice first
    # Those that reuse or skip something first: the others are flat lines.
    eventful = sorted(lines.items(), key=lambda item: not is_eventful(item[1]))
    triggered = tuple((name, charts.trigger_timeline(line, limit)) for name, line in eventful if line.shares)
    text = "One point for each epoch, mean over seeds; long histories are thinned out, peaks are kept."
    drawn += [Choices("Triggers", triggered)] if triggered else []
    return Section("timelines", "Over the run", text, charts=tuple(drawn))


def _matrices(groups: Sequence[Group]) -> Section | None:
    options = tuple((g.name, charts.accuracy_heatmap(g.numbers())) for g in groups if g.finished)
    if not options:
        return None
    text = f"Accuracy on each task after each task, mean over seeds. {_scores([g for g in groups if g.finished])}"
    tasks = tasks_table([record for group in groups for record in group.records])
    chart = Choices("Accuracy", options)
    return Section("matrices", "Task by task", text, charts=(chart,), tables=() if tasks is None else (tasks,))


def _gradients(records: Sequence[RunRecord]) -> Section | None:
    named = [(record.name, figure) for record in records for figure in record.figures]
    by_name = grouped(named, lambda entry: entry[1].name)
    drawn = tuple(Choices(options[0][1].title, tuple(options)) for options in by_name.values())
    text = "What cflat analyze found in the gradients and around the minima of these runs."
    return Section("gradients", "Gradient dynamics and landscapes", text, charts=drawn) if drawn else None


def _configurations(groups: Sequence[Group]) -> Section:
    keys = differing_keys([group.settings for group in groups])
    rows = tuple(
        (Cell(group.name), *(_setting(group.settings[key]) if key in group.settings else Cell("-") for key in keys))
        for group in groups
    )
    tables = (Table("Configuration differences", ("runs", *keys), rows),) if keys else ()
    folded = tuple((f"Full configuration: {group.name}", group.config.to_yaml()) for group in groups)
    text = "Only the keys that differ." if keys else "All runs share one configuration."
    return Section("configurations", "Configuration differences", text, tables=tables, folded=folded)


def _setting(value: Any) -> Cell:
    return Cell(plain_text(value), float(value) if is_number(value) else None)


def _environments(records: Sequence[RunRecord]) -> Section | None:
    known = [(record, flatten(record.environment)) for record in records if record.environment]
    if not known:
        return None
    differing = differing_keys([values for _, values in known])
    shared = {key: value for key, value in known[0][1].items() if key not in differing}
    facts = tuple((key.removeprefix("packages."), plain_text(value)) for key, value in shared.items())
    rows = []
    # One row for each environment, not for each run.
    for cells, alike in grouped(known, lambda entry: tuple(_setting(entry[1].get(key)) for key in differing)).items():
        more = f" and {len(alike) - 3} more" if len(alike) > 3 else ""
        rows.append((Cell(", ".join(record.name for record, _ in alike[:3]) + more), *cells))
    tables = (Table("Differences", ("runs", *differing), tuple(rows)),) if differing else ()
    return Section("environment", "Environment", "What all runs share:" if facts else "", facts, tables=tables)


def _runs(records: Sequence[RunRecord]) -> Section:
    absent = "no command line gives this configuration"
    commands = tuple((record.name, reproduce_command(record.config) or absent) for record in records)
    text = "Every run, and the command that repeats it."
    return Section("runs", "Runs and commands", text, tables=(runs_table(records),), commands=commands)


def _by_subject(groups: Sequence[Group]) -> dict[str, list[Group]]:
    return grouped(groups, lambda group: group.subject)


def _chart(title: str, groups: Sequence[Group], make: Callable[[Sequence[Group]], FigureData]) -> Choices:
    """Return one figure, or a chart with a choice of subjects if there are several."""
    options = tuple((subject, make(own)) for subject, own in _by_subject(groups).items())
    return Choices(title, options) if len(options) > 1 else Choices.only(options[0][1])
