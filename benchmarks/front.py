"""The front: accuracy against cost for all optimizers and rules, each at its own tuned learning rate and radius.

    cflat features --data cifar100 --data-root DATA --backbone vit_tiny --weights WEIGHTS --image-size 112 --out F.npz
    python benchmarks/front.py --out /tmp/front --features F.npz --data-root DATA --weights WEIGHTS
    python benchmarks/front.py --out /tmp/front --streams digits-task --rows none c_flat turbo --seeds 8
    python benchmarks/front.py --out /tmp/front --streams digits-task --rows none c_flat turbo --robustness
    python benchmarks/front.py --out /tmp/front --tables-only

For each stream and row: (1) the same number of trials over learning rate and radius, on validation images, with seeds
of their own; (2) final runs at the best trial's settings, trained on all training images (the choice is made, so none
are held out) and measured on test images; (3) the time of a step relative to plain, all rows in one process, step by
step in turn. ``--ablations`` varies beta, k, threshold, schedule and trigger of Turbo as printed. Every run is a run
directory below ``--out``; finished runs are reused, so a front that was stopped goes on, and rows, streams and seeds
can be added. Tables and figures go to ``--tables``.

The trials are one fixed set of points (a Halton sequence in the logarithms of rate and radius): all rows are tried at
the same rates, which also shows how wide the range of rates is that works for each; see the tables of trials.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import multiprocessing
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from front_streams import ROWS, STREAMS, Bench, Places, Row

from cflat._errors import CFlatError
from cflat._files import write_atomic, write_json
from cflat.config.documents import merge
from cflat.config.presets import resolve_config
from cflat.config.run_config import RunConfig
from cflat.data import BatchLoader
from cflat.figures.palette import OPTIMIZERS
from cflat.optim import create_optimizer
from cflat.runs.folder import RunFolder, RunSummary
from cflat.runs.jobs import Job, carry_out, run_jobs
from cflat.runs.run import assemble
from cflat.train import Runtime
from cflat.train.evaluate import Extractor
from cflat.train.objective import Objective
from cflat.train.schedules import make_base

VALIDATION = 0.2
TUNING_SEED = 1000
FINAL_SEED = 100
"""Seeds of trials and of final runs start here; nothing in the optimizers was chosen by looking at either."""
ROBUST_ROWS = ("none", "c_flat", "turbo")
FACTORS, BATCHES = (2, 4), (4, 8, 32, 64)
ABLATED = "turbo-paper"
ABLATIONS: dict[str, Mapping[str, Any]] = {
    **{f"beta {beta}": {"beta": beta, "trigger": False} for beta in (0.2, 0.4, 0.6, 0.8, 1.0)},
    **{f"k {k}": {"k": k} for k in (2, 5, 10, 20)},
    **{f"threshold {threshold}": {"threshold": threshold} for threshold in (0.0, 0.5, 1.0, 2.0)},
    "no schedule": {"schedule": False},
    "no trigger": {"trigger": False},
    "no trigger, no schedule": {"trigger": False, "schedule": False},
}
"""Of Turbo as printed, one setting at a time; beta without the trigger, which hardly ever lets it act."""
COLUMNS = (
    *("row", "rate", "radius", "Avg", "Last", "evaluations", "speed"),
    *("Avg to plain", "Last to plain", "Avg to C-Flat", "Last to C-Flat", "trials x seeds", "seeds", "e", "end loss"),
)


# -- settings ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Point:
    """A learning rate and a radius; a row without radius ignores it."""

    rate: float
    radius: float

    def layer(self, row: Row) -> dict[str, Any]:
        radius = {} if row.radius is None else {"rho": rounded(self.radius * row.radius)}
        return {"base": {**row.base, "lr": rounded(self.rate)}, "optimizer": {**row.optimizer, **radius}}


def design(bench: Bench, trials: int) -> list[Point]:
    """Return the trials of a stream, the same for all rows."""
    return [
        Point(between(bench.rates, halton(number, 2)), between(bench.radii, halton(number, 3)))
        for number in range(1, trials + 1)
    ]


def halton(number: int, base: int) -> float:
    """Return the digits of a number mirrored at the point: 1, 2, 3 in base 2 are 0.5, 0.25, 0.75."""
    value, share = 0.0, 1.0 / base
    while number:
        number, digit = divmod(number, base)
        value, share = value + digit * share, share / base
    return value


def between(ends: tuple[float, float], share: float) -> float:
    low, high = map(math.log, ends)
    return math.exp(low + share * (high - low))


def rounded(value: float) -> float:
    return float(f"{value:.3g}")


# -- running ----------------------------------------------------------------------------------------------------


@dataclass
class Progress:
    """Runs done and left, weighed by what they cost."""

    total: float
    done: float = 0.0
    start: float = field(default_factory=time.monotonic)
    spent: float = 0.0
    """Work of runs that were carried out, not found."""

    def tell(self, text: str, work: float, is_new: bool) -> None:
        self.done += work
        self.spent += work if is_new else 0.0
        if is_new:
            left = (time.monotonic() - self.start) / self.spent * max(0.0, self.total - self.done)
            share = self.done / self.total
            print(f"{share:5.1%} {text}; {left / 60:.0f} min left", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Front:
    """What is asked for."""

    out: Path
    places: Places
    trials: int
    tuning_seeds: int
    seeds: int | None
    jobs: int
    progress: Progress

    def final_seeds(self, bench: Bench) -> range:
        return range(FINAL_SEED, FINAL_SEED + (self.seeds or bench.seeds))

    def config(self, bench: Bench, *layers: Mapping[str, Any], split: str, seed: int) -> RunConfig:
        config = merge(bench.config(self.places), {"data": {"evaluate": split}, "seed": seed}, *layers)
        if split == "validation":
            config["data"]["validation"] = VALIDATION
        else:
            config["data"].pop("validation_per_class", None)
        return resolve_config(config)

    def carry_out(self, label: str, bench: Bench, row: Row, configs: Mapping[str, RunConfig]) -> list[RunSummary]:
        """Run what is not there yet, each in a folder of its own below ``label``."""
        jobs = [Job(config, self.out / label / name) for name, config in configs.items()]
        pending = [job for job in jobs if not job.is_finished]
        work = bench.seconds * row.evaluations
        self.progress.tell(label, work * (len(jobs) - len(pending)), is_new=False)
        for job in execute(pending, self.jobs):
            summary = RunFolder(job.out).load_summary()
            text = f"{label}/{job.out.name}: Avg {summary.value('avg'):.2%}, Last {summary.value('last'):.2%}"
            self.progress.tell(text, work, is_new=True)
        return run_jobs(jobs)


def execute(jobs: Sequence[Job], num_processes: int) -> Iterator[Job]:
    """Carry out jobs here, or side by side with one thread each; yield each when it is done."""
    if num_processes == 1 or len(jobs) < 2:
        for job in jobs:
            carry_out(job)
            yield job
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        num_processes, mp_context=context, initializer=torch.set_num_threads, initargs=(1,)
    ) as pool:
        futures = {pool.submit(carry_out, job): job for job in jobs}
        for future in as_completed(futures):
            future.result()
            yield futures[future]


# -- one row ----------------------------------------------------------------------------------------------------


def tune_row(front: Front, stream: str, name: str) -> tuple[Point, list[dict[str, Any]]]:
    """Return the best point of the design on validation images, and all of them."""
    bench, row = STREAMS[stream], ROWS[name]
    points = design(bench, front.trials)
    seeds = range(TUNING_SEED, TUNING_SEED + front.tuning_seeds)
    configs = {
        f"trial{number}-seed{seed}": front.config(bench, point.layer(row), split="validation", seed=seed)
        for number, point in enumerate(points)
        for seed in seeds
    }
    summaries = iter(front.carry_out(f"{stream}/{name}/tuning", bench, row, configs))
    trials = []
    for point in points:
        members = list(islice(summaries, len(seeds)))
        trials.append(
            {
                "rate": rounded(point.rate),
                "radius": None if row.radius is None else rounded(point.radius * row.radius),
                "avg": statistics.mean(member.value("avg", "validation") for member in members),
                "last": statistics.mean(member.value("last", "validation") for member in members),
            }
        )
    best = max(range(len(points)), key=lambda number: trials[number]["avg"])
    return points[best], trials


def run_row(front: Front, stream: str, name: str) -> dict[str, Any]:
    """Tune a row and run its final seeds."""
    bench, row = STREAMS[stream], ROWS[name]
    best, trials = tune_row(front, stream, name)
    configs = {
        f"seed{seed}": front.config(bench, best.layer(row), split="test", seed=seed)
        for seed in front.final_seeds(bench)
    }
    finals = f"{stream}/{name}/{final_folder(best, row)}"
    summaries = front.carry_out(finals, bench, row, configs)
    ends = [end_losses(front.out / finals / folder) for folder in configs]
    result = {
        "title": row.title,
        "settings": best.layer(row),
        "trials": trials,
        "tuning": [front.trials, front.tuning_seeds],
        "edge": edges(best, design(bench, front.trials), row),
        "end_loss": statistics.mean(loss for losses in ends for loss in losses),
        **measure(summaries),
    }
    write_json(front.out / stream / name / "result.json", result)
    return result


def final_folder(best: Point, row: Row) -> str:
    """Return the folder of final runs, by their settings: more trials may find others."""
    layer = best.layer(row)
    settings = {"rate": layer["base"]["lr"], "radius": layer["optimizer"].get("rho")}
    return "-".join(["final", *(f"{key}{value:g}" for key, value in settings.items() if value is not None)])


def measure(summaries: Sequence[RunSummary]) -> dict[str, Any]:
    columns = ("avg", "last", "forgetting", "evaluations_per_step")
    errors = [summary.cost.surrogate_error for summary in summaries]
    return {
        **{column: [summary.value(column) for summary in summaries] for column in columns},
        "surrogate_error": [error for error in errors if error is not None and error == error],
    }


def edges(best: Point, points: Sequence[Point], row: Row) -> list[str]:
    """Return which of rate and radius is best at the end of its range, so that a wider one might be better."""
    kinds = ("rate",) if row.radius is None else ("rate", "radius")
    found = []
    for kind in kinds:
        tried = [getattr(point, kind) for point in points]
        found += [
            f"{kind} {end}"
            for end, value in (("low", min(tried)), ("high", max(tried)))
            if getattr(best, kind) == value
        ]
    return found


def end_losses(folder: Path) -> list[float]:
    """Return the training loss of the last epoch of each task."""
    last: dict[int, float] = {}
    for record in RunFolder(folder).load_metrics():
        if record.get("event") == "epoch":
            last[record["task"]] = record["loss"]
    return list(last.values()) or [math.nan]


# -- robustness -------------------------------------------------------------------------------------------------


def run_robustness(front: Front, stream: str, name: str) -> dict[str, Any]:
    """Run a row at rates and radii above the tuned ones, and with other batches at the tuned ones."""
    row = ROWS[name]
    best, _ = tune_row(front, stream, name)
    conditions: dict[str, dict[str, Any]] = {"tuned": best.layer(row)}
    for factor in FACTORS:
        conditions[f"rate x{factor}"] = Point(best.rate * factor, best.radius).layer(row)
    for factor in FACTORS if row.radius is not None else ():
        conditions[f"radius x{factor}"] = Point(best.rate, best.radius * factor).layer(row)
    for size in BATCHES:
        conditions[f"batch {size}"] = merge(best.layer(row), {"train": {"batch_size": size}})
    return run_conditions(front, stream, name, best, conditions, "robustness.json")


def run_ablations(front: Front, stream: str) -> dict[str, Any]:
    """Vary the settings of Turbo as printed, at the rate and radius that were found for it."""
    best, _ = tune_row(front, stream, ABLATED)
    layer = best.layer(ROWS[ABLATED])
    conditions = {"tuned": layer}
    for condition, settings in ABLATIONS.items():
        conditions[condition] = merge(layer, {"optimizer": dict(settings)})
    return run_conditions(front, stream, ABLATED, best, conditions, "ablations.json")


def run_conditions(
    front: Front, stream: str, name: str, best: Point, conditions: Mapping[str, Mapping[str, Any]], file: str
) -> dict[str, Any]:
    bench, row = STREAMS[stream], ROWS[name]
    results = {}
    for condition, layer in conditions.items():
        configs = {
            f"seed{seed}": front.config(bench, layer, split="test", seed=seed) for seed in front.final_seeds(bench)
        }
        folder = final_folder(best, row) + ("" if condition == "tuned" else "-" + condition.replace(" ", "-"))
        results[condition] = measure(front.carry_out(f"{stream}/{name}/{folder}", bench, row, configs))
    write_json(front.out / stream / name / file, results)
    return results


# -- time -------------------------------------------------------------------------------------------------------


def measure_speed(front: Front, stream: str, names: Sequence[str], steps: int) -> None:
    """Measure the time of a step of every row, in turn on the same batches, and write ``speed.json``.

    Each row has a copy of the network of its own and takes all steps; CPU time of one thread, without loading.
    """
    bench = STREAMS[stream]
    torch.set_num_threads(1)
    middle = Point(between(bench.rates, 0.3), between(bench.radii, 0.5))
    configs = {name: front.config(bench, middle.layer(ROWS[name]), split="test", seed=0) for name in names}
    parts = assemble(configs["none"])
    runtime = Runtime(configs["none"].runtime)
    trained = [task for task in parts.stream.tasks[:2] if parts.method.phases(task)]
    extract = Extractor(parts.method, parts.inputs.eval, 64, runtime)
    for task in parts.stream.tasks[: trained[-1].index + 1]:
        parts.method.grow(task)
        parts.method.start_task(task, extract)
    task = trained[-1]
    phase = parts.method.phases(task)[0]
    parts.method.start_phase(task, phase, extract)
    loader = BatchLoader(task.train, parts.inputs.train, configs["none"].train.batch_size, shuffle=True, drop_last=True)
    racers = {}
    for name, config in configs.items():
        method = copy.deepcopy(parts.method)
        method.set_train_mode()
        base = make_base(method.param_groups(task, phase), config.base, is_first_task=task.index == 0)
        settings = config.optimizer.keywords()
        optimizer = create_optimizer(config.optimizer.name, base, model=method.network, **settings)
        racers[name] = (optimizer, Objective(method, method.network, runtime))
    seconds, evaluations = dict.fromkeys(racers, 0.0), dict.fromkeys(racers, 0)
    batches = (batch for epoch in range(steps + 1) for batch in loader.epoch(epoch))
    for number, batch in enumerate(islice(batches, steps + 1)):
        order = list(racers)
        for name in order[number % len(order) :] + order[: number % len(order)]:
            optimizer, objective = racers[name]
            if number <= 1:  # the first step warms up: start_task forgets it
                optimizer.start_task(task.index, parts.stream.num_tasks)
            start = time.process_time()
            optimizer.step(objective.closure(objective.prepare(batch)))
            if number:
                seconds[name] += time.process_time() - start
                evaluations[name] += optimizer.telemetry.last["evaluations"]
    values = {
        name: {
            "seconds": seconds[name] / steps,
            "relative": seconds["none"] / seconds[name],
            "evaluations": evaluations[name] / steps,
            "steps": steps,
        }
        for name in racers
    }
    path = front.out / stream / "speed.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {**(read(path) or {}), **values})
    for name, value in values.items():
        speed = f"{value['evaluations']:.2f} evaluations, speed {value['relative']:.3f} of plain"
        print(f"{stream}/{name}: {speed}", file=sys.stderr, flush=True)


# -- tables and figures -----------------------------------------------------------------------------------------


def interval(values: Sequence[float], reference: Sequence[float]) -> tuple[float, float]:
    """Return the mean paired difference in points and half of its 95 % interval; NaN for one pair."""
    from scipy.stats import t

    differences = [100 * (a - b) for a, b in zip(values, reference, strict=False)]
    n = len(differences)
    if n < 2:
        return (differences[0] if differences else math.nan), math.nan
    return statistics.mean(differences), float(t.ppf(0.975, n - 1)) * statistics.stdev(differences) / math.sqrt(n)


def collect(out: Path) -> dict[str, Any]:
    """Return everything that is finished, by stream and row."""
    found: dict[str, Any] = {}
    for stream, bench in STREAMS.items():
        rows = {name: read(out / stream / name / "result.json") for name in ROWS}
        rows = {name: row for name, row in rows.items() if row}
        speeds = read(out / stream / "speed.json") or {}
        for name, row in rows.items():
            row["relative_speed"] = speeds.get(name, {}).get("relative")
            row["differences"] = {
                reference: {metric: interval(row[metric], rows[reference][metric]) for metric in ("avg", "last")}
                for reference in ("none", "c_flat")
                if reference in rows and reference != name
            }
        ablations = read(out / stream / ABLATED / "ablations.json")
        robust = {name: read(out / stream / name / "robustness.json") for name in ROBUST_ROWS}
        if rows:
            found[stream] = {"title": bench.title, "rows": rows, "robustness": {k: v for k, v in robust.items() if v}}
            if ablations:
                found[stream]["ablations"] = ablations
    return found


def read(path: Path) -> Any:
    return json.loads(path.read_text()) if path.is_file() else None


def write_tables(out: Path, folder: Path) -> None:
    """Write ``front.json``, ``front.md`` and a figure for each stream."""
    found = collect(out)
    folder.mkdir(parents=True, exist_ok=True)
    speeds = {stream: read(out / stream / "speed.json") for stream in STREAMS}
    speeds = {stream: values for stream, values in speeds.items() if values}
    write_json(folder / "front.json", {"streams": found, "speed": speeds})
    write_atomic(folder / "front.md", markdown(found) + "".join(f"{line}\n" for line in _speeds(speeds)))
    for stream, values in found.items():
        draw(values, folder / f"{stream}.png")


def markdown(found: Mapping[str, Any]) -> str:
    lines = [
        "# The front",
        "",
        "Made by `benchmarks/front.py`. Each row has its own learning rate and radius, found with the same number of",
        "trials on validation images; then final runs with other seeds on test images. Differences are in points,",
        "seed by seed, with 95 % intervals. Speed is that of a step relative to plain, all rows in one process, step",
        "by step in turn. e is the surrogate error of Turbo, measured at its refreshes (1 is plain training). A",
        "setting marked with * is the best at the end of the range that was searched; the end loss is that of the last",
        "epoch of each task.",
    ]
    for stream, values in found.items():
        lines += ["", f"## {values['title']} (`{stream}`)", "", f"![front]({stream}.png)", ""]
        lines += ["| " + " | ".join(COLUMNS) + " |", "|---" * len(COLUMNS) + "|"]
        lines += [_table_row(row) for row in values["rows"].values()]
        lines += ["", *_trials(values["rows"])]
        if values["robustness"]:
            lines += ["", *_robustness(values["robustness"])]
    return "\n".join(lines) + "\n"


def _table_row(row: Mapping[str, Any]) -> str:
    edge = " ".join(row["edge"])
    rate = f"{row['settings']['base']['lr']:g}" + ("*" if "rate" in edge else "")
    radius = row["settings"]["optimizer"].get("rho")
    cells = [
        row["title"],
        rate,
        "-" if radius is None else f"{radius:g}" + ("*" if "radius" in edge else ""),
        percent(row["avg"]),
        percent(row["last"]),
        f"{statistics.mean(row['evaluations_per_step']):.2f}",
        "-" if row["relative_speed"] is None else f"{row['relative_speed']:.2f}",
        *(
            difference(row["differences"].get(reference, {}).get(metric))
            for reference in ("none", "c_flat")
            for metric in ("avg", "last")
        ),
        " x ".join(map(str, row.get("tuning", ["?", "?"]))),
        str(len(row["avg"])),
        f"{statistics.mean(row['surrogate_error']):.2f}" if row.get("surrogate_error") else "-",
        f"{row['end_loss']:.3f}",
    ]
    return "| " + " | ".join(cells) + " |"


def _trials(rows: Mapping[str, Any]) -> list[str]:
    """Show validation accuracy over the rates that were tried: how wide the range is that works."""
    rates = sorted({trial["rate"] for row in rows.values() for trial in row["trials"]})
    lines = ["Validation Avg (%) of all trials, by learning rate:", ""]
    lines += ["| row | " + " | ".join(f"{rate:g}" for rate in rates) + " |", "|---" * (len(rates) + 1) + "|"]
    for row in rows.values():
        by_rate = {trial["rate"]: f"{100 * trial['avg']:.1f}" for trial in row["trials"]}
        lines.append(f"| {row['title']} | " + " | ".join(by_rate.get(rate, "") for rate in rates) + " |")
    return lines


def _speeds(speeds: Mapping[str, Any]) -> list[str]:
    """Show the time of a step in every stream, also in those that have no results yet."""
    if not speeds:
        return []
    lines = ["", "## Speed of a step relative to plain", ""]
    lines += [
        "One thread, CPU time, without loading data, all rows in turn on the same batches; evaluations in brackets.",
        "",
    ]
    lines += ["| row | " + " | ".join(speeds) + " |", "|---" * (len(speeds) + 1) + "|"]
    for name in (name for name in ROWS if any(name in values for values in speeds.values())):
        cells = (
            f"{values[name]['relative']:.2f} ({values[name]['evaluations']:.2f})" if name in values else "-"
            for values in speeds.values()
        )
        lines.append(f"| {ROWS[name].title} | " + " | ".join(cells) + " |")
    return lines


def _robustness(rows: Mapping[str, Any]) -> list[str]:
    conditions = list(dict.fromkeys(condition for row in rows.values() for condition in row))
    lines = ["Avg / Last (%) away from the tuned settings:", ""]
    lines += ["| condition | " + " | ".join(ROWS[name].title for name in rows) + " |", "|---" * (len(rows) + 1) + "|"]
    for condition in conditions:
        cells = (
            f"{percent(row[condition]['avg'])} / {percent(row[condition]['last'])}" if condition in row else "-"
            for row in rows.values()
        )
        lines.append(f"| {condition} | " + " | ".join(cells) + " |")
    return lines


def percent(values: Sequence[float]) -> str:
    return f"{100 * statistics.mean(values):.1f}"


def difference(value: Sequence[float] | None) -> str:
    if value is None:
        return "-"
    return f"{value[0]:+.1f}" + ("" if value[1] != value[1] else f" ± {value[1]:.1f}")


def draw(values: Mapping[str, Any], path: Path) -> None:
    """Draw differences of Avg to plain and to C-Flat over evaluations per step and over relative time."""
    from matplotlib.figure import Figure

    rows = values["rows"]
    figure = Figure(figsize=(12, 8), layout="constrained")
    figure.suptitle(f"{values['title']}: difference of Avg in points, 95 % paired intervals")
    panels = figure.subplots(2, 2, sharex="col")
    for line, reference in enumerate(("none", "c_flat")):
        for column, label in enumerate(("evaluations per step", "time of a step relative to plain")):
            axes = panels[line][column]
            axes.axhline(0, color="#999999", linewidth=0.8)
            for name, row in rows.items():
                x = statistics.mean(row["evaluations_per_step"]) if column == 0 else inverse(row["relative_speed"])
                found = row["differences"].get(reference, {}).get("avg", (0.0, 0.0) if name == reference else None)
                if x is None or found is None:
                    continue
                color = OPTIMIZERS[ROWS[name].optimizer["name"]][1]
                axes.errorbar(
                    x, found[0], yerr=0 if found[1] != found[1] else found[1], fmt="o", color=color, capsize=2
                )
                axes.annotate(row["title"], (x, found[0]), (4, 4), textcoords="offset points", fontsize=7, color=color)
            axes.set_ylabel(f"to {ROWS[reference].title}")
            if line:
                axes.set_xlabel(label)
    figure.savefig(path, dpi=110)


def inverse(value: float | None) -> float | None:
    return None if not value else 1 / value


# -- command line -----------------------------------------------------------------------------------------------


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of all runs, outside the repository")
    parser.add_argument("--streams", nargs="+", choices=list(STREAMS), default=list(STREAMS))
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--trials", type=int, default=8, help="of every row")
    parser.add_argument("--tuning-seeds", type=int, default=1, help="runs of a trial")
    parser.add_argument("--seeds", type=int, help="final runs of a row; default: that of the stream")
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--features", type=Path, help="made by cflat features")
    parser.add_argument("--jobs", type=int, choices=(1, 2), default=1, help="runs at a time, one thread each")
    parser.add_argument("--speed-steps", type=int, default=60, help="steps to time; 0 keeps the times that are there")
    parser.add_argument(
        "--robustness", action="store_true", help=f"rows {', '.join(ROBUST_ROWS)} away from their settings"
    )
    parser.add_argument("--ablations", action="store_true", help="vary the settings of Turbo as printed")
    parser.add_argument("--speed-only", action="store_true", help="time the steps of all rows, and run nothing else")
    parser.add_argument("--tables", type=Path, default=Path(__file__).parents[1] / "docs" / "results" / "front")
    parser.add_argument("--tables-only", action="store_true", help="write tables and figures of what is finished")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    if not arguments.tables_only:
        torch.set_num_threads(1)
        places = Places(arguments.data_root, arguments.weights, arguments.features)
        for stream in arguments.streams:
            missing = [need for need in STREAMS[stream].needs if getattr(places, need) is None]
            if missing:
                sys.exit(
                    f"front: stream {stream} needs --{missing[0].replace('_', '-')}; give it, or leave the stream out."
                )
        try:
            carry_out_all(arguments, places)
        except CFlatError as error:
            sys.exit(f"front: {error}")
    write_tables(arguments.out, arguments.tables)


def carry_out_all(arguments: argparse.Namespace, places: Places) -> None:
    rows = [name for name in arguments.rows if name in ROBUST_ROWS] if arguments.robustness else arguments.rows
    rows = [ABLATED] if arguments.ablations else rows
    total = 0.0
    for stream in arguments.streams:
        bench = STREAMS[stream]
        num_seeds = arguments.seeds or bench.seeds
        runs = arguments.trials * arguments.tuning_seeds + num_seeds
        runs += num_seeds * (2 * len(FACTORS) + len(BATCHES)) if arguments.robustness else 0
        runs += num_seeds * len(ABLATIONS) if arguments.ablations else 0
        total += bench.seconds * runs * sum(ROWS[name].evaluations for name in rows)
    front = Front(
        arguments.out,
        places,
        arguments.trials,
        arguments.tuning_seeds,
        arguments.seeds,
        arguments.jobs,
        Progress(total),
    )
    for stream in arguments.streams:
        if arguments.ablations:
            run_ablations(front, stream)
            write_tables(arguments.out, arguments.tables)
            continue
        for name in () if arguments.speed_only else rows:
            run_robustness(front, stream, name) if arguments.robustness else run_row(front, stream, name)
            write_tables(arguments.out, arguments.tables)
        if arguments.speed_steps and not arguments.robustness:
            measure_speed(front, stream, list(dict.fromkeys(["none", *rows])), arguments.speed_steps)


if __name__ == "__main__":
    main()
