"""The paper's tables and figures: their numbers, their runs, and what is said about them."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from cflat import ConfigError, DataError
from cflat.data import list_datasets
from cflat.figures.figure import FigureData
from cflat.metrics import Spread
from cflat.nn import create_backbone
from cflat.paper.comparison import markdown, tables, verdicts, write_reproduction
from cflat.paper.exhibits import Exhibit, Published, list_exhibits, load_exhibit
from cflat.paper.figures import picture
from cflat.paper.reproduce import SCALES, Entry, Reproduction, Request, plan_exhibit, reproduce, watched_config
from cflat.runs.folder import RunFolder
from counting import Counting

NAMES = [exhibit.name for exhibit in list_exhibits()]
LABELS = {
    "table1": "tab:ptm",
    "table2": "tab:resnet",
    "table3": "tab:other_optim",
    "table5": "app:sche",
    "table6": "app:trig",
    "table8": "app:sams",
    "table9": "app:dil",
    "table10": "app:til",
    "table11": "tab:pertask",
}
OWN = """
title: Two optimizers on two tasks
seeds: [0, 1]
settings: {method: finetune, data: cifar100}
columns:
  - {name: one, metrics: [avg, stage.2, images_per_second]}
  - {name: other, settings: {stream: {order_seed: 7}}, metrics: [avg, config.base.lr]}
rows:
  - {group: A, name: plain, settings: {optimizer: none}, published: [[50, 40, 100], [60 ± 1.5, null]]}
  - {group: A, name: +SAM, settings: {optimizer: sam}, published: [[51, 41, 50], [59, null]]}
