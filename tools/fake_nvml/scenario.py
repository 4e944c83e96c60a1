"""Scenarios of the fake NVML library: what it answers, to which call, from when on.

A scenario is a dict, or a JSON file of the same shape:

    {"driver": "580.159.04", "nvml": "13.580.159.04", "cuda": 13000, "clock": "real", "init": STEPS, "calls": {...},
     "devices": [{"uuid": "GPU-…", "name": "NVIDIA H200", "pci": "00000000:01:00.0", "calls": {CALL: STEPS},
                  "mig": [{"uuid": "MIG-…", "gi": 1, "ci": 0, "calls": {CALL: STEPS}}]}]}

STEPS is a list of steps, one step, or a plain value that always holds. A step is {"value": V} or {"error": CODE}, each
with "from_call" (the count of this call on this device, from 0), "from_s" (seconds since the first init with this
scenario), "latency_us", and for fields "type". The last step whose conditions hold counts. Wherever V has a number it
may have {"ramp": [start, per_second], "quantum": seconds}, which grows from the step's `from_s` on. The tables below
name the calls and the shape of their values; a call that is not listed answers Not Supported. An error of the call
"any" goes before all others of its device. With "clock": "manual" the seconds move only by `lucid_fake_advance`.
"""

import argparse
import hashlib
import json
import os
import shutil
import stat
import struct
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["CALLS", "LIBRARY", "VARIABLE", "build", "cached_library", "compile_text", "environment"]

LIBRARY = "libnvidia-ml.so.1"
VARIABLE = "LUCID_FAKE_NVML"

_SOURCES = tuple(Path(__file__).with_name(name) for name in ("fake_nvml.c", "answers.h"))
_FLAGS = ("-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-fvisibility=hidden", "-pthread")
_ALL_ONES = 2**64 - 1
_NO_INSTANCE = 2**32 - 1
_MAX_VALUES = 1024
_MAX_TEXT = 95
_MAX_DEVICES = 159
_MAX_LATENCY_US = 60_000_000
_MAX_ERROR = 999

_PROCESS = ("pid", "bytes")
_VECTORS: dict[str, tuple[str, ...]] = {
    "memory": ("total", "free", "used"),
    "memory_v2": ("total", "reserved", "free", "used"),
    "bar1": ("total", "free", "used"),
    "utilization": ("gpu", "memory"),
    "ecc_mode": ("current", "pending"),
    "mig_mode": ("current", "pending"),
}
_SCALARS = (
    "power_usage",  # mW
    "enforced_power_limit",  # mW
    "energy",  # mJ
    "clock_graphics",  # MHz
    "clock_sm",  # MHz
    "clock_memory",  # MHz
    "clock_video",  # MHz
    "reasons",  # bit mask
    "temperature",  # degrees Celsius
    "performance_state",
    "persistence_mode",
)
# What a row holds at least; what may follow, with the values that stand for it where it does not.
_ROWS: dict[str, tuple[tuple[str, ...], tuple[int, ...]]] = {
    "compute_processes": (_PROCESS, (_NO_INSTANCE, _NO_INSTANCE)),  # GPU and compute instance
    "graphics_processes": (_PROCESS, (_NO_INSTANCE, _NO_INSTANCE)),
    "process_utilization": (("pid", "sm", "mem"), (0, 0, 0)),  # encoder, decoder, time in µs (0 = now)
}
# The scenario's own entries answer these; steps may only make them fail or wait.
_IDENTITY = (
    "any",
    "handle",
    "name",
    "uuid",
    "index",
    "pci_info",
    "field_values",
    "mig",
)
_SYSTEM = ("init", "device_count", "driver_version", "nvml_version", "cuda_driver_version")
CALLS = (*_VECTORS, *_SCALARS, *_ROWS, *_IDENTITY)

# https://docs.nvidia.com/deploy/nvml-api/group__nvmlDeviceEnumvs.html, nvmlValueType_t
_FIELD_TYPES = {
    "double": 0,
    "unsigned_int": 1,
    "unsigned_long": 2,
    "unsigned_long_long": 3,
    "signed_long_long": 4,
    "signed_int": 5,
}

_SCENARIO_KEYS = ("driver", "nvml", "cuda", "clock", "init", "calls", "devices")
_DEVICE_KEYS = ("uuid", "name", "pci", "mig", "calls")
_MIG_KEYS = ("uuid", "name", "gi", "ci", "calls")
_STEP_KEYS = ("value", "error", "from_call", "from_s", "latency_us", "type")


