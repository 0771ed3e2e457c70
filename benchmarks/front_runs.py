"""What the front runs: trials, final runs, other conditions, watched runs, and the time of a step."""

from __future__ import annotations

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

from cflat._files import write_json
from cflat.config.documents import merge
from cflat.config.presets import resolve_config
from cflat.config.run_config import RunConfig
from cflat.data import BatchLoader
from cflat.optim import create_optimizer
from cflat.runs.folder import RunFolder, RunSummary
from cflat.runs.jobs import Job, run_job, run_jobs
from cflat.runs.run import assemble
from cflat.studies.recording import Recording
from cflat.train import Runtime
from cflat.train.evaluate import Extractor
from cflat.train.objective import Objective
from cflat.train.schedules import make_base

VALIDATION = 0.2
TUNING_SEED = 1000
FINAL_SEED = 100
"""Seeds of trials and of final runs start here; nothing in the optimizers was chosen by looking at either."""
PROTOCOLS = {"stream": "rows", "first-task": "first-task"}
"""Where the ledger keeps results, by what they were tuned on: the whole stream, or its first task alone."""
ROBUST_ROWS = ("none", "c_flat", "turbo", "turbo-still")
RATE_FACTORS, RADIUS_FACTORS, BATCHES = (0.25, 0.5, 2, 4), (2, 4), (4, 8, 32, 64)
CONDITIONS = (
    *(f"rate x{factor}" for factor in RATE_FACTORS),
    *(f"radius x{factor}" for factor in RADIUS_FACTORS),
    *(f"batch {size}" for size in BATCHES),
)
AS_TURBO = ("as Turbo", *(f"as Turbo, {condition}" for condition in CONDITIONS))
"""Of plain training and C-Flat: the settings of Turbo, and away from these."""
MEASURES = ("avg", "last", "forgetting", "evaluations_per_step")
KEPT = (*MEASURES, "surrogate_error", "end_loss")
"""What is kept of every final run."""
WATCH_RADIUS, WATCH_EVERY = 0.05, 5
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


# -- settings ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Point:
    """A learning rate and a radius; a row without radius ignores it."""

    rate: float
    radius: float

    def layer(self, row: Row) -> dict[str, Any]:
        radius = {} if row.radius is None else {"rho": rounded(self.radius * row.radius)}
        rate = rounded(self.rate * row.rate)
        return {"base": {**row.base, "lr": rate}, "optimizer": {**row.optimizer, **radius}}


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
    published: Mapping[str, Any] = field(default_factory=dict)
    """Streams of the ledger, found elsewhere or earlier: neither tuned nor run again."""
    conditions: Sequence[str] = ()
    """Of those away from the tuned settings, only these; none named is all."""

    def known(self, stream: str, row: str, part: str = "rows") -> dict[str, Any]:
        """Return what is published of a row: its result, or what it did under other conditions."""
        return self.published.get(stream, {}).get(part, {}).get(row, {})

    def final_seeds(self, bench: Bench) -> range:
        return range(FINAL_SEED, FINAL_SEED + (self.seeds or bench.seeds))

    def config(self, bench: Bench, *layers: Mapping[str, Any], split: str, seed: int) -> RunConfig:
        config = merge(bench.config(self.places), {"data": {"evaluate": split}, "seed": seed}, *layers)
        if split == "validation":
            config["data"]["validation"] = VALIDATION
        else:
            config["data"].pop("validation_per_class", None)
        return resolve_config(config)

    def skip(self, bench: Bench, row: Row, num_runs: int) -> None:
        """Count runs as done that the ledger knows."""
        self.progress.tell("", bench.seconds * row.evaluations * num_runs, is_new=False)

    def run_job(self, label: str, bench: Bench, row: Row, configs: Mapping[str, RunConfig]) -> list[RunSummary]:
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
            run_job(job)
            yield job
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        num_processes, mp_context=context, initializer=torch.set_num_threads, initargs=(1,)
    ) as pool:
        futures = {pool.submit(run_job, job): job for job in jobs}
        for future in as_completed(futures):
            future.result()
            yield futures[future]


# -- one row ----------------------------------------------------------------------------------------------------


def tune_row(front: Front, stream: str, name: str, protocol: str = "stream") -> tuple[Point, list[dict[str, Any]]]:
    """Return the best point of the design on validation images, of the whole stream or its first task, and all."""
    bench, row = STREAMS[stream], ROWS[name]
    points = design(bench, front.trials)
    known = front.known(stream, name, PROTOCOLS[protocol])
    if known.get("tuning") == [front.trials, front.tuning_seeds]:
        front.skip(bench, row, front.trials * front.tuning_seeds)
        return best_of(points, known["trials"]), known["trials"]
    cut = {} if protocol == "stream" else {"stream": {"max_tasks": 1}}
    seeds = range(TUNING_SEED, TUNING_SEED + front.tuning_seeds)
    configs = {
        f"trial{number}-seed{seed}": front.config(bench, point.layer(row), cut, split="validation", seed=seed)
        for number, point in enumerate(points)
        for seed in seeds
    }
    folder = "tuning" if protocol == "stream" else f"tuning-{protocol}"
    summaries = iter(front.run_job(f"{stream}/{name}/{folder}", bench, row, configs))
    trials = []
    for point in points:
        members = list(islice(summaries, len(seeds)))
        trials.append(
            {
                "rate": rounded(point.rate * row.rate),
                "radius": None if row.radius is None else rounded(point.radius * row.radius),
                "avg": statistics.mean(member.value("avg", "validation") for member in members),
                "last": statistics.mean(member.value("last", "validation") for member in members),
            }
        )
    return best_of(points, trials), trials


