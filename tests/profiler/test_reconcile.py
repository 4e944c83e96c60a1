"""The reconciliation of a device's memory: the sums hold, and what is not known never counts as 0."""

from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lucid_profiler.reconcile import (
    MemoryReadings,
    Reconciliation,
    Term,
    TimedReadings,
    reconcile,
    reconcile_peak,
    reconcile_series,
    reserved_is_inside_used,
)

MIB = 2**20
TERMS = [field.name for field in fields(MemoryReadings) if field.name != "used_includes_reserved"]


def term(mib: int) -> Term:
    """Return an amount in MiB."""
    return Term(bytes=mib * MIB)


def readings(**changes: Any) -> MemoryReadings:
    """Return readings in which all is known and all but 10 MiB is explained, with changes."""
    plain = MemoryReadings(
        device_used=term(9_410),
        driver_reserved=term(590),
        others=term(400),
        process=term(9_006),
        torch_reserved=term(8_500),
        torch_allocated=term(6_000),
        private_pools=term(1_000),
        private_pools_allocated=term(700),
        context=term(500),
        used_includes_reserved=False,
    )
    return replace(plain, **changes)


def mib(found: Reconciliation) -> dict[str, float | None]:
    """Return the rows in MiB."""
    return {row.name: None if row.bytes is None else row.bytes / MIB for row in found.rows()}


def test_the_three_sums() -> None:
    """Each term below its sum, with what is left over under a name of its own."""
    found = reconcile(readings())
    assert mib(found) == {
        "device_used": 10_000,
        "driver_reserved": 590,
        "others": 400,
        "target": 9_006,
        "device_residue": 4,
        "context": 500,
        "torch_reserved": 8_500,
        "target_residue": 6,
        "allocated": 5_300,
        "graph_pools": 1_000,
        "cached": 2_200,
    }
    assert found.residue == term(10)
    assert found.residue_share == 0.001
    assert found.warning is False
    assert {row.name: row.share for row in found.rows()}["target"] == 0.9006


amounts = st.integers(0, 200 * 2**30)
unknown = st.sampled_from(["no_permission", "pid_namespace", "gap"]).map(lambda reason: Term(reason=reason))
any_term = amounts.map(lambda value: Term(bytes=value)) | unknown
any_readings = st.builds(
    MemoryReadings, **dict.fromkeys(TERMS, any_term), used_includes_reserved=st.sampled_from([True, False, None])
)


@given(given=any_readings)
def test_rows_that_are_all_known_sum_up(given: MemoryReadings) -> None:
    """To the byte, at every level; estimates have no residue of their own at theirs."""
    found = reconcile(given)
    rows = {row.name: row for row in found.rows()}
    for parent in ("device_used", "target", "torch_reserved"):
        parts = [row for row in rows.values() if row.parent == parent]
        if found.target.is_estimate and parent == "device_used":
            assert rows["device_residue"].reason == "estimated_target"
            parts = [row for row in parts if row.name != "device_residue"]
        known = [row.bytes for row in parts if row.bytes is not None]
        if len(known) == len(parts):
            assert sum(known) == rows[parent].bytes


@given(given=any_readings)
def test_every_row_is_a_number_or_has_a_reason(given: MemoryReadings) -> None:
    """And no share is made of what is not known."""
    for row in reconcile(given).rows():
        assert (row.bytes is None) <= bool(row.reason)
        assert row.bytes is not None or row.share is None


@given(given=any_readings, name=st.sampled_from(TERMS))
def test_what_is_not_known_never_counts_as_0(given: MemoryReadings, name: str) -> None:
    """No sum that needs a term has a number while the term has none."""
    missing: dict[str, Any] = {name: Term(reason="gap")}
    found = reconcile(replace(given, **missing))
    needs = {
        "device_used": ("device_used", "device_residue", "residue"),
        "driver_reserved": ("driver_reserved", "device_residue", "residue"),
        "others": ("others", "device_residue", "residue"),
        "process": ("device_residue",),
        "torch_reserved": ("torch_reserved", "target_residue", "residue", "cached"),
        "torch_allocated": ("allocated", "cached"),
        "private_pools": ("graph_pools", "cached"),
        "private_pools_allocated": () if given.private_pools.bytes == 0 else ("allocated", "cached"),
        "context": ("context", "target_residue", "residue"),
    }
    for needed in needs[name]:
        assert getattr(found, needed).bytes is None
    if found.residue.bytes is None:
        assert found.residue_share is None
        assert found.warning is not False


