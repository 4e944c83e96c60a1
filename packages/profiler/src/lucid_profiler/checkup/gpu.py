"""What the readings and settings of one GPU, or of one MIG instance, mean for a measurement. Pure."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from lucid_profiler.checkup.finding import Finding, Level, size_words, unknown
from lucid_profiler.checkup.settings import Answer, Settings
from lucid_profiler.monitor.gpu_processes import FIELDS as PROCESS_FIELDS
from lucid_profiler.monitor.readings import REASONS

__all__ = ["EVENTS", "Observed", "gpu_findings"]

EVENTS: Mapping[int, str] = MappingProxyType(
    {
        0x1: "idle",
        0x2: "clocks set by an administrator",
        0x4: "power cap",
        0x8: "hardware slowdown",
        0x10: "sync boost",
        0x20: "too hot (software)",
        0x40: "too hot (hardware)",
        0x80: "power brake",
        0x100: "display clocks",
    }
)
"""Bit: why clocks are not higher, https://docs.nvidia.com/deploy/nvml-api/group__nvmlClocksEventReasons.html."""
_HARMLESS = 0x1
_CHOSEN = 0x2 | 0x10 | 0x100
_BUSY_PERCENT = 5
_UNEXPLAINED_BYTES = 2**30
_EXPECTED = frozenset({"mig", "not_supported"})
"""Reasons that lie in the product or its division, not in the environment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """One device at one time.

    Attributes:
        uuid: Of the device.
        is_instance: It is a MIG instance, whose settings are its GPU's.
        has_instances: It is a GPU whose instances the program would see.
        values: Fields of a sample; None has an entry in `reasons`.
        reasons: Codes of `readings.REASONS`.
        settings: None for an instance.
    """

    uuid: str
    is_instance: bool
    has_instances: bool
    values: Mapping[str, int | float | None]
    reasons: Mapping[str, str]
    settings: Settings | None


def gpu_findings(observed: Observed) -> list[Finding]:
    """Return what a device's readings and settings come to."""
    findings = [_readings(observed)]
    if not observed.has_instances:
        findings.append(_processes(observed))
    if observed.settings is not None:
        findings += [_clocks(observed), *_settings(observed, observed.settings)]
    return findings


def _readings(observed: Observed) -> Finding:
    fields = [field for field in observed.values if field not in PROCESS_FIELDS]
    by_reason: defaultdict[str, list[str]] = defaultdict(list)
    for field in fields:
        if observed.values[field] is None:
            by_reason[observed.reasons[field]].append(field)
    num_known = len(fields) - sum(map(len, by_reason.values()))
    words = f"{num_known} of {len(fields)} readings"
    missing = [f"{', '.join(names)}: {REASONS.get(why, why)}" for why, names in by_reason.items()]
    if by_reason:
        words += "; without " + "; without ".join(missing)
    level: Level = "ok" if not by_reason else "note" if _EXPECTED.issuperset(by_reason) else "warning"
    value = {field: observed.values[field] for field in fields}
    return Finding(
        code="gpu_readings",
        level=level,
        found=words,
        value=value,
        reason=next(iter(by_reason), None),
        subject=observed.uuid,
    )


def _processes(observed: Observed) -> Finding:
    """Judge by the driver's list, and by memory and utilization where others do not appear in it."""
    values = observed.values
    seen, hidden = values.get("num_other_processes"), values.get("num_unknown_processes")
    used, busy = values.get("memory_used_bytes"), values.get("utilization_gpu_percent")
    signs = []
    if seen:
        signs.append(f"{seen} other process{'es' if seen != 1 else ''} on the GPU")
    if hidden:
        signs.append(f"{hidden} that cannot be seen from here")
    if used is not None and used > _UNEXPLAINED_BYTES:
        signs.append(f"{size_words(used)} in use")
    if busy is not None and busy > _BUSY_PERCENT:
        signs.append(f"busy {busy} % of the time")
    value = {"others": seen, "hidden": hidden, "memory_used_bytes": used, "utilization_gpu_percent": busy}
    if signs:
        return Finding(
            code="gpu_processes", level="warning", found=", ".join(signs), value=value, subject=observed.uuid
        )
    if seen is None:
        reason = observed.reasons.get("num_other_processes", "gap")
        level: Level = "note" if reason in _EXPECTED else "warning"
        return unknown("gpu_processes", reason, REASONS.get(reason, reason), level=level, subject=observed.uuid)
    return Finding(code="gpu_processes", level="ok", found="no other process", value=value, subject=observed.uuid)


