"""Everything below docs/results/study and docs/results/claims, and the README's table: from the ledger alone."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.study.analysis import (
    MEANINGS,
    NOT_YET,
    Effect,
    Finals,
    Verdict,
    differences,
    final_runs,
    is_converged,
    is_speed_limited,
    judge_claim,
    random_effects,
    row_means,
    speed_ratios,
    stream_correlation,
    stream_effect,
    streams_of,
    verdicts,
)
from benchmarks.study.definition import (
    AT_EQUAL_COMPUTE,
    BLOCK_OF,
    BLOCKS,
    CLAIMS,
    CONTRASTS,
    CONVERGED_LOSS,
    PAPER_CONTRASTS,
    ROWS,
    STREAMS,
    TUNED_BLOCKS,
    Block,
    Claim,
    Contrast,
)
from benchmarks.study.ledger import ROOT, Ledger, Line, definition_hash, frozen
from benchmarks.study.worker import unit_seconds

from cflat._files import write_atomic
from cflat.paper.exhibits import load_exhibit

RESULTS = ROOT / "docs" / "results"
README_ROWS = ("sgd", "qhm_average", "sam", "c_flat", "turbo", "forecast", "sgd_x4", "plain_rate_x4")
SHORT_TITLES = {
    "icarl": "iCaRL",
    "memo": "MEMO",
    "ranpac": "RanPAC",
    "aper": "APER",
    "ease": "EASE on CIFAR-100, the paper's settings",
    "duct": "DUCT on PACS, its authors' settings",
    "l2p": "L2P on CIFAR-100, the paper's settings",
}
"""Of the streams that the README shows one by one."""
COMMAND = "python -m benchmarks.study"


def write_pages(lines: Sequence[Line], results: Path = RESULTS) -> None:
    """Write all pages anew."""
    study, claims = results / "study", results / "claims"
    for folder in (study, claims):
        folder.mkdir(parents=True, exist_ok=True)
    write_atomic(study / "index.md", study_page(lines))
    write_atomic(study / "fragment.md", fragment(lines))
    for name in BLOCKS:
        write_atomic(study / f"block-{name.lower()}.md", block_page(name, lines))
    write_atomic(claims / "index.md", claims_page(lines))
    for claim in CLAIMS:
        write_atomic(claims / f"{claim.name}.md", claim_page(claim, lines))


def write_figures(lines: Sequence[Line], results: Path = RESULTS) -> None:
    """Draw all figures anew."""
    from benchmarks.study.figures import draw_claim, draw_contrasts

    draw_contrasts(lines, results / "study" / "contrasts.svg")
    for claim in CLAIMS:
        draw_claim(claim, judge_claim(lines, claim)[1], results / "claims" / f"{claim.name}.svg")


# -- small parts ------------------------------------------------------------------------------------------------


def table(rows: Sequence[Sequence[object]]) -> list[str]:
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in rows]
    return [lines[0], "|" + "---|" * len(rows[0]), *lines[1:]]


def points(effect: Effect | None, level: float = 0.05) -> str:
    """Return a difference with its interval."""
    if effect is None:
        return "-"
    low, high = effect.interval(level)
    return f"{effect.mean:+.2f} [{low:+.2f}, {high:+.2f}]"


def replicates_done(lines: Sequence[Line], contrast: Contrast, streams: Sequence[str]) -> str:
    """Return how many pairs there are, of how many."""
    done = sum(len(differences(final_runs(lines, stream), contrast)) for stream in streams)
    total = sum(BLOCKS[BLOCK_OF[stream]].final_replicates for stream in streams)
    return f"{done} of {total}"


def complete_replicates(name: str, lines: Sequence[Line]) -> tuple[int, int]:
    """Return the final replicates of a block for which all rows of a stream are there, and all of them."""
    block = BLOCKS[name]
    found = [rows for stream in block.streams for rows in final_runs(lines, stream).values()]
    return sum(len(rows) == len(block.rows) for rows in found), len(block.streams) * block.final_replicates


def _document(*parts: str | Sequence[str]) -> str:
    texts = [part if isinstance(part, str) else "\n".join(part) for part in parts if part]
    return "\n\n".join(texts) + "\n"


# -- the study --------------------------------------------------------------------------------------------------


def study_page(lines: Sequence[Line]) -> str:
    record = frozen()
    when = f"on {record['time']}" if record else "not yet"
    pooled = verdicts(lines, CONTRASTS, TUNED_BLOCKS)
    small = verdicts(lines, CONTRASTS, ("A",))
    paper = verdicts(lines, PAPER_CONTRASTS, ("P",))
    return _document(
        "# The study",
        _progress_sentence(lines),
        "![differences in Avg, stream by stream, for every contrast](contrasts.svg)",
        "## Verdicts",
        "Differences of Avg in points, paired by replicate; random-effects mean over streams with its 95 % interval "
        "(Hartung-Knapp). Verdicts are reached at Holm's level over the eight contrasts, by one rule for both "
        "directions; they are given when all replicates are there, and not before.",
        _verdict_table(pooled, lines, TUNED_BLOCKS),
        "Block A alone, as a family of its own:",
        _verdict_table(small, lines, ("A",)),
        "Block P, the paper's methods with the paper's settings, as a family of its own:",
        _verdict_table(paper, lines, ("P",)),
        [f"- **{word}**: {meaning}." for word, meaning in MEANINGS.items()],
        "A stream on which the rank correlation of end loss and Avg over the rows is beyond ±0.6 measures training "
        "speed and decides no contrast about flatness.",
        "Looked at afterwards ([post hoc](post-hoc.md)): why C-Flat Turbo is so near to SGD on most streams and far "
        "below it with RanPAC and APER, on which streams C-Flat gains, which runs learned nothing, and why everything "
        "that perturbs loses with DUCT's settings.",
        "## Blocks",
        _block_table(lines),
        f"Time is CPU time of one thread beside other work, measured in this ledger ({_machines(lines)}); with a "
        "tilde, predicted from a few steps of each part.",
        "## How it was made",
        f"The definition was frozen {when} under the hash `{definition_hash()}`, before the first final run: streams, "
        "rows, ranges, replicates, configurations, analysis and claims are in `definition.py`, `configs.py`, "
        "`tuning.py` and `analysis.py` of `benchmarks/study`. A replicate is a class order (or an order of domains), a "
        "choice of images and a seed; tuning and final runs have different ones. Every row has the same trials over "
        "rate and radius, and two more beyond an edge. SGD with as many more epochs stands beside every row that costs "
        "more. Every run is one line of the ledger, in `docs/results/study/ledger/`.",
        "Sizes were chosen before the freeze so that two cores can complete the study: block C has 50 of the 200 "
        "images per class at 64 px (all of them at 112 px would take 60 hours of one thread), block B 50 images per "
        "class at 16 px, block A a network of two layers. Block P keeps the paper's protocol with all images.",
        _how_to_go_on(lines),
        _commands(),
        "## Limits",
        LIMITS,
    )


LIMITS = (
    "- Verdicts about flatness rest on seven streams of block A: networks of two layers on digits and on frozen "
    "features. iCaRL, MEMO, RanPAC, APER and DUCT were speed-limited at the sizes that two cores can run.",
    "- No trained network is larger than a ViT-Tiny at 64 px or a ResNet-8 at 16 px, and datasets are parts of the "
    "published ones: of CIFAR-100 at most 200 of 500 images per class.",
    "- Equal budgets are not equal coverage. Trials are a Latin square, so each rate is tried with one radius: with "
    "four trials (B and C), rows without a radius see four rates, rows with one see four of the many pairs. In block "
    "C rates beyond the upper edge were chosen that failed in some final replicates ([post hoc](post-hoc.md)).",
    "- RanPAC and APER train the same adapters from the same seeds and differ in what they do with the features: the "
    "two streams of block C are less independent than two streams of block A.",
    "- Random-effects intervals over few streams are wide: with seven deciding streams, one at +8 points among others "
    "near 0 leaves a contrast undecided.",
    "- A row whose loss is not finite makes the rank correlation of its stream undefined, and the frozen rule then "
    "counts the stream as not speed-limited ([post hoc](post-hoc.md)).",
    "- Cost is counted in evaluations. How long these take on a machine is in [measurements](../measurements.md).",
)


def _progress_sentence(lines: Sequence[Line]) -> str:
    counts = {name: complete_replicates(name, lines) for name in BLOCKS}
    complete = [name for name, (done, total) in counts.items() if done == total]
    parts = [f"{', '.join(complete)} complete"] if complete else []
    for name, (done, total) in counts.items():
        if name not in complete:
            tuned = sum(line.block == name and line.stage == "tune" for line in lines)
            parts.append(f"{name} {done} of {total} replicates{f', {tuned} trials' if tuned else ''}")
    return f"Blocks: {'; '.join(parts)}."


def _verdict_table(found: Mapping[Contrast, Verdict], lines: Sequence[Line], blocks: Sequence[str]) -> list[str]:
    rows: list[list[object]] = [["contrast", "Avg, points", "verdict", "streams", "replicates"]]
    for contrast, verdict in found.items():
        streams = streams_of(contrast, blocks)
        deciding = len(verdict.streams) - len(verdict.left_out)
        limited = f", {len(verdict.left_out)} speed-limited" if verdict.left_out else ""
        effect = points(verdict.effect)
        count = f"{max(deciding, 0)} of {len(streams)}{limited}"
        rows.append([contrast.title, effect, verdict.text, count, replicates_done(lines, contrast, streams)])
    return table(rows)


def _block_table(lines: Sequence[Line]) -> list[str]:
    rows: list[list[object]] = [
        ["block", "what", "streams", "rows", "trials x replicates", "final replicates", "done", "h of one thread, all"]
    ]
    for name, block in BLOCKS.items():
        done, total = complete_replicates(name, lines)
        tuning = f"{block.trials} x {block.tuning_replicates}" if block.trials else "none: the paper's settings"
        rows.append(
            [
                f"[{name}](block-{name.lower()}.md)",
                block.title,
                len(block.streams),
                len(block.rows),
                tuning,
                block.final_replicates,
                f"{done} of {total}",
                _hours_needed(name, lines),
            ]
        )
    return table(rows)


PREDICTED = {"ease": (478, 697), "l2p": (162, 1841)}
"""CPU seconds of a final run beside its evaluations, and for each evaluation per step, one thread beside other work:
from a few steps of each part (`cflat plan`)."""


def _hours_needed(name: str, lines: Sequence[Line]) -> str:
    """Return the time of a whole block: all trials but those beyond an edge, and all final runs.

    Measured in the ledger where every stream of the block has been run, else predicted and marked with a tilde.
    """
    block, measured = BLOCKS[name], unit_seconds(lines)
    runs = block.trials * block.tuning_replicates + block.final_replicates
    cost, seconds, is_measured = sum(ROWS[row].cost for row in block.rows), 0.0, True
    for stream in block.streams:
        if stream in measured:
            seconds += measured[stream] * cost * runs
        elif stream in PREDICTED:
            is_measured = False
            fixed, evaluation = PREDICTED[stream]
            seconds += (fixed * len(block.rows) + evaluation * cost) * runs
        else:
            return "-"
    return f"{'' if is_measured else '~'}{seconds / 3600:.1f}"


def _machines(lines: Sequence[Line]) -> str:
    return "; ".join(sorted({line.machine for line in lines})) or "no run yet"


def _how_to_go_on(lines: Sequence[Line]) -> str:
    commits = {name: sorted({line.commit[:10] for line in lines if line.block == name}) for name in BLOCKS}
    used = "; ".join(f"block {name} {', '.join(map('`{}`'.format, own))}" for name, own in commits.items() if own)
    return (
        "To go on with it: clone the repository at a commit that the block was run with"
        f"{f' ({used})' if used else ''}, copy the ledger of the newest version into that clone, run there what is "
        "left (any number of workers, any machine; pairs are formed within one kind), and copy the ledger back."
    )


def _commands() -> list[str]:
    return [
        "```",
        f"{COMMAND} features --data-root DATA --weights VIT_TINY   # once on a machine",
        f"{COMMAND} run A --minutes 60 --worker 0/2                # goes on where it stopped; also B, C, P",
        f"{COMMAND} status",
        f"{COMMAND} pages                                          # these pages, from the ledger alone",
        "make study-check                                                         # repeats two runs of the ledger",
        "```",
    ]


# -- one block --------------------------------------------------------------------------------------------------


def block_page(name: str, lines: Sequence[Line]) -> str:
    block = BLOCKS[name]
    done, total = complete_replicates(name, lines)
    ledger = Ledger(lines)
    parts: list[str | Sequence[str]] = [
        f"# Block {name}: {block.title}",
        f"{done} of {total} final replicates. Avg and Last in %, differences in points with 95 % intervals over "
        "replicates, not corrected; verdicts are on [the study's page](index.md). A setting with * lies at the "
        "edge of what was tried.",
    ]
    for stream in block.streams:
        parts += list(_stream_parts(stream, lines, ledger))
    return _document(*parts)


def _stream_parts(stream: str, lines: Sequence[Line], ledger: Ledger) -> Iterator[str | Sequence[str]]:
    finals = final_runs(lines, stream)
    block = BLOCKS[BLOCK_OF[stream]]
    yield f"## {stream}"
    yield f"{STREAMS[stream].title[0].upper()}{STREAMS[stream].title[1:]}."
    if finals:
        yield _condition(finals, block)
        yield _row_table(stream, finals, ledger)
        exhibit = STREAMS[stream].exhibit
        if exhibit is not None:
            yield from _paper_parts(exhibit)
    elif block.trials:
        yield f"No final run yet; {_tuning_progress(stream, lines)}"
    else:
        yield "No run yet."
    if block.trials and ledger.scores(stream, block.rows[0]):
        yield "Mean Avg of the trials on validation images, in %, by learning rate (that of SGD):"
        yield _trial_table(stream, ledger)


def _tuning_progress(stream: str, lines: Sequence[Line]) -> str:
    block = BLOCKS[BLOCK_OF[stream]]
    done = sum(line.stream == stream and line.stage == "tune" for line in lines)
    return f"{done} of at least {len(block.rows) * block.trials * block.tuning_replicates} trial runs."


def _condition(finals: Finals, block: Block) -> str:
    reference = block.reference
    means = {metric: row_means(finals, metric).get(reference, math.nan) for metric in ("end_loss", "late_loss")}
    correlation = stream_correlation(finals)
    end = "not converged"
    if is_converged(means["end_loss"], means["late_loss"]):
        # A loss far above zero may stop falling because a schedule has ended.
        end = "converged" if means["end_loss"] < CONVERGED_LOSS else "it has stopped falling, by the study's rule"
    speed = "speed-limited: decides nothing about flatness" if is_speed_limited(correlation) else "not speed-limited"
    rank = f" {correlation:+.2f}"
    if len(row_means(finals, "avg")) < len(block.rows):
        rank, speed = "", "waits for the other rows"
    elif math.isnan(correlation):
        rank, speed = "", "undefined, since a row diverged, and counted as not speed-limited"
    return (
        f"The end loss of {ROWS[reference].title} is {means['end_loss']:.3f}, {means['late_loss']:.3f} after three "
        f"quarters: {end}. Rank correlation of end loss and Avg over rows{rank}: {speed}."
    )


def _row_table(stream: str, finals: Finals, ledger: Ledger) -> list[str]:
    block = BLOCKS[BLOCK_OF[stream]]
    has_norms = BLOCK_OF[stream] == "P"
    to_reference = f"Avg to {ROWS[block.reference].title}"
    head = ["row", "rate", "radius", "Avg", "Last", to_reference, "Avg to SGD at equal compute", "evaluations"]
    head += ["end loss", *(["update / plain's", "in task 1"] if has_norms else []), "n"]
    means = {metric: row_means(finals, metric) for metric in ("avg", "last", "evaluations_per_step", "end_loss")}
    rows: list[list[object]] = [head]
    for name in block.rows:
        if name not in means["avg"]:
            continue
        partner = AT_EQUAL_COMPUTE.get(name)
        cells: list[object] = [ROWS[name].title, *_settings(stream, name, finals, ledger)]
        cells += [f"{100 * means['avg'][name]:.2f}", f"{100 * means['last'][name]:.2f}"]
        cells += [_difference(finals, name, block.reference), _difference(finals, name, partner)]
        cells += [f"{means['evaluations_per_step'][name]:.2f}", f"{means['end_loss'][name]:.3g}"]
        cells += [_norm_ratio(finals, name, "update_norm"), _norm_ratio(finals, name, "first_update_norm")] * has_norms
        rows.append([*cells, sum(name in runs for runs in finals.values())])
    return table(rows)


def _settings(stream: str, row: str, finals: Finals, ledger: Ledger) -> tuple[str, str]:
    line = next(runs[row] for runs in finals.values() if row in runs)
    choice = ledger.choice(stream, row) if BLOCKS[BLOCK_OF[stream]].trials else None
    mark = "*" if choice is not None and choice.is_at_edge else ""
    return f"{line.lr:g}{mark}", "-" if line.rho is None else f"{line.rho:g}{mark}"


def _difference(finals: Finals, row: str, reference: str | None) -> str:
    if reference is None or row == reference:
        return "-"
    return points(stream_effect(differences(finals, Contrast(row, reference))))


def _norm_ratio(finals: Finals, row: str, name: str) -> str:
    both = [(runs[row], runs["plain"]) for runs in finals.values() if {row, "plain"} <= set(runs)]
    pairs = [(getattr(own, name), getattr(plain, name)) for own, plain in both]
    ratios = [own / plain for own, plain in pairs if own and plain]
    return f"{sum(ratios) / len(ratios):.2f}" if ratios else "-"


def _trial_table(stream: str, ledger: Ledger) -> list[str]:
    block = BLOCKS[BLOCK_OF[stream]]
    rates = [settings.lr for settings in ledger.trials(stream, "sgd")[: block.trials]]
    rows: list[list[object]] = [["row", *(f"{rate:g}" for rate in rates), "beyond an edge", "chosen"]]
    for name in block.rows:
        scores = ledger.scores(stream, name)
        means = {trial: f"{100 * sum(own) / len(own):.1f}" for trial, own in scores.items()}
        extra = ", ".join(text for trial, text in sorted(means.items()) if trial >= block.trials)
        choice = ledger.choice(stream, name)
        chosen = NOT_YET if choice is None else _chosen(choice)
        rows.append([ROWS[name].title, *(means.get(t, "-") for t in range(block.trials)), extra or "-", chosen])
    return table(rows)


def _chosen(choice) -> str:
    radius = "" if choice.settings.rho is None else f", radius {choice.settings.rho:g}"
    return f"{choice.settings.lr:g}{radius}{'*' if choice.is_at_edge else ''}"


PAPER_SCALES = {
    "table3": "table 3: ViT-B/16 at 224 px, 500 images per class",
    "table9": "table 9: ViT-B/16 on DomainNet, 6 domains of 345 classes",
}


def _paper_parts(exhibit: tuple[str, str]) -> Iterator[str | Sequence[str]]:
    """Yield the numbers that the paper has for a stream of block P."""
    name, column_name = exhibit
    table_of_paper = load_exhibit(name)
    index = [column.name for column in table_of_paper.columns].index(column_name)
    metrics = table_of_paper.columns[index].metrics
    last = "last" if "last" in metrics else metrics[-2]  # table 9 has a stage after each domain, then Avg
    published = {
        line.name: dict(zip(metrics, line.published[index], strict=True))
        for line in table_of_paper.rows
        if line.published
    }
    speed = published["plain"].get("images_per_second")
    rows: list[list[object]] = [["row", "Avg", "Last", "speed, % of plain"]]
    for line, numbers in published.items():
        own = numbers.get("images_per_second")
        fraction = f"{100 * own.mean / speed.mean:.1f}" if own and speed else "-"
        rows.append([line.removeprefix("+"), *(numbers[metric].text() for metric in ("avg", last)), fraction])
    yield f"In the paper ({PAPER_SCALES[name]}):"
    yield table(rows)


# -- claims -----------------------------------------------------------------------------------------------------


def claims_page(lines: Sequence[Line]) -> str:
    rows: list[list[object]] = [["claim", "verdict", "effect, points of Avg"]]
    for claim in CLAIMS:
        text, found = judge_claim(lines, claim)
        rows.append([f"[{claim.title}]({claim.name}.md)", text, _effects(claim, lines, found)])
    return _document(
        "# The paper's claims, one by one",
        "With the paper's optimizer: C-Flat Turbo is Algorithm 1. Small networks on CPUs; [the study]"
        "(../study/index.md) says how, and every page names the scale of its streams.",
        table(rows),
        "Claims about beta, k, the threshold, the scheduler, gradients over time and curvature are not part of the "
        "study; what was seen of them earlier is in the [exploration](../exploration.md), which decides nothing.",
        f"Written by `{COMMAND} pages` from the ledger.",
    )


def _effects(claim: Claim, lines: Sequence[Line], found: Mapping[Contrast, Verdict]) -> str:
    if claim.wanted == "faster":
        ratios = [_ratio(lines, stream, claim.contrasts[0]) for stream in _claim_streams(claim, claim.contrasts[0])]
        means = [effect.mean for effect in ratios if effect is not None]
        return f"{min(means):.2f} to {max(means):.2f} times fewer evaluations" if means else "-"
    if NOT_YET in [verdict.text for verdict in found.values()]:
        streams = _claim_streams(claim, claim.contrasts[0])
        return f"{replicates_done(lines, claim.contrasts[0], streams)} replicates"
    return "; ".join("no stream decides" if one.effect is None else points(one.effect) for one in found.values())


def _ratio(lines: Sequence[Line], stream: str, contrast: Contrast) -> Effect | None:
    return stream_effect(speed_ratios(final_runs(lines, stream), contrast))


def _claim_streams(claim: Claim, contrast: Contrast) -> list[str]:
    return streams_of(contrast, claim.blocks, claim.scenarios)


def claim_page(claim: Claim, lines: Sequence[Line]) -> str:
    text, found = judge_claim(lines, claim)
    parts: list[str | Sequence[str]] = [f"# {claim.title}", f"**{text[0].upper()}{text[1:]}.** {_rule(claim)}"]
    if any(verdict.streams for verdict in found.values()):
        parts.append(f"![differences in Avg, stream by stream]({claim.name}.svg)")
    for contrast, verdict in found.items():
        parts += [f"## {contrast.title}", _contrast_sentence(claim, contrast, verdict, lines)]
        parts.append(_claim_table(claim, contrast, verdict, lines))
    blocks = " ".join(claim.blocks)
    parts.append(
        f"Runs: `{COMMAND} run` {', '.join(f'`{block}`' for block in blocks.split())}; [the study](../study/index.md)."
    )
    return _document(*parts)


def _rule(claim: Claim) -> str:
    if claim.wanted == "faster":
        return (
            "Counted in evaluations per step, which depend on no machine. It holds if C-Flat takes at least twice as "
            "many on every stream, by the 95 % interval over replicates."
        )
    family = "the eight contrasts of the study" if claim.is_primary else "the contrasts of this page"
    return f'It holds if every contrast below comes out as "{claim.wanted}" or more; Holm over {family}.'


def _contrast_sentence(claim: Claim, contrast: Contrast, verdict: Verdict, lines: Sequence[Line]) -> str:
    streams = _claim_streams(claim, contrast)
    count = replicates_done(lines, contrast, streams)
    if claim.wanted == "faster":
        return f"{count} replicates."
    effect = "" if verdict.effect is None else f" {points(verdict.effect)} points of Avg over streams."
    if verdict.text != NOT_YET and len(verdict.left_out) == len(streams):
        effect = " Every stream is speed-limited (see the note in the table), so none decides."
    return f"{verdict.text[0].upper()}{verdict.text[1:]}; {count} replicates.{effect}"


def _claim_table(claim: Claim, contrast: Contrast, verdict: Verdict, lines: Sequence[Line]) -> list[str]:
    rows: list[list[object]] = [["stream", "Avg, points", "Last, points", "evaluations", "replicates", "note"]]
    for stream in _claim_streams(claim, contrast):
        finals = final_runs(lines, stream)
        last = stream_effect(differences(finals, contrast, "last"))
        costs = row_means(finals, "evaluations_per_step")
        both = f"{costs[contrast.row]:.2f} / {costs[contrast.reference]:.2f}" if len(verdict.streams) and {
            contrast.row, contrast.reference} <= set(costs) else "-"  # fmt: skip
        total = BLOCKS[BLOCK_OF[stream]].final_replicates
        note = "speed-limited" if stream in verdict.left_out else ""
        n = f"{len(differences(finals, contrast))} of {total}"
        title = f"`{stream}`: {STREAMS[stream].title}"
        rows.append([title, points(verdict.streams.get(stream)), points(last), both, n, note])
    return table(rows)


# -- the README -------------------------------------------------------------------------------------------------


SCALES = {
    "A": "small networks, 8 streams",
    "B": "ResNet-8 from scratch at 16 px",
    "C": "ViT-Tiny at 64 px",
    "P": "ViT-Tiny at 64 px",
}
POOLED = ("A",)
"""Blocks of which the README shows the mean over streams; of two or three streams it would say nothing."""


def fragment(lines: Sequence[Line]) -> str:
    """Return the README's table and its sentences of advice: of what is complete, and how far the rest has come."""
    complete = {name: complete_streams(name, lines) for name in BLOCKS}
    shown = [name for name, streams in complete.items() if streams]
    rows: list[list[object]] = [["optimizer", "evaluations", *(_column_title(name, complete[name]) for name in shown)]]
    for row in README_ROWS:
        cells = [_readme_cell(row, name, complete[name]) for name in shown]
        if set(cells) - {"-"}:
            rows.append([_title(row, shown), _evaluations(row, shown, lines), *cells])
    # A number from a stream that measures training speed must not pass for one about flatness.
    rows.append(["*of these streams, speed-limited*", "", *(_limited_count(complete[name]) for name in shown)])
    caption = (
        "First row: Avg in %; others: points above it with 95 % intervals, paired by class order, images and seed; "
        "over streams in block A, over the replicates of each stream elsewhere. On a *speed-limited* stream the end "
        "loss orders the optimizers: it shows who trains fastest, and the sentences on flatness below leave it out."
    )
    parts = [table(rows), caption] if shown else []
    return _document(*parts, _progress_sentence(lines), [f"- {sentence}" for sentence in advice(lines)])