def test_version_1_has_the_reserved_inside_and_does_not_tell_it() -> None:
    """What is used is known, what is left over is not: the driver's part may be in it."""
    found = reconcile(
        readings(device_used=term(10_000), driver_reserved=Term(reason="memory_api_v1"), used_includes_reserved=True)
    )
    assert found.device_used == term(10_000)
    assert found.device_residue == Term(reason="driver_reserved: memory_api_v1")
    assert found.target_residue == term(6)
    assert found.warning is None


def test_a_reserved_that_is_known_apart_completes_version_1() -> None:
    """The two versions then say the same."""
    found = reconcile(readings(device_used=term(10_000), used_includes_reserved=True))
    assert found == reconcile(readings())


def test_a_used_of_unknown_meaning_is_no_figure() -> None:
    """With or without the reserved, nobody knows."""
    found = reconcile(readings(used_includes_reserved=None))
    assert found.device_used.reason == "used_with_or_without_reserved"
    assert found.residue.bytes is None


@pytest.mark.parametrize(
    ("figures", "inside"),
    [
        ({"total": 100, "reserved": None, "used": 60, "free": 40}, True),
        ({"total": 100, "reserved": 10, "used": 50, "free": 40}, False),
        ({"total": 100, "reserved": 10, "used": 60, "free": 40}, True),
        ({"total": 100, "reserved": 0, "used": 60, "free": 40}, True),
        ({"total": 100, "reserved": 10, "used": 50, "free": 30}, None),
        ({"total": 100, "reserved": None, "used": 50, "free": 30}, None),
    ],
)
def test_the_figures_decide_whether_used_has_the_reserved(figures: dict[str, Any], inside: bool | None) -> None:
    """By which sum gives the total."""
    assert reserved_is_inside_used(**figures) is inside


@pytest.mark.parametrize(
    "process", [Term(reason="pid_namespace"), Term(bytes=0)], ids=["another namespace", "0 while torch holds memory"]
)
def test_a_process_that_the_driver_does_not_see_is_estimated(process: Term) -> None:
    """It is what the driver and the others leave, and says so; the residue shows below it."""
    found = reconcile(readings(process=process))
    assert found.target.bytes == 9_010 * MIB
    assert found.target.is_estimate
    assert found.target.reason == (process.reason or "implausible")
    assert found.device_residue == Term(reason="estimated_target")
    assert found.target_residue == Term(bytes=10 * MIB, is_estimate=True)
    assert found.warning is False


def test_a_process_that_cannot_be_estimated_keeps_its_reason() -> None:
    """Without others, nothing can be told apart."""
    found = reconcile(readings(process=Term(reason="pid_namespace"), others=Term(reason="no_permission")))
    assert found.target == Term(reason="pid_namespace")


def test_a_process_of_0_bytes_without_torch_is_plausible() -> None:
    """It has not touched the device yet."""
    found = reconcile(readings(process=term(0), torch_reserved=term(0)))
    assert found.target == term(0)


@pytest.mark.parametrize(
    ("changes", "warning"),
    [
        ({"context": term(310)}, False),
        ({"context": term(309)}, True),
        ({"context": term(711)}, True),
        ({"process": term(8_806)}, True),
        ({"context": Term(reason="timeout")}, None),
        ({"context": Term(reason="timeout"), "process": term(8_800)}, True),
    ],
)
def test_above_2_percent_of_what_is_used_there_is_a_warning(changes: dict[str, Term], warning: bool | None) -> None:
    """In either direction and at either level; what is not known is no reassurance."""
    assert reconcile(readings(**changes)).warning is warning


