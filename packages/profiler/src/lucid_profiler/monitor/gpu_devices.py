"""The GPUs and MIG instances that the driver lists, and which of them a process may use."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from lucid_profiler.monitor.nvml_calls import REPORTS_LOSS, REPORTS_NO_ANSWER
from lucid_profiler.monitor.visible import Known, names_by_number, resolve

__all__ = ["Device", "Found", "list_devices", "targets"]

_UNKNOWN_ORDER = (
    "which GPU a number in CUDA_VISIBLE_DEVICES means is not known: the machine has different GPUs and "
    "CUDA_DEVICE_ORDER is not PCI_BUS_ID; all of them are read"
)
_MIG_ENABLED = 1

Timed = Callable[[str, Callable[[], Any]], tuple[Any, int | None]]
"""Makes a call under the name that it has in the costs; returns its answer, or None and an error code."""


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


def list_devices(pynvml: Any, *, count: int, timed: Timed) -> tuple[list[Found], list[int]]:
    """Return the devices that answer, instances after their GPU, and the error codes of those that do not."""
    answers = [_known_or_code(_Listing(pynvml, timed), index) for index in range(count)]
    codes = [answer for answer in answers if isinstance(answer, int)]
    return [found for answer in answers if not isinstance(answer, int) for found in answer], codes


def targets(devices: Sequence[Device], environ: Mapping[str, str] | None) -> tuple[frozenset[str], str | None]:
    """Return the UUIDs of the devices that a process may use, with a divided GPU beside its instance, and a note.

    Args:
        devices: All devices.
        environ: The environment of the process; None where it is not known: all devices.
    """
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


class _GoneError(Exception):
    """The driver or the GPU is gone, with this code: there is nothing to list."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class _Listing:
    """The questions about a device; None where the driver does not tell."""

    def __init__(self, pynvml: Any, timed: Timed) -> None:
        self._pynvml = pynvml
        self._timed = timed

    def handle(self, index: int) -> tuple[Any, int | None]:
        return self._timed("handle_by_index", lambda: self._pynvml.nvmlDeviceGetHandleByIndex(index))

    def uuid(self, handle: Any) -> str | None:
        return self._text("uuid", lambda: self._pynvml.nvmlDeviceGetUUID(handle))

    def name(self, handle: Any) -> str | None:
        return self._text("name", lambda: self._pynvml.nvmlDeviceGetName(handle))

    def bus_id(self, handle: Any) -> str | None:
        return self._text("pci", lambda: self._pynvml.nvmlDeviceGetPciInfo(handle).busId)

    def instances(self, handle: Any) -> Iterator[tuple[int, Any]]:
        """Yield slot and handle of each instance of a GPU that is divided."""
        pynvml = self._pynvml
        if self._known("mig_mode", lambda: pynvml.nvmlDeviceGetMigMode(handle)[0]) != _MIG_ENABLED:
            return
        for slot in range(self._known("mig_count", lambda: pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)) or 0):
            read = partial(self._instance_handle, handle, slot)
            instance = self._known("mig_handle", read)
            if instance is not None:
                yield slot, instance

    def numbers(self, handle: Any) -> tuple[int | None, int | None]:
        """Return the numbers of an instance: of its part of the GPU, and within that."""
        pynvml = self._pynvml
        gpu = self._known("gpu_instance", lambda: pynvml.nvmlDeviceGetGpuInstanceId(handle))
        return gpu, self._known("compute_instance", lambda: pynvml.nvmlDeviceGetComputeInstanceId(handle))

    def _instance_handle(self, handle: Any, slot: int) -> Any:
        return self._pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, slot)

    def _text(self, name: str, read: Callable[[], Any]) -> str | None:
        value = self._known(name, read)
        # Older bindings return bytes.
        return value.decode("utf-8", "replace") if isinstance(value, bytes) else None if value is None else str(value)

    def _known(self, name: str, read: Callable[[], Any]) -> Any:
        answer, code = self._timed(name, read)
        if code in REPORTS_LOSS | REPORTS_NO_ANSWER:
            raise _GoneError(code)
        return answer


def _known_or_code(listing: _Listing, index: int) -> list[Found] | int:
    handle, code = listing.handle(index)
    if code is not None:
        return code
    try:
        return list(_with_instances(listing, handle, index))
    except _GoneError as error:
        return error.code


def _with_instances(listing: _Listing, handle: Any, index: int) -> Iterator[Found]:
    pci = listing.bus_id(handle)
    uuid = listing.uuid(handle) or pci or f"index {index}"
    gpu = Device(uuid=uuid, name=listing.name(handle), pci_bus_id=pci, index=index)
    yield Found(device=gpu, handle=handle)
    for slot, instance in listing.instances(handle):
        yield Found(device=_instance(listing, instance, gpu, slot=slot), handle=instance)


def _instance(listing: _Listing, handle: Any, gpu: Device, *, slot: int) -> Device:
    uuid, name = listing.uuid(handle), listing.name(handle)
    gpu_instance, compute_instance = listing.numbers(handle)
    return Device(
        uuid=uuid or f"{gpu.uuid} slot {slot}",
        name=name or gpu.name,
        pci_bus_id=gpu.pci_bus_id,
        index=gpu.index,
        parent_uuid=gpu.uuid,
        gpu_instance=gpu_instance,
        compute_instance=compute_instance,
    )
