import base64
import hashlib
import html.parser
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cli.harness import Lucid
from cli.html.rich import HOSTILE, states_of, write_rich_report
from cli.reports import write_arms, write_report
from lucid_cli.html import library, render_page
from lucid_cli.html.thinning import kept, thin
from lucid_profiler.reader import read_report
from lucid_profiler.records import Arm, Metric, Phase

VOID = {"meta", "link", "br", "hr", "input", "img"}
SECTIONS = ["comparison-0", "steps", "memory", "device", "kernels", "parity", "environment", "runs"]


class Outline(html.parser.HTMLParser):
    """Reads a page strictly: what is opened is closed, in order."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.scripts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len({name for name, _ in attrs}) == len(attrs), (tag, attrs)
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts[-1] += data
        else:
            self.texts.append(data)

    def named(self, tag: str) -> list[dict[str, str | None]]:
        """Return the attributes of the elements of one name."""
        return [attributes for name, attributes in self.elements if name == tag]


def outline(page: str) -> Outline:
    """Return what a page is made of."""
    found = Outline()
    found.feed(page)
    found.close()
    assert not found.open
    return found


def charts(found: Outline) -> list[dict[str, Any]]:
    """Return what the page's script draws."""
    loaded: list[dict[str, Any]] = json.loads(found.scripts[0])
    return loaded


@pytest.fixture(scope="module")
def rich(rich_page: Path) -> Outline:
    """Return the page with everything."""
    return outline(rich_page.read_text(encoding="utf-8"))


def rendered(path: Path) -> Outline:
    """Return the page of a report."""
    return outline(render_page(read_report(path)))


def test_a_page_is_well_formed_and_has_every_section(rich: Outline) -> None:
    """Every element is closed in order, and the sections stand in order under headings of their own."""
    assert [attributes["aria-labelledby"] for attributes in rich.named("section")] == SECTIONS
    assert {"html", "head", "title", "main", "nav"} <= {name for name, _ in rich.elements}


def test_every_name_of_an_element_is_there_once_and_can_be_linked_to(rich: Outline) -> None:
    """No two elements share an id; links and labels lead to one that is there."""
    idents = [attributes["id"] for _, attributes in rich.elements if "id" in attributes]
    assert len(set(idents)) == len(idents)
    led_to = [(attributes["href"] or "")[1:] for attributes in rich.named("a")]
    led_to += [
        attributes[key] or "" for _, attributes in rich.elements for key in attributes if key == "aria-labelledby"
    ]
    assert set(led_to) <= set(idents)


def test_a_page_loads_nothing(rich: Outline) -> None:
    """No element names an address but the empty icon, and the policy allows none."""
    addresses = [
        value
        for _, attributes in rich.elements
        for key, value in attributes.items()
        if key in {"src", "href", "srcset", "action"}
    ]
    assert {value for value in addresses if not (value or "").startswith("#")} == {"data:,"}
    policy = next(each["content"] or "" for each in rich.named("meta") if "http-equiv" in each)
    assert policy.startswith("default-src 'none'")
    assert "http" not in policy


def test_only_the_two_scripts_of_the_page_may_run(rich: Outline) -> None:
    """The policy names them by their digests."""
    policy = next(each["content"] or "" for each in rich.named("meta") if "http-equiv" in each)
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in rich.scripts[1:]]
    assert re.findall(r"sha256-([^']+)", policy) == digests


def test_every_chart_has_its_numbers_as_a_table(rich: Outline) -> None:
    """Each view of each chart has a block of tables, and the picture names its title and its description."""
    drawn = charts(rich)
    numbers = [(each["data-numbers"], each["data-view"]) for each in rich.named("div") if "data-numbers" in each]
    assert numbers == [(chart["id"], str(place)) for chart in drawn for place in range(len(chart["views"]))]
    plots = [each for each in rich.named("div") if each.get("class") == "plot"]
    assert [each["id"] for each in plots] == [chart["id"] for chart in drawn]
    assert all(each["role"] == "img" and each["aria-labelledby"] and each["aria-describedby"] for each in plots)