def best_of(points: Sequence[Point], trials: Sequence[Mapping[str, Any]]) -> Point:
    return points[max(range(len(points)), key=lambda number: trials[number]["avg"])]


def run_row(front: Front, stream: str, name: str, protocol: str = "stream") -> dict[str, Any]:
    """Tune a row and run its final seeds."""
    bench, row = STREAMS[stream], ROWS[name]
    best, trials = tune_row(front, stream, name, protocol)
    known = front.known(stream, name, PROTOCOLS[protocol])
    known = known if known.get("settings") == best.layer(row) else {}
    finals = f"{stream}/{name}/{final_folder(best, row)}"
    found = run_final(front, finals, bench, row, best.layer(row), known)
    result = {
        "title": row.title,
        "settings": best.layer(row),
        "trials": trials,
        "tuning": [front.trials, front.tuning_seeds],
        "edge": edges(best, design(bench, front.trials), row),
        **found,
    }
    file = "result" if protocol == "stream" else PROTOCOLS[protocol]
    save(front.out / stream / name / f"{file}.json", result)
    return result


def check_row(front: Front, stream: str, name: str) -> bool:
    """Run the first final seeds of a published row again and say whether they end where the ledger says."""
    bench, row, known = STREAMS[stream], ROWS[name], front.known(stream, name)
    if not known:
        print(f"{stream}/{name}: not in the ledger", flush=True)
        return False
    found = run_final(front, f"{stream}/{name}/check", bench, row, known["settings"], {})
    ends = [list(zip(side["avg"], side["last"], strict=True)) for side in (found, known)]
    for seed, (new, old) in enumerate(zip(*ends, strict=False), start=FINAL_SEED):  # there may be fewer published
        values = f"Avg {new[0]:.2%} (ledger {old[0]:.2%}), Last {new[1]:.2%} (ledger {old[1]:.2%})"
        print(f"{stream}/{name}/seed{seed}: {values}: {'same' if new == old else 'DIFFERENT'}", flush=True)
    return all(new == old for new, old in zip(*ends, strict=False))


def run_final(
    front: Front, label: str, bench: Bench, row: Row, layer: Mapping[str, Any], known: Mapping[str, Any]
) -> dict[str, Any]:
    """Run the final seeds that are not known yet, and return all of them, in the order of the seeds."""
    wanted = front.final_seeds(bench)
    seeds = wanted[len(known.get("avg", ())) :]
    front.skip(bench, row, len(wanted) - len(seeds))
    configs = {f"seed{seed}": front.config(bench, layer, split="test", seed=seed) for seed in seeds}
    summaries = front.run_job(label, bench, row, configs)
    found = {column: [summary.value(column) for summary in summaries] for column in MEASURES}
    errors = [summary.cost.surrogate_error for summary in summaries]
    found["surrogate_error"] = [error for error in errors if error is not None and error == error]
    found["end_loss"] = [statistics.mean(end_losses(front.out / label / folder)) for folder in configs]
    return {key: [*known.get(key, ()), *values] for key, values in found.items()}


def final_folder(best: Point, row: Row) -> str:
    """Return the folder of final runs, by their settings: more trials may find others."""
    layer = best.layer(row)
    settings = {"rate": layer["base"]["lr"], "radius": layer["optimizer"].get("rho")}
    return "-".join(["final", *(f"{key}{value:g}" for key, value in settings.items() if value is not None)])


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
    """Run a row at rates around and radii above the tuned ones, and with other batches at the tuned ones.

    Plain training and exact C-Flat are also run at the settings of Turbo, where they differ: four times a higher rate
    is another thing than four times a lower one.
    """
    row = ROWS[name]
    best, _ = tune_row(front, stream, name)
    conditions = {"tuned": best.layer(row), **away_from(best, row)}
    if name in ("none", "c_flat"):
        turbos, _ = tune_row(front, stream, "turbo")
        if turbos.layer(row) != best.layer(row):
            conditions["as Turbo"] = turbos.layer(row)
            conditions |= {f"as Turbo, {other}": layer for other, layer in away_from(turbos, row).items()}
    return run_conditions(front, stream, name, best, conditions, "robustness")


