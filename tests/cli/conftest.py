from pathlib import Path

import pytest

from cli.harness import Lucid


@pytest.fixture
def lucid(tmp_path: Path) -> Lucid:
    """Return the command, to be run in an empty directory."""
    return Lucid(tmp_path)
