"""One page for each claim of the paper: what it says, what we found, and a verdict.

    python benchmarks/claims.py [--ledger docs/results/front/front.json] [--pages docs/results/claims]

Reads the ledger of `benchmarks/front.py` (and that of `benchmarks/convergence.py`) and writes the pages; it trains
nothing, so anyone can check a page against the ledger, and a row of the ledger against runs of their own.
Published numbers come from the recipes of `cflat reproduce`. All effects are paired by seed, with 95 % intervals.

A verdict is decided by rules that are fixed here, before the numbers:

- "A is better than B" holds if the interval lies above 0 in at least one comparison and below 0 in none; it does not
  hold if it lies below 0 in one. For this count the intervals of a claim are widened to hold together with 95 %
  (Bonferroni), so that one lucky comparison among many decides nothing; tables show each interval by itself.
- "A is as good as B" holds if every interval excludes a loss of more than `MARGIN` points; it does not hold if one lies
  below 0 (and does not exclude such a loss).
- "A does not help" holds if every interval excludes a gain of more than `MARGIN` points; it does not hold if one lies
  above 0 (and does not exclude such a gain).
- "A makes no difference" likewise, in both directions.
- Otherwise the runs are too few to tell, and the claim cannot be decided here.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from front_runs import ABLATED, read
from front_streams import ROWS, STREAMS
from front_tables import LEDGER, MARGIN, interval

import cflat.paper
from cflat._files import write_atomic, write_json
from cflat.figures.palette import OPTIMIZERS
from cflat.optim import get_optimizer_spec

HOLDS, FAILS, UNTESTED = "holds here", "does not hold here", "cannot be decided here"
SCRATCH, PRETRAINED = ("icarl", "memo"), ("ease", "ranpac")
FRONT = "python benchmarks/front.py --out F --features FEATURES.npz --data-root DATA --weights WEIGHTS"


@dataclass(frozen=True)
class Effect:
    """A paired difference on one stream."""

    where: str
    what: str
    mean: float
    half: float
    """Half of the 95 % interval."""
    seeds: int
    evaluations: float | None = None

    @property
    def low(self) -> float:
        return self.mean - self.half

    @property
    def high(self) -> float:
        return self.mean + self.half

    def row(self, unit: str = "points") -> list[str]:
        cost = "-" if self.evaluations is None else f"{self.evaluations:.2f}"
        sign = "" if math.isnan(self.half) else f" ± {self.half:.2f}"
        return [self.where, self.what, f"{self.mean:+.2f}{sign} {unit}".strip(), str(self.seeds), cost]


COLUMNS = ("setting", "compared", "effect (95 % interval)", "seeds", "evaluations per step")


@dataclass(frozen=True)
class Finding:
    """What the runs say about a claim."""

    verdict: str
    reason: str
    rows: Sequence[Sequence[str]] = ()
    columns: Sequence[str] = COLUMNS


@dataclass(frozen=True)
class Runs:
    """Everything that is finished: the ledger of the front, and the convergence curves."""

    ledger: Mapping[str, Any]
    convergence: Any = None

    @property
    def streams(self) -> Mapping[str, Any]:
        return self.ledger["streams"]

    @property
    def speeds(self) -> Mapping[str, Any]:
        return self.ledger["speed"]

    def part(self, name: str) -> dict[str, Any]:
        """Return what was measured besides results, by stream and row: robustness, ablations or watched."""
        return {stream: values[name] for stream, values in self.streams.items() if name in values}

    def ablations(self) -> dict[str, Any]:
        """Return the settings of Turbo as printed that were varied, by stream."""
        return {stream: rows[ABLATED] for stream, rows in self.part("ablations").items() if ABLATED in rows}

    def effect(self, stream: str, row: str, reference: str, metric: str = "avg", part: str = "rows") -> Effect | None:
        """Return a row's difference to another in points, or None if one of them is not finished."""
        rows = self.streams.get(stream, {}).get(part, {})
        if row not in rows or reference not in rows:
            return None
        mean, half = interval(rows[row][metric], rows[reference][metric])
        cost = statistics.mean(rows[row]["evaluations_per_step"])
        number = min(len(rows[row][metric]), len(rows[reference][metric]))
        name = {"avg": "Avg", "last": "Last"}[metric]
        what = f"{ROWS[row].title} - {ROWS[reference].title}, {name}"
        return Effect(STREAMS[stream].title, what, mean, half, number, cost)

    def effects(self, streams: Iterable[str], rows: Sequence[str], reference: str, part: str = "rows") -> list[Effect]:
        metrics = ("avg", "last")
        found = (self.effect(s, row, reference, metric, part) for s in streams for row in rows for metric in metrics)
        return [effect for effect in found if effect is not None and effect.seeds > 1]