def _limited_count(complete: Mapping[str, Finals]) -> str:
    limited = sum(is_speed_limited(stream_correlation(finals)) for finals in complete.values())
    return f"{limited} of {len(complete)}"


def complete_streams(name: str, lines: Sequence[Line]) -> dict[str, Finals]:
    """Return the streams of a block of which every final run is there."""
    block = BLOCKS[name]
    by_stream = {stream: final_runs(lines, stream) for stream in block.streams}
    return {
        stream: finals
        for stream, finals in by_stream.items()
        if len(finals) == block.final_replicates and all(len(rows) == len(block.rows) for rows in finals.values())
    }


def _column_title(name: str, complete: Mapping[str, Finals]) -> str:
    if name in POOLED:
        return f"{name}: {SCALES[name]}"
    so_far = "" if len(complete) == len(BLOCKS[name].streams) else ", so far"
    titles = ", ".join(SHORT_TITLES[stream] for stream in complete)
    return f"{name}{so_far}: {titles}; {SCALES[name]}; {BLOCKS[name].final_replicates} replicates"


def _title(row: str, shown: Sequence[str]) -> str:
    return "plain" if row == "sgd" and shown == ["P"] else ROWS[row].title


def _evaluations(row: str, shown: Sequence[str], lines: Sequence[Line]) -> str:
    rows = {row, *(BLOCKS[name].reference for name in shown if row == "sgd")}
    own = [line for line in lines if line.block in shown and line.row in rows and line.stage == "final"]
    return f"{sum(line.evaluations_per_step for line in own) / len(own):.1f}" if own else "-"


