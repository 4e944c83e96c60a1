"""Turns a monitor's log into a scenario that plays the same readings at the same times.

What was null is played as the error, or the answer that nobody can believe, that its reason stands for; reasons that no
device gives, such as "gap", are played as an unknown error. A log sums processes up: the target's memory is played as
that of one process, the others' as that of the first of so many processes 1. Energy has the value of the last mark.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lucid_profiler.errors import ReportError
from lucid_profiler.monitor.log import read_log
from lucid_profiler.monitor.records import to_fields

__all__ = ["to_scenario"]

_CALLS: dict[str, tuple[str, ...]] = {
    "utilization": ("utilization_gpu_percent", "utilization_memory_percent"),
    "power_usage": ("power_draw_mw",),
    "clock_sm": ("clock_sm_mhz",),
    "clock_memory": ("clock_memory_mhz",),
    "reasons": ("clocks_event_reasons",),
    "temperature": ("temperature_c",),
}
_MEMORY = ("memory_total_bytes", "memory_reserved_bytes", "memory_free_bytes", "memory_used_bytes")
_MEMORY_V1 = ("memory_total_bytes", "memory_free_bytes", "memory_used_bytes")
_PROCESSES = ("process_memory_bytes", "others_memory_bytes", "num_other_processes", "num_unknown_processes")
_FUNCTION_NOT_FOUND = 13
_UNKNOWN = 999
_ERRORS = {"not_supported": 3, "no_permission": 4, "not_found": 6, "no_driver": 9, "lost": 15, "driver_mismatch": 18}
_ALL_ONES = 2**64 - 1
_BLANK = _ALL_ONES ^ 2**31  # implausible as 32 and 64 bits, signed or not
_OTHERS_PID = 1
_HIDDEN_PID = 2**22  # the driver may name it, no process has it: PID_MAX_LIMIT
_MAX_ROWS = 256
_DISBELIEVED = {"abi_suspect": [[2**32 - 1, 0]], "implausible": [[_OTHERS_PID, 2**63]]}
_NS_PER_S = 1_000_000_000

Steps = list[dict[str, Any]]


def to_scenario(records: Iterable[Mapping[str, Any]], *, pid: int | None = None) -> dict[str, Any]:
    """Return the scenario that plays the records of a monitor's log; its second 0 is the first reading.

    Args:
        records: the log's records, in their order.
        pid: the process that has the target's memory; the recorded one if None.

    Raises:
        ValueError: there is no header.
    """
    taken = list(records)
    recording = _Recording(pid=pid, first_version=_with_first_version(taken))
    for record in taken:
        recording.take(record)
    if recording.versions is None:
        raise ValueError("the log has no header")
    return recording.scenario()


def _with_first_version(records: Iterable[Mapping[str, Any]]) -> frozenset[str]:
    """Return the devices that have the first version of the memory query, which does not tell what is reserved."""
    samples = (record["gpus"] for record in records if record["kind"] == "sample")
    memory = ((uuid, [values.get(name) for name in _MEMORY]) for gpus in samples for uuid, values in gpus.items())
    return frozenset(uuid for uuid, (total, reserved, *_) in memory if total is not None and reserved is None)


@dataclass(slots=True, kw_only=True)
class _Recording:
    """Collects steps, one where an answer changes.

    Attributes:
        first_version: the devices whose null memory is that of the first version of the query.
    """

    pid: int | None
    first_version: frozenset[str]
    versions: Mapping[str, Any] | None = None
    devices: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    calls: dict[str, dict[str, Steps]] = field(default_factory=dict)
    reasons: Mapping[str, str] = field(default_factory=dict)
    begin_ns: int | None = None

    def take(self, record: Mapping[str, Any]) -> None:
        """Take in one record; kinds that hold no readings are passed over."""
        kind = record["kind"]
        if kind == "header":
            self.versions = record["versions"]
            self.pid = record["target"]["pid"] if self.pid is None else self.pid
            self._add_devices(record["devices"])
        elif kind == "event" and record["name"] == "devices":
            self._add_devices(record["data"]["devices"])
        elif kind == "reasons":
            self.reasons = record["fields"]
        elif kind == "sample":
            for uuid, values in record["gpus"].items():
                self._sample(record["mono_ns"], uuid, values)
        elif kind == "mark":
            for uuid, value in record["energy_mj"].items():
                self._step(record["mono_ns"], uuid, "energy", self._answer(uuid, ("energy_mj",), {"energy_mj": value}))

    def scenario(self) -> dict[str, Any]:
        """Return what was collected."""
        versions = self.versions or {}
        found = {name: versions[name] for name in ("driver", "nvml") if versions.get(name)}
        gpus = [device for device in self.devices.values() if not device.get("parent_uuid")]
        return {**found, "devices": [self._device(gpu) for gpu in gpus]}

    def _device(self, gpu: Mapping[str, Any]) -> dict[str, Any]:
        calls = self.calls.get(gpu["uuid"], {})
        address = gpu["pci_bus_id"] or f"FFFFFFFF:{gpu['index']:02X}:00.0"
        entry = {"uuid": gpu["uuid"], "name": gpu["name"] or "unknown", "pci": address, "calls": calls}
        parts = [device for device in self.devices.values() if device.get("parent_uuid") == gpu["uuid"]]
        if parts:
            entry["mig"] = [self._instance(part) for part in parts]
        return entry

    def _instance(self, part: Mapping[str, Any]) -> dict[str, Any]:
        instance = {"gi": part.get("gpu_instance") or 0, "ci": part.get("compute_instance") or 0}
        calls = self.calls.get(part["uuid"], {})
        return {"uuid": part["uuid"], "name": part["name"] or "unknown", **instance, "calls": calls}

    def _add_devices(self, devices: Sequence[Mapping[str, Any]]) -> None:
        for device in devices:
            self.devices.setdefault(device["uuid"], device)

    def _sample(self, mono_ns: int, uuid: str, values: Mapping[str, Any]) -> None:
        for call, names in _CALLS.items():
            if names[0] in values:
                self._step(mono_ns, uuid, call, self._answer(uuid, names, values))
        if _MEMORY[0] in values:
            for call, answer in self._memory(uuid, values).items():
                self._step(mono_ns, uuid, call, answer)
        if _PROCESSES[0] in values:
            self._step(mono_ns, uuid, "compute_processes", self._processes(uuid, values))

    def _memory(self, uuid: str, values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        if uuid in self.first_version and values.get("memory_reserved_bytes") is None:
            return {"memory_v2": {"error": _FUNCTION_NOT_FOUND}, "memory": self._answer(uuid, _MEMORY_V1, values)}
        answer = self._answer(uuid, _MEMORY, values)
        if "error" in answer:
            return {"memory_v2": answer, "memory": answer}
        total, reserved, free, used = answer["value"]
        return {"memory_v2": answer, "memory": {"value": [total, free, min(used + reserved, _ALL_ONES)]}}

    def _processes(self, uuid: str, values: Mapping[str, Any]) -> dict[str, Any]:
        ours, others, num_others, num_unknown = (values.get(name) for name in _PROCESSES)
        why_not_ours, why_not_others = (self._why(uuid, name) for name in _PROCESSES[:2])
        if ours is None and others is None and num_others is None:
            if why_not_others in _DISBELIEVED:
                return {"value": _DISBELIEVED[why_not_others]}
            return {"error": _ERRORS.get(why_not_others, _UNKNOWN)}
        is_listed = ours is not None or why_not_ours in {"not_supported", "implausible"}
        rows = [[self.pid, 0 if why_not_ours == "implausible" else ours]] if is_listed else []
        pids = [_OTHERS_PID] * (num_others or 0) + [_HIDDEN_PID] * (num_unknown or 0)
        if others and not pids:  # older logs do not count them
            pids = [_OTHERS_PID]
        all_others = 2**63 if why_not_others == "implausible" else others
        rows += [[pid, 0 if place else all_others] for place, pid in enumerate(pids)]
        return {"value": rows[:_MAX_ROWS]}

    def _answer(self, uuid: str, names: Sequence[str], values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the error of a field that could not be read, else all values, with a blank for what is implausible."""
        reasons = [self._why(uuid, name) for name in names if values.get(name) is None]
        failed = [reason for reason in reasons if reason != "implausible"]
        if failed:
            return {"error": _ERRORS.get(failed[0], _UNKNOWN)}
        told = [_BLANK if values.get(name) is None else values[name] for name in names]
        return {"value": told[0] if len(told) == 1 else told}

    def _why(self, uuid: str, name: str) -> str:
        return self.reasons.get(f"gpu:{uuid}.{name}", "")

    def _step(self, mono_ns: int, uuid: str, call: str, answer: dict[str, Any]) -> None:
        self.begin_ns = mono_ns if self.begin_ns is None else self.begin_ns
        steps = self.calls.setdefault(uuid, {}).setdefault(call, [])
        if not steps or {key: steps[-1][key] for key in steps[-1] if key != "from_s"} != answer:
            steps.append({**answer, "from_s": (mono_ns - self.begin_ns) / _NS_PER_S})


def _read(path: Path) -> list[Mapping[str, Any]]:
    """Read the records of a log with its rotated parts; a last line that is not whole is left out."""
    return [to_fields(record) for record in read_log(path).records]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the scenario of a log."""
    parser = argparse.ArgumentParser(description="Turn a monitor's log into a scenario of the fake NVML library.")
    parser.add_argument("log", type=Path, metavar="LOG.jsonl")
    parser.add_argument("--pid", type=int, help="the process that has the target's memory; else the recorded one")
    options = parser.parse_args(arguments)
    try:
        scenario = to_scenario(_read(options.log), pid=options.pid)
    except ReportError as error:
        parser.error(str(error))
    except ValueError as error:
        parser.error(f"{options.log}: {error}")
    json.dump(scenario, sys.stdout, indent=1)
    print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
