"""A section of the page: a heading, and what stands below it in order."""

from collections.abc import Sequence
from dataclasses import dataclass

from lucid_cli.html.charts import Chart
from lucid_cli.html.markup import Html, tag

__all__ = ["Section", "missing"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Part of the page, named in its table of contents."""

    ident: str
    title: str
    parts: Sequence[Html | Chart]

    @property
    def charts(self) -> list[Chart]:
        """The charts of the section."""
        return [part for part in self.parts if isinstance(part, Chart)]

    def html(self) -> Html:
        """Return the section."""
        shown = [part.html() if isinstance(part, Chart) else part for part in self.parts]
        return tag("section", tag("h2", self.title, id=self.ident), shown, aria_labelledby=self.ident)


def missing(sentence: str) -> Html:
    """Return why something is not there."""
    return tag("p", sentence, class_="missing")