def compile_text(scenario: Mapping[str, Any]) -> str:
    """Turn a scenario into the text that the library reads.

    Raises:
        ValueError: Something in it is wrong; the message says where and what.
    """
    _check_keys(scenario, _SCENARIO_KEYS, "the scenario")
    clock = scenario.get("clock", "real")
    if clock not in {"real", "manual"}:
        raise ValueError(f'clock is {clock!r}; it is "real" or "manual"')
    versions = [_word(scenario.get(key, "0"), key) for key in ("driver", "nvml")]
    cuda = _integer(scenario.get("cuda", 0), "cuda", 0, 2**31 - 1)
    lines = [f"lucid-fake-nvml 1 {' '.join(versions)} {cuda} {int(clock == 'manual')}"]
    system = dict(_mapping(scenario.get("calls", {}), "calls"))
    if "init" in scenario:
        system["init"] = scenario["init"]
    lines += _calls(system, _SYSTEM, "the system")
    devices = _sequence(scenario.get("devices", []), "devices")
    number = 1
    for index, device in enumerate(devices):
        lines += _device(_mapping(device, f"devices[{index}]"), f"devices[{index}]", number=number, index=index)
        number += 1 + len(device.get("mig", []))
    _check_unique(devices)
    return "\n".join(lines) + "\n"


def _device(device: Mapping[str, Any], where: str, *, number: int, index: int) -> list[str]:
    _check_keys(device, _DEVICE_KEYS, where)
    uuid, pci = _word(device.get("uuid"), f"{where}.uuid"), _bus(device.get("pci"), f"{where}.pci")
    name = _text(device.get("name"), f"{where}.name")
    instances = _sequence(device.get("mig", []), f"{where}.mig")
    calls = dict(_mapping(device.get("calls", {}), f"{where}.calls"))
    if "mig" in device:
        calls.setdefault("mig_mode", [1, 1])
    lines = [f"device {uuid} 0 {index} {_NO_INSTANCE} {_NO_INSTANCE} {pci} {name}", *_calls(calls, CALLS, where)]
    for slot, instance in enumerate(instances):
        place = f"{where}.mig[{slot}]"
        _check_keys(instance, _MIG_KEYS, place)
        uuid = _word(instance.get("uuid"), f"{place}.uuid")
        ids = [_integer(instance.get(key), f"{place}.{key}", 0, _NO_INSTANCE) for key in ("gi", "ci")]
        its_name = _text(instance.get("name", f"{name} MIG"), f"{place}.name")
        lines.append(f"device {uuid} {number} {slot} {ids[0]} {ids[1]} - {its_name}")
        lines += _calls(_mapping(instance.get("calls", {}), f"{place}.calls"), CALLS, place)
    return lines


def _check_unique(devices: Sequence[Any]) -> None:
    uuids: set[str] = set()
    buses: set[str] = set()
    for device in devices:
        for owner in (device, *device.get("mig", [])):
            uuid = owner["uuid"]
            if uuid in uuids:
                raise ValueError(f"the uuid {uuid!r} appears twice")
            uuids.add(uuid)
        bus = _bus(device["pci"], "pci")
        if bus in buses:
            raise ValueError(f"the pci address {bus!r} appears twice")
        buses.add(bus)
    if len(uuids) > _MAX_DEVICES:
        raise ValueError(f"{len(uuids)} devices and instances; the library holds {_MAX_DEVICES}")


def _calls(calls: Mapping[str, Any], known: Sequence[str], where: str) -> list[str]:
    lines = []
    for name, content in calls.items():
        if name not in known and not (known is CALLS and _is_field(name)):
            more = ", field:<id>" if known is CALLS else ""
            raise ValueError(f"{where} has the unknown call {name!r}; known are {', '.join(known)}{more}")
        lines.append(f"call {name}")
        place = f"{where}, {name}"
        lines += [_step(step, name, f"{place}, step {index}") for index, step in enumerate(_steps(content, place))]
    return lines


def _is_field(name: str) -> bool:
    number = name.removeprefix("field:")
    return name != number and number.isascii() and number.isdigit() and int(number) < 2**32