# -- how verdicts are reached -----------------------------------------------------------------------------------


def nothing() -> Finding:
    return Finding(UNTESTED, "No run that it needs is finished.")


def better(effects: Sequence[Effect]) -> Finding:
    """Judge "is better than"."""
    if not effects:
        return nothing()
    halves = [joint_half(effect, len(effects)) for effect in effects]
    gains = sum(effect.mean > half for effect, half in zip(effects, halves, strict=True))
    losses = sum(effect.mean < -half for effect, half in zip(effects, halves, strict=True))
    reason = (
        f"{len(effects)} comparisons; significant gains: {gains}, significant losses: {losses}, "
        f"undecided: {len(effects) - gains - losses}."
    )
    return Finding(decide(gains and not losses, losses), reason, [e.row() for e in effects])


def joint_half(effect: Effect, number: int) -> float:
    """Return half of the interval that is right together with those of all other comparisons, by Bonferroni."""
    from scipy.stats import t

    degrees = effect.seeds - 1
    return effect.half * float(t.ppf(1 - 0.025 / number, degrees) / t.ppf(0.975, degrees))


def as_good(effects: Sequence[Effect]) -> Finding:
    """Judge "is as good as"."""
    if not effects:
        return nothing()
    kept = sum(e.low > -MARGIN for e in effects)
    worse = sum(e.high < 0 and e.low <= -MARGIN for e in effects)
    reason = (
        f"{len(effects)} comparisons; a loss of more than {MARGIN:g} point is excluded in {kept}; significant "
        f"losses among the others: {worse}."
    )
    return Finding(decide(kept == len(effects), worse), reason, [e.row() for e in effects])


def no_gain(effects: Sequence[Effect]) -> Finding:
    """Judge "does not help"."""
    if not effects:
        return nothing()
    none = sum(e.high < MARGIN for e in effects)
    gains = sum(e.low > 0 and e.high >= MARGIN for e in effects)
    reason = (
        f"{len(effects)} comparisons; a gain of more than {MARGIN:g} point is excluded in {none}; significant "
        f"gains among the others: {gains}."
    )
    return Finding(decide(none == len(effects), gains), reason, [e.row() for e in effects])


def equal(effects: Sequence[Effect]) -> Finding:
    """Judge "makes no difference"."""
    if not effects:
        return nothing()
    same = sum(abs(e.mean) + e.half < MARGIN for e in effects)
    apart = sum(abs(e.mean) > e.half and abs(e.mean) + e.half >= MARGIN for e in effects)
    reason = (
        f"{len(effects)} comparisons; a difference of more than {MARGIN:g} point is excluded in {same}; significant "
        f"differences among the others: {apart}."
    )
    return Finding(decide(same == len(effects), apart), reason, [e.row() for e in effects])


def decide(holds: float, fails: float) -> str:
    return FAILS if fails else HOLDS if holds else UNTESTED


def unpaired(a: Sequence[float], b: Sequence[float]) -> tuple[float, float]:
    """Return the difference of two means with half of Welch's 95 % interval."""
    from scipy.stats import ttest_ind

    found = ttest_ind(a, b, equal_var=False).confidence_interval(0.95)
    return (found.low + found.high) / 2, (found.high - found.low) / 2


def gains_of(runs: Runs, stream: str, row: str, metric: str = "last") -> list[float]:
    rows = runs.streams.get(stream, {}).get("rows", {})
    if row not in rows or "none" not in rows:
        return []
    return [100 * (a - b) for a, b in zip(rows[row][metric], rows["none"][metric], strict=False)]


