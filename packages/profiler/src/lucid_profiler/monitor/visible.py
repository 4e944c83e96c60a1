"""Which GPUs a value of CUDA_VISIBLE_DEVICES lets a process use, and in which order. Pure; never raises.

Source: https://docs.nvidia.com/cuda/cuda-c-programming-guide/index.html#env-vars and
https://docs.nvidia.com/datacenter/tesla/mig-user-guide/index.html#cuda-visible-devices
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

__all__ = ["Known", "names_by_number", "resolve"]

_NUMBER = re.compile(r"[+-]?[0-9]+")
_MAX_DIGITS = 10
_BLANKS = " \t\n\v\f\r"
_OLD_MIG = re.compile(r"MIG-(GPU-[^/]*)/([0-9]{1,9})/([0-9]{1,9})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """A GPU, or an instance of one that MIG has divided.

    Attributes:
        uuid: `GPU-…` or `MIG-…`.
        parent_uuid: The GPU of an instance; None for a GPU.
        gpu_instance: The instance's number, compute_instance likewise; None for a GPU.
    """

    uuid: str
    parent_uuid: str | None = None
    gpu_instance: int | None = None
    compute_instance: int | None = None


def resolve(text: str | None, devices: Sequence[Known]) -> tuple[str, ...]:
    """Return the UUIDs of the devices that CUDA would show, as CUDA numbers them.

    The list ends at the first entry that names no device; a device named twice leaves none. The first entry decides
    whether the list holds numbers or UUIDs. A UUID may be cut short as long as it is unique. A GPU that MIG has divided
    stands for its first instance; CUDA shows one instance at most, and no whole GPU beside it.

    Args:
        text: The variable's value; None where it is not set, which means every GPU.
        devices: The GPUs in CUDA's order, instances after or between them.
    """
    gpus = [device for device in devices if device.parent_uuid is None]
    if text is None:
        return _usable(gpus, devices)
    entries = [entry.strip(_BLANKS) for entry in text.split(",")]
    if entries[0].startswith("MIG-"):
        instances = [device for device in devices if device.parent_uuid is not None]
        return _usable(_until_invalid(entries, partial(_instance, instances)), devices)
    find = _by_uuid if entries[0].startswith("GPU-") else _by_number
    return _usable(_until_invalid(entries, partial(find, gpus)), devices)


def names_by_number(text: str | None) -> bool:
    """Tell whether a value names devices by CUDA's numbers, which only CUDA's own order gives a meaning to."""
    return text is not None and _NUMBER.match(text.split(",")[0].strip(_BLANKS)) is not None


def _until_invalid(entries: Iterable[str], find: Callable[[str], Known | None]) -> list[Known]:
    found: list[Known] = []
    for entry in entries:
        device = find(entry)
        if device is None:
            return found
        if device in found:
            return []
        found.append(device)
    return found


def _by_number(gpus: Sequence[Known], entry: str) -> Known | None:
    # What follows the digits does not count: "1gpu" is 1. A number of more digits than any machine has GPUs is none.
    match = _NUMBER.match(entry)
    number = int(match[0]) if match and len(match[0]) < _MAX_DIGITS else -1
    return gpus[number] if 0 <= number < len(gpus) else None


def _by_uuid(gpus: Sequence[Known], entry: str) -> Known | None:
    return _by_prefix(gpus, entry) if entry.startswith("GPU-") else None


def _instance(instances: Sequence[Known], entry: str) -> Known | None:
    old = _OLD_MIG.fullmatch(entry)
    if old is None:
        return _by_prefix(instances, entry) if entry.startswith("MIG-") else None
    wanted = (old[1], int(old[2]), int(old[3]))
    numbers = [(device.parent_uuid, device.gpu_instance, device.compute_instance) for device in instances]
    return instances[numbers.index(wanted)] if wanted in numbers else None


def _by_prefix(devices: Sequence[Known], entry: str) -> Known | None:
    matches = [device for device in devices if device.uuid.startswith(entry)]
    return matches[0] if len(matches) == 1 else None


def _usable(found: Sequence[Known], devices: Sequence[Known]) -> tuple[str, ...]:
    """Put instances in the place of divided GPUs; where there are any, CUDA shows the first one alone."""
    parts = [next((part for part in devices if part.parent_uuid == device.uuid), device) for device in found]
    instances = [part.uuid for part in parts if part.parent_uuid is not None]
    return tuple(instances[:1] or [part.uuid for part in parts])