def _steps(content: Any, where: str) -> list[Mapping[str, Any]]:
    if _is_step(content):
        return [content]
    if isinstance(content, (list, tuple)) and any(_is_step(item) for item in content):
        wrong = [index for index, item in enumerate(content) if not _is_step(item)]
        if wrong:
            raise ValueError(f'{where}, step {wrong[0]} has neither "value" nor "error"')
        return list(content)
    return [{"value": content}]


def _is_step(content: Any) -> bool:
    return isinstance(content, Mapping) and ("value" in content or "error" in content)


def _step(step: Mapping[str, Any], name: str, where: str) -> str:
    _check_keys(step, _STEP_KEYS, where)
    if "value" in step and "error" in step:
        raise ValueError(f'{where} has both "value" and "error"')
    from_call = _integer(step.get("from_call", 0), f"{where}, from_call", 0, 2**63)
    from_s = _number(step.get("from_s", 0), f"{where}, from_s")
    if from_s < 0:
        raise ValueError(f"{where}, from_s is {from_s}; it is 0 or more")
    latency_us = _integer(step.get("latency_us", 0), f"{where}, latency_us", 0, _MAX_LATENCY_US)
    error = _integer(step["error"], f"{where}, error", 1, _MAX_ERROR) if "error" in step else 0
    values = [] if error else _values(step["value"], name, where)
    kind = _field_type(step, name, where)
    return " ".join(["step", str(from_call), repr(from_s), str(latency_us), str(error), str(kind), *values])


def _field_type(step: Mapping[str, Any], name: str, where: str) -> int:
    if "type" not in step:
        return _FIELD_TYPES["double" if isinstance(step.get("value"), float) else "unsigned_long_long"]
    if not _is_field(name) or step["type"] not in _FIELD_TYPES:
        raise ValueError(f"{where}, type is {step['type']!r}; fields have one of {', '.join(_FIELD_TYPES)}")
    return _FIELD_TYPES[step["type"]]


def _values(value: Any, name: str, where: str) -> list[str]:
    if name in _ROWS:
        required, defaults = _ROWS[name]
        rows = [_row(row, required, defaults, f"{where}, row {i}") for i, row in enumerate(_sequence(value, where))]
        flat = [item for row in rows for item in row]
        if len(flat) > _MAX_VALUES:
            raise ValueError(f"{where} has {len(rows)} rows; the library holds {_MAX_VALUES // len(rows[0])}")
        return flat
    if name in _VECTORS:
        parts = _VECTORS[name]
        if not isinstance(value, (list, tuple)) or len(value) != len(parts):
            raise ValueError(f"{where} is {value!r}; it takes [{', '.join(parts)}]")
        return [_value(item, f"{where}, {part}") for part, item in zip(parts, value, strict=True)]
    if name in _IDENTITY or name in _SYSTEM:
        if value is not None:
            raise ValueError(f"{where} is {value!r}; this call takes errors, or null for none")
        return []
    if isinstance(value, float) and _is_field(name):
        return [f"{struct.unpack('<Q', struct.pack('<d', value))[0]}:0:0"]
    return [_value(value, where)]


def _row(row: Any, required: tuple[str, ...], defaults: tuple[int, ...], where: str) -> list[str]:
    if not isinstance(row, (list, tuple)) or not len(required) <= len(row) <= len(required) + len(defaults):
        raise ValueError(f"{where} is {row!r}; it takes [{', '.join(required)}] and at most {len(defaults)} more")
    filled = [*row, *defaults[len(row) - len(required) :]]
    if required == _PROCESS and filled[1] is None:
        filled[1] = _ALL_ONES
    return [_value(item, where) for item in filled]


def _value(value: Any, where: str) -> str:
    if not isinstance(value, Mapping):
        return f"{_integer(value, where, -(2**63), _ALL_ONES) & _ALL_ONES}:0:0"
    _check_keys(value, ("ramp", "quantum"), where)
    ramp = _sequence(value.get("ramp"), f"{where}, ramp")
    if len(ramp) != len(("start", "per_second")):
        raise ValueError(f"{where}, ramp is {list(ramp)!r}; it takes [start, per_second]")
    start = _integer(ramp[0], f"{where}, ramp start", -(2**63), _ALL_ONES) & _ALL_ONES
    quantum_s = _number(value.get("quantum", 0), f"{where}, quantum")
    if quantum_s < 0:
        raise ValueError(f"{where}, quantum is {quantum_s}; it is 0 seconds or more")
    return f"{start}:{_number(ramp[1], f'{where}, ramp per_second')!r}:{quantum_s!r}"