def _readme_cell(row: str, name: str, complete: Mapping[str, Finals]) -> str:
    block = BLOCKS[name]
    row = block.reference if row == "sgd" else row
    if row not in block.rows:
        return "-"
    if row == block.reference:
        means = [100 * row_means(own, "avg")[row] for own in complete.values()]
        means = [sum(means) / len(means)] if name in POOLED else means
        return ", ".join(f"{mean:.1f} %" for mean in means)
    effects = [stream_effect(differences(own, Contrast(row, block.reference))) for own in complete.values()]
    found = [effect for effect in effects if effect is not None]
    shown = [random_effects(found)] if name in POOLED else found
    return ", ".join(_short(one) for one in shown if one is not None)


def _short(effect: Effect) -> str:
    mean = round(effect.mean, 1) + 0.0  # never -0.0
    return f"{mean:+.1f}±{effect.interval()[1] - effect.mean:.1f}"


def advice(lines: Sequence[Line]) -> list[str]:
    """Return three sentences that follow from the verdicts; block A's stand in while the others are not complete."""
    pooled, small = verdicts(lines, CONTRASTS, TUNED_BLOCKS), verdicts(lines, CONTRASTS, ("A",))
    missing = [name for name in TUNED_BLOCKS if len(complete_streams(name, lines)) < len(BLOCKS[name].streams)]
    alone = f" in block A alone; {' and '.join(missing)} {'are' if len(missing) > 1 else 'is'} not complete"

    def answer(row: str, reference: str, question: str) -> str:
        (contrast,) = (one for one in CONTRASTS if (one.row, one.reference) == (row, reference))
        for verdict, where in ((pooled[contrast], ""), (small[contrast], alone)):
            if verdict.text != NOT_YET:
                effect = "no stream decides" if verdict.effect is None else f"{points(verdict.effect)} points of Avg"
                return f"{question} **{verdict.text.capitalize()}**{where}: {effect}."
        return f"{question} Not yet decided."

    questions = (
        ("qhm_average", "sgd", "First the free things, momentum and averaging (QHM + average against SGD):"),
        ("c_flat", "sgd", "Does flatness pay for four evaluations (C-Flat against SGD)?"),
        ("turbo", "c_flat", "Can it be had for less (C-Flat Turbo against C-Flat)?"),
    )
    answers = [answer(*question) for question in questions]
    if all(text.endswith("Not yet decided.") for text in answers):
        return ["None of the study's contrasts is decided yet: verdicts are given when all replicates are there."]
    return answers
