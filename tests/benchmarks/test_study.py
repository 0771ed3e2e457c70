"""The study on synthetic ledgers: known effects come out, in both directions alike, and nothing comes out too early."""

from __future__ import annotations

import math
import random
import sys
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import ttest_1samp, ttest_rel

sys.path.append(str(Path(__file__).resolve().parents[2]))

from benchmarks.study import analysis, configs, ledger, pages, post_hoc, repeat, runs, worker
from benchmarks.study.analysis import NOT_YET, UNDECIDED, Effect, decide_family, holm_levels, random_effects
from benchmarks.study.configs import Key, Places, Run
from benchmarks.study.definition import (
    AT_EQUAL_COMPUTE,
    BLOCKS,
    CLAIMS,
    CONTRASTS,
    CONTROLS,
    EQUAL_COMPUTE,
    FIRST_FINAL,
    PAPER_CONTRASTS,
    ROWS,
    STREAMS,
    TUNED_BLOCKS,
    Contrast,
    replicate_layer,
)
from benchmarks.study.ledger import Ledger, LedgerError, Line
from benchmarks.study.tuning import Place, Settings, choose, extra_places, places, settings_at, trials_of

from cflat.train import TrainingInterrupted

PLACES = Places(Path("/features"), Path("/data"), Path("/weights.safetensors"))
MACHINE = "a processor, torch 2"


def line(stream: str, row: str, replicate: int, stage: str = "final", trial: int = -1, **values) -> Line:
    block = next(name for name, own in BLOCKS.items() if stream in own.streams)
    defaults = {
        "lr": 0.01, "rho": None, "definition": "d", "commit": "c", "code": "s", "machine": MACHINE,
        "finished": "2026-11-18T03:00:00Z", "avg": 0.5, "last": 0.4, "forgetting": 0.1, "stages": [0.6, 0.4],
        "end_loss": 0.01, "late_loss": 0.02, "steps": 100, "evaluations": round(100 * ROWS[row].cost),
        "nonfinite_steps": 0, "seconds": ROWS[row].cost,
    }  # fmt: skip
    return Line(block=block, stream=stream, row=row, replicate=replicate, stage=stage, trial=trial, **defaults | values)


def finals(effects: dict[str, float], blocks=TUNED_BLOCKS, noise: float = 0.5, seed: int = 0, **values) -> list[Line]:
    """Return all final runs of some blocks; rows differ from the others by so many points."""
    rng = random.Random(seed)
    made = []
    for name in blocks:
        for stream in BLOCKS[name].streams:
            for replicate in BLOCKS[name].finals:
                level = rng.gauss(60, 5)
                for row in BLOCKS[name].rows:
                    avg = (level + effects.get(row, 0.0) + rng.gauss(0, noise)) / 100
                    made.append(line(stream, row, replicate, avg=avg, **values))
    return spread_losses(made)


def spread_losses(lines: list[Line]) -> list[Line]:
    """Give rows end losses that have nothing to do with their accuracy: half of each kind up, half down."""
    found = []
    for stream in dict.fromkeys(one.stream for one in lines):
        own = [one for one in lines if one.stream == stream]
        means = analysis.row_means(analysis.final_runs(own, stream), "avg")
        ranked = sorted(means, key=lambda row: means[row])
        losses = {row: 0.01 + 0.001 * (place % 2) + 0.0001 * abs(place - 3) for place, row in enumerate(ranked)}
        found += [replace(one, end_loss=losses[one.row]) for one in own]
    return found


# -- the definition ---------------------------------------------------------------------------------------------


def test_what_was_frozen_has_not_changed() -> None:
    record = ledger.frozen()
    if record is None:
        pytest.skip("the study is not frozen yet")
    assert ledger.definition_hash() == record["hash"]


def test_the_ledger_holds_nothing_but_the_study() -> None:
    record = ledger.frozen()
    lines = ledger.read()
    assert not lines or record is not None
    assert list(ledger.check(lines, ledger.definition_hash(), record and record["time"])) == []


def test_every_block_has_the_controls_and_sgd_at_equal_compute() -> None:
    for name in TUNED_BLOCKS:
        assert set(CONTROLS) | set(EQUAL_COMPUTE) <= set(BLOCKS[name].rows)
    for block in BLOCKS.values():
        for row in block.rows:
            partner = AT_EQUAL_COMPUTE.get(row)
            assert partner is None or abs(ROWS[partner].cost - ROWS[row].cost) <= 0.2


