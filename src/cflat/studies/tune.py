"""Tune optimizers with the same number of trials each, on validation images alone; test images are never looked at.

A trial is a run (one for each tuning seed) that is measured on the validation images of its stream. The first half of
the trials is completed; every other one is paused after a quarter of the stream and after a half, and ends there if
it is behind the better half of those that came as far (Optuna's asynchronous successive halving). What a trial draws is
a function of the search seed and the trials before it, only finished trials are stored, each in one write, and trials
are runs with checkpoints: a search that was killed at any moment resumes to the same result.
"""

from __future__ import annotations

import json
import math
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from pathlib import Path
from statistics import mean
from typing import Any, Literal, TypeAlias

import numpy as np

from cflat._errors import ConfigError, DataError
from cflat._files import make_folder, plain_values, write_json
from cflat._registry import require_known, suggest
from cflat.config.documents import Layer, flatten, merge, nested, parse_overrides
from cflat.config.presets import resolve_config
from cflat.config.run_config import RunConfig
from cflat.config.variants import Variant, parse_variant
from cflat.figures.static import save
from cflat.figures.sweeps import SEARCH_COLORS, TrialPoint, search_figure
from cflat.methods import get_method_spec
from cflat.report.groups import title_of
from cflat.runs.folder import RunFolder
from cflat.runs.jobs import Executor, Job, finish_jobs
from cflat.runs.run import make_stream
from cflat.studies.compare import comparison_sweep
from cflat.studies.space import Interval, Settings, parse_axis
from cflat.studies.tuned import COSTS, METRICS, PROTOCOLS, Metric, Protocol, Trial, Tuned, Tuning, validation_score

LR_FACTOR, RHO_FACTOR = 10.0, 5.0
"""How far below and above the preset's learning rate and radius the search goes."""
VALIDATION = 0.2
DEFAULT_SEEDS = (1000,)
SAMPLERS = ("tpe", "random")
FIRST_RUNG = 4
"""The first pause is after this part of the stream, every other one at twice as many tasks."""
REDUCTION = 2

Range: TypeAlias = "Interval | tuple[Any, ...]"
"""What a key is drawn from: an interval, or a list of values."""


