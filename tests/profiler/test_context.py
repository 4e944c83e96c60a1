"""The measurement of an empty context: what is read, which way, and that whatever goes wrong is a reason."""

import os
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lucid_profiler import jsonio
from lucid_profiler.context import Measured, measure_context

MIB = 2**20
UUID = "GPU-11111111-2222-3333-4444-555555555555"
OTHER = "GPU-99999999-2222-3333-4444-555555555555"

# Says that it has a context on the device, and stays until it may go.
CONTEXT = """
import os, sys
print("a startup file says this")
print("[1]")
print('{"kind": "lucid.context", "pid": %d, "device_uuid": "11111111-2222-3333-4444-555555555555",'
      '"reserved_bytes": 2097152, "later": 1}' % os.getpid(), flush=True)
open(sys.argv[0] + ".pid", "w").write(str(os.getpid()))
sys.stdin.read()
"""

# As much of torch as the process uses.
TORCH = """
__version__ = "9.9"
class device:
    def __init__(self, kind, index):
        self.index = index
class cuda:
    is_available = staticmethod(lambda: True)
    device_count = staticmethod(lambda: 2)
    synchronize = staticmethod(lambda device: None)
    memory_reserved = staticmethod(lambda device: 2097152)
    memory_allocated = staticmethod(lambda device: 512)
    @staticmethod
    def get_device_properties(device):
        class properties:
            uuid = "0000000%d-2222-3333-4444-555555555555" % device.index
        return properties
def zeros(size, device):
    return [0] * size
"""

Interpreter = Callable[[str], str]


class Memory:
    """A device whose memory holds a process while that runs."""

    def __init__(self, *readings_mib: int | None) -> None:
        self._readings = list(readings_mib)

    def used(self, uuid: str) -> int | None:
        """Return the next reading of the device."""
        if uuid != UUID:
            return 0
        reading = self._readings.pop(0)
        return None if reading is None else reading * MIB


@pytest.fixture
def interpreter(tmp_path: Path) -> Interpreter:
    """Give a function that makes an executable which runs a script, whatever its arguments."""

    def make(script: str) -> str:
        path = tmp_path / "python"
        path.write_text(f"#!{sys.executable}\n{script}", encoding="utf-8")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return str(path)

    return make


def test_the_driver_s_figure_of_the_process_is_taken_first(interpreter: Interpreter) -> None:
    """Without what torch reserved; the reader is asked for that process on that device."""
    python = interpreter(CONTEXT)
    asked: list[tuple[str, int]] = []

    def read_process(uuid: str, pid: int) -> int:
        asked.append((uuid, pid))
        return 502 * MIB

    memory = Memory(100, 900, 100)
    measured = measure_context(python, (OTHER, UUID), read_used=memory.used, read_process=read_process)
    assert measured == Measured(
        bytes=500 * MIB, method="process", device_uuid=UUID, torch_reserved_bytes=2 * MIB, reason=None
    )
    pid = int(Path(f"{python}.pid").read_text(encoding="ascii"))
    assert asked == [(UUID, pid)]
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize("process_bytes", [None, 0])
def test_without_it_the_device_s_difference_counts(interpreter: Interpreter, process_bytes: int | None) -> None:
    """A driver that cannot tell the process from others gives nothing, or 0."""
    measured = measure_context(
        interpreter(CONTEXT),
        [UUID],
        read_used=Memory(100, 602, 100).used,
        read_process=lambda uuid, pid: process_bytes,
    )
    assert (measured.bytes, measured.method, measured.reason) == (500 * MIB, "device", None)


def test_a_device_on_which_others_came_or_went_says_nothing(interpreter: Interpreter) -> None:
    """What was used before must be used again after."""
    measured = measure_context(interpreter(CONTEXT), [UUID], read_used=Memory(100, 700, 200).used)
    assert (measured.bytes, measured.method, measured.reason) == (None, "device", "others_changed")


def test_a_small_change_is_no_other_process(interpreter: Interpreter) -> None:
    """The smaller difference counts."""
    measured = measure_context(interpreter(CONTEXT), [UUID], read_used=Memory(100, 602, 103).used)
    assert measured.bytes == 497 * MIB


@pytest.mark.parametrize("readings", [(None, 602, 100), (100, None, 100), (100, 602, None)])
def test_what_could_not_be_read_is_no_context(interpreter: Interpreter, readings: tuple[int | None, ...]) -> None:
    """Never 0."""
    measured = measure_context(interpreter(CONTEXT), [UUID], read_used=Memory(*readings).used)
    assert (measured.bytes, measured.reason) == (None, "no_reading")


@pytest.mark.parametrize("process_mib", [2, 1])
def test_a_context_of_nothing_is_implausible(interpreter: Interpreter, process_mib: int) -> None:
    """The process must hold more than torch reserved in it."""
    measured = measure_context(
        interpreter(CONTEXT), [UUID], read_used=lambda uuid: 0, read_process=lambda uuid, pid: process_mib * MIB
    )
    assert (measured.bytes, measured.reason) == (None, "implausible")


def test_readers_that_fail_are_no_reading(interpreter: Interpreter) -> None:
    """Nothing of it reaches the caller."""

    def fail(*_: object) -> int:
        raise RuntimeError("the driver is away")

    measured = measure_context(interpreter(CONTEXT), [UUID], read_used=fail, read_process=fail)
    assert (measured.bytes, measured.reason) == (None, "no_reading")