def test_times_when_a_clock_is_held_down_are_bands(rich: Outline) -> None:
    """The stretch of the power cap, from its first reading to the next one without it, is drawn across the panels."""
    device = next(chart for chart in charts(rich) if chart["id"] == "device-readings")
    (band,) = device["views"][0]["layout"]["shapes"]
    strip = next(trace for trace in device["traces"] if trace["name"] == "power cap")
    assert band["x0"] == pytest.approx(strip["base"][0], rel=1e-4)
    assert band["x1"] - band["x0"] == pytest.approx(strip["x"][0], rel=1e-4)
    assert strip["x"][0] == pytest.approx(2.5, rel=0.05)


def test_the_areas_of_memory_add_up_to_what_is_used(rich: Outline) -> None:
    """Parts and wholes are never drawn both."""
    account = next(chart for chart in charts(rich) if chart["id"] == "memory-account")
    traces = [account["traces"][place] for place in account["views"][0]["traces"]]
    areas = [trace["y"][0] for trace in traces if "stackgroup" in trace]
    assert sum(areas) == traces[-1]["y"][0] == 2000


def test_a_changed_environment_is_named_with_both_values(rich: Outline) -> None:
    """Fact, run and value stand in the section."""
    assert {"process: torch", "run 3", "2.9.1", "2.9.2"} <= set(rich.texts)


def test_what_is_missing_is_said_and_not_drawn(tmp_path: Path) -> None:
    """Without a GPU, samples or traces a section is a sentence."""
    write_report(tmp_path / "plain.jsonl")
    found = rendered(tmp_path / "plain.jsonl")
    assert sum(each.get("class") == "missing" for each in found.named("p")) == 4
    assert [chart["id"] for chart in charts(found)] == ["effects-0", "values-0"]
    assert any("no CUDA device was used" in text for text in found.texts)


