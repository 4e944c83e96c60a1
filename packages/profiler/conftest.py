# ruff: noqa: INP001 - pytest finds it by its place
"""Keeps the search for doctests away from modules whose trainer is not installed."""

from importlib.util import find_spec

collect_ignore_glob = (
    [] if find_spec("lightning") or find_spec("pytorch_lightning") else ["src/lucid_profiler/integrations/lightning.py"]
)