def test_budgets_are_those_that_were_decided() -> None:
    assert (BLOCKS["A"].trials, BLOCKS["A"].tuning_replicates, BLOCKS["A"].final_replicates) == (8, 3, 24)
    assert all((BLOCKS[name].trials, BLOCKS[name].tuning_replicates) == (4, 2) for name in "BC")
    assert (BLOCKS["B"].final_replicates, BLOCKS["C"].final_replicates, BLOCKS["P"].final_replicates) == (16, 8, 3)
    assert (len(CONTRASTS), len(PAPER_CONTRASTS)) == (8, 8)


@pytest.mark.parametrize("name", TUNED_BLOCKS)
def test_a_replicate_is_an_order_images_and_a_seed_and_final_ones_are_others(name: str) -> None:
    block = BLOCKS[name]
    assert not set(range(block.tuning_replicates)) & set(block.finals)
    for stream, own in block.streams.items():
        settings = settings_at(places(block.trials)[0], own, ROWS["sgd"])
        made = [
            configs.config_of(Run(Key(stream, "sgd", number, "final"), settings), PLACES) for number in block.finals
        ]
        assert len({config.seed for config in made}) == block.final_replicates
        assert len({config.data.subsample_seed for config in made}) == block.final_replicates
        orders = {(config.stream.order_seed, config.stream.task_order_seed) for config in made}
        assert len(orders) == block.final_replicates


@pytest.mark.parametrize("name", TUNED_BLOCKS)
def test_every_run_has_a_configuration_and_trials_never_see_test_images(name: str) -> None:
    block = BLOCKS[name]
    for stream, own in block.streams.items():
        for row in block.rows:
            settings = settings_at(places(block.trials)[-1], own, ROWS[row])
            trial = configs.config_of(Run(Key(stream, row, 0, "tune", 0), settings), PLACES)
            final = configs.config_of(Run(Key(stream, row, FIRST_FINAL, "final"), settings), PLACES)
            assert (trial.data.evaluate, final.data.evaluate) == ("validation", "test")
            assert trial.data.validation > 0
            assert final.base.lr == trial.base.lr == settings.lr
            assert final.optimizer.keywords().get("rho") == settings.rho
            assert final.train.epochs == round(own.layer["train"]["epochs"] * ROWS[row].epochs)
            assert (final.runtime.threads, final.runtime.accelerator) == (1, "cpu")


def test_block_p_is_what_reproduce_runs(shared: Path) -> None:
    here = Places(None, shared / "data", next((shared / "weights").iterdir()))
    for stream in BLOCKS["P"].streams:
        made = {row: configs.config_of(Run(Key(stream, row, 100, "final"), None), here) for row in BLOCKS["P"].rows}
        plain = made["plain"]
        assert plain.preset == "paper"
        assert plain.seed == 100
        assert [made[row].base.lr / plain.base.lr for row in ("plain_rate_x2", "plain_rate_x4")] == [2, 4]
        assert made["turbo"].optimizer.keywords()["reading"] == "printed"
        assert all(config.train == plain.train for config in made.values())
        other = configs.config_of(Run(Key(stream, "plain", 101, "final"), None), here)
        assert other.stream != plain.stream


def test_claims_are_about_the_papers_optimizers() -> None:
    compared = {row for claim in CLAIMS for contrast in claim.contrasts for row in (contrast.row, contrast.reference)}
    assert compared == {"c_flat", "turbo", "sgd", "plain", "sam", "looksam"}
    assert ROWS["turbo"].optimizer == {"name": "c_flat_turbo", "reading": "printed"}
    for claim in CLAIMS:
        for contrast in claim.contrasts:
            assert analysis.streams_of(contrast, claim.blocks, claim.scenarios)


def test_images_and_orders_differ_between_replicates() -> None:
    layers = [replicate_layer(number, "class") for number in (0, 1, 100)]
    assert len({layer["stream"]["order_seed"] for layer in layers}) == 3
    assert set(replicate_layer(0, "domain")["stream"]) == {"task_order_seed"}


# -- tuning -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [4, 8])
def test_trials_have_every_rate_and_every_radius_once(count: int) -> None:
    found = places(count)
    for values in ([place.rate for place in found], [place.radius for place in found]):
        ordered = sorted(values)
        assert len(set(values)) == count
        assert (ordered[0] + ordered[-1]) == pytest.approx(1)
        assert all(high - low == pytest.approx(1 / count) for low, high in pairwise(ordered))