def test_without_private_pools_all_that_is_allocated_is_outside() -> None:
    """Nobody needs to ask what is inside of none."""
    found = reconcile(readings(private_pools=term(0), private_pools_allocated=Term(reason="not_read")))
    assert (found.allocated, found.graph_pools, found.cached) == (term(6_000), term(0), term(2_500))


def test_figures_that_contradict_each_other_are_no_figures() -> None:
    """As when they were not read at one time."""
    found = reconcile(readings(torch_allocated=term(600)))
    assert found.allocated == Term(reason="inconsistent")
    found = reconcile(readings(torch_reserved=term(5_000)))
    assert found.cached == Term(reason="inconsistent")


def test_an_unknown_amount_needs_a_reason() -> None:
    """At the place where it is made."""
    with pytest.raises(ValueError, match="needs a reason"):
        Term()


def test_nothing_read_is_nothing_known() -> None:
    """Every row has a reason."""
    found = reconcile(MemoryReadings())
    assert {row.bytes for row in found.rows()} == {None}
    assert found.warning is None


def at(mono_ns: int, given: MemoryReadings | None = None, **how: int) -> TimedReadings:
    """Return what counts for a moment."""
    return TimedReadings(mono_ns=mono_ns, readings=given or readings(), **how)


def test_a_series_has_the_rows_of_every_sample() -> None:
    """In the order given, gaps included."""
    series = reconcile_series([at(5), at(6, MemoryReadings())])
    assert [(one.mono_ns, one.memory.device_used.bytes) for one in series] == [(5, 10_000 * MIB), (6, None)]


def test_the_peak_is_one_sample() -> None:
    """The first of the largest where all are as good; its terms are of its own time."""
    larger = readings(device_used=term(9_700), others=term(690))
    peak = reconcile_peak([at(1), at(2, larger), at(3, MemoryReadings()), at(4, larger)])
    assert peak is not None
    assert (peak.mono_ns, peak.unread) == (2, None)
    assert peak.memory == reconcile(larger)


def test_of_samples_near_the_largest_the_one_with_the_nearest_terms_is_the_peak() -> None:
    """Within 1 % of the largest use; beyond that nothing makes up for being smaller."""
    larger, near = readings(device_used=term(9_700)), readings(device_used=term(9_640))
    peak = reconcile_peak([at(1, larger, age_ns=900), at(2, near, age_ns=5), at(3, near, age_ns=7), at(4, age_ns=0)])
    assert peak is not None
    assert (peak.mono_ns, peak.unread) == (2, None)


def test_a_peak_whose_terms_were_not_read_is_told_beside_the_one_that_has_them() -> None:
    """It is larger by more than 1 %: what was read of smaller times does not explain it."""
    spike = readings(device_used=term(20_000), torch_reserved=Term(reason="not_read"))
    peak = reconcile_peak([at(1, age_ns=9), at(2, spike, num_unread=1), at(3, age_ns=4)])
    assert peak is not None
    assert (peak.mono_ns, peak.memory.residue_share) == (3, 0.001)
    assert peak.unread is not None
    assert (peak.unread.mono_ns, peak.unread.memory.device_used.bytes) == (2, (20_000 + 590) * MIB)


def test_a_peak_just_above_one_that_has_its_terms_needs_no_words() -> None:
    """Less than 1 % is no spike."""
    peak = reconcile_peak([at(1), at(2, readings(device_used=term(9_480)), num_unread=1)])
    assert peak is not None
    assert (peak.mono_ns, peak.unread) == (1, None)


def test_where_no_sample_has_all_terms_the_largest_is_the_peak() -> None:
    """Its rows say what was not read."""
    larger = readings(device_used=term(9_700), torch_reserved=Term(reason="not_read"))
    peak = reconcile_peak([at(1, num_unread=1), at(2, larger, num_unread=1)])
    assert peak is not None
    assert (peak.mono_ns, peak.memory.residue_share, peak.unread) == (2, None, None)


def test_without_a_known_sample_there_is_no_peak() -> None:
    """Not one of 0 bytes."""
    assert reconcile_peak([]) is None
    assert reconcile_peak([at(1, MemoryReadings())]) is None
