"""The page in a real browser: drawn without errors and without the network, sortable, light and dark, narrow."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cflat.figures import Curve, FigureData, Panel
from cflat.report.write import write_report
from report.browser import Browser, missing_programs, open_browser
from report.pages import config_of, write_run

HOSTILE = "<img src=x onerror=alert(1)><script>document.title='taken'<!--"
LIGHT, DARK = "rgb(251, 251, 250)", "rgb(21, 24, 28)"

pytestmark = pytest.mark.skipif(
    bool(missing_programs()), reason=f"needs Debian's chromium and chromium-driver; absent: {missing_programs()}"
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with open_browser(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four optimizers with three seeds, a run with a hostile name, an unfinished one, a broken one, and gradients."""
    root = tmp_path_factory.mktemp("report")
    for name in ("none", "sam", "c_flat", "c_flat_turbo"):
        for seed in range(3):
            write_run(root / "runs" / f"{name}-seed{seed}", config_of(optimizer=name, seed=seed))
    write_run(root / "runs" / HOSTILE, config_of(optimizer="gam"))
    write_run(root / "runs" / "begun", config_of(optimizer="ss_sam"), is_finished=False)
    broken = root / "runs" / "broken"
    write_run(broken, config_of(optimizer="gsam"))
    (broken / "config.yaml").write_text("method: [")
    analysis = root / "runs" / "none-seed0" / "analysis"
    analysis.mkdir()
    panels = [Panel(f"panel {n}", "x", "y", [Curve("c", [1.0, 2.0], [n, 2.0])]) for n in range(4)]
    for number in range(4):
        figure = FigureData(f"figure-{number}", HOSTILE, panels)
        (analysis / f"{figure.name}.json").write_text(json.dumps(figure.to_dict()))
    write_report([root / "runs"], root / "report.html", title="A report")
    return root / "report.html"


@pytest.fixture
def opened(browser: Browser, page: Path) -> Browser:
    """The page, wide and light, with every chart drawn; loaded again only where a test has turned it dark or narrow."""
    is_loaded = browser.run("return window.cflatReport !== undefined && !document.documentElement.dataset.theme")
    browser.emulate(1200, 900, dark=False)
    if is_loaded and browser.run("return location.href") == page.resolve().as_uri():
        return browser
    browser.run("try { localStorage.clear(); } catch { /* not on a blank page */ }")
    browser.log("browser")
    browser.requests()
    return load(browser, page)


def load(browser: Browser, page: Path) -> Browser:
    browser.open(page)
    browser.run("window.cflatReport.drawAll()")
    browser.wait_for("return document.body.dataset.drawn === document.body.dataset.charts")
    return browser


def texts(browser: Browser, column: int, table: str) -> list[str]:
    script = "return [...document.querySelectorAll(`table[aria-label='${arguments[1]}'] tbody tr`)]"
    return browser.run(f"{script}.map((row) => row.cells[arguments[0]].textContent)", column, table)


def sort_by(browser: Browser, column: int, table: str) -> None:
    heads = "document.querySelectorAll(`table[aria-label='${arguments[1]}'] th button`)"
    browser.run(f"{heads}[arguments[0]].click()", column, table)


def test_nothing_is_asked_of_the_network_and_nothing_fails(opened: Browser, page: Path) -> None:
    assert opened.log("browser") == []
    asked = opened.requests()
    own = page.resolve().as_uri()
    assert own in asked
    inner = (own, "data:", "blob:", "chrome:")  # the last: Chromium's own empty tab, sometimes still in the log
    assert [address for address in asked if not address.startswith(inner)] == []


def test_errors_and_requests_would_be_noticed(browser: Browser, tmp_path: Path) -> None:
    bad = tmp_path / "bad.html"
    bad.write_text("<script src='absent.js'></script><script>throw new Error('seen')</script>")
    browser.open(bad)
    messages, addresses = [], []
    for _ in range(200):  # the logs of a busy browser come late
        messages += [entry["message"] for entry in browser.log("browser")]
        addresses += browser.requests()
        if any("seen" in message for message in messages) and (tmp_path / "absent.js").as_uri() in addresses:
            return
        time.sleep(0.1)
    pytest.fail(f"Not noticed; messages {messages}, requests {addresses}.")


def test_every_chart_is_drawn(opened: Browser) -> None:
    drawn = opened.run(
        "return [...document.querySelectorAll('.plot')].map((plot) =>"
        " plot.querySelectorAll('.trace, .hm, .heatmaplayer image, .point').length)"
    )
    assert len(drawn) == opened.run("return Number(document.body.dataset.charts)") >= 7
    assert all(count > 0 for count in drawn), drawn


def test_charts_are_drawn_when_they_come_into_view(browser: Browser, page: Path) -> None:
    browser.emulate(1200, 600, dark=False)
    browser.open(page)
    browser.wait_for("return Number(document.body.dataset.drawn) > 0")
    charts, drawn = browser.run("return [Number(document.body.dataset.charts), Number(document.body.dataset.drawn)]")
    assert drawn < charts
    browser.run("dispatchEvent(new Event('beforeprint'))")
    browser.wait_for("return document.body.dataset.drawn === document.body.dataset.charts")