def test_rates_are_log_uniform_within_the_range() -> None:
    stream = STREAMS["digits-few"]
    rates = [settings_at(place, stream, ROWS["sgd"]).lr for place in places(8)]
    steps = [math.log(b / a) for a, b in pairwise(rates)]
    assert steps == pytest.approx([math.log(stream.rates[1] / stream.rates[0]) / 8] * 7, rel=0.02)
    assert stream.rates[0] < rates[0] < rates[-1] < stream.rates[1]


def scores_peaking_at(trial: int, count: int = 8, replicates: int = 3) -> dict[int, list[float]]:
    return {number: [0.9 if number == trial else 0.5] * replicates for number in range(count)}


@pytest.mark.parametrize(("trial", "sign"), [(0, -1), (7, 1)])
def test_an_edge_brings_two_more_trials_beyond_it(trial: int, sign: int) -> None:
    row, first = ROWS["sgd"], places(8)
    needed = trials_of(scores_peaking_at(trial), row, 8, 3)
    assert needed[:8] == first
    assert [place.rate for place in needed[8:]] == pytest.approx([first[trial].rate + sign * 0.2 * n for n in (1, 2)])
    assert len(trials_of(scores_peaking_at(3), row, 8, 3)) == 8


def test_the_radius_has_edges_too_but_only_for_rows_that_have_one() -> None:
    first = places(8)
    trial = next(number for number, place in enumerate(first) if place.radius == max(p.radius for p in first))
    assert 0 < trial < 7
    scores = scores_peaking_at(trial)
    assert len(trials_of(scores, ROWS["sgd"], 8, 3)) == 8
    extra = trials_of(scores, ROWS["c_flat"], 8, 3)[8:]
    assert [place.rate for place in extra] == [first[trial].rate] * 2
    assert [place.radius for place in extra] == pytest.approx([first[trial].radius + 0.2, first[trial].radius + 0.4])


def test_the_edge_rule_is_the_same_for_every_row() -> None:
    # The highest rate has no extreme radius.
    found = {tuple(place.rate for place in trials_of(scores_peaking_at(7), row, 8, 3)) for row in ROWS.values()}
    assert len(found) == 1


def test_a_choice_waits_for_all_trials_and_says_whether_it_lies_at_an_edge() -> None:
    stream, row = STREAMS["digits-few"], ROWS["sgd"]
    scores = scores_peaking_at(7)
    assert choose(scores, stream, row, 8, 3) is None  # two more are needed
    inside = choose({**scores, 8: [0.8] * 3, 9: [0.1] * 3}, stream, row, 8, 3)
    assert inside is not None
    assert (inside.trial, inside.is_at_edge) == (7, False)
    beyond = choose({**scores, 8: [0.91] * 3, 9: [0.95] * 3}, stream, row, 8, 3)
    assert beyond is not None
    assert (beyond.trial, beyond.is_at_edge) == (9, True)
    assert beyond.settings.lr > stream.rates[1]
    assert choose({**scores_peaking_at(3), 5: [0.9] * 2}, stream, row, 8, 3) is None


def test_a_place_inside_brings_nothing() -> None:
    assert extra_places(Place(0.5, 0.5), [Place(0.1, 0.1), Place(0.9, 0.9), Place(0.5, 0.5)], True) == []


# -- statistics -------------------------------------------------------------------------------------------------


def test_the_effect_of_a_stream_is_the_paired_t_test() -> None:
    rng = np.random.default_rng(0)
    first, second = rng.normal(60, 5, 24), rng.normal(61, 5, 24)
    effect = analysis.stream_effect(list(first - second))
    expected = ttest_rel(first, second)
    assert effect is not None
    assert effect.p == pytest.approx(expected.pvalue)
    interval = expected.confidence_interval()
    assert effect.interval() == pytest.approx((interval.low, interval.high))


def test_random_effects_with_large_spread_are_a_t_test_over_streams() -> None:
    means = [3.0, -2.0, 8.0, 1.0, -5.0]
    effect = random_effects([Effect(mean, 1e-3, 23, 24) for mean in means])
    assert effect is not None
    assert effect.mean == pytest.approx(np.mean(means), rel=1e-4)
    assert effect.p == pytest.approx(ttest_1samp(means, 0).pvalue, rel=1e-3)


