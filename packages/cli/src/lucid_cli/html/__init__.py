"""One report as one HTML file that needs nothing else: no network, no server."""

from lucid_cli.html.page import drawn_series, render_page

__all__ = ["drawn_series", "render_page"]