def test_every_choice_of_a_list_can_be_drawn(opened: Browser) -> None:
    choices = opened.run("return [...document.querySelectorAll('select')].map((list) => list.options.length)")
    assert max(choices) >= 4
    for number, length in enumerate(choices):
        for value in range(length):
            opened.run(
                "const list = document.querySelectorAll('select')[arguments[0]];"
                "list.value = arguments[1]; list.dispatchEvent(new Event('change'));",
                number,
                str(value),
            )
            opened.wait_for(
                "const list = document.querySelectorAll('select')[arguments[0]];"
                "const plot = document.getElementById(list.dataset.chart);"
                "return plot.dataset.choice === arguments[1] && plot.data.length > 0;",
                number,
                str(value),
            )
    assert opened.log("browser") == []


def test_a_click_sorts_numbers_as_numbers_and_the_next_turns_them_round(opened: Browser) -> None:
    columns = opened.run(
        "return [...document.querySelectorAll(`table[aria-label='Runs'] th`)].map((head) => head.textContent)"
    )
    speed = columns.index("images/s")
    before = texts(opened, speed, "Runs")
    sort_by(opened, speed, "Runs")
    up = [float(text) for text in texts(opened, speed, "Runs") if text != "-"]
    assert up == sorted(up)
    assert len(set(up)) > 5
    assert up != [float(text) for text in before if text != "-"]
    sort_by(opened, speed, "Runs")
    assert [float(text) for text in texts(opened, speed, "Runs") if text != "-"] == up[::-1]
    sort_by(opened, 0, "Runs")
    names = texts(opened, 0, "Runs")
    assert names.index("c_flat-seed0") < names.index("none-seed1") < names.index("sam-seed2")


def test_the_filter_hides_runs_and_their_commands(opened: Browser) -> None:
    opened.run(
        "const input = document.querySelector('.filter input');"
        "input.value = 'turbo seed1'; input.dispatchEvent(new Event('input'));"
    )
    shown = opened.run(
        "return [...document.querySelectorAll(`table[data-filtered] tbody tr, [data-filter]`)]"
        ".filter((item) => item.offsetParent !== null).map((item) => item.textContent)"
    )
    assert len(shown) == 2
    assert all("c_flat_turbo-seed1" in text for text in shown)
    opened.run(
        "const input = document.querySelector('.filter input');"
        "input.value = ''; input.dispatchEvent(new Event('input'));"
    )
    assert opened.run("return document.querySelectorAll('[data-filter][hidden]').length") == 0


def look(browser: Browser) -> dict[str, str]:
    return browser.run(
        "const text = document.querySelector('.plot .xtick text');"
        "return {page: getComputedStyle(document.body).backgroundColor, ink: getComputedStyle(text).fill,"
        " button: document.getElementById('theme').textContent}"
    )


def switch(browser: Browser, ink: str) -> None:
    browser.run("document.getElementById('theme').click()")
    browser.wait_for("return getComputedStyle(document.querySelector('.plot .xtick text')).fill !== arguments[0]", ink)


def test_the_switch_turns_page_and_charts_dark_and_is_remembered(opened: Browser, page: Path) -> None:
    light = look(opened)
    assert (light["page"], light["button"]) == (LIGHT, "Dark")
    switch(opened, light["ink"])
    dark = look(opened)
    assert (dark["page"], dark["button"]) == (DARK, "Light")
    assert dark["ink"] != light["ink"]
    assert look(load(opened, page)) == dark
    switch(opened, dark["ink"])
    assert look(opened) == light


def test_the_theme_of_the_system_is_the_first_choice(opened: Browser, page: Path) -> None:
    opened.emulate(1200, 900, dark=True)
    assert look(load(opened, page))["page"] == DARK


def test_the_switch_works_without_storage(browser: Browser, page: Path, tmp_path: Path) -> None:
    denied = "Object.defineProperty(window, 'localStorage', {get() { throw new DOMException('denied'); }});"
    copy = tmp_path / "denied.html"
    copy.write_text(page.read_text().replace("<head>", f"<head><script>{denied}</script>", 1))
    browser.emulate(1200, 900, dark=False)
    browser.log("browser")
    load(browser, copy)
    switch(browser, look(browser)["ink"])
    assert look(browser)["page"] == DARK
    assert browser.log("browser") == []


def test_the_page_is_usable_at_400_pixels(opened: Browser, page: Path) -> None:
    opened.emulate(400, 800, dark=False)
    load(opened, page)
    opened.wait_for("return document.querySelector('.plot').dataset.narrow === 'true'")
    assert opened.run("return document.documentElement.scrollWidth") <= 400
    wide = opened.run(
        "return [...document.querySelectorAll('.plot .main-svg, h1, .headline, .commands li, .facts div')]"
        ".filter((item) => item.getBoundingClientRect().right > 400.5).map((item) => item.outerHTML.slice(0, 80))"
    )
    assert wide == []
    opened.emulate(1200, 900, dark=False)
    opened.run("dispatchEvent(new Event('resize'))")
    opened.wait_for("return document.querySelector('.plot').dataset.narrow === 'false'")


def test_hostile_names_are_text(opened: Browser) -> None:
    assert opened.run("return document.title") == "A report"
    assert HOSTILE in texts(opened, 0, "Runs")
    assert opened.run("return document.querySelectorAll('main img').length") == 0
    headings = opened.run("return [...document.querySelectorAll('h3')].map((head) => head.textContent)")
    assert HOSTILE in headings


def test_what_could_not_be_read_is_said(opened: Browser) -> None:
    told = opened.run("return document.querySelector('.problems').textContent")
    assert "1 thing could not be read" in told
    assert "broken" in told


def test_commands_can_be_copied(opened: Browser) -> None:
    opened.run("document.querySelector('.copy').click()")
    assert opened.wait_for("return document.querySelector('.copy').textContent === 'Copied'")
