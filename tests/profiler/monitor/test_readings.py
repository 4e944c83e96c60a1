import pytest

from lucid_profiler.monitor.readings import (
    LIMITS,
    REASONS,
    WINDOWS_NS,
    Reading,
    Sheet,
    is_too_short,
)

SENTINELS = (2**63 - 1, 2**64 - 1, 9223372036854775794, -(2**63), -1_000)
FIELDS_OF_32_BITS = [field for field in LIMITS if field.endswith(("_percent", "_mw", "_mhz", "_c"))]


@pytest.mark.parametrize(
    ("field", "sentinel"),
    [
        *((field, sentinel) for field in LIMITS for sentinel in SENTINELS),
        *((field, 2**32 - 1) for field in FIELDS_OF_32_BITS),
    ],
)
def test_a_sentinel_is_no_value(field: str, sentinel: int) -> None:
    """All ones and the blanks of NVML and DCGM become None with a reason."""
    sheet = Sheet()
    sheet.put(field, sentinel)
    assert (sheet.values, sheet.reasons) == ({field: None}, {field: "implausible"})


@pytest.mark.parametrize(("value", "is_kept"), [(0, True), (100, True), (101, False), (-1, False), (None, False)])
def test_a_utilization_lies_between_0_and_100(value: int | None, is_kept: bool) -> None:
    """Every percentage that can be true is kept, 0 too, and no other."""
    sheet = Sheet()
    sheet.put("utilization_gpu_percent", value)
    assert sheet.values == {"utilization_gpu_percent": value if is_kept else None}


def test_no_power_is_no_reading() -> None:
    """A GPU that answers draws power: 0 mW says that the driver does not know."""
    sheet = Sheet()
    sheet.put("power_draw_mw", 0)
    assert sheet.reasons == {"power_draw_mw": "implausible"}


def test_a_none_always_has_a_reason() -> None:
    """Whatever way a field becomes None, its reason is beside it and one of the known codes."""
    sheet = Sheet()
    sheet.put("temperature_c", None)
    sheet.miss(["energy_mj", "clock_sm_mhz"], "lost")
    sheet.put_reading("process_memory_bytes", Reading(value=None))
    sheet.put_reading("others_memory_bytes", Reading(value=0, reason="not_found"))
    missing = {field for field, value in sheet.values.items() if value is None}
    assert missing == sheet.reasons.keys()
    assert sheet.values["others_memory_bytes"] == 0
    assert set(sheet.reasons.values()) <= REASONS.keys()


@pytest.mark.parametrize("field", LIMITS)
def test_a_reading_is_held_to_the_limits_of_its_field(field: str) -> None:
    """Whatever way a value takes into the sheet."""
    low, high = LIMITS[field]
    for value, kept in ((low, low), (high, high), (low - 1, None), (high + 1, None)):
        sheet = Sheet()
        sheet.put_reading(field, Reading(value=value))
        assert sheet.values == {field: kept}
        assert sheet.reasons == ({} if kept is not None else {field: "implausible"})


@pytest.mark.parametrize("field", WINDOWS_NS)
def test_a_run_shorter_than_an_average_is_told(field: str) -> None:
    """A run is too short for a field up to the longest time one reading covers."""
    assert is_too_short(field, WINDOWS_NS[field] - 1)
    assert not is_too_short(field, WINDOWS_NS[field])
    assert not is_too_short("memory_used_bytes", 0)


def test_every_reason_says_what_it_means() -> None:
    """The words fit into one line of a report."""
    assert all(10 < len(words) < 120 and words[-1] not in ".;" for words in REASONS.values())
