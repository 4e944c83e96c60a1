"""The readings of the GPUs of one process, one after the other, whatever the driver does meanwhile.

A question that fails makes its fields None with a reason and is asked again later; a GPU that is lost leaves the others
alone; a driver that is away, or lists a GPU that does not answer, is opened anew. The waits are 1, 2, 4 … 60 s. Nothing
here raises.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

from lucid_profiler.monitor.driver import Driver
from lucid_profiler.monitor.gpu_devices import Device, Found, targets
from lucid_profiler.monitor.gpu_processes import FIELDS, GpuProcess, IsMember, never, share_out
from lucid_profiler.monitor.nvml_calls import (
    ENERGY,
    FAST,
    MEMORY,
    REPORTS_LOSS,
    REPORTS_NO_ANSWER,
    Call,
    Side,
    processes,
    reason_of,
)
from lucid_profiler.monitor.readings import REASONS, Reasons, Sheet, Values

__all__ = ["Device", "Gpus", "Sheets"]

_FIRST_WAIT_NS = 1_000_000_000
_LONGEST_WAIT_NS = 60_000_000_000
_PROC = Path("/proc")
_LASTING = frozenset({"not_supported", "no_permission"})
"""Reasons that a question is not asked again at once."""
_DISBELIEF = frozenset({"implausible", "abi_suspect"})
_GONE = REPORTS_LOSS | REPORTS_NO_ANSWER
_UNEXPLAINED_BYTES = 512 * 2**20
_FIRST_VERSION = "the driver has no second version of the memory query: used includes what it reserves"

Sheets = dict[str, tuple[Values, Reasons]]
"""UUID of a device: its fields, and why those that are None are."""
Times = dict[str, tuple[int, int]]
"""UUID of a device: the times before and after the call."""


class _Wait:
    """When something that failed is tried again; `reason` is None while it has not failed."""

    __slots__ = ("_wait_ns", "due_ns", "reason")

    def __init__(self) -> None:
        self.end()

    def end(self) -> None:
        self.reason: str | None = None
        self.due_ns = 0
        self._wait_ns = _FIRST_WAIT_NS

    def begin(self, reason: str, now_ns: int) -> None:
        self.reason = reason
        self.due_ns = now_ns + self._wait_ns
        self._wait_ns = min(2 * self._wait_ns, _LONGEST_WAIT_NS)


class _Watched:
    """A device that is read: its handle, and what of it is waiting."""

    __slots__ = ("asked_ns", "device", "handle", "not_asked", "wait", "waits")

    def __init__(self, found: Found, not_asked: Side | None) -> None:
        self.device = found.device
        self.handle = found.handle
        self.not_asked = not_asked  # what the other side of a MIG partition answers
        self.asked_ns = (0, 0)  # before and after the last question
        self.wait = _Wait()
        if found.handle is None:
            self.wait.reason = "lost"
        self.waits: defaultdict[str, _Wait] = defaultdict(_Wait)


class Gpus:
    """The GPUs that one process may use. Not for several threads.

    Attributes:
        devices: Every device that the driver lists, the process's or not.
        reason: Why there are no readings, a code of `readings.REASONS`; None while there are.
        notes: What a reader should know, each said once.
        num_errors: Call and code, such as "power_usage.not_supported": how often an answer was no value.
    """

    def __init__(self, *, clock: Callable[[], int], environ: Mapping[str, str] | None, proc: Path) -> None:
        self.devices: tuple[Device, ...] = ()
        self.reason: str | None = None
        self.notes: list[str] = []
        self.num_errors: defaultdict[str, int] = defaultdict(int)
        self._clock, self._environ, self._proc = clock, environ, proc
        self._driver = Driver()
        self._wait = _Wait()
        self._found: tuple[Found, ...] = ()
        self._watched: tuple[_Watched, ...] = ()

    @classmethod
    def open(
        cls,
        *,
        clock: Callable[[], int],
        environ: Mapping[str, str] | None = None,
        proc: Path = _PROC,
    ) -> "Gpus":
        """Open NVML; where that fails, `reason` says why and it is tried again later.

        Args:
            clock: Monotonic time in ns, for the waits.
            environ: The environment of the process that is watched; None: all devices are read.
            proc: Where the process file system is.
        """
        gpus = cls(clock=clock, environ=environ, proc=proc)
        gpus._start()
        return gpus

    @property
    def memory_api(self) -> Literal["v2", "v1"] | None:
        """Return which version of the memory query answers, the older one where devices differ; None where none has."""
        ways = {self._driver.way(MEMORY.name, watched.device.uuid) for watched in self._watched} - {None}
        return None if not ways else "v2" if ways == {0} else "v1"

    @property
    def why_missing(self) -> str | None:
        """Return why devices may be missing; None where all that the driver lists are there."""
        return self._wait.reason

    @property
    def nvml_ns(self) -> Mapping[str, int]:
        """Return the time spent in each call, in ns."""
        return self._driver.nvml_ns

    @property
    def num_calls(self) -> Mapping[str, int]:
        """Return how often each call was made."""
        return self._driver.num_calls

    def close(self) -> None:
        """Give NVML back; what others in this process have opened stays open. May be called again."""
        self._driver.close()
        self._watched = ()

    def reopen_if_due(self) -> bool:
        """Open NVML anew if something is missing and the wait is over, as every reading does; return whether it did."""
        if self._driver.is_forked:
            self.reason = "forked"
        elif self._wait.reason is not None and self._clock() >= self._wait.due_ns:
            self._start()
            return self.reason is None
        return False

    def read_fast(self) -> Sheets:
        """Read memory, utilization, power, clocks, why they are low, and temperature of every device."""
        return self._read(lambda _: FAST, shows_silence=True)

    def read_energy(self) -> tuple[Sheets, Times]:
        """Read the energy counters, and between which times each was; this takes milliseconds on some drivers."""
        sheets = self._read(lambda _: (ENERGY,))
        asked = ((watched.device.uuid, watched.asked_ns) for watched in self._watched)
        known = {uuid for uuid, (values, _) in sheets.items() if values["energy_mj"] is not None}
        return sheets, {uuid: asked_ns for uuid, asked_ns in asked if uuid in known}

    def read_processes(self, pids: Collection[int], *, is_member: IsMember = never) -> Sheets:
        """Read how much memory the processes `pids` have on every device, and how much others have.

        Args:
            pids: The target's processes, as far as they are known.
            is_member: Tells whether another process is one of them, too.
        """
        return self._read(
            lambda watched: (processes(partial(self._share_out, watched, pids=pids, is_member=is_member)),)
        )

    def _start(self) -> None:
        code = self._driver.open()
        if code is not None:
            return self._go_away(code)
        found, codes = self._driver.devices()
        if not found:
            return self._go_away(codes[0] if codes else None)
        if codes:
            self._note(f"{len(codes)} of the driver's GPUs cannot be read: {REASONS[reason_of(codes[0])]}")
        self.reason = None
        passing = [reason for reason in map(reason_of, codes) if reason not in _LASTING]
        if passing:
            self._wait.begin(passing[0], self._clock())
        else:
            self._wait.end()
        here = {each.device.uuid for each in found}
        gone = [replace(each, handle=None) for each in self._found if each.device.uuid not in here]
        self._found = (*map(self._with_memory, found), *gone)
        self._choose()
        return None

    def _with_memory(self, found: Found) -> Found:
        answer, _ = self._driver.ask(MEMORY.name, found.handle, uuid=found.device.uuid)
        sheet = Sheet()
        if answer is not None:
            MEMORY.store(answer, sheet)
        total = sheet.values.get("memory_total_bytes")
        return replace(found, device=replace(found.device, memory_total_bytes=None if total is None else int(total)))

    def _choose(self) -> None:
        wanted, note = targets([found.device for found in self._found], self._environ)
        if note is not None:
            self._note(note)
        self._found = tuple(
            replace(found, device=replace(found.device, is_target=found.device.uuid in wanted)) for found in self._found
        )
        self.devices = tuple(found.device for found in self._found)
        divided = {device.parent_uuid for device in self.devices}
        self._watched = tuple(
            _Watched(found, _not_asked(found.device, divided)) for found in self._found if found.device.is_target
        )

    def _go_away(self, code: int | None) -> None:
        if self.reason is None:  # it was there: the waits begin anew
            self._wait.end()
        self.reason = "no_devices" if code is None else reason_of(code)
        self._wait.begin(self.reason, self._clock())

    def _read(self, calls: Callable[[_Watched], Sequence[Call]], *, shows_silence: bool = False) -> Sheets:
        """Ask every device; many questions without an answer show that the driver is away, a single one does not."""
        self.reopen_if_due()
        now_ns = self._clock()
        sheets: Sheets = {}
        codes: list[int | None] = []
        for watched in self._watched:
            sheet = Sheet()
            sheets[watched.device.uuid] = (sheet.values, sheet.reasons)
            device_codes = self._read_device(watched, calls(watched), sheet, now_ns=now_ns)
            self._judge(watched, device_codes, now_ns=now_ns, shows_silence=shows_silence)
            codes += device_codes
        silence = [code for code in codes if code in REPORTS_NO_ANSWER]
        if shows_silence and silence and _GONE.issuperset(codes):
            self._go_away(silence[0])
        return sheets

    def _read_device(self, watched: _Watched, calls: Sequence[Call], sheet: Sheet, *, now_ns: int) -> list[int | None]:
        """Fill a device's sheet; return what its questions gave: NVML's error codes, None for answers."""
        codes: list[int | None] = []
        refused = None if self.reason else self._renew(watched, now_ns=now_ns)
        if refused is not None:
            codes.append(refused)
        why_not = self.reason or (watched.wait.reason if now_ns < watched.wait.due_ns else None)
        for call in calls:
            wait = watched.waits[call.name]
            if call.side == watched.not_asked:
                sheet.miss(call.fields, "mig")
            elif why_not is not None:
                sheet.miss(call.fields, why_not)
            elif wait.reason is not None and now_ns < wait.due_ns:
                sheet.miss(call.fields, wait.reason)
            else:
                code = self._ask(watched, call, sheet, now_ns=now_ns)
                codes.append(code)
                if code in REPORTS_LOSS:
                    why_not = "lost"
        return codes

    def _ask(self, watched: _Watched, call: Call, sheet: Sheet, *, now_ns: int) -> int | None:
        begin_ns = self._clock()
        answer, code = self._driver.ask(call.name, watched.handle, uuid=watched.device.uuid)
        watched.asked_ns = (begin_ns, self._clock())
        wait = watched.waits[call.name]
        if code is None:
            if wait.reason is not None:
                wait.end()
            call.store(answer, sheet)
            if sheet.reasons:
                if call is MEMORY and self._driver.way(MEMORY.name, watched.device.uuid):
                    self._note(f"{watched.device.uuid}: {_FIRST_VERSION}")
                for reason in _DISBELIEF.intersection(sheet.reasons.get(field, "") for field in call.fields):
                    self._count(watched, call, reason)
            return None
        reason = reason_of(code)
        sheet.miss(call.fields, reason)
        self._count(watched, call, reason)
        if reason in _LASTING:
            wait.begin(reason, now_ns)
        return code

    def _renew(self, watched: _Watched, *, now_ns: int) -> int | None:
        """Take a new handle of a device that was lost, once its wait is over; return the error code of that."""
        wait = watched.wait
        if wait.reason is None or now_ns < wait.due_ns:
            return None
        watched.handle, code = self._driver.handle(watched.device.uuid)
        if code is None:
            wait.due_ns = 0
        else:
            wait.begin(wait.reason, now_ns)
        return code

    def _judge(self, watched: _Watched, codes: Sequence[int | None], *, now_ns: int, shows_silence: bool) -> None:
        """Let a device wait that is lost, or about which the driver answers nothing."""
        wait = watched.wait
        failed = [code for code in codes if code in _GONE]
        if now_ns < wait.due_ns:
            return
        if not REPORTS_LOSS.isdisjoint(failed):
            wait.begin("lost", now_ns)
        elif shows_silence and failed and len(failed) == len(codes):
            wait.begin(reason_of(failed[0]), now_ns)
        elif codes and wait.reason is not None:
            wait.end()

    def _share_out(
        self,
        watched: _Watched,
        listed: list[GpuProcess],
        sheet: Sheet,
        *,
        pids: Collection[int],
        is_member: IsMember,
    ) -> None:
        memory = Sheet()
        answer, code = self._driver.ask(MEMORY.name, watched.handle, uuid=watched.device.uuid)
        if code is None:
            MEMORY.store(answer, memory)
        used = memory.values.get("memory_used_bytes")
        used_bytes = None if used is None else int(used)
        shares = share_out(listed, pids, is_member=is_member, used_bytes=used_bytes, proc=self._proc)
        for field, reading in zip(FIELDS, shares.readings(), strict=True):
            sheet.put_reading(field, reading)
        uuid = watched.device.uuid
        if shares.match == "only_process":
            self._note(f"{uuid}: the only process on the GPU is taken for the target; its id is of another namespace")
        if shares.match is not None and used is not None and shares.process.value is not None:
            unexplained = used - shares.process.value - (shares.others.value or 0)
            if unexplained > max(_UNEXPLAINED_BYTES, used // 5):
                self._note(
                    f"{uuid}: processes explain too little of the used memory: it is managed, graphics or hidden"
                )

    def _count(self, watched: _Watched, call: Call, reason: str) -> None:
        self.num_errors[f"{call.name}.{reason}"] += 1
        self._note(f"{watched.device.uuid}: {call.name}: {REASONS[reason]}")

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


def _not_asked(device: Device, divided: Collection[str | None]) -> Side | None:
    if device.parent_uuid is not None:
        return "gpu"
    return "instance" if device.uuid in divided else None