def test_random_effects_without_spread_weigh_by_precision_and_are_not_too_sure() -> None:
    effects = [Effect(1.0, 0.1, 23, 24), Effect(1.0, 1.0, 23, 24), Effect(1.0, 1.0, 23, 24)]
    effect = random_effects(effects)
    assert effect is not None
    assert effect.error == pytest.approx(1 / math.sqrt(100 + 1 + 1))  # equal means must not shrink it to 0
    assert random_effects(effects[:1]) is None


def test_intervals_of_random_effects_cover_the_truth() -> None:
    rng = np.random.default_rng(1)
    covered = 0
    for _ in range(300):
        truths = rng.normal(0.7, 1.0, 8)
        effects = [Effect(float(rng.normal(truth, 0.5)), 0.5, 23, 24) for truth in truths]
        low, high = random_effects(effects).interval()  # type: ignore[union-attr]
        covered += low <= 0.7 <= high
    assert covered / 300 == pytest.approx(0.95, abs=0.03)


def test_holm_stops_at_the_first_that_is_kept() -> None:
    assert [rejected for _, rejected in holm_levels([0.001, 0.02, 0.03, 0.6])] == [True, False, False, False]
    assert [rejected for _, rejected in holm_levels([0.001, 0.012, 0.02, 0.6])] == [True, True, True, False]
    assert [level for level, _ in holm_levels([0.5, 0.1])] == [0.05, 0.025]


# -- verdicts ---------------------------------------------------------------------------------------------------


def test_known_effects_are_recovered() -> None:
    lines = finals({"c_flat": 2.0, "turbo": 2.0, "qhm_average": 1.0})
    found = {(c.row, c.reference): v for c, v in analysis.verdicts(lines, CONTRASTS, TUNED_BLOCKS).items()}
    assert found["c_flat", "sgd"].text == "better"
    assert found["c_flat", "sgd"].effect.mean == pytest.approx(2.0, abs=0.2)  # type: ignore[union-attr]
    assert found["turbo", "c_flat"].text == "level"
    assert found["forecast", "c_flat"].text == "worse"
    assert found["qhm_average", "sgd"].text == "better"
    assert found["c_flat_qhm_average", "qhm_average"].text == "worse"


@pytest.mark.parametrize("size", [0.0, 0.3, 0.8, 3.0])
@pytest.mark.parametrize("noise", [0.2, 3.0])
def test_both_directions_are_judged_alike(size: float, noise: float) -> None:
    mirrored = {"better": "worse", "worse": "better", "as good": "no better", "no better": "as good"}
    lines = finals({"c_flat": size}, noise=noise)
    there = analysis.verdicts(lines, [Contrast("c_flat", "sgd")], TUNED_BLOCKS)
    back = analysis.verdicts(lines, [Contrast("sgd", "c_flat")], TUNED_BLOCKS)
    (one,), (other,) = there.values(), back.values()
    assert other.text == mirrored.get(one.text, one.text)


def test_nothing_is_found_where_there_is_nothing() -> None:
    wrong = Counter()
    for seed in range(20):
        lines = finals({}, blocks=("A",), noise=2.0, seed=seed)
        texts = [verdict.text for verdict in analysis.verdicts(lines, CONTRASTS, ("A",)).values()]
        wrong[any(text in ("better", "worse") for text in texts)] += 1
    assert wrong[True] <= 4  # 5 % of 20 in the mean


def test_a_stream_that_contradicts_prevents_a_verdict() -> None:
    agreeing = [Effect(2.0 + 0.01 * number, 0.3, 23, 24) for number in range(8)]
    contradicting = Effect(-2.0, 0.3, 23, 24)
    pooled = Effect(2.0, 0.1, 7, 8)
    assert analysis.decide(pooled, agreeing, 0.05, True) == "better"
    assert analysis.decide(pooled, [*agreeing, contradicting], 0.05, True) != "better"
    torn = [Effect(sign * 0.1, 1.0, 23, 24) for sign in (1, 1, 1, -1, -1, -1)]
    assert analysis.decide(pooled, torn, 0.05, True) != "better"  # no two thirds


def test_a_missing_replicate_leaves_a_contrast_undecided_and_no_other() -> None:
    lines = finals({"c_flat": 2.0})
    missing = Key("cub-task", "c_flat", 110, "final")
    found = analysis.verdicts([one for one in lines if one.key != missing], CONTRASTS, TUNED_BLOCKS)
    texts = {(contrast.row, contrast.reference): verdict.text for contrast, verdict in found.items()}
    assert texts["c_flat", "sgd"] == texts["turbo", "c_flat"] == NOT_YET
    assert NOT_YET not in (texts["qhm_average", "sgd"], texts["turbo", "sgd"])