# -- the claims -------------------------------------------------------------------------------------------------


def larger_gain(runs: Runs, large: Sequence[str], small: Sequence[str]) -> Finding:
    """Judge whether the gain over plain is larger on some streams than on others, by all pairs of them."""
    effects = []
    for row in ("c_flat", "turbo"):
        for first in large:
            for second in small:
                a, b = gains_of(runs, first, row), gains_of(runs, second, row)
                if min(len(a), len(b)) > 1:
                    mean, half = unpaired(a, b)
                    where = f"{STREAMS[first].title}; beside {STREAMS[second].title}"
                    what = f"gain in Last of {ROWS[row].title} over SGD"
                    effects.append(Effect(where, what, mean, half, min(len(a), len(b))))
    return better(effects)


def varied(
    prefix: str, reference: str, *, only: Callable[[str], bool] = lambda name: True
) -> Callable[[Runs], Finding]:
    """Judge whether a setting of Turbo as printed does not matter: each value beside the usual one."""

    def judge(runs: Runs) -> Finding:
        effects = []
        for stream, values in runs.ablations().items():
            for name, entry in values.items():
                if not name.startswith(prefix) or name == reference or not only(name):
                    continue
                mean, half = interval(entry["avg"], values[reference]["avg"])
                cost = statistics.mean(entry["evaluations_per_step"])
                what = f"{name} - {reference}, Avg"
                effects.append(Effect(STREAMS[stream].title, what, mean, half, len(entry["avg"]), cost))
        return equal(effects)

    return judge


def saves(without: str) -> Callable[[Runs], Finding]:
    """Judge whether a part of Turbo as printed saves evaluations and keeps accuracy."""

    def judge(runs: Runs) -> Finding:
        rows, effects, cheaper = [], [], []
        for stream, values in runs.ablations().items():
            mean, half = interval(values["tuned"]["avg"], values[without]["avg"])
            costs = [statistics.mean(values[name]["evaluations_per_step"]) for name in ("tuned", without)]
            effect = Effect(STREAMS[stream].title, f"with it - {without}, Avg", mean, half, len(values["tuned"]["avg"]))
            effects.append(effect)
            cheaper.append(costs[0] < costs[1])
            rows.append([*effect.row()[:-1], f"{costs[0]:.2f} with it, {costs[1]:.2f} without"])
        if not rows:
            return nothing()
        kept = as_good(effects)
        reason = f"It saves evaluations on {sum(cheaper)} of {len(rows)} streams. {kept.reason}"
        return Finding(kept.verdict if all(cheaper) else FAILS, reason, rows)

    return judge


def directions_are_slow(runs: Runs) -> Finding:
    effects = []
    for stream, rows in runs.part("watched").items():
        for row, values in rows.items():
            for vector, beside in (("g_vs", "g"), ("g_vf", "g"), ("g_vf", "g_0")):
                mean, half = interval(values[f"turn {vector}"], values[f"turn {beside}"])
                what = f"{ROWS[row].title}: cosine to 5 steps earlier, {vector} - {beside}"
                effects.append(Effect(STREAMS[stream].title, what, mean / 100, half / 100, len(values["turn g"])))
    found = better(effects)
    return Finding(found.verdict, found.reason, [effect.row(unit="") for effect in effects])


def directions_are_short(runs: Runs) -> Finding:
    rows = []
    smaller = []
    for stream, by_row in runs.part("watched").items():
        for row, values in by_row.items():
            means = {v: statistics.mean(values[f"distance {v}"]) for v in ("g", "g_0", "g_vs", "g_vf")}
            smaller.append(max(means["g_vs"], means["g_vf"]) < min(means["g"], means["g_0"]))
            seeds = str(len(values["turn g"]))
            rows.append([STREAMS[stream].title, ROWS[row].title, *(f"{means[v]:.3g}" for v in means), seeds])
    if not rows:
        return nothing()
    reason = (
        f"On {sum(smaller)} of {len(rows)} both g_vs and g_vf move less than g and g_0. They are also shorter vectors: "
        "see the claim about their directions before drawing conclusions."
    )
    columns = ("setting", "optimizer", "g", "g_0", "g_vs", "g_vf", "seeds")
    return Finding(HOLDS if all(smaller) else FAILS, reason, rows, columns)


