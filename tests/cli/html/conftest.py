from collections.abc import Iterator
from pathlib import Path

import pytest

from cli.html.browser import CHROMIUM, Page, browser
from cli.html.rich import write_rich_report
from lucid_cli.html import render_page
from lucid_profiler.reader import read_report


@pytest.fixture(scope="session")
def rich_report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a report that has everything: two runs of each arm on a GPU, sampled, traced, with phases and limits."""
    path = tmp_path_factory.mktemp("rich") / "rich.jsonl"
    write_rich_report(path)
    return path


@pytest.fixture(scope="session")
def rich_page(rich_report: Path) -> Path:
    """Return the page of that report."""
    page = rich_report.with_suffix(".html")
    page.write_text(render_page(read_report(rich_report)), encoding="utf-8")
    return page


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """Return a browser; the test is skipped where there is none."""
    if not CHROMIUM:
        pytest.skip("no Chromium is installed: `apt-get install chromium` brings it")
    with browser(tmp_path_factory.mktemp("profile")) as page:
        yield page
