"""What is remembered from one sample to the next: reasons, gaps, and how many readings differed from the one before."""

import dataclasses
from collections import Counter
from collections.abc import Mapping
from typing import Any, Protocol

from lucid_profiler.monitor.readings import Reasons, Values
from lucid_profiler.monitor.records import Gap, ReasonsChanged, Record

_MAX_GAPS_NAMED = 100
Sheet = tuple[Values, Reasons]

__all__ = ["Book"]


class _Writer(Protocol):
    def write(self, record: Record) -> bool:
        """Append a record; return whether it was."""


class Book:
    """Keeps account of samples, and writes what has to stand before them.

    Args:
        log: where reasons and gaps are written.

    Attributes:
        num_gaps: how many gaps there were.
    """

    def __init__(self, log: _Writer) -> None:
        self.num_gaps = 0
        self._log = log
        self._gaps: list[Gap] = []
        self._reasons: dict[str, str] = {}
        self._written: dict[str, str] = {}
        self._latest: dict[str, int | float] = {}
        self._distinct: Counter[str] = Counter()
        self._last_seen: dict[str, int] = {}
        self._absent: dict[str, tuple[int, str]] = {}
        self._begin_ns: int | None = None
        self._why_missing = "gap"

    def observe(self, now_ns: int, host: Sheet, gpus: Mapping[str, Sheet], *, why_missing: str | None = None) -> None:
        """Take in a sample before it is written: the reasons that hold for it are written now if they are new.

        Args:
            now_ns: its time.
            host: of the host.
            gpus: of the devices, by UUID.
            why_missing: why there may be devices that are not among them; None where there are none.
        """
        self._take("host.", host)
        for uuid, sheet in gpus.items():
            self._take(f"gpu:{uuid}.", sheet)
            self._follow(now_ns, uuid, sheet)
        self._write_reasons(now_ns)
        self._begin_ns = now_ns if self._begin_ns is None else self._begin_ns
        self._why_missing = why_missing or self._why_missing

    def explain(self, now_ns: int, gpus: Mapping[str, Sheet]) -> None:
        """Take in fields that are read apart from samples."""
        for uuid, sheet in gpus.items():
            self._take(f"gpu:{uuid}.", sheet)
        self._write_reasons(now_ns)

    def add_gap(self, gap: Gap) -> None:
        """Write a gap and remember it for the last record."""
        self.remember(gap)
        self._log.write(gap)

    def remember(self, gap: Gap) -> None:
        """Remember a gap that is written already for the last record."""
        self.num_gaps += 1
        if len(self._gaps) < _MAX_GAPS_NAMED:
            self._gaps.append(gap)

    def close_gaps(self, now_ns: int) -> None:
        """Write the gaps that last until the end."""
        for uuid in list(self._absent):
            self._end_gap(now_ns, uuid)

    def gaps(self) -> tuple[dict[str, Any], ...]:
        """Return the first hundred gaps."""
        return tuple(dataclasses.asdict(gap) for gap in self._gaps)

    def distinct(self) -> dict[str, int]:
        """Return by field how many readings differed from the one before."""
        return dict(self._distinct)

    def _take(self, prefix: str, sheet: Sheet) -> None:
        values, reasons = sheet
        for field, value in values.items():
            name = prefix + field
            if value is None:
                self._reasons[name] = reasons.get(field, "gap")
                continue
            self._reasons.pop(name, None)
            if self._latest.get(name) != value:
                self._latest[name] = value
                self._distinct[name] += 1

    def _follow(self, now_ns: int, uuid: str, sheet: Sheet) -> None:
        """Notice when a device begins and ceases to answer nothing at all; one that comes late was missing before."""
        values, reasons = sheet
        if self._begin_ns is not None and uuid not in self._last_seen and uuid not in self._absent:
            self._absent[uuid] = (self._begin_ns, self._why_missing)
        if any(value is not None for value in values.values()):
            if uuid in self._absent:
                self._end_gap(now_ns, uuid)
            self._last_seen[uuid] = now_ns
        elif values and uuid not in self._absent:
            self._absent[uuid] = (self._last_seen.get(uuid, now_ns), self._why_silent(uuid, reasons))

    def _why_silent(self, uuid: str, reasons: Reasons) -> str:
        """Return the reason of a field that the device has answered before; those of the others are older."""
        known = [reason for field, reason in reasons.items() if f"gpu:{uuid}.{field}" in self._latest]
        return next(iter(known or [reason for reason in reasons.values() if reason != "mig"]), "gap")

    def _end_gap(self, now_ns: int, uuid: str) -> None:
        begin_ns, reason = self._absent.pop(uuid)
        self.add_gap(Gap(begin_ns=begin_ns, end_ns=now_ns, reason=reason, device=uuid))

    def _write_reasons(self, now_ns: int) -> None:
        # What could not be written is tried again, since the nulls that follow need it.
        if self._reasons != self._written and self._log.write(
            ReasonsChanged(mono_ns=now_ns, fields=dict(self._reasons))
        ):
            self._written = dict(self._reasons)
