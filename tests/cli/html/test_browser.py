from pathlib import Path
from typing import Literal

import pytest

from cli.html.browser import Page
from cli.html.rich import HOSTILE, write_rich_report
from lucid_cli.html import render_page
from lucid_profiler.reader import read_report
from lucid_profiler.records import Arm

CHARTS = ("effects-0", "values-0", "step-spread", "step-trend", "memory-account", "memory-resident", "device-readings")
Scheme = Literal["light", "dark"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
def test_every_chart_is_drawn_without_a_complaint(chromium: Page, rich_page: Path, width: int, scheme: Scheme) -> None:
    """The console stays empty, each picture has marks, nothing is wider than the window, nothing else is loaded."""
    chromium.show(rich_page, width=width, scheme=scheme)
    for chart in CHARTS:
        marks = f"document.querySelectorAll('#{chart} .points path, #{chart} .lines path, #{chart} .trace path').length"
        assert chromium.ask(marks) > 0, chart
        assert 0 < chromium.ask(f"document.querySelector('#{chart} .main-svg').getBoundingClientRect().width") <= width
    assert chromium.ask("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    assert chromium.complaints() == []
    assert [url for url in chromium.requested() if not url.startswith(("file:", "data:"))] == []


def test_the_page_follows_the_system_and_the_choice_of_theme(chromium: Page, rich_page: Path) -> None:
    """Dark by the system, light by choice, and the charts' text takes the colour of the page's."""
    background = "getComputedStyle(document.body).backgroundColor"
    text = "getComputedStyle(document.querySelector('#step-trend .xtick text')).fill"
    chromium.show(rich_page, width=1280, scheme="light")
    light = [chromium.ask(background), chromium.ask(text)]
    chromium.show(rich_page, width=1280, scheme="dark")
    dark = [chromium.ask(background), chromium.ask(text)]
    assert light[0] != dark[0]
    assert light[1] != dark[1]
    chromium.ask("theme.value = 'light'; theme.dispatchEvent(new Event('change'))")
    chromium.wait(f"{text} === {light[1]!r}")
    assert chromium.ask(background) == light[0]
    chromium.ask("localStorage.clear()")


def test_the_tab_key_reaches_every_control(chromium: Page, rich_page: Path) -> None:
    """Links, choices, buttons and what opens get the focus, in the order of the page, and it can be seen."""
    chromium.show(rich_page, width=1280)
    wanted = chromium.ask(
        "[...document.querySelectorAll('a, select, button, summary')].filter(e => e.checkVisibility()).length"
    )
    reached: list[str] = []
    last = -1
    for _ in range(wanted + 60):
        chromium.press("Tab", 9)
        place, name, is_visible = chromium.ask(
            "(e => [[...document.querySelectorAll('*')].indexOf(e), e.tagName, e.matches(':focus-visible')])"
            "(document.activeElement)"
        )
        if name == "BODY" or place < last:
            break
        assert is_visible, name
        reached.append(name)
        last = place
    assert sum(name in {"A", "SELECT", "BUTTON", "SUMMARY"} for name in reached) == wanted


def test_another_view_changes_the_picture_and_its_table(chromium: Page, rich_page: Path) -> None:
    """Choosing another metric shows its axis, and only its numbers."""
    chromium.show(rich_page, width=1280)
    title = "document.querySelector('#effects-0 .xtitle').textContent"
    assert chromium.ask(title).startswith("wall")
    chromium.ask(
        "(choice => { choice.value = '1'; choice.dispatchEvent(new Event('change')) })"
        "(document.querySelector('select[data-chart=effects-0]'))"
    )
    chromium.wait(f"!{title}.startsWith('wall')")
    blocks = "[...document.querySelectorAll('[data-numbers=effects-0]')]"
    assert chromium.ask(f"{blocks}.filter(e => !e.hidden).map(e => e.dataset.view).join()") == "1"


def test_the_keyboard_zooms_and_moves_a_chart(chromium: Page, rich_page: Path) -> None:
    """Enter on + halves the axis, and on Reset shows all again."""
    chromium.show(rich_page, width=1280)
    width = "(r => r[1] - r[0])(document.getElementById('device-readings')._fullLayout.xaxis.range)"
    whole = chromium.ask(width)
    for action in ("in", "reset"):
        chromium.ask(f"document.querySelector('[data-chart=device-readings][data-zoom={action}]').focus()")
        chromium.press("Enter", 13)
        chromium.wait(f"Math.abs({width} / {whole} - {0.5 if action == 'in' else 1}) < 0.01")
    assert chromium.complaints() == []


def test_a_hostile_report_runs_no_script(chromium: Page, tmp_path: Path) -> None:
    """Its texts are shown as they are, in tables and in charts, and the console stays empty."""
    report = tmp_path / "hostile.jsonl"
    write_rich_report(report, hostile=HOSTILE, arms=(Arm(name=HOSTILE), Arm(name="--arm-1" + HOSTILE)))
    page = tmp_path / "hostile.html"
    page.write_text(render_page(read_report(report)), encoding="utf-8")
    chromium.show(page, width=1280)
    chromium.ask("document.querySelectorAll('details').forEach(e => { e.open = true })")
    assert chromium.ask("window.hacked === undefined")
    assert chromium.ask("document.querySelectorAll('main img, main a[href^=http], main svg a').length") == 0
    assert chromium.complaints() == []
    assert chromium.ask("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