def test_a_report_of_one_run_has_a_page(tmp_path: Path) -> None:
    """Also what was stopped at once is shown, with what is wrong about it."""
    write_report(tmp_path / "a.jsonl")
    lines = (tmp_path / "a.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "a.jsonl").write_bytes(b"".join(lines[:2]))
    found = rendered(tmp_path / "a.jsonl")
    assert any("has no end" in text for text in found.texts)


def test_nothing_of_a_hostile_report_becomes_markup(tmp_path: Path) -> None:
    """Texts that would end a script or open an element stay texts wherever a report may hold one."""
    path = tmp_path / "hostile.jsonl"
    write_rich_report(
        path, hostile=HOSTILE, arms=(Arm(name=HOSTILE), Arm(name="other" + HOSTILE, env={HOSTILE: HOSTILE}))
    )
    page = render_page(read_report(path))
    found = outline(page)
    assert len(found.scripts) == 3
    assert not found.named("img")
    assert not [key for _, attributes in found.elements for key in attributes if key.startswith("on")]
    assert "\u2028" not in page.replace(found.scripts[1], "")
    assert "</script>" not in found.scripts[0]
    names = [trace.get("name", "") for chart in charts(found) for trace in chart["traces"]]
    assert names
    assert not any("<" in name or "$" in name for name in names)


def test_each_further_arm_has_a_comparison(tmp_path: Path) -> None:
    """Three arms make two blocks, each with its charts."""
    path = tmp_path / "three.jsonl"
    write_rich_report(path, arms=(Arm(name="native"), Arm(name="captured"), Arm(name="again", control=True)))
    found = rendered(path)
    assert [each["aria-labelledby"] for each in found.named("section")][:2] == ["comparison-0", "comparison-1"]
    assert {"effects-0", "effects-1"} <= {chart["id"] for chart in charts(found)}
    assert any("what differs here is noise" in text for text in found.texts)


def test_a_long_report_is_thinned_and_says_so(tmp_path: Path) -> None:
    """The page stays below 6 MB, and the captions tell how much is drawn."""
    path = tmp_path / "long.jsonl"
    write_rich_report(path, num_samples=20_000)
    page = render_page(read_report(path))
    assert len(page.encode()) < 6_000_000
    found = outline(page)
    assert any("are drawn: the smallest and largest of each of" in text for text in found.texts)
    assert sum(len(trace.get("x", ())) for chart in charts(found) for trace in chart["traces"]) < 50_000


def test_a_page_is_the_same_each_time(rich_report: Path) -> None:
    """Neither time nor chance is in it."""
    assert render_page(read_report(rich_report)) == render_page(read_report(rich_report))


def test_thinning_keeps_ends_and_extremes_of_every_bin() -> None:
    """Single peaks survive, and the order stays."""
    values = [0.0] * 1000
    values[333], values[777] = 9.0, -9.0
    places = kept(values, 10)
    assert places == sorted(places)
    assert {0, 333, 777, 999} <= set(places)
    assert len(places) <= 22


def test_thinning_leaves_short_series_alone_and_gaps_open() -> None:
    """What fits stays whole; a bin without a value keeps a hole."""
    assert thin([1, 2], [5, None], 4).y == [5, None]
    gap = thin(range(300), [1.0] * 100 + [None] * 100 + [1.0] * 100, 30)
    assert None in gap.y
    assert gap.num == 300


def test_the_command_writes_beside_the_report_and_replaces_nothing(lucid: Lucid, rich_report: Path) -> None:
    """The second time it refuses, and --overwrite does it all the same."""
    (lucid.directory / "a.jsonl").write_bytes(rich_report.read_bytes())
    assert lucid("report", "html", "a.jsonl").code == 0
    assert (lucid.directory / "a.html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    again = lucid("report", "html", "a.jsonl")
    assert again.code == 2
    assert "--overwrite" in again.err
    assert lucid("report", "html", "a.jsonl", "--overwrite").code == 0
    assert {path.name for path in lucid.directory.iterdir()} == {"a.jsonl", "a.html"}


def test_the_report_itself_is_never_replaced(lucid: Lucid, rich_report: Path) -> None:
    """Also not with --overwrite, whatever name it goes by."""
    report = lucid.directory / "a.jsonl"
    report.write_bytes(rich_report.read_bytes())
    (lucid.directory / "link").symlink_to("a.jsonl")
    ran = lucid("report", "html", "a.jsonl", "-o", "link", "--overwrite")
    assert ran.code == 2
    assert report.read_bytes() == rich_report.read_bytes()


def test_a_page_comes_from_stdin_and_goes_to_stdout(lucid: Lucid, rich_report: Path, rich_page: Path) -> None:
    """`-` stands for both; without -o a report without a name is refused."""
    with rich_report.open("rb") as stdin:
        ran = lucid("report", "html", "-", "-o", "-", stdin=stdin)
    assert ran.code == 0
    assert ran.out == rich_page.read_text(encoding="utf-8")
    assert lucid("report", "html", "-").code == 2


def test_a_bad_report_leaves_no_page(lucid: Lucid) -> None:
    """The exit code says that the report is bad."""
    (lucid.directory / "a.jsonl").write_text("{}\n")
    assert lucid("report", "html", "a.jsonl").code == 7
    assert not (lucid.directory / "a.html").exists()


def test_without_the_library_the_remedy_is_said(lucid: Lucid, rich_report: Path) -> None:
    """Exit 9, one line, no page; torch and numpy are not asked for."""
    (lucid.directory / "a.jsonl").write_bytes(rich_report.read_bytes())
    (lucid.directory / "plotly.py").write_text("raise ImportError('there is none')\n")
    ran = lucid("report", "html", "a.jsonl", env={"PYTHONPATH": str(lucid.directory)})
    assert ran.code == 9
    assert "pip install plotly" in ran.err
    assert not (lucid.directory / "a.html").exists()


def test_the_library_can_stand_in_a_script_element() -> None:
    """Its text neither ends the element nor opens a comment in it."""
    script = library.charting_script().lower()
    assert "</script" not in script
    assert "<!--" not in script


def test_another_computation_is_not_called_equal(tmp_path: Path) -> None:
    """Of an arm that is declared to be one no parity is asked, and the page says so in tile, tables and pairs."""
    arms = [Arm(name="muon"), Arm(name="sgd", different=True)]
    report = write_arms(tmp_path / "r.jsonl", arms, [("sgd", 100.0 + step, 80.0) for step in range(4)])
    text = " ".join(outline(render_page(report)).texts)
    assert text.count("not asked (base runs agree)") == 2
    assert "Parity of muon runs by part" in text
    assert "equal to the last bit" not in text


def followed(found: Outline, *texts: str) -> bool:
    """Return whether texts stand one after the other on a page."""
    shown = [text for text in found.texts if text.strip()]
    return any(tuple(shown[place : place + len(texts)]) == texts for place in range(len(shown)))


def test_phases_are_drawn_as_marked_and_summed_within_the_wall(rich_report: Path) -> None:
    """The table has what every other form has, and the chart says which is which."""
    report = read_report(rich_report)
    runs = []
    for run in report.runs:
        assert run.wall is not None
        end_ns = run.wall.end_ns
        marked = (("save", 0, 10**9), ("save", end_ns - 5 * 10**8, end_ns + 10**10), ("exit", end_ns, end_ns + 1))
        phases = tuple(Phase(name=name, begin_ns=begin_ns, end_ns=stop_ns) for name, begin_ns, stop_ns in marked)
        runs.append(replace(run, phases=phases))
    found = outline(render_page(replace(report, runs=tuple(runs))))
    assert followed(found, "phase", "times", "seconds", "save", "2", "1.5", "limit of the clock of run 0, native")
    assert any("beyond the wall interval; their sums in the table are cut to it" in text for text in found.texts)
    device = next(chart for chart in charts(found) if chart["id"] == "device-readings")
    assert next(trace["x"] for trace in device["traces"] if trace["name"] == "save") == [1.0, 10.5]


def test_the_tile_of_parity_names_the_parts_that_differ(rich_report: Path) -> None:
    """And not those that are equal; where all are, it names all."""
    report = read_report(rich_report)
    assert followed(outline(render_page(report)), "parity", "equal to the last bit", "model")
    digests = {run.run: "01"[run.arm == "captured"] * 64 for run in report.runs}
    losses = tuple(states_of(run, part="losses", digest=digests[run.run]) for run in report.runs)
    found = outline(render_page(replace(report, states=(*report.states, *losses))))
    assert followed(found, "parity", "different", "losses", "pairs in the statistics")


def test_a_pair_without_a_value_is_not_said_to_be_in_the_statistics(rich_report: Path) -> None:
    """It says that it has none, and one pair is one."""
    report = read_report(rich_report)
    unknown = Metric(value=None, unit="J", reason="no_driver")
    runs = tuple(
        replace(run, metrics={**run.metrics, "gpu_energy": unknown}) if run.pair else run for run in report.runs
    )
    found = outline(render_page(replace(report, runs=runs)))
    assert followed(found, "pair 1", "-", "no value", "pair 2", "-", "no value", "median")
    assert "1 pair" in found.texts
    assert "1 pairs" not in found.texts


def test_the_runs_say_which_steps_are_counted(rich: Outline) -> None:
    """Those of all optimizers and processes, which step times are not."""
    assert "optimizer steps" in rich.texts
    assert any("all optimizers in all processes of a run together" in text for text in rich.texts)
    assert any("one optimizer, the one that stepped most often in a run's first process" in text for text in rich.texts)
