"""The GPUs and MIG instances that the driver lists, and which of them a process may use."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from lucid_profiler.monitor.nvml_calls import REPORTS_LOSS, REPORTS_NO_ANSWER, code_of, failures
from lucid_profiler.monitor.visible import Known, names_by_number, resolve

__all__ = ["Device", "Found", "list_devices", "targets"]

_UNKNOWN_ORDER = (
    "which GPU a number in CUDA_VISIBLE_DEVICES means is not known: the machine has different GPUs and "
    "CUDA_DEVICE_ORDER is not PCI_BUS_ID; all of them are read"
)
_MIG_ENABLED = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A GPU, or an instance of one that MIG has divided.

    Attributes:
        uuid: `GPU-…` or `MIG-…`; the bus id where the driver does not tell it.
        name: None where the driver does not tell it; `pci_bus_id` and `memory_total_bytes` likewise.
        index: NVML's number of the GPU, which is not CUDA's.
        parent_uuid: The GPU of an instance; None for a GPU.
        gpu_instance: The instance's number, `compute_instance` likewise; None for a GPU.
        is_target: The watched process may use it, or one of its instances.
    """

    uuid: str
    name: str | None
    pci_bus_id: str | None
    index: int
    memory_total_bytes: int | None = None
    parent_uuid: str | None = None
    gpu_instance: int | None = None
    compute_instance: int | None = None
    is_target: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A device and how the driver is asked about it."""

    device: Device
    handle: Any


def list_devices(pynvml: Any, *, count: int) -> tuple[list[Found], list[int]]:
    """Return the devices that answer, instances after their GPU, and the error codes of those that do not."""
    answers = [_known_or_code(pynvml, index) for index in range(count)]
    codes = [answer for answer in answers if isinstance(answer, int)]
    return [found for answer in answers if not isinstance(answer, int) for found in answer], codes


def targets(
    devices: Sequence[Device], environ: Mapping[str, str] | None, uuids: Iterable[str] | None
) -> tuple[frozenset[str], str | None]:
    """Return the UUIDs of the devices that a process may use, with a divided GPU beside its instance, and a note.

    Args:
        devices: All devices.
        environ: The environment of the process; None where it is not known: all devices.
        uuids: What CUDA shows the process, where it has told us: this is the truth. torch leaves the `GPU-` away.
    """
    if uuids is not None:
        wanted = {_bare(uuid) for uuid in uuids}
        return _with_parents(devices, {device.uuid for device in devices if _bare(device.uuid) in wanted}), None
    if environ is None:
        return frozenset(device.uuid for device in devices), None
    text = environ.get("CUDA_VISIBLE_DEVICES")
    models = {device.name for device in devices if device.parent_uuid is None}
    if names_by_number(text) and len(models) > 1 and environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        return frozenset(device.uuid for device in devices), _UNKNOWN_ORDER
    ordered = sorted(devices, key=lambda device: (device.pci_bus_id or "", device.index))
    known = [
        Known(
            uuid=device.uuid,
            parent_uuid=device.parent_uuid,
            gpu_instance=device.gpu_instance,
            compute_instance=device.compute_instance,
        )
        for device in ordered
    ]
    return _with_parents(devices, set(resolve(text, known))), None


def _with_parents(devices: Iterable[Device], uuids: set[str]) -> frozenset[str]:
    parents = {device.parent_uuid for device in devices if device.uuid in uuids and device.parent_uuid}
    return frozenset(uuids | parents)


def _bare(uuid: str) -> str:
    return uuid.removeprefix("GPU-").removeprefix("MIG-")


def _known_or_code(pynvml: Any, index: int) -> list[Found] | int:
    try:
        return list(_with_instances(pynvml, pynvml.nvmlDeviceGetHandleByIndex(index), index))
    except failures(pynvml) as error:
        return code_of(error)


def _with_instances(pynvml: Any, handle: Any, index: int) -> Iterator[Found]:
    known = partial(_known, pynvml)
    pci = known(lambda: _text(pynvml.nvmlDeviceGetPciInfo(handle).busId))
    uuid = known(lambda: _text(pynvml.nvmlDeviceGetUUID(handle))) or pci or f"index {index}"
    name = known(lambda: _text(pynvml.nvmlDeviceGetName(handle)))
    gpu = Device(uuid=uuid, name=name, pci_bus_id=pci, index=index)
    yield Found(device=gpu, handle=handle)
    if known(lambda: pynvml.nvmlDeviceGetMigMode(handle)[0]) != _MIG_ENABLED:
        return
    for slot in range(known(lambda: pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)) or 0):
        instance = known(partial(pynvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, slot))
        if instance is not None:
            yield Found(device=_instance(pynvml, instance, gpu, slot), handle=instance)


def _instance(pynvml: Any, handle: Any, gpu: Device, slot: int) -> Device:
    uuid = _known(pynvml, lambda: _text(pynvml.nvmlDeviceGetUUID(handle)))
    return Device(
        uuid=uuid or f"{gpu.uuid} slot {slot}",
        name=_known(pynvml, lambda: _text(pynvml.nvmlDeviceGetName(handle))) or gpu.name,
        pci_bus_id=gpu.pci_bus_id,
        index=gpu.index,
        parent_uuid=gpu.uuid,
        gpu_instance=_known(pynvml, lambda: pynvml.nvmlDeviceGetGpuInstanceId(handle)),
        compute_instance=_known(pynvml, lambda: pynvml.nvmlDeviceGetComputeInstanceId(handle)),
    )


def _known(pynvml: Any, read: Callable[[], Any]) -> Any:
    """Return what is read, or None where the driver does not tell; a driver or a GPU that is gone goes on as it is."""
    try:
        return read()
    except failures(pynvml) as error:
        if code_of(error) in REPORTS_LOSS | REPORTS_NO_ANSWER:
            raise
        return None


def _text(value: Any) -> str:
    # Older bindings return bytes.
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
