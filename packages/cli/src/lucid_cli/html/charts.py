"""Charts as the page's script draws them: views that share traces, a legend in HTML, and the numbers as tables.

Colours are names of the style sheet's variables, such as `--arm-0`, which the script resolves in light and dark.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from lucid_cli.html.markup import Html, details, tag
from lucid_profiler.records import Header

NUM_ARM_COLORS = 4
NUM_CATEGORY_COLORS = 8
_DIGITS = 6

__all__ = [
    "Chart",
    "LegendItem",
    "View",
    "arm_color",
    "arm_legend",
    "axis",
    "category_color",
    "chart_data",
    "rounded",
    "span",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class LegendItem:
    """A colour with its meaning."""

    label: str
    color: str
    shape: Literal["dot", "ring", "line", "area"] = "area"


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """One of the pictures that a chart can show."""

    label: str
    """What is chosen in the list of views."""
    traces: Sequence[Mapping[str, Any]]
    """In the words of plotly.js; one that several views hold is written once."""
    layout: Mapping[str, Any]
    numbers: Html
    """The same as tables."""
    height: int | None = None
    """Pixels, where it is not the chart's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A figure with its controls."""

    ident: str
    title: str
    description: str
    """What is to be seen, for those who do not see it, and below the chart for all."""
    views: Sequence[View]
    view_name: str = "Show"
    """Label of the list of views."""
    legend: Sequence[LegendItem] = ()
    height: int = 360
    can_zoom: bool = False
    """Whether the horizontal axis can be zoomed and moved."""
    notes: Sequence[str] = field(default=())

    def html(self) -> Html:
        """Return the figure without its picture, which the script draws."""
        height = self.views[0].height or self.height
        return tag(
            "figure",
            tag("h3", self.title, id=f"{self.ident}-title"),
            tag("div", self._choice(), self._buttons(), class_="controls"),
            _legend(self.legend),
            tag(
                "div",
                id=self.ident,
                class_="plot",
                role="img",
                aria_labelledby=f"{self.ident}-title",
                aria_describedby=f"{self.ident}-text",
                style=f"height:{height}px",
            ),
            tag("figcaption", " ".join([self.description, *self.notes]), id=f"{self.ident}-text"),
            details("The numbers as a table", [self._numbers(place, view) for place, view in enumerate(self.views)]),
            class_="chart",
        )

    def _choice(self) -> Html:
        if len(self.views) < 2:
            return Html("")
        options = [tag("option", view.label, value=str(place)) for place, view in enumerate(self.views)]
        return tag("label", f"{self.view_name} ", tag("select", options, data_chart=self.ident))

    def _buttons(self) -> Html:
        if not self.can_zoom:
            return Html("")
        actions = {
            "in": ("+", "Zoom in"),
            "out": ("−", "Zoom out"),
            "left": ("←", "Move left"),
            "right": ("→", "Move right"),
            "reset": ("Reset", "Show all again"),
        }
        buttons = [
            tag("button", sign, type="button", data_chart=self.ident, data_zoom=action, aria_label=label, title=label)
            for action, (sign, label) in actions.items()
        ]
        return tag("div", buttons, class_="zoom", role="group", aria_label=f"Zoom: {self.title}")

    def _numbers(self, place: int, view: View) -> Html:
        head = tag("h4", view.label) if len(self.views) > 1 else Html("")
        return tag("div", head, view.numbers, data_numbers=self.ident, data_view=str(place))


def _legend(items: Sequence[LegendItem]) -> Html:
    if not items:
        return Html("")
    shown = [
        tag(
            "li",
            tag("span", class_=f"key {item.shape}", style=f"--key:var({item.color})", aria_hidden="true"),
            item.label,
        )
        for item in items
    ]
    return tag("ul", shown, class_="legend", aria_label="Legend")


def chart_data(charts: Sequence[Chart]) -> list[dict[str, Any]]:
    """Return what the script needs to know, with each trace once."""
    return [_data(chart) for chart in charts]


def _data(chart: Chart) -> dict[str, Any]:
    places: dict[int, int] = {}
    traces: list[Mapping[str, Any]] = []
    for view in chart.views:
        for trace in view.traces:
            if id(trace) not in places:
                places[id(trace)] = len(traces)
                traces.append(trace)
    views = [
        {
            "traces": [places[id(trace)] for trace in view.traces],
            "layout": view.layout,
            "height": view.height or chart.height,
        }
        for view in chart.views
    ]
    return {"id": chart.ident, "traces": traces, "views": views}


def rounded(values: Sequence[float | int | None]) -> list[float | None]:
    """Return numbers with as many digits as a chart can show."""
    return [None if value is None else float(f"{value:.{_DIGITS}g}") for value in values]


def axis(title: str = "", **settings: Any) -> dict[str, Any]:
    """Return an axis in the page's colours."""
    return {
        "title": {"text": title},
        "automargin": True,
        "gridcolor": "--grid",
        "linecolor": "--axis",
        "zerolinecolor": "--axis",
        "zeroline": False,
        **settings,
    }


def span(low: float, high: float, share: float = 0.06) -> list[float]:
    """Return the range of an axis that holds an interval with some room on both sides."""
    room = (high - low) * share or abs(high) * share or 1.0
    return [low - room, high + room]


def arm_color(header: Header, arm: str) -> str:
    """Return the colour of an arm."""
    names = [one.name for one in header.arms]
    return f"--arm-{(names.index(arm) if arm in names else 0) % NUM_ARM_COLORS}"


def arm_legend(header: Header, shape: Literal["dot", "line", "area"] = "area") -> list[LegendItem]:
    """Return the arms with their colours."""
    return [LegendItem(label=arm.name, color=arm_color(header, arm.name), shape=shape) for arm in header.arms]


def category_color(place: int) -> str:
    """Return one of the colours of things that have no order."""
    return f"--cat-{place % NUM_CATEGORY_COLORS}"