@pytest.mark.parametrize("gpus", [(), (OTHER,)])
def test_a_device_that_the_readers_do_not_know_has_no_figure(interpreter: Interpreter, gpus: tuple[str, ...]) -> None:
    """Another device's memory is never taken for it."""
    measured = measure_context(interpreter(CONTEXT), gpus, read_used=lambda uuid: 7)
    assert (measured.bytes, measured.reason) == (None, "unknown_device")
    assert "11111111" in measured.detail


@pytest.mark.parametrize(("gpus", "found"), [((UUID,), UUID), ((UUID, OTHER), None)])
def test_a_torch_that_says_no_uuid_is_on_the_only_device(
    interpreter: Interpreter, gpus: tuple[str, ...], found: str | None
) -> None:
    """With several, nobody knows on which."""
    python = interpreter(CONTEXT.replace("11111111-2222-3333-4444-555555555555", ""))
    measured = measure_context(python, gpus, read_used=Memory(100, 602, 100).used)
    assert measured.device_uuid == found
    assert measured.reason == (None if found else "unknown_device")


def test_a_process_that_says_nothing_is_ended_in_time(interpreter: Interpreter) -> None:
    """However much else it prints."""
    for script in ("import sys; sys.stdin.read()", "while True: print('noise')"):
        begin = time.monotonic()
        measured = measure_context(interpreter(script), [UUID], read_used=lambda uuid: 0, timeout_s=0.3)
        assert measured.reason == "timeout"
        assert time.monotonic() - begin < 60


def test_a_process_that_fails_leaves_its_last_words(interpreter: Interpreter) -> None:
    """As when the device is taken by another."""
    python = interpreter(
        "import sys; print('Traceback', file=sys.stderr); sys.exit('CUDA error: all devices are busy')"
    )
    measured = measure_context(python, [UUID], read_used=lambda uuid: 0)
    assert (measured.reason, measured.detail) == ("child_failed", "CUDA error: all devices are busy")


def test_a_process_that_says_something_else_has_failed(interpreter: Interpreter) -> None:
    """A figure that is no number is not used."""
    python = interpreter(CONTEXT.replace("2097152", '"many"'))
    measured = measure_context(python, [UUID], read_used=lambda uuid: 0)
    assert measured.reason == "child_failed"
    assert "reserved_bytes" in measured.detail


def test_an_interpreter_that_is_not_there_is_a_reason(tmp_path: Path) -> None:
    """With the system's words."""
    measured = measure_context(str(tmp_path / "python"), [UUID], read_used=lambda uuid: 0)
    assert measured.reason == "not_started"
    assert "No such file" in measured.detail


def test_the_process_has_a_context_on_the_device_asked_for(tmp_path: Path) -> None:
    """And neither the agent's variables, nor modules of the current folder."""
    folder = tmp_path / "stand-ins"
    folder.mkdir()
    check = 'import os\nassert not {"LUCID_RUN_DIR", "LUCID_KERNELS"} & os.environ.keys()\n'
    (folder / "torch.py").write_text(check + TORCH, encoding="utf-8")
    environ = os.environ | {"PYTHONPATH": str(folder), "LUCID_RUN_DIR": str(tmp_path), "LUCID_KERNELS": "20"}
    uuid = "GPU-00000001-2222-3333-4444-555555555555"
    measured = measure_context(
        sys.executable,
        [UUID, uuid],
        read_used=lambda uuid: 0,
        read_process=lambda uuid, pid: 402 * MIB,
        device_index=1,
        environ=environ,
    )
    assert measured == Measured(bytes=400 * MIB, method="process", device_uuid=uuid, torch_reserved_bytes=2 * MIB)


def test_the_process_says_one_line_and_ends_with_its_input(tmp_path: Path) -> None:
    """Whoever started it and is gone leaves nothing behind."""
    (tmp_path / "torch.py").write_text(TORCH, encoding="utf-8")
    ran = subprocess.run(
        [sys.executable, "-m", "lucid_profiler.context", "--device", "0"],
        input=b"",
        capture_output=True,
        timeout=60,
        check=True,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
    )
    said = jsonio.loads(ran.stdout)
    assert said.pop("pid") > 0
    assert said == {
        "kind": "lucid.context",
        "device_uuid": "00000000-2222-3333-4444-555555555555",
        "reserved_bytes": 2 * MIB,
        "allocated_bytes": 512,
        "torch": "9.9",
    }


@pytest.mark.parametrize(
    ("torch", "reason"),
    [
        ("raise ImportError('no torch here')", "no_torch"),
        (TORCH.replace("lambda: True", "lambda: False"), "no_cuda"),
        (TORCH.replace("lambda: 2", "lambda: 0"), "no_cuda"),
    ],
)
def test_without_cuda_the_process_says_why(tmp_path: Path, torch: str, reason: str) -> None:
    """It creates nothing."""
    (tmp_path / "torch.py").write_text(torch, encoding="utf-8")
    environ = os.environ | {"PYTHONPATH": str(tmp_path)}
    measured = measure_context(sys.executable, [UUID], read_used=lambda uuid: 0, environ=environ)
    assert (measured.bytes, measured.reason) == (None, reason)
    assert measured.detail