def test_a_verdict_that_was_given_stays_when_the_rest_arrives() -> None:
    rng = random.Random(3)
    for _ in range(200):
        family = []
        for _ in range(8):
            truth = rng.choice((0.0, 0.5, 1.5))
            effects = {str(number): Effect(rng.gauss(truth, 1.0), 0.4, 23, 24) for number in range(8)}
            family.append(analysis.Evidence(effects, (), True))
        early = [replace(one, is_complete=rng.random() < 0.5) for one in family]
        for before, after in zip(decide_family(early), decide_family(family), strict=True):
            if before.text in ("better", "worse"):
                assert after.text == before.text


def test_a_speed_limited_stream_decides_nothing_about_flatness() -> None:
    lines = finals({"c_flat": 2.0, "qhm_average": 2.0}, blocks=("A",))
    limited = ("digits-few", "cub-task")
    ordered = [replace(one, end_loss=1 - one.avg) if one.stream in limited else one for one in lines]
    found = analysis.verdicts(ordered, CONTRASTS, ("A",))
    for contrast, verdict in found.items():
        assert verdict.left_out == (limited if contrast.is_about_flatness else ())
        assert len(verdict.streams) == 8
        assert verdict.effect is not None
        assert verdict.effect.n == (6 if contrast.is_about_flatness else 8)


def test_pairs_are_formed_within_one_kind_of_machine() -> None:
    here = [line("digits-few", row, 100, avg=0.5) for row in ("sgd", "c_flat")]
    there = [line("digits-few", row, 100, avg=0.9, machine="another") for row in ("sgd", "c_flat", "sam")]
    found = analysis.final_runs([*here, *there], "digits-few")
    assert {one.machine for one in found[100].values()} == {"another"}
    assert len(found[100]) == 3


