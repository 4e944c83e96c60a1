"""The words that reports use for codes."""

from lucid_cli.reporters.words import _REASONS
from lucid_optim import REASONS


def test_every_reason_of_capture_has_words() -> None:
    """Reports name each reason that an optimizer can count."""
    assert REASONS.keys() <= _REASONS.keys()
    assert "not_implemented" not in _REASONS