def becomes_normal(runs: Runs) -> Finding:
    effects = []
    for stream, rows in runs.part("watched").items():
        for row, values in rows.items():
            mean, half = interval(values["normality last"], values["normality first"])
            what = f"{ROWS[row].title}: Shapiro-Wilk W of the squared norm, last task - first task"
            effects.append(Effect(STREAMS[stream].title, what, mean / 100, half / 100, len(values["turn g"])))
    found = better(effects)
    return Finding(found.verdict, found.reason, [effect.row(unit="") for effect in effects])


def ends_flatter(row: str, keys: Sequence[str]) -> Callable[[Runs], Finding]:
    """Judge whether a row ends at lower values than plain, by the mean of log ratios."""

    def judge(runs: Runs) -> Finding:
        effects = []
        for stream, rows in runs.part("watched").items():
            if row not in rows or "none" not in rows:
                continue
            for key in keys:
                pairs = list(zip(rows[row][key], rows["none"][key], strict=False))
                ratios = [math.log(b / a) for a, b in pairs if a > 0 and b > 0]
                if len(ratios) > 1:
                    mean, half = interval([r / 100 for r in ratios], [0.0] * len(ratios))
                    what = f"log(SGD / {ROWS[row].title}), {key}"
                    effects.append(Effect(STREAMS[stream].title, what, mean, half, len(ratios)))
        found = better(effects)
        return Finding(found.verdict, found.reason, [effect.row(unit="") for effect in effects])

    return judge


def is_faster(runs: Runs) -> Finding:
    rows, faster = [], []
    for stream, values in runs.speeds.items():
        if "c_flat" not in values:
            continue
        for name in ("c_flat", "turbo", "turbo-paper", "turbo-1.15", "looksam", "sam"):
            if name in values:
                gain = values[name]["relative"] / values["c_flat"]["relative"]
                cells = [f"{values[name]['relative']:.2f}", f"{gain:.2f}", f"{values[name]['evaluations']:.2f}"]
                rows.append([STREAMS[stream].title, ROWS[name].title, *cells, str(values[name]["steps"])])
                faster += [gain >= 2.0] if name == "turbo" else []
    if not faster:
        return nothing()
    reason = f"Default Turbo takes at most half of C-Flat's time on {sum(faster)} of {len(faster)} streams."
    columns = ("setting", "optimizer", "speed to plain", "speed to C-Flat", "evaluations per step", "steps timed")
    return Finding(HOLDS if all(faster) else FAILS, reason, rows, columns)


def memory_is_small(runs: Runs) -> Finding:
    kept, printed = get_optimizer_spec("c_flat_turbo").kept, 2
    rows, shares = [], []
    recipe = yaml.safe_load((Path(cflat.paper.__file__).parent / "recipes" / "table7.yaml").read_text())
    by_group: dict[str, dict[str, Any]] = {}
    for row in recipe["rows"]:
        by_group.setdefault(row["group"], {})[row["name"]] = row["published"][0]
    for group, values in by_group.items():
        millions, exact = values["+C-Flat"]
        turbo = values["+C-Flat Turbo"][1]
        share = millions * 4e-3 * kept / exact
        shares.append(share)
        caches = f"{millions * 4e-3 * kept:.3f} ({kept} buffer), {millions * 4e-3 * printed:.3f} ({printed})"
        rows.append([group, f"{millions:g}", f"{exact:g}", f"{turbo - exact:+.2f}", caches, f"{share:.1%}"])
    reason = (
        f"Arithmetic on the paper's own parameters: the default keeps {kept} buffer of the size of the trainable "
        f"weights (counted by the tests), at most {max(shares):.1%} of C-Flat's memory; the printed rules keep "
        f"{printed}. The differences that the paper prints are of this size. Memory on a GPU was not measured."
    )
    columns = (
        *("setting", "trainable, millions", "C-Flat, GB (paper)", "Turbo - C-Flat, GB (paper)"),
        *("caches, GB (float32)", "share of C-Flat's memory"),
    )
    return Finding(HOLDS if max(shares) < 0.05 else FAILS, reason, rows, columns)