def tune(
    chosen: Mapping[str, Any],
    optimizers: Sequence[str],
    out: str | Path,
    *,
    trials: int = 8,
    protocol: Protocol = "stream",
    seeds: Sequence[int] = DEFAULT_SEEDS,
    ranges: Mapping[str, Range] | None = None,
    metric: Metric = "avg",
    score: str | None = None,
    sampler: Literal["tpe", "random"] = "tpe",
    search_seed: int = 0,
    prune: bool = True,
    executor: Executor | None = None,
) -> Tuning:
    """Search settings for every optimizer with the same number of trials, and write ``tuned.json``.

    Learning rate and radius are drawn log-uniformly around those of the preset (or of ``chosen``), which are the first
    trial. What an entry of ``optimizers`` sets itself is not searched.

    Args:
        chosen: What all runs share, as for `compare`; ``data.validation`` is 0.2 by default.
        optimizers: Names, with settings of their own where wanted: ``c_flat_turbo:reading=calibrated``.
        out: Folder of the search; one that was begun is resumed, and may be given more trials.
        trials: Of every optimizer.
        protocol: ``stream`` judges by the whole stream, ``first-task`` by its first task; see `PROTOCOLS`.
        seeds: Of each trial, whose score is the mean; final runs must have others.
        ranges: What to search by dotted key, instead of the usual ranges or besides them.
        metric: Validation accuracy to maximise: avg (mean over the stages of the stream) or last.
        score: The method's score that it is of; None takes its headline.
        sampler: Optuna's tpe, which learns from earlier trials, or random.
        search_seed: Decides every random choice of the search.
        prune: Whether trials that are behind others end early.
        executor: Where to run; trials of different optimizers and seeds are jobs of one batch.

    Raises:
        ConfigError: If something is unknown or wrong, Optuna is missing, or every trial of all optimizers diverged.
        DataError: If ``out`` holds another search.
    """
    try:
        optuna = import_module("optuna")
    except ModuleNotFoundError:
        raise ConfigError("cflat tune needs the package optuna; run: pip install 'cflat[sweep]'") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)  # it would log a line per trial
    require_known("protocol", protocol, PROTOCOLS)
    require_known("metric", metric, METRICS)
    require_known("sampler", sampler, SAMPLERS)
    if trials < 1:
        raise ConfigError(f"trials must be a whole number from 1, got {trials}.")
    if search_seed < 0:
        raise ConfigError(f"search_seed must be a whole number from 0, got {search_seed}.")
    shared, runs = validation_layer(chosen), Path(out) / "trials"
    layers = trial_layers(shared, optimizers, seeds)
    configs = {name: resolve_config({**layer, "seed": seeds[0]}) for name, layer in layers.items()}
    spaces = {name: _space(parse_variant(name), config, ranges or {}) for name, config in configs.items()}
    _require_known(ranges or {}, spaces)
    first = next(iter(configs.values()))  # method, data and stream are those of all
    stages = stages_of(make_stream(first).num_tasks, protocol, prune)
    score = get_method_spec(first.method.name).score(score)
    judged: dict[str, Any] = {"protocol": protocol, "metric": metric, "score": score, "seeds": list(seeds)}
    request = {**judged, "sampler": sampler, "search_seed": search_seed, "stages": stages}
    with _storage(optuna, Path(out)) as storage:
        searches = [
            _Search(optuna, storage, parse_variant(name), layer, configs[name], spaces[name], request, trials, runs)
            for name, layer in layers.items()
        ]
        for number in range(trials):
            # One trial of every optimizer at a time: they run side by side where there is room.
            running = [search for search in searches if search.num_done == number]
            for search in running:
                search.draw()
            for stage in stages:
                finish_jobs([job for search in running for job in search.jobs(stage)], executor)
                running = [search for search in running if not search.is_over(stage)]
        found = {search.variant.text: search.result() for search in searches}
    subject = (first.method.name, first.data.name, protocol, metric, score, tuple(seeds))
    searched = {name: {key: _plain(range_) for key, range_ in space.items()} for name, space in spaces.items()}
    tuning = Tuning(*subject, trials, shared, searched, found)
    if not tuning.settings:
        raise ConfigError(tuning.diverged)
    write_json(Path(out) / "tuned.json", tuning.to_dict())
    return tuning


def write_search(folder: Path, tuning: Tuning) -> Path:
    """Draw everything that was tried into ``search.png``; return its path."""
    base = tuning.base
    points = [
        TrialPoint(title_of(name, base), trial.settings, trial.score, trial.state == "complete", trial is tuned.best)
        for name, tuned in tuning.optimizers.items()
        for trial in tuned.trials
    ]
    title = (
        f"{tuning.method} on {tuning.data}: {tuning.num_trials} trials each, score {tuning.score}, "
        f"protocol {tuning.protocol}"
    )
    return save(search_figure(title, points), folder / "search.png", SEARCH_COLORS)


def validation_layer(chosen: Mapping[str, Any]) -> Layer:
    """Return what trials share: with validation images, and nothing else about how runs are measured."""
    shared = merge({"data": {"validation": VALIDATION}}, {key: v for key, v in chosen.items() if key != "seed"})
    data = shared["data"]
    if not data.get("validation"):
        raise ConfigError("Settings are chosen by validation images; set data.validation above 0, for example to 0.2.")
    if data.pop("evaluate", "validation") != "validation":  # trials set it themselves
        raise ConfigError("Settings are chosen by validation images alone; leave data.evaluate out.")
    return shared