def _check_keys(entry: Any, known: Sequence[str], where: str) -> None:
    unknown = sorted(set(_mapping(entry, where)) - set(known))
    if unknown:
        raise ValueError(f"{where} has the unknown key {unknown[0]!r}; known are {', '.join(known)}")


def _mapping(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{where} is {value!r}; it takes an object")  # noqa: TRY004 - one kind of error for a scenario
    return value


def _sequence(value: Any, where: str) -> Sequence[Any]:
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"{where} is {value!r}; it takes a list")  # noqa: TRY004 - one kind of error for a scenario
    return value


def _integer(value: Any, where: str, low: int, high: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ValueError(f"{where} is {value!r}; it takes an integer from {low} to {high}")
    return value


def _number(value: Any, where: str) -> float:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e15:
        return float(value)
    raise ValueError(f"{where} is {value!r}; it takes a finite number")


def _text(value: Any, where: str) -> str:
    if (
        isinstance(value, str)
        and value.isprintable()
        and 0 < len(value.encode()) <= _MAX_TEXT
        and value == value.strip()
    ):
        return value
    raise ValueError(f"{where} is {value!r}; it takes a line of 1 to {_MAX_TEXT} bytes")


def _word(value: Any, where: str) -> str:
    if " " in _text(value, where):
        raise ValueError(f"{where} is {value!r}; it takes no blanks")
    return str(value)


def _bus(value: Any, where: str) -> str:
    text = _word(value, where)
    try:
        domain, bus, device = (int(part, 16) for part in text.removesuffix(".0").split(":"))
    except ValueError:
        domain, bus, device = -1, 0, 0
    if not (0 <= domain < 2**32 and 0 <= bus < 2**8 and 0 <= device < 2**5):
        raise ValueError(f"{where} is {value!r}; it takes an address such as 00000000:01:00.0")
    return f"{domain:08X}:{bus:02X}:{device:02X}.0"


def build(folder: Path) -> Path:
    """Compile the library into a folder, replacing it in one step, and return its path.

    Raises:
        RuntimeError: There is no C compiler, or it refuses the source.
    """
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        raise RuntimeError("the fake NVML library needs a C compiler; install gcc or name one in CC")
    target = folder / LIBRARY
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        built = Path(scratch) / LIBRARY
        command = [compiler, *_FLAGS, "-o", str(built), str(_SOURCES[0])]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
        built.replace(target)
    return target


def cached_library() -> Path:
    """Return the library of the present source and user, built where it is not there yet.

    Raises:
        RuntimeError: It cannot be built, or its folder belongs to someone else.
    """
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in _SOURCES) + " ".join(_FLAGS).encode()).hexdigest()
    folder = Path(tempfile.gettempdir()) / f"lucid-fake-nvml-{os.getuid()}-{digest[:16]}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if status.st_uid != os.getuid() or not stat.S_ISDIR(status.st_mode) or stat.S_IMODE(status.st_mode) & 0o022:
        raise RuntimeError(f"{folder} can be written by others; remove it")
    library = folder / LIBRARY
    return library if library.is_file() else build(folder)


def environment(text_file: Path, library: Path) -> dict[str, str]:
    """Return this process's environment with the fake before any other NVML library."""
    folders = [str(library.parent), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    return {**os.environ, "LD_LIBRARY_PATH": os.pathsep.join(folders), VARIABLE: str(text_file)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command under the fake library and return its exit code."""
    parser = argparse.ArgumentParser(description="Run a command with a fake NVML library that plays a scenario.")
    parser.add_argument("scenario", type=Path, metavar="SCENARIO.json")
    parser.add_argument("command", nargs="+", metavar="CMD", help="after --")
    options = parser.parse_args(arguments)
    try:
        text = compile_text(json.loads(options.scenario.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        parser.error(f"{options.scenario}: {error}")
    with tempfile.TemporaryDirectory() as folder:
        text_file = Path(folder) / "scenario.txt"
        text_file.write_text(text, encoding="utf-8")
        code = subprocess.run(options.command, env=environment(text_file, cached_library()), check=False).returncode
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