def converges(runs: Runs) -> Finding:
    if not runs.convergence:
        return nothing()
    rows, ok = [], []
    bound = runs.convergence["theorem"]["exponent"]
    for name, entry in runs.convergence.items():
        if name != "theorem":
            ok.append(max(entry["exponents"]) <= bound)
            exponents = ", ".join(f"{value:.2f}" for value in entry["exponents"])
            rows.append([name, exponents, f"{bound:.2f}", str(len(entry["exponents"]))])
    reason = f"{sum(ok)} of {len(ok)} optimizers fall at least as fast as the bound on this problem."
    return Finding(HOLDS if all(ok) else FAILS, reason, rows, ("optimizer", "exponents", "bound", "seeds"))


def plateau(runs: Runs) -> Finding:
    """Judge whether flatness widens the range of learning rates that work, by the rates beside the tuned one."""
    rows, wider = [], []
    for stream, found in runs.part("robustness").items():
        if "none" not in found:
            continue
        means = {
            row: {n: 100 * statistics.mean(v["avg"]) for n, v in values.items() if n == "tuned" or n.startswith("rate")}
            for row, values in found.items()
        }
        for row, by_rate in means.items():
            text = ", ".join(f"{n.removeprefix('rate ')}: {by_rate[n]:.1f}" for n in sorted(by_rate, key=rate_of))
            cells = [f"{width(by_rate)} of {len(by_rate)}", str(len(found[row]["tuned"]["avg"]))]
            rows.append([STREAMS[stream].title, ROWS[row].title, text, *cells])
        for row in (name for name in ("c_flat", "turbo") if name in means):
            mine, plains = ({n: means[name][n] for n in means[row] if n in means["none"]} for name in (row, "none"))
            wider.append(width(mine) > width(plains))
    if not wider:
        return nothing()
    reason = f"In {sum(wider)} of {len(wider)} comparisons the optimizer has more rates within 2 points of its best."
    columns = ("setting", "optimizer", "Avg by factor on the tuned rate", "rates within 2 points of the best", "seeds")
    return Finding(HOLDS if sum(wider) > len(wider) / 2 else FAILS, reason, rows, columns)


def width(by_rate: Mapping[str, float]) -> int:
    """Return how many rates are within 2 points of the best."""
    return sum(mean >= max(by_rate.values()) - 2 for mean in by_rate.values())


def rate_of(condition: str) -> float:
    return 1.0 if condition == "tuned" else float(condition.removeprefix("rate x"))


@dataclass(frozen=True)
class Claim:
    """What the paper says, and how it is judged."""

    title: str
    says: str
    judge: Callable[[Runs], Finding]
    command: str
    note: str = ""


MAIN = FRONT + " --rows none c_flat turbo turbo-paper --trials 6 --tuning-seeds 3"
ABLATE = FRONT + " --streams digits-class --ablations --trials 6 --tuning-seeds 3 --seeds 5"
WATCH = (
    FRONT
    + " --streams digits-class features-class --rows none c_flat turbo --watch --trials 6 --tuning-seeds 3 --seeds 8"
)
CLASS = [name for name, bench in STREAMS.items() if bench.layer.get("stream", {}).get("scenario") == "class"]
OTHER = [name for name in STREAMS if name not in CLASS]
PLAIN = ("none", "none-nesterov")
PTM = ("features-class", "features-task", *PRETRAINED)

