"""Measures what an empty CUDA context takes on a device, on a process that does nothing else.

`python -m lucid_profiler.context` is that process: it creates the context, says in one JSON line who it is, and stays
until its stdin is closed. `measure_context` starts it and reads the device's memory around it. The context is
measured, not what is left over: what is left over in a reconciliation has a name of its own.
"""

import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any, Literal

from lucid_profiler import jsonio
from lucid_profiler.codec import from_plain
from lucid_profiler.standalone import standalone_command

TIMEOUT_S = 120.0
TOLERANCE_BYTES = 8 * 2**20
_EXIT_S = 10.0
_KIND = "lucid.context"
_MAX_SAID_BYTES = 1 << 20

Method = Literal["process", "device"]

__all__ = ["TIMEOUT_S", "TOLERANCE_BYTES", "Measured", "measure_context"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The bytes of an empty context, without what torch's allocator reserved in it; None with a reason.

    Reasons: no_cuda, no_torch, not_started, timeout, child_failed, unknown_device, no_reading, others_changed,
    implausible. `detail` has the words behind it.
    """

    bytes: int | None = None
    reason: str | None = None
    method: Method | None = None
    """`process`: the driver's figure for that process. `device`: the device's difference before and after."""
    device_uuid: str | None = None
    torch_reserved_bytes: int | None = None
    detail: str = ""


class _FailedError(Exception):
    """A reason on its way to the caller."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason, detail)
        self.measured = Measured(reason=reason, detail=detail[:500])


def measure_context(
    python: str,
    gpus: Sequence[str],
    *,
    read_used: Callable[[str], int | None],
    read_process: Callable[[str, int], int | None] | None = None,
    device_index: int = 0,
    environ: Mapping[str, str] | None = None,
    timeout_s: float = TIMEOUT_S,
) -> Measured:
    """Measure an empty context in a fresh process.

    Args:
        python: Interpreter of the program that is measured, since its torch decides what a context holds.
        gpus: UUIDs of the devices that the readers know.
        read_used: UUID to the bytes in use on the device, None if not known.
        read_process: UUID and pid to the bytes of that process on the device, None if not known; tried first.
        device_index: As the process counts its devices.
        environ: Environment of the process; the agent's variables are taken out of it.
        timeout_s: For the process to create its context.

    Never raises: what goes wrong is a reason.
    """
    before = {uuid: _read_or_none(read_used, uuid) for uuid in gpus}
    try:
        with _context_process(python, device_index=device_index, environ=environ) as child:
            said = _said(child, timeout_s)
            uuid = _known_uuid(said.device_uuid, gpus)
            process_bytes = None if read_process is None else _read_or_none(read_process, uuid, said.pid)
            during_bytes = _read_or_none(read_used, uuid)
    except _FailedError as failure:
        return failure.measured
    except OSError as error:
        return Measured(reason="not_started", detail=str(error))
    method, used_bytes, reason = _used(process_bytes, before[uuid], during_bytes, _read_or_none(read_used, uuid))
    context_bytes = None if used_bytes is None else used_bytes - said.reserved_bytes
    if context_bytes is not None and context_bytes <= 0:
        context_bytes, reason = None, "implausible"
    return Measured(
        bytes=context_bytes, reason=reason, method=method, device_uuid=uuid, torch_reserved_bytes=said.reserved_bytes
    )


def _read_or_none(read: Callable[..., int | None], *place: Any) -> int | None:
    try:
        return read(*place)
    except Exception:  # noqa: BLE001 - the readers are the caller's, and a run must not end because one of them does
        return None


def _used(
    process_bytes: int | None, before_bytes: int | None, during_bytes: int | None, after_bytes: int | None
) -> tuple[Method | None, int | None, str | None]:
    """Return how the bytes of the process were read, the bytes, and the reason if there are none."""
    if process_bytes:
        return "process", process_bytes, None
    if before_bytes is None or during_bytes is None or after_bytes is None:
        return None, None, "no_reading"
    if abs(after_bytes - before_bytes) > TOLERANCE_BYTES:
        return "device", None, "others_changed"
    return "device", during_bytes - max(before_bytes, after_bytes), None


def _known_uuid(said: str, gpus: Sequence[str]) -> str:
    """Return the UUID as the driver writes it; torch leaves out the prefix, and older ones say nothing."""
    found = [uuid for uuid in gpus if said and uuid.partition("-")[2] == said.removeprefix("GPU-").removeprefix("MIG-")]
    if not said and len(gpus) == 1:
        return gpus[0]
    if len(found) != 1:
        raise _FailedError("unknown_device", f"the process is on {said or 'a device without UUID'}")
    return found[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Said:
    """What the process says about itself."""

    pid: int
    device_uuid: str
    reserved_bytes: int


@dataclass(frozen=True, slots=True)
class _Child:
    process: subprocess.Popen[bytes]
    errors: IO[bytes]

    def last_words(self) -> str:
        self.errors.seek(max(0, self.errors.seek(0, os.SEEK_END) - 2000))
        lines = self.errors.read().decode("utf-8", "replace").strip().splitlines()
        return lines[-1][:500] if lines else ""


@contextmanager
def _context_process(python: str, *, device_index: int, environ: Mapping[str, str] | None) -> Iterator[_Child]:
    """Run the process with an empty context; its end is waited for."""
    given = os.environ if environ is None else environ
    kept = {name: value for name, value in given.items() if name not in _OWN_VARIABLES}
    command = standalone_command(python, "lucid_profiler.context", "--device", str(device_index))
    with tempfile.TemporaryFile() as errors:
        try:
            process = subprocess.Popen(  # noqa: S603 - the interpreter is the one that the user runs
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=kept | _NO_CURRENT_FOLDER
            )
        except OSError as error:
            raise _FailedError("not_started", str(error)) from error
        with process:
            try:
                yield _Child(process, errors)
            finally:
                _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Let the process end by itself, or kill it: an orderly end gives all memory back before it is waited for."""
    if process.stdin is not None:
        process.stdin.close()
    try:
        process.wait(_EXIT_S)
    except subprocess.TimeoutExpired:
        process.kill()


def _said(child: _Child, timeout_s: float) -> _Said:
    """Return what the process says about itself; other lines, which its startup files may print, are passed over."""
    deadline = time.monotonic() + timeout_s
    text = b""
    while True:
        piece = _read(child.process, deadline)
        if piece is None:
            child.process.kill()
            raise _FailedError("timeout", f"no context within {timeout_s:g} s")
        text += piece
        *lines, text = text.split(b"\n")
        for line in lines:
            if (said := _parse(line)) is not None:
                return said
        if not piece or len(text) > _MAX_SAID_BYTES:
            _end(child.process)
            raise _FailedError("child_failed", child.last_words())


def _read(process: subprocess.Popen[bytes], deadline: float) -> bytes | None:
    """Return the next bytes, none at the end of the stream, None when the deadline has passed."""
    if process.stdout is None:
        return b""
    remaining_s = deadline - time.monotonic()
    if remaining_s <= 0:
        return None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        if not selector.select(remaining_s):
            return None
    return os.read(process.stdout.fileno(), 1 << 16)


def _parse(line: bytes) -> _Said | None:
    try:
        said = jsonio.loads(line)
    except ValueError:
        return None
    if not isinstance(said, dict) or said.pop("kind", None) != _KIND:
        return None
    if "reason" in said:
        raise _FailedError(str(said["reason"]), str(said.get("detail", "")))
    try:
        return from_plain(_Said, said, Counter())
    except ValueError as error:
        raise _FailedError("child_failed", str(error)) from error


def _main(argv: Sequence[str]) -> int:
    """Create a context on the device `--device INDEX`, print who this is, and stay until stdin ends."""
    index = int(argv[1]) if len(argv) == 2 and argv[0] == "--device" else 0
    sys.stdout.buffer.write(jsonio.dumps({"kind": _KIND, "pid": os.getpid(), **_create(index)}) + b"\n")
    sys.stdout.buffer.flush()
    sys.stdin.buffer.read()
    return 0


def _create(index: int) -> dict[str, Any]:
    try:
        import torch  # noqa: PLC0415 - the launcher never loads it
    except ImportError as error:
        return {"reason": "no_torch", "detail": str(error)}
    if not torch.cuda.is_available() or index >= torch.cuda.device_count():
        return {"reason": "no_cuda", "detail": f"torch {torch.__version__} sees {torch.cuda.device_count()} devices"}
    device = torch.device("cuda", index)
    held = torch.zeros(1, device=device)
    torch.cuda.synchronize(device)
    _HELD.append(held)
    return {
        "device_uuid": str(getattr(torch.cuda.get_device_properties(device), "uuid", "")),
        "reserved_bytes": torch.cuda.memory_reserved(device),
        "allocated_bytes": torch.cuda.memory_allocated(device),
        "torch": str(torch.__version__),
    }


_OWN_VARIABLES = frozenset({"LUCID_RUN_DIR", "LUCID_KERNELS"})
_NO_CURRENT_FOLDER = {"PYTHONSAFEPATH": "1"}  # on the path of modules, as for a script
_HELD: list[Any] = []

if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
