"""The report without a browser: what it reads, what it survives, what it says."""

from __future__ import annotations

import json
import os
import re
import shlex
from pathlib import Path

import pytest

from cflat import DataError
from cflat._files import write_json
from cflat.cli.main import run_app
from cflat.config.commands import reproduce_command
from cflat.config.run_config import parse_config
from cflat.data import Outline
from cflat.figures import Curve, FigureData, Panel
from cflat.figures.figure import MAX_POINTS
from cflat.figures.palette import OPTIMIZERS
from cflat.report import records
from cflat.report.build import build_page, embed_json
from cflat.report.export import write_tables
from cflat.report.page import Cell, Problem, ReportData, Section, Table
from cflat.report.write import collect_report, write_report
from cflat.runs.folder import RunFolder, find_runs
from report.pages import NUM_TASKS, Page, config_of, write_run

OWN_SIZE = 1_500_000
"""Bytes of a page of a hundred runs, plotly's script apart."""
HOSTILE = "<script>alert('x')<!--\u2028</script>&amp;"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two optimizers with three seeds, one of them unfinished."""
    root = tmp_path_factory.mktemp("runs")
    for name in ("none", "c_flat_turbo"):
        for seed in range(3):
            is_finished = (name, seed) != ("c_flat_turbo", 2)
            write_run(root / f"{name}-seed{seed}", config_of(optimizer=name, seed=seed), is_finished=is_finished)
    return root


@pytest.fixture(scope="module")
def page(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Page:
    out = tmp_path_factory.mktemp("page") / "report.html"
    write_report([runs], out)
    return Page(out.read_text())


def test_the_page_asks_for_nothing_outside(page: Page) -> None:
    assert page.outside() == []
    policy = [a["content"] for tag, a in page.elements if tag == "meta" and "http-equiv" in a]
    assert policy == ["default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"]


def test_every_section_is_there(page: Page) -> None:
    names = [attributes["id"] for tag, attributes in page.elements if tag == "section"]
    expected = ["accuracy", "front", "cost", "timelines", "matrices", "configurations", "environment", "runs"]
    assert names == expected


def test_groups_are_everything_but_the_seed_and_the_base_alone_is_first(runs: Path) -> None:
    report = collect_report([runs])
    assert [(group.name, len(group.records), len(group.finished)) for group in report.groups] == [
        ("SGD", 3, 3),
        ("C-Flat Turbo", 3, 2),
    ]
    plain = report.groups[0]
    values = [RunFolder(runs / f"none-seed{seed}").load_summary().headline.avg for seed in range(3)]
    assert plain.spread("avg").mean == pytest.approx(sum(values) / 3)
    ((_, curves),) = report.data.sections[0].charts[0].options
    stages = [RunFolder(runs / f"none-seed{seed}").load_summary().headline.stage_accuracy for seed in range(3)]
    assert curves.panels[0].marks[0].y == pytest.approx((100 * sum(stages) / 3).tolist())


def test_the_headline_says_gain_certainty_and_cost(runs: Path) -> None:
    (sentence,) = collect_report([runs]).data.headlines
    assert re.search(r"C-Flat Turbo (gains|loses) \d+\.\d\d points of average accuracy \(cnn\) (over|to) SGD", sentence)
    assert "2 seeds" in sentence  # those that both have
    assert re.search(r"with [+-]\d+\.\d\d points at the end of the stream \(p = ", sentence)
    assert "2.50 evaluations per step" in sentence


def test_a_significant_gain_is_told_from_chance(tmp_path: Path) -> None:
    for seed in range(3):
        write_run(tmp_path / f"none-{seed}", config_of(seed=seed))
        write_run(tmp_path / f"sam-{seed}", config_of(optimizer="sam", seed=seed))
        better = RunFolder(tmp_path / f"sam-{seed}")
        values = json.loads(better.summary_file.read_text())
        values["scores"] = json.loads((tmp_path / f"none-{seed}" / "summary.json").read_text())["scores"]
        correct = values["scores"]["cnn"]["correct"]
        for stage, row in enumerate(correct):
            row[: stage + 1] = [min(50, count + 3 + (stage + seed) % 2) for count in row[: stage + 1]]
        better.summary_file.write_text(json.dumps(values))
    (sentence,) = collect_report([tmp_path]).data.headlines
    assert re.search(r"SAM gains .* paired over 3 seeds, p = 0\.0", sentence)


def test_only_what_differs_in_the_optimizer_alone_is_compared(tmp_path: Path) -> None:
    short, long = {"train": {"epochs": 1}}, {"train": {"epochs": 5}}
    for seed in range(2):
        write_run(tmp_path / f"none-short-{seed}", config_of(seed=seed, **short))
        write_run(tmp_path / f"sam-long-{seed}", config_of(optimizer="sam", seed=seed, **long))
    report = collect_report([tmp_path])
    assert [group.name for group in report.groups] == ["SGD, train.epochs=1", "SAM, train.epochs=5"]
    (sentence,) = report.data.headlines
    assert sentence.startswith("No two of these 2 configurations differ in the optimizer alone")
    assert "gains" not in sentence
    accuracy, cost = (section.tables[0] for section in report.data.sections if section.name in ("accuracy", "cost"))
    assert [row[-1].text for row in accuracy.rows] == ["-", "-"]
    assert not any(cell.is_best for row in accuracy.rows for cell in row)
    assert [row[2].text for row in cost.rows] == ["1.00 x", "1.00 x"]
    for seed in range(2):
        write_run(tmp_path / f"none-long-{seed}", config_of(seed=seed, **long))
    (sentence,) = collect_report([tmp_path]).data.headlines
    assert re.search(r"SAM, train.epochs=5 (gains|loses) .* (over|to) SGD, train.epochs=5 ", sentence)


def test_where_and_how_a_run_was_made_keeps_nothing_apart(tmp_path: Path) -> None:
    write_run(tmp_path / "none", config_of(runtime={"threads": 1}))
    write_run(tmp_path / "sam", config_of(optimizer="sam", runtime={"threads": 2}, train={"checkpoint_minutes": 3}))
    report = collect_report([tmp_path])
    assert [group.name for group in report.groups] == ["SGD", "SAM"]
    assert re.search(r"SAM (gains|loses) ", report.data.headlines[0])


def test_the_headline_is_one_arithmetic_over_the_seeds_that_both_have(tmp_path: Path) -> None:
    for seed in range(5):
        write_run(tmp_path / f"none-{seed}", config_of(seed=seed))
    for name, seeds in (("sam", (0, 1, 2)), ("c_flat", (1, 2)), ("msam", (2, 3, 4))):
        for seed in seeds:
            write_run(tmp_path / f"{name}-{seed}", config_of(optimizer=name, seed=seed))
    (sentence,) = collect_report([tmp_path]).data.headlines
    number = r"(\d+\.\d\d)"
    found = re.search(rf"(gains|loses) {number} points.*?\({number} ± \S+\s% against {number} ± \S+\s%;", sentence)
    sign = 1 if found[1] == "gains" else -1
    assert round(float(found[3]) - float(found[4]), 2) == sign * float(found[2])


def test_optimizers_have_one_colour_on_every_page(runs: Path, tmp_path: Path) -> None:
    write_run(tmp_path / "turbo", config_of(optimizer="c_flat_turbo"))
    alone, both = (collect_report([root]).data.colors for root in (tmp_path, runs))
    assert alone["C-Flat Turbo"] == both["C-Flat Turbo"] == OPTIMIZERS["c_flat_turbo"][1]
    assert both["SGD"] == OPTIMIZERS["none"][1]


def test_tasks_are_named_by_their_classes(tmp_path: Path) -> None:
    outline = Outline("class", (("a", range(2)), ("b", range(2, 3))), ("ant", "bee", "cow"))
    for seed in range(2):
        write_run(tmp_path / f"run-{seed}", config_of(seed=seed))
        folder = RunFolder(tmp_path / f"run-{seed}")
        write_json(folder.stream_file, outline.to_dict())
    (section,) = [s for s in collect_report([tmp_path]).data.sections if s.name == "matrices"]
    (table,) = section.tables
    assert [[cell.text for cell in row] for row in table.rows] == [["1", "ant, bee", "2"], ["2", "cow", "1"]]
    folder.stream_file.write_text("{}")
    report = collect_report([tmp_path])
    assert [problem.where for problem in report.problems] == ["run-1"]


def test_tasks_of_every_class_order_are_listed(tmp_path: Path) -> None:
    names = ("ant", "bee", "cow")
    for seed, classes in enumerate((names, names[::-1], names)):  # the first and the last order are the same
        write_run(tmp_path / f"run-{seed}", config_of(seed=seed, stream={"order_seed": seed % 2}))
        outline = Outline("class", (("a", range(2)), ("b", range(2, 3))), classes)
        write_json(RunFolder(tmp_path / f"run-{seed}").stream_file, outline.to_dict())
    (section,) = [s for s in collect_report([tmp_path]).data.sections if s.name == "matrices"]
    (table,) = section.tables
    streams = [f"icarl on digits, stream.order_seed={seed}" for seed in (0, 0, 1, 1)]
    assert [row[0].text for row in table.rows] == streams
    assert [row[2].text for row in table.rows] == ["ant, bee", "cow", "cow, bee", "ant"]


def test_unfinished_runs_are_shown_with_what_is_known(page: Page, runs: Path) -> None:
    assert f"unfinished, {NUM_TASKS} tasks learned" in page.texts
    assert any(text.endswith("so far") for text in page.texts)
    alone = collect_report([runs / "c_flat_turbo-seed2"])
    assert (alone.num_runs, alone.num_unfinished) == (1, 1)
    assert alone.data.sections[0].charts[0].options[0][1].panels[0].marks[0].style == "dashed"
    assert "No run is finished yet" in alone.data.headlines[0]


def test_timelines_count_what_happened_in_each_epoch(runs: Path) -> None:
    line = collect_report([runs]).groups[1].timeline()
    assert line.steps == [10 * (number + 1) for number in range(4 * NUM_TASKS)]
    assert line.evaluations_per_step == pytest.approx([2.0] * len(line.steps))
    assert line.shares["sharpness.reused"] == pytest.approx([0.6] * len(line.steps))
    assert "flatness.reused" not in line.shares


def test_one_run_is_enough(runs: Path, tmp_path: Path) -> None:
    report = write_report([runs / "none-seed0"], tmp_path / "one.html", title="My run")
    page = Page((tmp_path / "one.html").read_text())
    assert page.texts.count("My run") == 2  # the tab and the heading
    assert "front" not in [section.name for section in report.data.sections]
    assert len(page.figures) >= 3


def test_a_hundred_runs_with_long_histories_stay_small(tmp_path: Path) -> None:
    for number in range(100):
        chosen = {"optimizer": {"name": "c_flat_turbo", "k": 1 + number // 5}, "seed": number % 5}
        write_run(tmp_path / "runs" / f"run-{number:03}", config_of(**chosen), num_epochs=60)
    report = write_report([tmp_path / "runs"], tmp_path / "report.html")
    assert (len(report.groups), report.num_runs) == (20, 100)
    page = Page((tmp_path / "report.html").read_text())
    from plotly.offline import get_plotlyjs

    assert (tmp_path / "report.html").stat().st_size - len(get_plotlyjs().encode()) < OWN_SIZE
    assert "sensitivity" in [section.name for section in report.data.sections]
    assert page.count("canvas") == 0
    assert page.count("select") == 3  # costs, triggers and matrices are chosen, not piled up


def test_several_scenarios_get_a_choice_and_a_sentence_each(tmp_path: Path) -> None:
    for method in ("icarl", "replay"):
        for optimizer in ("none", "sam"):
            write_run(tmp_path / f"{method}-{optimizer}", config_of(method=method, optimizer=optimizer))
    report = collect_report([tmp_path])
    assert [sentence.split(":")[0] for sentence in report.data.headlines] == ["icarl on digits", "replay on digits"]
    (choices,) = report.data.sections[0].charts
    assert [label for label, _ in choices.options] == ["icarl on digits", "replay on digits"]
    assert report.groups[1].name == "SAM, icarl on digits"


def broken_config(run: RunFolder) -> None:
    run.config_file.write_text("method: [")


def foreign_config(run: RunFolder) -> None:
    run.config_file.write_text("name: my-app\nport: 80\n")


def binary_config(run: RunFolder) -> None:
    run.config_file.write_bytes(b"\xff\xfe\x00")


def half_summary(run: RunFolder) -> None:
    run.summary_file.write_bytes(run.summary_file.read_bytes()[:100])


def summary_without_costs(run: RunFolder) -> None:
    write_json(run.summary_file, {**json.loads(run.summary_file.read_text()), "cost": {}})


def summary_with_text_for_numbers(run: RunFolder) -> None:
    values = json.loads(run.summary_file.read_text())
    write_json(run.summary_file, {**values, "cost": {**values["cost"], "images_per_second": "fast"}})


def summary_with_odd_kinds(run: RunFolder) -> None:
    values = json.loads(run.summary_file.read_text())
    write_json(run.summary_file, {**values, "cost": {**values["cost"], "evaluations_by_kind": [1]}})


def summary_of_nothing(run: RunFolder) -> None:
    values = json.loads(run.summary_file.read_text())
    write_json(run.summary_file, {**values, "scores": {"cnn": {"correct": [], "total": [5]}}})


@pytest.mark.parametrize(
    "damage",
    [
        broken_config,
        foreign_config,
        binary_config,
        half_summary,
        summary_without_costs,
        summary_with_text_for_numbers,
        summary_with_odd_kinds,
        summary_of_nothing,
    ],
)
def test_a_run_that_cannot_be_read_is_named_and_the_rest_is_shown(damage, tmp_path: Path) -> None:
    write_run(tmp_path / "good", config_of())
    write_run(tmp_path / "bad", config_of(seed=1))
    damage(RunFolder(tmp_path / "bad"))
    report = write_report([tmp_path], tmp_path / "report.html")
    assert report.num_runs == 1
    (problem,) = report.problems
    assert problem.where == "bad"
    page = Page((tmp_path / "report.html").read_text())
    assert problem.message in page.texts
    assert "good" in page.texts


@pytest.mark.parametrize("text", ["{", "[1, 2]\n", '{"event": "epoch"}\n', '{"event": "task", "cnn": 3}\n', "7\n"])
def test_a_broken_history_costs_the_timeline_alone(text: str, tmp_path: Path) -> None:
    write_run(tmp_path / "run", config_of())
    (tmp_path / "run" / "metrics.jsonl").write_text(text + "{\n")
    report = collect_report([tmp_path])
    assert report.num_runs == 1
    assert "metrics.jsonl" in report.problems[0].message
    assert "timelines" not in [section.name for section in report.data.sections]


def test_a_half_written_last_line_is_no_problem(tmp_path: Path) -> None:
    write_run(tmp_path / "run", config_of(), is_finished=False)
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"event": "ep')
    report = collect_report([tmp_path])
    assert report.problems == ()
    assert report.groups[0].timeline() is not None


def test_nothing_to_report_is_an_error_that_says_why(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no run directory at or below"):
        collect_report([tmp_path, tmp_path / "absent"])


def test_a_missing_folder_does_not_hide_the_others(runs: Path, tmp_path: Path) -> None:
    report = collect_report([tmp_path / "absent", runs])
    assert report.num_runs == 6
    assert report.problems == (
        Problem(str(tmp_path / "absent"), f"There is no run directory at or below {str(tmp_path / 'absent')!r}."),
    )


def test_a_run_given_twice_is_shown_once(runs: Path) -> None:
    assert collect_report([runs, runs / "none-seed0", runs]).num_runs == 6


def test_a_seed_that_was_run_twice_counts_twice(runs: Path, tmp_path: Path) -> None:
    write_run(tmp_path / "again", config_of(seed=0))
    report = collect_report([runs, tmp_path])
    assert report.groups[0].spread("avg").n == 4
    assert len(report.groups[0].by_seed("avg")) == 3


def test_a_folder_name_that_is_no_text_is_no_problem(tmp_path: Path) -> None:
    odd = Path(os.fsdecode(os.fsencode(tmp_path) + b"/odd-\xff"))
    write_run(odd, config_of())
    write_run(tmp_path / "other", config_of(seed=1))
    write_report([tmp_path], tmp_path / "report.html")
    assert "odd-?" in Page((tmp_path / "report.html").read_text()).texts


def test_long_curves_of_the_analysis_are_thinned_out(tmp_path: Path) -> None:
    write_run(tmp_path / "run", config_of())
    (tmp_path / "run" / "analysis").mkdir()
    values = [float(number) for number in range(50_000)]
    figure = FigureData("long", "Long", [Panel("p", "x", "y", [Curve("c", values, values, values, values)])])
    (tmp_path / "run" / "analysis" / "long.json").write_text(json.dumps(figure.to_dict()))
    (section,) = [section for section in collect_report([tmp_path]).data.sections if section.name == "gradients"]
    (curve,) = section.charts[0].options[0][1].panels[0].marks
    assert len(curve.x) <= MAX_POINTS
    assert (curve.y[0], curve.y[-1]) == (0.0, 49_999.0)


def test_figures_of_the_analysis_are_shown_and_others_named(tmp_path: Path) -> None:
    write_run(tmp_path / "run", config_of())
    folder = tmp_path / "run" / "analysis"
    folder.mkdir()
    figure = FigureData("ratios", "Ratios", [Panel("p", "x", "y", [Curve("c", [1.0, 2.0], [1.0, float("inf")])])])
    (folder / "ratios.json").write_text(json.dumps(figure.to_dict()))
    wrong = {"name": "x", "title": "t", "panels": [{"title": "p", "x_label": 3, "y_label": "", "marks": []}]}
    for name, text in (("a", "{"), ("b", "[]"), ("c", json.dumps(wrong)), ("d", '{"title": "t", "panels": []}')):
        (folder / f"{name}.json").write_text(text)
    report = write_report([tmp_path], tmp_path / "report.html")
    (section,) = [section for section in report.data.sections if section.name == "gradients"]
    assert [choice.title for choice in section.charts] == ["Ratios"]
    assert [problem.where for problem in report.problems] == [f"run/analysis/{name}.json" for name in "abcd"]


def test_names_with_markup_are_shown_as_text(tmp_path: Path) -> None:
    name = HOSTILE.replace("/", "")
    write_run(tmp_path / name, config_of())
    write_run(tmp_path / "other", config_of(seed=1))
    (tmp_path / name / "env.json").write_text(json.dumps({HOSTILE: HOSTILE}))
    out = tmp_path / "report.html"
    write_report([tmp_path], out, title=HOSTILE)
    page = Page(out.read_text())
    assert page.texts.count(HOSTILE) >= 2  # the tab, the heading
    assert name in page.texts
    assert len(page.scripts) == 3  # the style, plotly, our own
    assert not any("alert" in script for script in page.scripts[2:])


def test_embedded_json_cannot_end_its_element() -> None:
    text = embed_json({"name": HOSTILE})
    assert not set("<>&\u2028") & set(text)
    assert json.loads(text) == {"name": HOSTILE}


def test_a_page_is_a_pure_function_of_its_data() -> None:
    table = Table("t", ("a", "b"), ((Cell("x"), Cell("1", 1.0, is_best=True)),))
    report = ReportData(
        "T", ("Sentence.",), (Section("s", "S", tables=(table,)),), (("runs", "1"),), (Problem("w", "m"),)
    )
    assert build_page(report, "1") == build_page(report, "1")
    page = Page(build_page(report, "1"))
    assert [attributes.get("data-value") for tag, attributes in page.elements if tag == "td"] == [None, "1.0"]


COMMANDS = [
    {},
    {"optimizer": {"name": "c_flat_turbo", "k": 7, "rho": 1e-5}, "seed": 3},
    {"method": {"name": "icarl", "memory_total": 100}, "preset": "smoke"},
    {"data": {"name": "digits", "train_per_class": 20}, "train": {"epochs": 2, "clip_norm": 1.5}},
    {"method": "ease", "data": "cifar100", "backbone": {"weights": "a folder/vit's.safetensors"}, "optimizer": "sam"},
    {"method": "memo", "data": "cifar100", "backbone": {"name": "resnet32"}, "base": {"milestones": [1, 2]}},
    {"method": "l2p", "data": "npz:my file.npz", "preset": "cpu", "backbone": {"weights": "random"}},
]


@pytest.mark.parametrize("chosen", COMMANDS)
def test_the_command_resolves_to_the_same_configuration(chosen, capsys, monkeypatch) -> None:
    import cflat.cli.commands.run as command_line

    seen = []
    monkeypatch.setattr(command_line, "_show_plan", lambda config, folder, as_json: seen.append(config))
    config = config_of(**chosen)
    program, *arguments = shlex.split(reproduce_command(config))
    assert program == "cflat"
    assert run_app([*arguments, "--dry-run"]) == 0
    assert seen == [config]


def test_the_command_names_only_what_the_preset_does_not_say() -> None:
    config = config_of(optimizer={"name": "sam", "rho": 0.3}, seed=2)
    expected = "cflat run --method icarl --data digits --optimizer sam --seed 2 optimizer.rho=0.3"
    assert reproduce_command(config) == expected


def test_a_configuration_without_preset_gets_a_command_too() -> None:
    config = parse_config({**config_of().to_dict(), "preset": "custom"})
    assert reproduce_command(config) == "cflat run --method icarl --data digits --optimizer none --seed 0"


def test_the_command_line_writes_the_page_and_tells_problems(runs: Path, tmp_path: Path, capsys) -> None:
    out = tmp_path / "made" / "report.html"
    assert run_app(["report", str(runs), str(tmp_path / "absent"), "-o", str(out)]) == 0
    told = capsys.readouterr()
    assert "points of average accuracy" in told.out
    assert f"Page: {out} (6 runs, 1 unfinished, 2 configurations)" in told.out
    assert "Left out" in told.err
    assert run_app(["report", str(runs), "-o", str(out), "--json", "--title", "T"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert (values["runs"], values["unfinished"], values["title"], values["problems"]) == (6, 1, "T", [])
    assert run_app(["report", str(tmp_path / "absent")]) == 2
    assert run_app(["report"]) == 2


def test_page_and_tables_share_one_reading(runs: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    found = []
    monkeypatch.setattr(records, "find_runs", lambda root: found.append(root) or find_runs(root))
    words = ["report", str(runs), "-o", str(tmp_path / "report.html"), "--tables", str(tmp_path / "tables"), "--json"]
    assert run_app(words) == 0
    assert len(json.loads(capsys.readouterr().out)["tables"]) == 6
    assert found == [runs]
    for file in write_tables([runs], tmp_path / "again"):
        assert file.read_text() == (tmp_path / "tables" / file.name).read_text()


def test_runs_tuned_by_one_search_are_compared_whatever_their_rates(tmp_path: Path) -> None:
    settings = {"none": {"base.lr": 0.2}, "sam": {"base.lr": 0.05, "optimizer.rho": 0.1}}
    for seed in range(2):
        write_run(tmp_path / f"none-{seed}", config_of(seed=seed, base={"lr": 0.2}))
        write_run(
            tmp_path / f"sam-{seed}", config_of(optimizer={"name": "sam", "rho": 0.1}, seed=seed, base={"lr": 0.05})
        )
    assert collect_report([tmp_path]).data.headlines[0].startswith("No two of these 2 configurations")
    entries = {name: {"settings": own} for name, own in settings.items()}
    (tmp_path / "tuned.json").write_text(json.dumps({"optimizers": entries}))
    (sentence,) = collect_report([tmp_path]).data.headlines
    assert re.search(r"^SAM, base.lr=0.05 (gains|loses) .* SGD, base.lr=0.2 ", sentence)
    assert "on test images" in sentence
    entries["gam"] = {"settings": None}  # all its trials diverged
    (tmp_path / "tuned.json").write_text(json.dumps({"optimizers": entries}))
    assert collect_report([tmp_path]).data.headlines == (sentence,)
    entries["sam"]["settings"]["base.lr"] = 0.04  # another search than that of these runs
    (tmp_path / "tuned.json").write_text(json.dumps({"optimizers": entries}))
    assert collect_report([tmp_path]).data.headlines[0].startswith("No two of these 2 configurations")


def test_one_optimizer_is_singled_out_by_validation_images_alone(tmp_path: Path) -> None:
    names = ("none", "sam", "c_flat", "msam", "gsam")
    for name in names:
        write_run(tmp_path / name, config_of(optimizer=name))
    (sentence,) = collect_report([tmp_path]).data.headlines
    assert [title in sentence for title in ("SAM ", "C-Flat ")] == [True, True]
    assert sentence.endswith("1 more in the table; test images choose no best one.")
    for number, name in enumerate(names):
        file = RunFolder(tmp_path / name).summary_file
        values = json.loads(file.read_text())
        scores = json.loads(json.dumps(values["scores"]))
        for stage, row in enumerate(scores["cnn"]["correct"]):
            row[: stage + 1] = [10 + (30 if name == "msam" else number)] * (stage + 1)
        file.write_text(json.dumps({**values, "validation": {"scores": scores}}))
    (sentence,) = collect_report([tmp_path]).data.headlines
    assert sentence.startswith("MSAM ")
    assert sentence.endswith("Of 4, it is the best on validation images.")


@pytest.mark.parametrize("images", ["test", "validation"])
def test_curves_name_the_images_they_were_measured_on(images: str, tmp_path: Path) -> None:
    config = config_of(data={"name": "digits", "validation": 0.2, "evaluate": images})
    write_run(tmp_path / "run", config, is_finished=False)
    assert f"on the {images} images of every task" in collect_report([tmp_path]).data.sections[0].text