CLAIMS: dict[str, Claim] = {
    "c-flat-gains": Claim(
        "C-Flat is better than plain training",
        "Tables 1 to 3: C-Flat gains 0.2 to 1.9 points of Avg over every method that it is plugged into.",
        lambda runs: better(runs.effects(CLASS, ["c_flat"], "none")),
        MAIN,
    ),
    "turbo-gains": Claim(
        "C-Flat Turbo is better than plain training",
        "Tables 1 to 3: C-Flat Turbo gains on every method, more than C-Flat.",
        lambda runs: better([e for plain in PLAIN for e in runs.effects(CLASS, ["turbo"], plain)]),
        MAIN.replace(" none ", " none none-nesterov "),
        "Judged for the default rules of this library, at 1.4 evaluations per step. Plain training is SGD with "
        "momentum 0.9, and where it was run, SGD with Nesterov's momentum, tuned in the same way: it has a part of "
        "what looking ahead gains.",
    ),
    "turbo-as-good": Claim(
        "C-Flat Turbo is as good as C-Flat",
        "Abstract: comparable or even improved accuracy.",
        lambda runs: as_good(runs.effects(STREAMS, ["turbo"], "c_flat")),
        MAIN,
        "Judged for the default rules of this library.",
    ),
    "turbo-printed": Claim(
        "C-Flat Turbo as printed is as good as C-Flat",
        "Abstract: comparable or even improved accuracy.",
        lambda runs: as_good(runs.effects(STREAMS, ["turbo-paper"], "c_flat")),
        MAIN,
        'Judged for `rules="paper"`, the literal reading of Algorithm 1.',
    ),
    "sam-pretrained": Claim(
        "SAM and LookSAM do not help with pretrained models",
        "Table 3 and its discussion: no obvious benefit over the plain optimizer.",
        lambda runs: no_gain(runs.effects(PTM, ["sam", "looksam"], "none")),
        FRONT + " --streams features-class features-task --rows none sam looksam --trials 6 --tuning-seeds 3",
    ),
    "speed": Claim(
        "C-Flat Turbo is at least twice as fast as C-Flat",
        "Table 3: 59.4 and 61.6 % of plain's images per second, where C-Flat has 30.0 and 26.5 %.",
        is_faster,
        FRONT + " --streams digits-task digits-class features-task features-class ease icarl icarl-resnet18"
        " --rows none c_flat sam looksam turbo turbo-paper turbo-1.15 --speed-only",
        "The exceptions are MLPs on cached features, whose batches take about 0.6 ms: what a step does besides its "
        "evaluations hardly depends on the network, and weighs most there.",
    ),
    "scratch": Claim(
        "The gain is larger from scratch than with pretrained models",
        "Tables 1 and 2: +1.6 to +3.1 points of Last from scratch, +0.2 to +1 with a ViT-B/16.",
        lambda runs: larger_gain(runs, SCRATCH, PRETRAINED),
        MAIN + " --streams icarl memo ease ranpac",
    ),
    "memo": Claim(
        "MEMO gains most",
        "Section 4.3: the larger gains of MEMO suggest that Turbo is particularly good for expansion.",
        lambda runs: larger_gain(runs, ["memo"], ["icarl", *PRETRAINED]),
        MAIN + " --streams icarl memo ease ranpac",
    ),
    "beta": Claim(
        "Accuracy is flat for beta from 0.4 to 1",
        "Figure 5 a: similar accuracies as long as beta lies in [0.4, 1.0].",
        varied("beta", "beta 0.8", only=lambda name: float(name.split()[1]) >= 0.4),
        ABLATE,
        '`rules="paper"` without the trigger, so that beta acts; beside beta 0.8.',
    ),
    "k": Claim(
        "Accuracy hardly depends on k",
        "Table 5 and Figure 5 a: within 0.2 points for k from 2 to 10.",
        varied("k ", "k 5"),
        ABLATE,
        '`rules="paper"`, beside k 5.',
    ),
    "threshold": Claim(
        "Accuracy hardly depends on the threshold of the trigger",
        "Table 6: 91.9 to 92.1 % of Avg for m from 0.1 to 5.",
        varied("threshold", "threshold 1.0"),
        ABLATE,
        '`rules="paper"`, beside threshold 1.',
    ),
    "scheduler": Claim(
        "The scheduler adds speed without loss",
        "Section 4.5: about 15 % faster on MEMO and 30 % over C-Flat on EASE at comparable accuracy.",
        saves("no schedule"),
        ABLATE,
        '`rules="paper"`.',
    ),
    "trigger": Claim(
        "The trigger saves evaluations without loss",
        "Section 3.3: combining C-Flat with SGD makes training cheaper.",
        saves("no trigger"),
        ABLATE,
        '`rules="paper"`.',
    ),
    "slow-distance": Claim(
        "g_vs and g_vf move less than g and g_0",
        "Figures 3 and 7: L2 distances to five steps earlier.",
        directions_are_short,
        WATCH,
    ),
    "slow-direction": Claim(
        "The directions of g_vs and g_vf are kept over steps",
        "Section 3.2: direction-invariant components, which may therefore be reused.",
        directions_are_slow,
        WATCH,
        "The cosine to five steps earlier, whatever the length: only a direction that is kept can be reused.",
    ),
    "normal": Claim(
        "The squared gradient norm tends to a normal distribution over the tasks",
        "Figure 4: Q-Q plots approach the line in the course of learning.",
        becomes_normal,
        WATCH,
        "Shapiro-Wilk's W is 1 for a normal sample.",
    ),
    "flat-c-flat": Claim(
        "C-Flat ends at lower sharpness and flatness than plain training",
        "Figure 5 c and d.",
        ends_flatter("c_flat", ("end sharpness", "end flatness", "top eigenvalue", "trace")),
        WATCH,
        "All at the same radius, 0.05; positive is flatter than SGD.",
    ),
    "flat-turbo": Claim(
        "C-Flat Turbo ends at lower sharpness and flatness than plain training",
        "Figure 5 c and d: lower than with C-Flat.",
        ends_flatter("turbo", ("end sharpness", "end flatness", "top eigenvalue", "trace")),
        WATCH,
        "All at the same radius, 0.05; positive is flatter than SGD.",
    ),
    "memory": Claim(
        "The memory of cached gradients is negligible",
        "Table 7 and its discussion.",
        memory_is_small,
        "pytest tests/optim -k kept",
    ),
    "task-and-domain": Claim(
        "The gains carry over to task- and domain-incremental learning",
        "Tables 9 and 10: DUCT on DomainNet +0.5 to +0.6, DualPrompt -0.1 to +0.2 points.",
        lambda runs: better(runs.effects(OTHER, ["c_flat", "turbo"], "none")),
        MAIN + " --streams digits-task features-task digits-domain pacs",
    ),
    "first-task": Claim(
        "Tuned on the first task alone, C-Flat and Turbo are better than plain training",
        "Not in the paper. A continual learner has only seen its first task when it chooses its settings.",
        lambda runs: better(runs.effects(STREAMS, ["c_flat", "turbo"], "none", "first-task")),
        MAIN.replace(" turbo-paper", "") + " --protocol first-task --streams features-class features-task --seeds 12",
        "The same trials as on the whole stream, but the best is chosen on validation images of the first task.",
    ),
    "convergence": Claim(
        "The C-Flat gradient vanishes at the rate of the theorem",
        "Appendix: the mean squared norm of the C-Flat gradient is O((1 + log T) / sqrt(T)).",
        converges,
        "python benchmarks/convergence.py --steps 3000 --seeds 2 --out C",
    ),
    "plateau": Claim(
        "Flatness widens the range of learning rates that work",
        "Not in the paper: a hypothesis of ours, since a continual learner cannot tune on tasks to come.",
        plateau,
        FRONT + " --streams digits-class features-class features-task --rows none c_flat turbo --robustness --trials 6"
        " --tuning-seeds 3 --seeds 5",
    ),
}