def _clocks(observed: Observed) -> Finding:
    mask = observed.values.get("clocks_event_reasons")
    if mask is None:
        reason = observed.reasons.get("clocks_event_reasons", "gap")
        return unknown("gpu_clocks", reason, REASONS.get(reason, reason), subject=observed.uuid)
    bits = int(mask)
    names = [name for bit, name in EVENTS.items() if bits & bit]
    names += [f"unknown cause {rest:#x}"] if (rest := bits & ~sum(EVENTS)) else []
    clocks = {name: observed.values.get(name) for name in ("clock_sm_mhz", "clock_memory_mhz")}
    words = ", ".join(
        f"{label} {'unknown' if value is None else f'{value} MHz'}"
        for label, value in zip(("SM", "memory"), clocks.values(), strict=True)
    )
    words += f"; held down by: {', '.join(names)}" if names else "; not held down"
    level: Level = "ok" if not bits & ~_HARMLESS else "note" if not bits & ~(_HARMLESS | _CHOSEN) else "warning"
    return Finding(
        code="gpu_clocks", level=level, found=words, value={**clocks, "reasons": bits}, subject=observed.uuid
    )


def _settings(observed: Observed, settings: Settings) -> Iterator[Finding]:
    uuid = observed.uuid
    yield _power_cap(uuid, settings)
    yield _persistence(uuid, settings.persistence)
    yield _two_modes("gpu_ecc", uuid, settings.ecc)
    yield _mig(observed, settings.mig)


def _power_cap(uuid: str, settings: Settings) -> Finding:
    limit, default = settings.power_limit_mw, settings.default_power_limit_mw
    if limit.value is None:
        return _unknown("gpu_power_cap", uuid, limit)
    words = f"{limit.value / 1000:g} W"
    value = {"limit_mw": limit.value, "default_mw": default.value}
    if default.value is None:
        words += f"; the product's own is unknown: {REASONS.get(default.reason or '', default.reason)}"
        return Finding(
            code="gpu_power_cap", level="note", found=words, value=value, reason=default.reason, subject=uuid
        )
    words += f" of {default.value / 1000:g} W"
    level: Level = "warning" if limit.value < default.value else "ok"
    return Finding(code="gpu_power_cap", level=level, found=words, value=value, subject=uuid)


def _persistence(uuid: str, answer: Answer) -> Finding:
    if answer.value is None:
        return _unknown("gpu_persistence", uuid, answer)
    is_on = bool(answer.value)
    return Finding(
        code="gpu_persistence",
        level="ok" if is_on else "warning",
        found="on" if is_on else "off",
        value=is_on,
        subject=uuid,
    )


def _two_modes(code: str, uuid: str, answer: Answer) -> Finding:
    """Judge a setting that a reset may change."""
    if answer.value is None:
        return _unknown(code, uuid, answer)
    now, later = (bool(part) for part in answer.value)
    words = f"{'on' if now else 'off'}" + ("" if now == later else f", and {'on' if later else 'off'} after a reset")
    level: Level = "ok" if now == later else "warning"
    return Finding(code=code, level=level, found=words, value={"current": now, "pending": later}, subject=uuid)


def _mig(observed: Observed, answer: Answer) -> Finding:
    finding = _two_modes("gpu_mig", observed.uuid, answer)
    if finding.value is None or not finding.value["current"] or finding.level != "ok":
        return finding
    level: Level = "note" if observed.has_instances else "warning"
    words = "on" if observed.has_instances else "on, without an instance that the program would see"
    return Finding(code="gpu_mig", level=level, found=words, value=finding.value, subject=observed.uuid)


def _unknown(code: str, uuid: str, answer: Answer) -> Finding:
    reason = answer.reason or "gap"
    return unknown(code, reason, REASONS.get(reason, reason), subject=uuid)