def test_convergence_and_correlation() -> None:
    assert analysis.is_converged(0.01, 0.5)
    assert analysis.is_converged(0.3, 0.31)
    assert not analysis.is_converged(0.3, 0.5)
    assert analysis.rank_correlation([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1)
    assert math.isnan(analysis.rank_correlation([1, 2, 3], [1, 2, 3]))
    assert analysis.is_speed_limited(-0.7)
    assert not analysis.is_speed_limited(math.nan)


def test_claims_follow_from_verdicts() -> None:
    claims = {claim.name: claim for claim in CLAIMS}
    lines = finals({"c_flat": 2.0, "turbo": 2.0})
    judged = {name: analysis.judge_claim(lines, claim)[0] for name, claim in claims.items()}
    assert judged["c-flat-gains"] == judged["turbo-gains"] == judged["turbo-as-good"] == analysis.HOLDS
    assert judged["turbo-speed"] == analysis.HOLDS  # 4 over 1.4 evaluations
    assert judged["task-and-domain"] == analysis.HOLDS
    assert judged["paper-protocol"] == judged["turbo-sam"] == NOT_YET
    slow = [replace(one, evaluations=300) if one.row == "turbo" else one for one in lines]
    assert analysis.judge_claim(slow, claims["turbo-speed"])[0] == analysis.FAILS
    assert analysis.judge_claim(finals({}), claims["turbo-gains"])[0] == analysis.FAILS  # level
    assert analysis.judge_claim(finals({}, noise=20.0), claims["turbo-gains"])[0] == UNDECIDED


# -- the ledger and what is left --------------------------------------------------------------------------------


def test_lines_come_back_as_they_were(tmp_path: Path) -> None:
    made = [line("digits-few", "sgd", 100), line("cub-task", "c_flat", 101, rho=0.1, end_loss=math.inf)]
    for one in made:
        ledger.append(one, tmp_path)
    assert sorted(ledger.read(tmp_path), key=lambda one: one.replicate) == made
    assert {path.name for path in tmp_path.iterdir()} == {"A-digits-few.jsonl", "A-cub-task.jsonl"}
    (tmp_path / "A-digits-few.jsonl").write_text('{"block": "A"\n')
    with pytest.raises(LedgerError, match=r"A-digits-few.jsonl, line 1"):
        ledger.read(tmp_path)


def tuned(name: str) -> list[Line]:
    """Return all trials of a block; in the middle of the range is the best, where there is a middle."""
    block = BLOCKS[name]
    made = []
    for stream, own in block.streams.items():
        for row in block.rows:
            for trial, place in enumerate(places(block.trials)):
                settings = settings_at(place, own, ROWS[row])
                values = {"avg": 0.9 if trial == 3 else 0.5, "lr": settings.lr, "rho": settings.rho}
                made += [
                    line(stream, row, number, "tune", trial, **values) for number in range(block.tuning_replicates)
                ]
    return made


def test_a_whole_block_is_run_replicate_by_replicate_and_passes_its_check() -> None:
    block, lines, order = BLOCKS["A"], [], []
    while left := list(worker.pending("A", lines, MACHINE)):
        for run in left:
            avg = 0.9 - abs(run.key.trial - 3) / 10 if run.key.stage == "tune" else 0.5
            settings = run.settings
            assert settings is not None
            lines.append(line(**run.key._asdict(), avg=avg, lr=settings.lr, rho=settings.rho))
            order.append(run.key)
    assert list(ledger.check(lines, "d")) == []
    tuning = [key for key in order if key.stage == "tune"]
    final = [key for key in order if key.stage == "final"]
    assert len(set(order)) == len(order)
    assert order == tuning + final
    assert len(tuning) >= len(block.streams) * len(block.rows) * 24
    assert len(final) == len(block.streams) * len(block.rows) * 24
    assert [key.replicate for key in final] == sorted(key.replicate for key in final)
    size = len(block.rows)
    for start in range(0, len(final), size):
        part = final[start : start + size]
        assert {(key.stream, key.replicate) for key in part} == {(part[0].stream, part[0].replicate)}
        assert [key.row for key in part] == list(block.rows)


def test_workers_share_the_runs() -> None:
    left = [run.key for run in worker.pending("A", [], MACHINE)]
    parts = [[key for key in left if worker.is_mine(key, number, 3)] for number in range(3)]
    assert sorted(key for part in parts for key in part) == sorted(left)
    assert min(map(len, parts)) > len(left) / 4


def test_a_replicate_that_another_machine_began_is_run_as_a_whole() -> None:
    lines = tuned("A")
    wanted = [run.key for run in worker.pending("A", lines, MACHINE) if run.key.stage == "final"]
    stream = wanted[0].stream
    begun = [line(stream, row, 100, machine="another") for row in BLOCKS["A"].rows[:3]]
    again = [run.key for run in worker.pending("A", lines + begun, MACHINE) if run.key.stage == "final"]
    assert again == wanted
    whole = [line(stream, row, 100, machine="another") for row in BLOCKS["A"].rows]
    left = [run.key for run in worker.pending("A", lines + whole, MACHINE) if run.key.stage == "final"]
    assert left == [key for key in wanted if (key.stream, key.replicate) != (stream, 100)]


def test_block_p_needs_no_tuning() -> None:
    left = list(worker.pending("P", [], MACHINE))
    assert len(left) == 3 * 7 * 3
    assert all(run.settings is None and run.key.stage == "final" for run in left)
    assert worker.time_left("P", [], MACHINE) is None
    lines = [line(stream, "plain", 100, seconds=100.0) for stream in BLOCKS["P"].streams]
    costs = sum(ROWS[row].cost for row in BLOCKS["P"].rows)
    assert worker.time_left("P", lines, MACHINE) == pytest.approx(100 * (9 * costs - 3))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"definition": "other"}, "made with definition other"),
        ({"replicate": 99}, "no such replicate"),
        ({"row": "looksam"}, "not part of the study"),
        ({"lr": 0.5}, "expected Settings"),
        ({"finished": "2026-11-18T01:00:00Z"}, "before the freeze"),
        ({"code": "other"}, "2 versions of src/cflat"),
    ],
)
def test_the_check_finds_what_the_study_does_not_allow(change: dict[str, object], complaint: str) -> None:
    lines = tuned("A")
    settings = Ledger(lines).choice("digits-few", "sgd").settings
    good = line("digits-few", "sgd", 100, lr=settings.lr, rho=settings.rho)
    arguments = ("d", "2026-11-18T02:00:00Z")
    assert list(ledger.check([*lines, good], *arguments)) == []
    found = list(ledger.check([*lines, replace(good, **change)], *arguments))
    assert any(complaint in text for text in found)
    assert any("run twice" in text for text in ledger.check([*lines, good, good], *arguments))


def test_no_final_run_before_the_freeze(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "frozen", lambda: None)
    run = Run(Key("digits-few", "sgd", 100, "final"), Settings(0.01))
    with pytest.raises(Exception, match="frozen definition"):
        worker.require_ready(run, PLACES)
    with pytest.raises(Exception, match=r"needs cub200.npz"):
        worker.require_ready(Run(Key("cub-task", "sgd", 0, "tune", 0), Settings(0.01)), PLACES)