# -- pages ------------------------------------------------------------------------------------------------------


def page(claim: Claim, finding: Finding) -> str:
    lines = [f"# {claim.title}", "", f"**Verdict: {finding.verdict}.** {finding.reason}", ""]
    lines += [f"The paper: {claim.says}", ""]
    if claim.note:
        lines += [f"Our setting: {claim.note}", ""]
    lines += [
        "Learning rate and radius were tuned for each optimizer with the same budget on validation images (settings",
        "and trials are in [the front](../front/front.md), whose column 'trials x seeds' has a stream's `--trials` and",
        "`--tuning-seeds` where they differ from the command's); accuracies are those of test images, paired by seed.",
        "",
    ]
    if finding.rows:
        lines += ["| " + " | ".join(finding.columns) + " |", "|---" * len(finding.columns) + "|"]
        lines += ["| " + " | ".join(row) + " |" for row in finding.rows]
        lines.append("")
    lines += ["```", claim.command, "python benchmarks/claims.py", "```", ""]
    lines.append("Written by `benchmarks/claims.py`, whose head says how a verdict is reached.")
    return "\n".join(lines) + "\n"


def overview(findings: Mapping[str, Finding], streams: Iterable[str]) -> str:
    counts = {verdict: sum(f.verdict == verdict for f in findings.values()) for verdict in (HOLDS, FAILS, UNTESTED)}
    lines = ["# The paper's claims, one by one", ""]
    lines += [
        f"Of {len(findings)} claims {counts[HOLDS]} hold here, {counts[FAILS]} do not, and {counts[UNTESTED]} cannot "
        "be decided. Small networks and few images on two CPU cores: a verdict is about these settings.",
        "",
    ]
    lines += ["| claim | verdict | why |", "|---|---|---|"]
    lines += [f"| [{CLAIMS[name].title}]({name}.md) | {f.verdict} | {f.reason} |" for name, f in findings.items()]
    lines += ["", "![what C-Flat and Turbo gain over tuned plain training, stream by stream](gains.png)", ""]
    lines += [f"- `{name}`: {STREAMS[name].title}" for name in STREAMS if name in streams]
    lines += ["", "Written by `benchmarks/claims.py` from finished runs; its head says how a verdict is reached."]
    return "\n".join(lines) + "\n"