def away_from(point: Point, row: Row) -> dict[str, dict[str, Any]]:
    """Return the settings of a row at other rates, at greater radii if it has one, and with other batches."""
    points = {f"rate x{factor}": Point(point.rate * factor, point.radius) for factor in RATE_FACTORS}
    if row.radius is not None:
        points |= {f"radius x{factor}": Point(point.rate, point.radius * factor) for factor in RADIUS_FACTORS}
    batches = {f"batch {size}": merge(point.layer(row), {"train": {"batch_size": size}}) for size in BATCHES}
    return {**{condition: other.layer(row) for condition, other in points.items()}, **batches}


def run_ablations(front: Front, stream: str) -> dict[str, Any]:
    """Vary the settings of Turbo as printed, at the rate and radius that were found for it."""
    best, _ = tune_row(front, stream, ABLATED)
    layer = best.layer(ROWS[ABLATED])
    conditions = {"tuned": layer}
    for condition, settings in ABLATIONS.items():
        conditions[condition] = merge(layer, {"optimizer": dict(settings)})
    return run_conditions(front, stream, ABLATED, best, conditions, "ablations")


def run_conditions(
    front: Front, stream: str, name: str, best: Point, conditions: Mapping[str, Mapping[str, Any]], part: str
) -> dict[str, Any]:
    """Run the conditions that are asked for; those that are known already stay."""
    bench, row = STREAMS[stream], ROWS[name]
    result = front.known(stream, name)
    is_same = result.get("settings") == best.layer(row)
    results = dict(front.known(stream, name, part)) if is_same else {}
    for condition, layer in conditions.items():
        if front.conditions and condition not in (*front.conditions, "tuned"):
            continue
        known = results.get(condition, {})
        if condition == "tuned" and is_same:
            count = max(len(front.final_seeds(bench)), len(known.get("avg", ())))
            known = {key: values[:count] for key, values in result.items() if key in KEPT}
        folder = final_folder(best, row) + ("" if condition == "tuned" else "-" + condition.replace(" ", "-"))
        results[condition] = run_final(front, f"{stream}/{name}/{folder}", bench, row, layer, known)
    save(front.out / stream / name / f"{part}.json", results)
    return results


def read(path: Path) -> Any:
    return json.loads(path.read_text()) if path.is_file() else None


def save(path: Path, found: Any) -> None:
    """Write what was found, also where all of it was known and nothing has been run."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, found)


# -- watched runs -----------------------------------------------------------------------------------------------


def watch_row(front: Front, stream: str, name: str) -> dict[str, Any]:
    """Repeat a row's final runs, recording what exact C-Flat sees every few steps and the landscape at the end."""
    bench, row = STREAMS[stream], ROWS[name]
    best, _ = tune_row(front, stream, name)
    label = f"{stream}/{name}/{final_folder(best, row)}-watched"
    found = []
    for seed in front.final_seeds(bench):
        folder = front.out / label / f"seed{seed}"
        job = Job(front.config(bench, best.layer(row), split="test", seed=seed), folder)
        is_new = not job.is_finished
        if is_new:
            run_job(job, [Recording(WATCH_RADIUS, WATCH_EVERY, file=folder / "recording.json")])
        found.append(watched(json.loads((folder / "recording.json").read_text())))
        front.progress.tell(f"{label}/seed{seed}", bench.seconds * (row.evaluations + 1), is_new=is_new)
    result = {key: [entry[key] for entry in found] for key in found[0]}
    save(front.out / stream / name / "watched.json", result)
    return result


def watched(recording: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of one watched run that claims are about."""
    from scipy.stats import shapiro

    records, landscapes = recording["history"]["records"], recording["landscapes"]
    tasks = sorted({record["task"] for record in records})
    ends = [record for task in tasks for record in last_third([r for r in records if r["task"] == task])]
    numbers: dict[str, Any] = {
        f"end {key}": statistics.mean(record[key] for record in ends if record[key] is not None)
        for key in ("loss", "sharpness", "flatness")
    }
    for vector in ("g", "g_0", "g_vs", "g_vf"):
        later = [record for record in records if vector in record["turns"]]
        numbers[f"turn {vector}"] = statistics.mean(record["turns"][vector] for record in later)
        numbers[f"distance {vector}"] = statistics.mean(record["distances"][vector] for record in later)
    for when, task in (("first", tasks[0]), ("last", tasks[-1])):
        squares = [record["norms"]["g"] ** 2 for record in records if record["task"] == task]
        numbers[f"normality {when}"] = float(shapiro(squares).statistic)
    numbers["top eigenvalue"] = landscapes["eigenvalues"]["values"][0]
    numbers["trace"] = landscapes["trace"]["mean"]
    return numbers


def last_third(items: Sequence[Any]) -> Sequence[Any]:
    return items[-max(1, len(items) // 3) :]


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
    save(path, {**(read(path) or {}), **values})
    for name, value in values.items():
        speed = f"{value['evaluations']:.2f} evaluations, speed {value['relative']:.3f} of plain"
        print(f"{stream}/{name}: {speed}", file=sys.stderr, flush=True)