def trial_layers(
    shared: Layer, optimizers: Sequence[str], seeds: Sequence[int], tuned: Mapping[str, Settings] | None = None
) -> dict[str, Layer]:
    """Return the configuration of each optimizer, measured on validation images alone; the seed is not part of it."""
    names = [parse_variant(name).text for name in optimizers]
    sweep = comparison_sweep(merge(shared, {"data": {"evaluate": "validation"}}), names, seeds)
    sweep = replace(sweep, tuned=tuned or {})
    return {name: sweep.layer({"optimizer.name": name}) for name in names}


def parse_range(text: str) -> tuple[str, Range]:
    """Read what to search: ``key=low:high``, drawn log-uniformly, ``key=low:high:linear``, or ``key=[a, b]``.

    >>> parse_range("base.lr=0.001:0.1")
    ('base.lr', Interval(low=0.001, high=0.1, scale='log'))
    >>> parse_range("optimizer.reading=[printed, calibrated]")
    ('optimizer.reading', ('printed', 'calibrated'))
    """
    key, _, values = (part.strip() for part in text.partition("="))
    ends = values.split(":")
    try:
        if "." not in key:
            raise ValueError("Only keys of a section can be searched.")  # caught below, like those of float()
        if values.startswith("["):
            return key, parse_axis(key, flatten(parse_overrides([text]))[key])
        low, high, scale = ends if len(ends) == 3 else [*ends, "log"]
        return key, parse_axis(key, {"low": float(low), "high": float(high), "scale": scale})
    except (ValueError, KeyError, ConfigError):
        raise ConfigError(
            f"A range is written as base.lr=0.001:0.1 (log-uniform), optimizer.lam=0:1:linear or optimizer.k=[2, 5, "
            f"10], got {text!r}."
        ) from None