"""
TINY = {"data": {"train_per_class": 4, "test_per_class": 4}}


@pytest.fixture(autouse=True)
def _no_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CFLAT_DATA", raising=False)


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Exhibit:
    file = tmp_path_factory.mktemp("recipe") / "mine.yaml"
    file.write_text(OWN, encoding="utf-8")
    return load_exhibit(str(file))


@pytest.fixture
def everywhere(tmp_path: Path) -> Path:
    """A data root where every dataset seems to be."""
    for spec in list_datasets():
        for place in spec.places[:1]:
            (tmp_path / place).mkdir(parents=True)
    return tmp_path


@pytest.mark.parametrize("name", LABELS)
def test_published_numbers_are_those_of_the_paper(name: str, shared: Path) -> None:
    text = next((shared / "paper").glob("*.tex")).read_text(encoding="utf-8")
    printed = _printed(text, LABELS[name])
    ours: Counter[float] = Counter()
    for line in load_exhibit(name).rows:
        if (name, line.name) == ("table8", "plain"):  # taken from Table 1, as its note says
            continue
        for numbers in line.published:
            for value in numbers:
                if value is not None:
                    ours.update([value.mean] if math.isnan(value.std) else [value.mean, value.std])
    settings = Counter({2.0: 3, 5.0: 6, 10.0: 6, 20.0: 3}) if name == "table5" else Counter()
    settings += Counter({0.1: 1, 0.2: 1, 0.5: 1, 1.0: 1, 2.0: 1, 5.0: 1}) if name == "table6" else Counter()
    assert ours == printed - settings


def _printed(text: str, label: str) -> Counter[float]:
    """Return the numbers in the body of one LaTeX table, without shares in parentheses."""
    start = text.index(f"\\label{{{label}}}")
    body = text[text.index("\\midrule" if label != "app:sche" else "$k_0$", start) : text.index("\\bottomrule", start)]
    body = re.sub(r"\\(?:cmidrule|multirow|rotatebox)(?:\(lr\))?(?:\{[\d*-]+\})?", " ", body)
    body = re.sub(r"\\cite\{[^}]*\}|\([^)]*%\}?\)?\)?|\$k_0\$|\\pm", " ", body)
    return Counter(float(number) for number in re.findall(r"(?<![\w.])\d+(?:\.\d+)?(?![\w])", body))


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_is_a_valid_plan_at_every_scale(name: str, scale: str, everywhere: Path) -> None:
    exhibit = load_exhibit(name)
    chosen = {} if scale == "smoke" else {"data": {"root": str(everywhere)}}
    request = Request(scale, weights="random", chosen=chosen)
    plan = plan_exhibit(exhibit, request, Path("runs"))
    assert not plan.missing
    expected = "smoke" if scale == "smoke" else "cpu" if (name, scale) == ("table2", "cpu") else "paper"
    assert {job.config.preset for job in plan.all_jobs} <= {expected}
    if exhibit.figures:
        assert watched_config(exhibit, request).optimizer.name == "c_flat"
    assert exhibit.figures or plan.all_jobs or exhibit.needs_no_run


def test_hyperparameters_of_preset_paper_are_the_published_ones() -> None:
    plan = plan_exhibit(load_exhibit("table4"), Request("smoke"), Path("nowhere"))
    assert not plan.all_jobs
    for cells in reproduce(plan).entries:
        for entry in cells[0]:
            measured = None if entry.measured is None else entry.measured.mean
            assert measured == (None if entry.published is None else entry.published.mean), entry.title


def test_a_table_is_run_once_shared_and_set_beside_the_paper(own: Exhibit, tmp_path: Path) -> None:
    request = Request("smoke", chosen=TINY, seeds=(0, 1))
    counting = Counting()
    plan = plan_exhibit(own, request, tmp_path)
    found = reproduce(plan, counting)
    assert len(counting.jobs) == len(plan.all_jobs) == 8
    assert len({job.out for job in counting.jobs}) == 8

    for line, cells in zip(plan.jobs, found.entries, strict=True):
        summaries = [RunFolder(job.out).load_summary() for job in line[0]]
        avg, stage, speed, counted = cells[0]
        assert avg.by_seed == pytest.approx([100 * summary.headline.avg for summary in summaries])
        assert stage.by_seed == pytest.approx([100 * summary.headline.stage_accuracy[1] for summary in summaries])
        assert speed.measured.n == 2
        assert counted.metric == "evaluations_per_step"
        assert counted.published is None
    assert [cells[0][3].measured.mean for cells in found.entries] == [1.0, 2.0]
    assert found.entries[0][1][0].published == Published(60.0, 1.5)
    assert found.entries[0][1][1].measured.mean == plan.jobs[0][1][0].config.base.lr

    again = Counting()
    part = own.select(["sam"], ["one"])
    assert [line.name for line in part.rows] == ["+SAM"]
    assert [[number.mean for number in numbers] for numbers in part.rows[0].published] == [[51, 41, 50]]
    reproduce(plan_exhibit(part, request, tmp_path), again)
    assert again.jobs == []

    files = write_reproduction(tmp_path / "results", plan, found)
    values = json.loads(files["json"].read_text(encoding="utf-8"))
    assert values["rows"][1]["columns"][0]["entries"][0]["published"] == 51
    assert "| A | +SAM |" in files["markdown"].read_text(encoding="utf-8")
    assert len(files["csv"].read_text().splitlines()) == 1 + 2 * (4 + 2)
    assert "Two optimizers on two tasks" in files["page"].read_text(encoding="utf-8")
    assert files["picture"].stat().st_size > 5000


def test_columns_without_data_are_left_out_and_named(tmp_path: Path) -> None:
    (tmp_path / "cifar100.npz").touch()
    exhibit = load_exhibit("table1")
    request = Request("cpu", weights="random", chosen={"data": {"root": str(tmp_path)}})
    plan = plan_exhibit(exhibit, request, tmp_path)
    assert list(plan.missing) == ["CUB B0_Inc10", "IN-R B0_Inc20", "ObjNet B0_Inc10"]
    assert "CUB-200 not found under" in plan.missing["CUB B0_Inc10"]
    assert {job.config.data.name for job in plan.all_jobs} == {"cifar100"}
    with pytest.raises(DataError, match="needs a data root"):
        plan_exhibit(exhibit, Request("cpu", weights="random"), tmp_path)
    ease = exhibit.select(["ease"], ["cifar100"])
    there = replace(ease.rows[1], settings={**ease.rows[1].settings, "data": "cub200"})
    mixed = plan_exhibit(replace(ease, rows=(ease.rows[0], there)), request, tmp_path)
    assert list(mixed.missing) == ["EASE +C-Flat, CIFAR100 B0_Inc10"]
    assert [len(line[0]) for line in mixed.jobs] == [1, 0]


def test_weights_go_to_pretrained_backbones_alone(everywhere: Path) -> None:
    request = Request("paper", weights="some.safetensors", chosen={"data": {"root": str(everywhere)}})
    for name, expected in (("table1", "some.safetensors"), ("table2", "random")):
        jobs = plan_exhibit(load_exhibit(name), request, Path("runs")).all_jobs
        assert {job.config.backbone.weights for job in jobs} == {expected}
    with pytest.raises(ConfigError, match=r"backbone\.weights must be given"):
        plan_exhibit(load_exhibit("table1"), replace(request, weights=None), Path("runs"))


def test_further_class_orders_are_further_order_seeds(everywhere: Path) -> None:
    request = Request("paper", weights="random", chosen={"data": {"root": str(everywhere)}})
    plan = plan_exhibit(load_exhibit("table3"), request, Path("runs"))
    for cells in plan.jobs:
        for own in cells:
            assert [job.config.stream.order_seed for job in own] == [1993, 1994, 1995]
            assert [job.config.seed for job in own] == [1993, 1994, 1995]  # PILOT seeds torch with it, too
    turbo = plan.jobs[-1][0][0].config.optimizer.settings
    assert (turbo.k, turbo.schedule) == (5, False)  # "the update interval ... is fixed to 5"


def test_networks_from_scratch_are_those_of_the_sources(everywhere: Path) -> None:
    request = Request("paper", chosen={"data": {"root": str(everywhere)}})
    plan = plan_exhibit(load_exhibit("table2"), request, Path("runs"))
    names = [[own[0].config.backbone.name for own in cells] for cells in plan.jobs]
    assert names == 3 * [["resnet18_cifar", "resnet34_cifar"]] + 3 * [["resnet18", "resnet32"]]
    assert {(job.config.backbone.image_size, job.config.backbone.inputs) for job in plan.all_jobs} == {(32, "cifar")}
    memory = plan_exhibit(
        load_exhibit("table7").select(["icarl, resnet-18", "icarl, resnet-34"]), request, Path("runs")
    )
    for line, cells in zip(memory.exhibit.rows, memory.jobs, strict=True):
        backbone = create_backbone(cells[0][0].config.backbone.name)
        with_head = sum(p.numel() for p in backbone.parameters()) + 10 * (backbone.feature_dim + 1)
        trained, total, _ = line.published[0]
        assert f"{with_head / 1e6:.2f}" == f"{trained.mean:.2f}" == f"{total.mean:.2f}"


def test_the_papers_protocol_runs_on_a_small_machine(everywhere: Path) -> None:
    request = Request("cpu", weights="tiny.safetensors", chosen={"data": {"root": str(everywhere)}})
    plans = {name: plan_exhibit(load_exhibit(name), request, Path("runs")) for name in ("table1", "table3", "table9")}
    for plan in plans.values():
        for job in plan.all_jobs:
            assert (job.config.backbone.name, job.config.stream.max_tasks) == ("vit_tiny", None)
            assert (job.config.data.train_per_class, job.config.data.test_per_class) == (None, None)
    ease = plans["table3"].jobs[0][1][0].config
    assert (ease.base.lr, ease.train.epochs, ease.train.batch_size, ease.backbone.image_size) == (2.5e-3, 5, 16, 64)
    assert (ease.stream.initial, ease.stream.increment) == (10, 10)
    for name in ("table3", "table9"):
        assert [cells[0][0].config.optimizer.name for cells in plans[name].jobs] == [
            *("none", "sam", "looksam", "c_flat", "c_flat_turbo")
        ]
    duct = plans["table9"].jobs[0][0][0].config
    assert (duct.data.name, duct.train.epochs, duct.method.settings.regularization) == ("pacs", 15, 0.01)
    assert plans["table3"].meaning == (
        "What differs from the paper's runs: backbone.image_size 64 (the paper: 224), backbone.name vit_tiny (the "
        "paper: vit_base). Compare signs and ratios with the paper, not values."
    )


def test_numbers_have_the_score_that_was_published(own: Exhibit, everywhere: Path) -> None:
    request = Request("paper", weights="random", chosen={"data": {"root": str(everywhere)}})
    for name, method, score in (
        *(("table1", "icarl", "cnn"), ("table1", "l2p", "batchwise"), ("table1", "ease", "logits")),
        *(("table3", "l2p", "batchwise"), ("table8", "l2p", "batchwise"), ("table10", "dualprompt", "batchwise")),
    ):
        assert plan_exhibit(load_exhibit(name), request, Path("runs")).score_of(method) == score
    with pytest.raises(ConfigError, match=r"Unknown score of table3 'nme'"):
        plan_exhibit(load_exhibit("table3"), replace(request, score="nme"), Path("runs"))


def test_both_scores_of_a_method_are_shown_by_name(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(OWN.replace("finetune", "icarl") + "scores: {icarl: cnn}\n", encoding="utf-8")
    part = load_exhibit(str(file)).select(["plain"], ["one"])
    for score, other in ((None, "nme"), ("nme", "cnn")):
        request = Request("smoke", chosen=TINY, score=score)
        found = reproduce(plan_exhibit(part, request, tmp_path))
        (cells,) = found.entries
        avg, *_, second = cells[0]
        summary = RunFolder(plan_exhibit(part, request, tmp_path).all_jobs[0].out).load_summary()
        assert avg.score == (score or "cnn")
        assert avg.by_seed == pytest.approx([100 * summary.accuracy[avg.score].avg])
        assert (second.metric, second.title, second.score) == (f"avg@{other}", f"Avg, {other}", other)
        assert second.by_seed == pytest.approx([100 * summary.accuracy[other].avg])
        assert "score" in tables(found)[0].columns


def test_a_dry_run_shows_every_configuration_and_needs_no_data(capsys: pytest.CaptureFixture[str]) -> None:
    from cflat.cli.main import run_app

    assert run_app(["reproduce", "table3", "--rows", "c_flat", "--dry-run", "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert [run["config"]["stream"]["order_seed"] for run in values["runs"]] == 2 * [1993, 1994, 1995]
    assert values["runs"][0]["shown_in"] == ["+C-Flat, L2P"]
    assert values["runs"][0]["score"] == "batchwise"
    assert values["runs"][0]["config"]["base"]["lr"] == 2e-3


def invented(exhibit: Exhibit, scale: str = "cpu") -> Reproduction:
    """A reproduction that has measured half of every published number, or counts up where there is none."""
    plan = plan_exhibit(exhibit, Request("smoke"), Path("nowhere"))
    entries = []
    for number, line in enumerate(exhibit.rows):
        cells = []
        for c, column in enumerate(exhibit.columns):
            made = []
            for m, metric in enumerate(column.metrics):
                published = line.number(c, m)
                value = number + 1.0 if published is None else published.mean / 2
                made.append(_entry(metric, column.title(m), published, value))
            cells.append(tuple(made))
        entries.append(tuple(cells))
    return Reproduction(plan.exhibit, scale, tuple(entries), plan.missing, 1)


def _entry(metric: str, title: str, published: Published | None, value: float) -> Entry:
    return Entry(metric, title, published, Spread(value, math.nan, 1), (value,))


@pytest.mark.parametrize("name", [name for name in NAMES if load_exhibit(name).rows and name != "table4"])
def test_every_table_has_a_picture_and_a_row_for_every_line(name: str, tmp_path: Path) -> None:
    exhibit = load_exhibit(name)
    found = invented(exhibit)
    drawn = picture(found)
    if name == "table7":  # memory alone: nothing to draw over a reference
        assert drawn is None
    else:
        assert FigureData.from_dict(json.loads(json.dumps(drawn.to_dict()))) == drawn
        assert all(panel.marks for panel in drawn.panels)
    for table in tables(found):
        assert {row[table.num_text - 1].text for row in table.rows} >= (
            {"here"} if "numbers" in table.columns else {line.name for line in exhibit.rows}
        )
        assert all(len(row) == len(table.columns) for row in table.rows)
    assert exhibit.title in markdown(found)


def test_the_verdict_counts_gains_in_both() -> None:
    exhibit = load_exhibit("table1").select(["ease"])
    sentences = verdicts(invented(exhibit))
    assert sentences == [
        "+C-Flat against plain, Avg: here +0.17 points, above in 4 of 4; in the paper +0.34 points, above in 4 of 4 "
        "(one seed).",
        "+C-Flat Turbo against plain, Avg: here +0.27 points, above in 4 of 4; in the paper +0.53 points, above in "
        "4 of 4 (one seed).",
    ]
    assert verdicts(invented(exhibit, "smoke")) == []


def test_gains_are_halved_in_the_picture_as_they_were_invented() -> None:
    gains, speed = picture(invented(load_exhibit("table3"))).panels
    bars = {bar.name: bar for bar in gains.marks}
    assert bars["+SAM, the paper"].categories == ["L2P", "EASE"]
    assert bars["+SAM, the paper"].values == pytest.approx([0.26, 0.20])
    assert bars["+SAM, here"].values == pytest.approx([0.13, 0.10])
    ratios = {bar.name: bar.values for bar in speed.marks}
    assert ratios["+C-Flat Turbo, the paper"] == pytest.approx([59.39, 61.64], abs=0.01)
    assert ratios["+C-Flat Turbo, here"] == pytest.approx(ratios["+C-Flat Turbo, the paper"])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("titles: x", r"Unknown key 'mine\.titles'\. Did you mean 'title'"),
        ("columns: 3\nrows: []", "columns must be a list, got 3"),
        ("title: x", "must have rows and columns, or figures"),
        ("columns: [{name: c, metrics: [awg]}]\nrows: [{name: r}]", "Unknown metric 'awg'. Did you mean 'avg'"),
        ("columns: [{name: c, metrics: [stage.0]}]\nrows: [{name: r}]", "Unknown metric 'stage.0'"),
        ("columns: [{name: c}]\nrows: [{name: r, published: [[1]]}]", r"published of 'r' must have \[2\] numbers"),
        ("columns: [{name: c}]\nrows: [{name: r, published: [[1, x]]}]", "must look like 59.13"),
        ("columns: [{name: c, titles: [a]}]\nrows: [{name: r}]", "needs one title for each"),
        ("columns: [{name: c}, {name: c}]\nrows: [{name: r}]", "every column must have a name of its own"),
        ("seeds: [0, 0]\ncolumns: [{name: c}]\nrows: [{name: r}]", "seeds must list different seeds"),
        ("scales: {cpu: 3}\ncolumns: [{name: c}]\nrows: [{name: r}]", r"scales\.cpu must hold keys"),
        ("draw: {x: optimizer.rho}\ncolumns: [{name: c}]\nrows: [{name: r}]", r"a number at optimizer\.rho"),
        ("columns: [{name: c, colour: red}]\nrows: [{name: r}]", r"columns\[0\]\.colour"),
    ],
)
def test_a_wrong_file_is_named_with_what_is_wrong(text: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=words):
        load_exhibit(str(file))


def test_a_file_may_name_itself(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    for name, expected in (("", "mine"), ("name: radius\n", "radius")):
        file.write_text(f"{name}columns: [{{name: c}}]\nrows: [{{name: r}}]")
        assert load_exhibit(str(file)).name == expected


def test_a_scale_that_has_none_of_the_chosen_lines_is_named() -> None:
    lines = load_exhibit("table9").select(["sam"])
    with pytest.raises(ConfigError, match="table9 has none of these lines at scale paper; choose scale cpu or smoke"):
        plan_exhibit(lines, Request("paper", weights="random"), Path("runs"))


def test_wrong_names_are_answered_with_the_nearest() -> None:
    for name, words in (("tabel1", "Did you mean 'table1'"), ("fig2", "is a drawing of the idea")):
        with pytest.raises(ConfigError, match=words):
            load_exhibit(name)
    with pytest.raises(ConfigError, match=r"table1 has no 'eese'\. Did you mean 'ease'"):
        load_exhibit("table1").select(["eese"])
    with pytest.raises(ConfigError, match=r"Unknown scale 'cpus'\. Did you mean 'cpu'"):
        Request("cpus")
    with pytest.raises(ConfigError, match="would pretend a spread"):
        Request("cpu", seeds=(1, 1))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_runs_at_smoke_scale(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from cflat.cli.main import run_app

    assert run_app(["reproduce", name, "--scale", "smoke", "--out", str(tmp_path), "--json", "runtime.threads=1"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert Path(values["files"]["page"]).is_file()
    assert not values["missing"]
