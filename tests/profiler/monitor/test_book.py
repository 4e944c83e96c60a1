from collections.abc import Sequence

import pytest

from lucid_profiler.monitor.book import Book, Sheet
from lucid_profiler.monitor.readings import Values
from lucid_profiler.monitor.records import Gap, Record

UUID = "GPU-1"
NOTHING: Sheet = ({}, {})


class Paper:
    """Keeps what is written."""

    def __init__(self) -> None:
        self.records: list[Record] = []

    def write(self, record: Record) -> bool:
        """Append a record."""
        self.records.append(record)
        return True


def sheet(**fields: int | str) -> Sheet:
    """Return a sheet of values and, as texts, of reasons."""
    values: Values = {field: None if isinstance(value, str) else value for field, value in fields.items()}
    return values, {field: value for field, value in fields.items() if isinstance(value, str)}


def gaps_of(sheets: Sequence[Sheet | None], *, why_missing: Sequence[str | None] = ()) -> list[Record]:
    """Return the gaps of a device with one sheet at each of the times 0, 10, 20 …; None where it is not listed."""
    paper = Paper()
    book = Book(paper)
    reasons = [*why_missing, *[None] * len(sheets)]
    for index, one in enumerate(sheets):
        book.observe(10 * index, NOTHING, {} if one is None else {UUID: one}, why_missing=reasons[index])
    book.close_gaps(10 * len(sheets))
    gaps: list[Record] = [record for record in paper.records if isinstance(record, Gap)]
    assert book.num_gaps == len(gaps)
    return gaps


def lost(begin_ns: int, end_ns: int, reason: str = "lost") -> Gap:
    """Return the gap of the device."""
    return Gap(begin_ns=begin_ns, end_ns=end_ns, reason=reason, device=UUID)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (sheet(memory="mig", power=1), sheet(memory="mig", power="lost")),
        (sheet(utilization="not_supported", memory=1), sheet(utilization="not_supported", memory="lost")),
    ],
)
def test_a_gap_has_the_reason_of_what_was_read_before(before: Sheet, after: Sheet) -> None:
    """A field that never answered has a reason of its own, which says nothing of the rest."""
    assert gaps_of([before, after, after, before]) == [lost(0, 30)]


def test_a_device_that_never_answered_has_a_reason_that_is_no_partition_s() -> None:
    """What belongs to the other side of a MIG partition is missing there at all times."""
    assert gaps_of([sheet(memory="mig", power="lost")] * 2) == [lost(0, 20)]


def test_a_device_that_is_listed_late_was_missing_until_it_answers() -> None:
    """From the first sample on, with the last reason that there was, in one gap."""
    silent = sheet(power="unknown_error")
    reasons = ["no_driver", "lost"]
    assert gaps_of([None, None, sheet(power=1)], why_missing=reasons) == [lost(0, 20)]
    assert gaps_of([None, None, silent, sheet(power=1)], why_missing=reasons) == [lost(0, 30)]
    assert gaps_of([None, sheet(power=1)]) == [lost(0, 10, "gap")]


def test_a_device_that_answers_at_once_has_no_gap() -> None:
    """Whatever another is missing for."""
    assert gaps_of([sheet(power=1)] * 3, why_missing=["lost", "lost", None]) == []
