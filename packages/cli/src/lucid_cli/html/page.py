"""The whole page: sections, charts, style and scripts in one document that loads nothing.

Its content security policy names its two scripts by their digests: whatever a report holds, no other one runs.
"""

import base64
import hashlib
from collections.abc import Sequence
from importlib import resources

from lucid_cli.html import device, memory, steps
from lucid_cli.html.charts import Chart, chart_data
from lucid_cli.html.device import device_section
from lucid_cli.html.environment import environment_section
from lucid_cli.html.kernels import kernels_section
from lucid_cli.html.library import charting_script
from lucid_cli.html.markup import Html, json_data, tag
from lucid_cli.html.memory import memory_section
from lucid_cli.html.overview import banner, comparison_section, runs_section
from lucid_cli.html.parity import parity_section
from lucid_cli.html.section import Section
from lucid_cli.html.series import Series
from lucid_cli.html.steps import steps_section
from lucid_profiler.compare import Analysis, analyze_all
from lucid_profiler.reader import Report

MAX_COMPARISONS = 6

__all__ = ["MAX_COMPARISONS", "drawn_series", "render_page"]


def drawn_series() -> Series:
    """Return what takes the samples of a page while its report is read."""
    return Series({**steps.DRAWN, **memory.DRAWN, **device.DRAWN})


def render_page(report: Report, series: Series | None = None) -> str:
    """Return the document.

    Args:
        report: what the page shows.
        series: its samples, where the report was read without them.

    Raises:
        EnvironmentUnusableError: The library that draws the charts is not installed.
    """
    library = charting_script()
    analyses = analyze_all(report)
    sections = _sections(report, analyses, _series(report) if series is None else series)
    charts = [chart for section in sections for chart in section.charts]
    body = tag(
        "body",
        tag("a", "To the content", href="#content", class_="skip"),
        _bar(sections),
        tag(
            "main",
            banner(report, analyses),
            tag(
                "noscript", tag("p", "The charts need JavaScript; the tables below them hold the same.", class_="note")
            ),
            [section.html() for section in sections],
            _footer(report),
            id="content",
        ),
        _scripts(charts, library),
    )
    return f"<!DOCTYPE html>\n{tag('html', _head(report, library), body, lang='en')}\n"


def _series(report: Report) -> Series:
    series = drawn_series()
    for samples in report.samples:
        series.add(samples)
    return series


def _sections(report: Report, analyses: tuple[Analysis, ...], series: Series) -> list[Section]:
    return [
        *(
            comparison_section(report, analysis, place=place, is_only=len(analyses) == 1)
            for place, analysis in enumerate(analyses[:MAX_COMPARISONS])
        ),
        steps_section(report, series),
        memory_section(report, series),
        device_section(report, series),
        kernels_section(report),
        parity_section(report, analyses),
        environment_section(report),
        runs_section(report),
    ]


def _head(report: Report, library: str) -> Html:
    digests = " ".join(f"'sha256-{_digest(script)}'" for script in (library, _asset("page.js")))
    policy = f"default-src 'none'; script-src {digests}; style-src 'unsafe-inline'; img-src data:; base-uri 'none'"
    arms = " and ".join(arm.name for arm in report.header.arms)
    return tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=f"{policy}; form-action 'none'"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", f"lucid: {arms}, {report.header.created[:10]}"),
        tag("link", rel="icon", href="data:,"),
        tag("style", Html(_asset("page.css"))),
    )


def _asset(name: str) -> str:
    return resources.files("lucid_cli.html").joinpath(name).read_text(encoding="utf-8")


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _bar(sections: Sequence[Section]) -> Html:
    links = [tag("li", tag("a", section.title, href=f"#{section.ident}")) for section in sections]
    options = [tag("option", name.capitalize(), value=name) for name in ("system", "light", "dark")]
    theme = tag("label", "Theme ", tag("select", options, id="theme"))
    return tag("nav", tag("ul", links), theme, class_="bar", aria_label="Sections")


def _footer(report: Report) -> Html:
    header = report.header
    text = (
        f"Written by {header.tool.name} {header.tool.version}, {header.schema}, method {header.method}, report "
        f"{header.id}. Charts by plotly.js, MIT licence. This page loads nothing."
    )
    return tag("footer", tag("p", text))


def _scripts(charts: Sequence[Chart], library: str) -> list[Html]:
    return [
        tag("script", json_data(chart_data(charts)), type="application/json", id="charts"),
        tag("script", Html(library)),
        tag("script", Html(_asset("page.js"))),
    ]
