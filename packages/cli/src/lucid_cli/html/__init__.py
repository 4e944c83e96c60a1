"""One report as one HTML file that needs nothing else: no network, no server."""

from lucid_cli.html.page import render_page

__all__ = ["render_page"]
