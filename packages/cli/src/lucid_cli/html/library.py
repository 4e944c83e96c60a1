"""The script that draws the charts: plotly.js as its Python package carries it, so that a page needs no network."""

from lucid_profiler.errors import EnvironmentUnusableError

__all__ = ["charting_script"]


def charting_script() -> str:
    """Return the text of plotly.js.

    Raises:
        EnvironmentUnusableError: The package is not installed, or an import of its own fails.
    """
    try:
        from plotly.offline import get_plotlyjs  # noqa: PLC0415 - only this command needs it, and it need not be there
    except ImportError as error:
        raise EnvironmentUnusableError(
            f"the charts are drawn by plotly, which cannot be imported ({error}): run `pip install plotly`, or install "
            "lucid-profile-cli[html]"
        ) from error
    script: str = get_plotlyjs()
    return script