@dataclass
class _Search:
    """The trials of one optimizer: those that are stored, and the one that is running."""

    optuna: Any
    storage: Any
    variant: Variant
    layer: Layer
    config: RunConfig
    space: Mapping[str, Range]
    request: Mapping[str, Any]
    num_trials: int
    folder: Path

    def __post_init__(self) -> None:
        self.study = self.optuna.create_study(
            storage=self.storage, study_name=self.variant.text, direction="maximize", load_if_exists=True
        )
        self.known = flatten(self.config.to_dict())
        space = {key: _plain(range_) for key, range_ in self.space.items()}
        wanted = json.dumps(plain_values({**self.request, "config": self.config.to_dict(), "space": space}))
        if self.study.user_attrs.get("request", wanted) != wanted:
            raise DataError(
                f"{str(self.folder.parent)!r} holds a search of {self.variant.text} with other settings; "
                "choose another --out."
            )
        self.study.set_user_attr("request", wanted)

    @property
    def num_startup(self) -> int:
        """Number of trials that are drawn at random and never pruned: the others are judged by them."""
        return max(3, self.num_trials // 2)

    @property
    def num_done(self) -> int:
        """Number of stored trials, each with its verdict."""
        return len(self.study.get_trials(deepcopy=False))

    def draw(self) -> None:
        """Draw the next trial; its values depend on the search seed and the stored trials alone.

        It lives in memory until its verdict is known. A killed search therefore draws it again, with the same values,
        and its runs resume from their checkpoints.
        """
        number = self.num_done
        # Without pauses the only stage is None, and the pruner is never asked.
        pruner = self.optuna.pruners.SuccessiveHalvingPruner(
            min_resource=self.request["stages"][0] or 1, reduction_factor=REDUCTION
        )
        # A study of its own: ask() writes key by key, so a kill could leave half a trial in the storage.
        memory = self.optuna.create_study(direction="maximize", sampler=self._sampler(number), pruner=pruner)
        memory.add_trials(self.study.get_trials(deepcopy=False))
        if number == 0 and all(self.known[key] in range_ for key, range_ in self.space.items()):
            memory.enqueue_trial({key: _coded(range_, self.known[key]) for key, range_ in self.space.items()})
        self.trial = memory.ask({key: self._distribution(key) for key in self.space})
        self.settings = {key: _decoded(range_, self.trial.params[key]) for key, range_ in self.space.items()}
        stem = f"{self.variant.slug}-{number:03d}"
        self.runs = [RunFolder(self.folder / f"{stem}-seed{seed}") for seed in self.request["seeds"]]

    def jobs(self, stage: int | None) -> list[Job]:
        """Return one job for each seed, up to a stage of the running trial."""
        # What is ahead early in a stream may forget later, so the first trials run to the end without a pause.
        stage = self.request["stages"][-1] if self.trial.number < self.num_startup else stage
        layer = merge(self.layer, *(nested(key, value) for key, value in self.settings.items()))
        return [
            Job(resolve_config({**layer, "seed": seed}), run.path, stage, may_diverge=True)
            for seed, run in zip(self.request["seeds"], self.runs, strict=True)
        ]

    def is_over(self, stage: int | None) -> bool:
        """Judge the running trial by what it has reached; return whether it has ended, and is stored."""
        record = self._measure(stage)
        if stage != self.request["stages"][-1] and record.state != "diverged":
            self.trial.report(record.score, step=stage)
            # Called for every trial: the pruner compares with the rungs that it notes down here.
            if not self.trial.should_prune() or self.trial.number < self.num_startup:
                return False
            record = replace(record, state="pruned")
        self.trial.set_user_attr("record", plain_values(asdict(record)))
        pruned = None, self.optuna.trial.TrialState.PRUNED
        self.trial.study.tell(self.trial, *(pruned if record.state == "pruned" else (record.score,)))
        # One write for the whole trial, so it is in the storage with its verdict or not at all.
        self.study.add_trial(self.trial.study.get_trials(deepcopy=False)[self.trial.number])
        # Only now: until the verdict is stored, a killed search resumes from these checkpoints.
        for run in self.runs:
            shutil.rmtree(run.checkpoints, ignore_errors=True)
        return True

    def result(self) -> Tuned:
        """Return the trials, all of them done."""
        trials = self.study.get_trials(deepcopy=False)[: self.num_trials]
        return Tuned(self.variant.text, tuple(Trial(**trial.user_attrs["record"]) for trial in trials))

    def _measure(self, stage: int | None) -> Trial:
        tasks = [run.load_tasks()[:stage] for run in self.runs]
        has_diverged = any(run.diverged_file.is_file() for run in self.runs)
        judged_by = self.request["metric"], self.request["score"], stage
        score = 0.0 if has_diverged else mean(validation_score(run, *judged_by) for run in self.runs)
        # A task record has the cost of the run so far, so the last one has all of it.
        last = [{**own[-1]["cost"], "seconds": own[-1]["seconds"]} for own in tasks if own]
        costs = {name: sum(one[name] for one in last) for name in COSTS}
        state: Literal["complete", "diverged"] = "diverged" if has_diverged else "complete"
        paths = [str(run.path) for run in self.runs]
        return Trial(self.trial.number, self.settings, state, score, min(map(len, tasks)), **costs, runs=paths)

    def _sampler(self, number: int) -> Any:
        # Seeded by trial: how many trials this process has run before must not matter.
        seed = int(np.random.SeedSequence([self.request["search_seed"], number]).generate_state(1)[0])
        if self.request["sampler"] == "random":
            return self.optuna.samplers.RandomSampler(seed=seed)
        return self.optuna.samplers.TPESampler(seed=seed, n_startup_trials=self.num_startup)

    def _distribution(self, key: str) -> Any:
        """Return what Optuna draws a key from; whole numbers where the preset's value is one, or the ends are."""
        range_, example, kinds = self.space[key], self.known[key], self.optuna.distributions
        if isinstance(range_, tuple):
            return kinds.CategoricalDistribution([_coded(range_, value) for value in range_])
        is_whole = range_.low == int(range_.low) and range_.high == int(range_.high)
        is_log = range_.scale == "log"
        if isinstance(example, int) or (example is None and is_whole):
            return kinds.IntDistribution(math.ceil(range_.low), math.floor(range_.high), log=is_log)
        return kinds.FloatDistribution(range_.low, range_.high, log=is_log)


def _space(variant: Variant, config: RunConfig, ranges: Mapping[str, Range]) -> dict[str, Range]:
    """Return what is searched for an optimizer: learning rate first, then radius, then what the user adds."""
    if config.base.first_lr is not None and "base.first_lr" not in ranges:
        raise ConfigError("base.first_lr is set, so base.lr does not reach the first task; leave it out to tune.")
    known = flatten(config.to_dict())
    space: dict[str, Range] = {
        key: Interval(low=value / factor, high=value * factor, scale="log")
        for key, factor in (("base.lr", LR_FACTOR), ("optimizer.rho", RHO_FACTOR))
        if isinstance(value := known.get(key), float) and value > 0
    }
    # A key that an optimizer does not have is searched for the others.
    space |= {key: range_ for key, range_ in ranges.items() if key in known}
    for key, range_ in space.items():
        is_count = isinstance(known[key], int)
        if is_count and isinstance(range_, Interval) and math.ceil(range_.low) > range_.high:
            raise ConfigError(f"{key} is a whole number; there is none from {range_.low:g} to {range_.high:g}.")
    return {key: range_ for key, range_ in space.items() if key not in variant.settings}


def _require_known(ranges: Mapping[str, Range], spaces: Mapping[str, Mapping[str, Range]]) -> None:
    known = list(dict.fromkeys(key for space in spaces.values() for key in space))
    for key in ranges:
        if key not in known:
            raise ConfigError(f"No chosen optimizer searches {key!r}.{suggest(key, known)} Known: {', '.join(known)}.")
    for name, space in spaces.items():
        if not space:
            raise ConfigError(f"Nothing is left to search for {name!r}: it sets everything itself.")


def stages_of(num_tasks: int, protocol: Protocol, prune: bool) -> list[int | None]:
    """Return after how many tasks a trial is looked at; None is the end of the stream.

    >>> stages_of(10, "stream", True), stages_of(5, "stream", True), stages_of(5, "first-task", True)
    ([3, 6, None], [2, 4, None], [1])
    """
    if protocol == "first-task":
        return [1]
    first = -(-num_tasks // FIRST_RUNG)  # rounded up: a pause before the first task compares nothing
    # The rungs at which Optuna's pruner compares: min_resource * reduction_factor**rung.
    pauses = [first * REDUCTION**power for power in range(num_tasks.bit_length())]
    return [*(pause for pause in pauses if prune and pause < num_tasks), None]


def _plain(range_: Range) -> Any:
    return list(range_) if isinstance(range_, tuple) else asdict(range_)


def _coded(range_: Range, value: Any) -> Any:
    """Return a value as Optuna stores it: its categories cannot be lists or mappings, their JSON can."""
    return json.dumps(value) if isinstance(range_, tuple) else value


def _decoded(range_: Range, value: Any) -> Any:
    if isinstance(range_, tuple):
        return json.loads(value)
    return range_.rounded(value) if isinstance(value, float) else value  # folders and tuned.json have few digits


@contextmanager
def _storage(optuna: Any, out: Path) -> Iterator[Any]:
    """Open the database of a search; SQLite's transactions survive a kill at any moment."""
    make_folder(out)
    try:
        # Optuna warns about experimental parts, and warnings must not end a search.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            storage = optuna.storages.RDBStorage(f"sqlite:///{out.resolve() / 'search.db'}")
    except Exception as error:
        raise DataError(f"{str(out / 'search.db')!r} is not a search database: {error!r:.200}.") from error
    try:
        yield storage
    finally:
        storage.remove_session()
        storage.engine.dispose()  # an open connection keeps the file locked