def test_a_run_is_repeated_bit_for_bit(tmp_path: Path) -> None:
    order = worker.Order("A", Places(), tmp_path, minutes=0.0)
    assert worker.work(order, tell=lambda text: None) == 0
    trial = settings_at(places(8)[3], STREAMS["digits-few"], ROWS["sgd"])
    made = runs.perform(Run(Key("digits-few", "sgd", 0, "tune", 3), trial), Places())
    assert 0.5 < made.avg <= 1
    assert (made.block, made.lr, made.rho) == ("A", trial.lr, None)
    assert made.end_loss < 0.2
    assert made.evaluations == made.steps == 600
    ledger.append(made, tmp_path)
    assert repeat.repeat_runs(tmp_path, Places(), 1)
    ledger.append(replace(made, avg=made.avg + 0.01, row="nesterov", seconds=0.0), tmp_path)
    assert not repeat.repeat_runs(tmp_path, Places(), 1)


@pytest.mark.parametrize("killed", ["in its training", "before its line was written"])
def test_a_run_that_was_killed_gives_the_line_of_one_that_was_not(killed: str, tmp_path: Path) -> None:
    run = Run(Key("digits-few", "c_flat", 0, "tune", 0), Settings(0.02, 0.05))
    folder = runs.scratch_folder(tmp_path, run.key)
    if killed == "in its training":
        answers = iter([False] * 250 + [True])
        with pytest.raises(TrainingInterrupted):
            runs.perform(run, Places(), tmp_path, lambda: next(answers))
        assert not (folder / "summary.json").exists()
    else:
        runs.perform(run, Places(), tmp_path)
        assert (folder / "summary.json").exists()
    neutral = {"seconds": 0.0, "finished": ""}
    again, alone = (replace(runs.perform(run, Places(), scratch), **neutral) for scratch in (tmp_path, None))
    assert again == alone
    assert math.isfinite(again.end_loss)


# -- pages ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["empty", "tuning", "partial", "complete"])
def test_pages_are_written_from_any_ledger(kind: str, tmp_path: Path) -> None:
    lines: list[Line] = []
    if kind != "empty":
        lines = [one for name in TUNED_BLOCKS for one in tuned(name)]
    if kind in ("partial", "complete"):
        lines += finals({"c_flat": 2.0, "turbo": 2.0}, blocks=tuple(BLOCKS), update_norm=0.1, first_update_norm=0.2)
    if kind == "partial":
        lines = [one for one in lines if one.replicate < 102]
    pages.write_pages(lines, tmp_path)
    index = (tmp_path / "study" / "index.md").read_text()
    readme = (tmp_path / "study" / "fragment.md").read_text()
    claims = {path.name: path.read_text() for path in (tmp_path / "claims").glob("*.md")}
    assert set(claims) == {"index.md", *(f"{claim.name}.md" for claim in CLAIMS)}
    if kind == "complete":
        assert NOT_YET not in index.split("- **better**")[0]
        assert "| better |" in index
        assert "Holds here" in claims["turbo-gains.md"]
        assert "not yet" not in readme.lower()
        assert "Blocks: A, B, C, P complete." in index
    else:
        assert "| better |" not in index
        assert "Holds here" not in claims["turbo-gains.md"]
        assert "decided yet" in readme
        assert "not yet (" not in readme  # no table of empty cells
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.*")}
    pages.write_pages(list(reversed(lines)), tmp_path)  # the order of lines is no matter
    assert {path: path.read_bytes() for path in before} == before


def test_numbers_of_speed_limited_streams_are_labelled_in_the_readme_and_decide_no_claim(tmp_path: Path) -> None:
    lines = finals({"c_flat": 2.0}, blocks=("A", "B"))
    ordered = [replace(one, end_loss=1 - one.avg) if one.block == "B" else one for one in lines]
    pages.write_pages(ordered, tmp_path)
    readme = (tmp_path / "study" / "fragment.md").read_text()
    assert "| *of these streams, speed-limited* |  | 0 of 8 | 2 of 2 |" in readme
    assert "in block A alone; C is not complete" in readme
    scratch = (tmp_path / "claims" / "scratch.md").read_text()
    assert "Undecided here" in scratch
    assert scratch.count("so none decides") == 2
    assert "so none decides" not in (tmp_path / "claims" / "task-and-domain.md").read_text()