def draw(runs: Runs, path: Path) -> None:
    """Draw what C-Flat and Turbo gain over plain training, stream by stream."""
    from matplotlib.figure import Figure

    streams = [name for name in STREAMS if runs.effect(name, "turbo", "none")]
    figure = Figure(figsize=(10, 1.2 + 0.55 * len(streams)), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, metric in zip(panels, ("avg", "last"), strict=True):
        axes.axvline(0, color="#999999", linewidth=0.8)
        for place, stream in enumerate(streams):
            for shift, row in ((-0.15, "turbo"), (0.15, "c_flat")):
                effect = runs.effect(stream, row, "none", metric)
                if effect is not None and not math.isnan(effect.half):
                    color = OPTIMIZERS[ROWS[row].optimizer["name"]][1]
                    axes.errorbar(effect.mean, place + shift, xerr=effect.half, fmt="o", color=color, capsize=2)
        axes.set_title({"avg": "Avg", "last": "Last"}[metric] + ": difference to tuned SGD, points (95 %)", fontsize=9)
        axes.set_yticks(range(len(streams)), streams)
        axes.invert_yaxis() if metric == "avg" else None
    for row in ("turbo", "c_flat"):
        panels[0].plot([], [], "o", color=OPTIMIZERS[ROWS[row].optimizer["name"]][1], label=ROWS[row].title)
    panels[0].legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    docs = Path(__file__).parents[1] / "docs"
    parser.add_argument(
        "--ledger", type=Path, default=docs / "results" / "front" / LEDGER, help="of benchmarks/front.py"
    )
    parser.add_argument(
        "--convergence", type=Path, default=docs / "figures" / "convergence.json", help="of benchmarks/convergence.py"
    )
    parser.add_argument("--only", nargs="+", choices=list(CLAIMS), default=list(CLAIMS))
    parser.add_argument("--pages", type=Path, default=docs / "results" / "claims")
    arguments = parser.parse_args()
    runs = Runs(read(arguments.ledger), read(arguments.convergence))
    arguments.pages.mkdir(parents=True, exist_ok=True)
    findings = {name: CLAIMS[name].judge(runs) for name in arguments.only}
    for name, finding in findings.items():
        write_atomic(arguments.pages / f"{name}.md", page(CLAIMS[name], finding))
        print(f"{CLAIMS[name].title}: {finding.verdict}. {finding.reason}")
    if set(arguments.only) == set(CLAIMS):
        write_atomic(arguments.pages / "index.md", overview(findings, runs.streams))
        draw(runs, arguments.pages / "gains.png")
        verdicts = {name: {"verdict": f.verdict, "reason": f.reason} for name, f in findings.items()}
        write_json(arguments.pages / "verdicts.json", verdicts)


if __name__ == "__main__":
    main()
