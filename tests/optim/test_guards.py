"""The list of guards that are disabled in turn is of the sources as they stand."""

from pathlib import Path

import pytest
from tools.mutate_guards import GUARDS, PACKAGE, Guard

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("guard", GUARDS, ids=lambda guard: guard.name)
def test_every_guard_stands_once_and_names_tests_that_exist(guard: Guard) -> None:
    """Also those that only a device can try."""
    assert (PACKAGE / f"{guard.module}.py").read_text(encoding="utf-8").count(guard.line) == 1
    assert guard.line != guard.disabled
    for test in guard.tests:
        file, name = test.split("::")
        assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8")