def test_a_stream_is_not_labelled_before_every_row_is_there() -> None:
    lines = finals({"sam": 1.0}, blocks=("P",))
    assert "waits for the other rows" not in pages.block_page("P", lines)
    begun = [one for one in lines if one.row in ("plain", "sam", "c_flat")]
    assert pages.block_page("P", begun).count("over rows: waits for the other rows.") == len(BLOCKS["P"].streams)


def test_figures_are_drawn_where_there_is_something_to_draw(tmp_path: Path) -> None:
    lines = [one for one in finals({"c_flat": 2.0}) if one.stream in ("digits-few", "cub-task")]
    pages.write_pages(lines, tmp_path)
    pages.write_figures(lines, tmp_path)
    drawn = {path.stem for path in tmp_path.rglob("*.svg")}
    assert drawn == {"contrasts", *(claim.name for claim in CLAIMS if set(claim.blocks) == set(TUNED_BLOCKS))}
    for path in tmp_path.rglob("*.svg"):
        assert path.stem == "contrasts" or f"({path.name})" in path.with_suffix(".md").read_text()


def test_the_pages_in_docs_are_those_of_the_ledger(tmp_path: Path) -> None:
    pages.write_pages(ledger.read(), tmp_path)
    for path in sorted(tmp_path.rglob("*.md")):
        assert path.read_text() == (pages.RESULTS / path.relative_to(tmp_path)).read_text(), path.name
    written = (pages.RESULTS / "study" / "post-hoc.md").read_text()
    assert written == post_hoc.page(ledger.read(), post_hoc.read_measured())


def test_what_is_looked_at_afterwards_grows_with_the_streams_that_are_complete() -> None:
    numbers = {"mean of |g|²": 12.0, "loss x 1": 0.02}
    lines = finals({"sgd_x4": 3.0, "c_flat": -1.0}, blocks=("A", "B"))
    text = post_hoc.page(lines, {"trigger": {"digits-few": numbers, "icarl": numbers}, "head": {}})
    assert text.index("| digits-few | 12 | 2.0% |") < text.index("| icarl | 12 | 2.0% |")
    assert "| memo | yes |" in text
    assert "speed-limited" not in text.split("## A row that diverged")[0]
    ordered = [replace(one, end_loss=1 - one.avg) if one.stream == "memo" else one for one in lines]
    measured = {"trigger": {"digits-few": numbers}, "head": {"duct": {"plain": {"mean of |g|": 3.0}}}}
    assert "| memo | -1.00 |" in post_hoc.page(ordered, measured)
    assert "| plain | 3 |" in post_hoc.page(ordered, measured)
    partial = [one for one in ordered if one.block == "A" or one.replicate < 110]
    assert "learned nothing" not in post_hoc.page(ordered, measured)
    assert "| memo" not in post_hoc.page(partial, measured)


def test_runs_that_learned_nothing_are_listed_with_the_difference_without_them() -> None:
    lines = finals({"c_flat": 1.0}, blocks=("A", "C"), noise=0.0)
    guessing = {"avg": 0.1, "end_loss": math.log(10)}
    lost = [("ranpac", "c_flat", 101), ("ranpac", "sgd", 102)]
    lines = [replace(one, **guessing) if (one.stream, one.row, one.replicate) in lost else one for one in lines]
    text = post_hoc.page(lines, {"trigger": {"digits-few": {"mean of |g|²": 1.0}}, "head": {}})
    assert "| ranpac | SGD | 0.01 | 1 of 8 | - | - |" in text
    (row,) = (one for one in text.splitlines() if one.startswith("| ranpac | C-Flat | 0.01 | 1 of 8 |"))
    assert "| +1.00 [" not in row.rsplit("|", 2)[0], "all replicates"
    assert row.rsplit("|", 2)[1].strip().startswith("+1.00 ["), "those in which both learned"
    assert "| aper" not in text.split("## Runs of block C that learned nothing")[1]


def test_the_printed_trigger_depends_on_the_scale_of_the_loss_and_its_root_does_not():
    tasks = np.random.default_rng(0).exponential(2.0, (2, 200)).tolist()
    rates = [post_hoc.fired(tasks, scale) for scale in (0.1, 1.0, 10.0)]
    assert rates[0] > rates[1] > rates[2]
    assert post_hoc.fired(tasks, 0.125, is_rooted=True) == post_hoc.fired(tasks, 8.0, is_rooted=True)
