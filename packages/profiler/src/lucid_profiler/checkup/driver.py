"""The NVIDIA driver and the GPUs that the program would see, each looked at once."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lucid_profiler.checkup.finding import Finding, Level, unknown
from lucid_profiler.checkup.gpu import Observed, gpu_findings
from lucid_profiler.checkup.settings import Answer, read_driver_cuda, read_driver_version, read_settings
from lucid_profiler.monitor.gpu import Device, Gpus
from lucid_profiler.monitor.readings import REASONS
from lucid_profiler.monitor.visible import names_by_number

__all__ = ["DriverFacts", "look_at_driver"]

_ABSENT = frozenset({"no_driver", "no_devices"})


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverFacts:
    """What the other areas need to know of the driver.

    Attributes:
        num_gpus: GPUs that the program would see; None where the driver does not answer although it may be there.
        cuda: The newest CUDA that the driver knows, (major, minor).
    """

    num_gpus: int | None
    cuda: Answer


def look_at_driver(environ: Mapping[str, str], *, proc: Path = Path("/proc")) -> tuple[list[Finding], DriverFacts]:
    """Return the findings about the driver and each GPU that a program with this environment would see."""
    gpus = Gpus.open(clock=time.monotonic_ns, environ=environ, proc=proc)
    try:
        if gpus.reason is not None:
            num_gpus = 0 if gpus.reason in _ABSENT else None
            return [_closed(gpus.reason)], DriverFacts(num_gpus=num_gpus, cuda=Answer(reason=gpus.reason))
        visible = [device for device in gpus.devices if device.is_target]
        cuda = read_driver_cuda()
        findings = [
            _open(gpus, cuda),
            _visible(gpus.devices, visible, environ),
            *(finding for observed in _observe(gpus, visible) for finding in gpu_findings(observed)),
        ]
        return findings, DriverFacts(num_gpus=len(_gpus(visible)), cuda=cuda)
    finally:
        gpus.close()


def _closed(reason: str) -> Finding:
    words = f"the GPUs cannot be read: {REASONS[reason]}"
    level: Level = "note" if reason in _ABSENT else "warning"
    return Finding(code="nvml", level=level, found=words, reason=reason)


def _open(gpus: Gpus, cuda: Answer) -> Finding:
    version = read_driver_version()
    words = f"driver {version.value}" if version.value else f"driver of unknown version ({version.reason})"
    words += f", CUDA up to {cuda.value[0]}.{cuda.value[1]}" if cuda.value else ""
    words += "; " + ", ".join(f"{device.index}: {device.name or 'unnamed'}" for device in _gpus(gpus.devices))
    value = {"driver": version.value, "cuda": list(cuda.value) if cuda.value else None, "uuids": _uuids(gpus.devices)}
    level: Level = "note" if gpus.notes else "ok"
    return Finding(code="nvml", level=level, found="; ".join([words, *gpus.notes]), value=value)


def _visible(devices: Sequence[Device], visible: Sequence[Device], environ: Mapping[str, str]) -> Finding:
    setting = environ.get("CUDA_VISIBLE_DEVICES")
    has_models = len({device.name for device in _gpus(devices)}) > 1
    if names_by_number(setting) and has_models and environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        words = f"CUDA numbers different GPUs in an order of its own, so CUDA_VISIBLE_DEVICES={setting!r} may name any"
        return unknown("gpus_visible", "device_order", words)
    words = f"{len(_gpus(visible))} of {len(_gpus(devices))}"
    words += "" if setting is None else f" under CUDA_VISIBLE_DEVICES={setting!r}"
    return Finding(code="gpus_visible", level="ok" if visible else "warning", found=words, value=_uuids(visible))


def _gpus(devices: Sequence[Device]) -> list[Device]:
    return [device for device in devices if device.parent_uuid is None]


def _uuids(devices: Sequence[Device]) -> list[str]:
    return [device.uuid for device in devices]


def _observe(gpus: Gpus, visible: Sequence[Device]) -> Iterator[Observed]:
    """Read each device once; the programs that use it are all others, since none of ours runs."""
    fast, processes = gpus.read_fast(), gpus.read_processes(())
    divided = {device.parent_uuid for device in visible}
    for device in visible:
        values, reasons = fast[device.uuid]
        more, more_reasons = processes[device.uuid]
        yield Observed(
            uuid=device.uuid,
            is_instance=device.parent_uuid is not None,
            has_instances=device.uuid in divided,
            values={**values, **more},
            reasons={**reasons, **more_reasons},
            settings=read_settings(device) if device.parent_uuid is None else None,
        )
