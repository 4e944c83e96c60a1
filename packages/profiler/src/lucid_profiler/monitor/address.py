"""Where the user's daemon is found: a directory that only the user can enter, a lock that says who runs, a socket."""

import fcntl
import os
import stat
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from lucid_profiler.errors import EnvironmentUnusableError

# sun_path holds 108 bytes with the final zero: https://man7.org/linux/man-pages/man7/unix.7.html
MAX_SOCKET_PATH_BYTES = 107
_NUM_ATTEMPTS = 10
_NUM_LOOKS = 5
_LOOK_S = 0.01

__all__ = [
    "MAX_SOCKET_PATH_BYTES",
    "Lock",
    "holder",
    "lock_path",
    "make_private",
    "runtime_directory",
    "socket_path",
]


def runtime_directory(environ: Mapping[str, str]) -> Path:
    """Return the directory of the user's daemon; it need not exist.

    Raises:
        EnvironmentUnusableError: its name is too long for a socket in it.
    """
    base = environ.get("XDG_RUNTIME_DIR")
    if base and Path(base).is_absolute():
        directory = Path(base, "lucid")
    else:
        directory = Path(tempfile.gettempdir()).absolute() / f"lucid-{os.geteuid()}"
    if len(os.fsencode(socket_path(directory))) > MAX_SOCKET_PATH_BYTES:
        raise EnvironmentUnusableError(
            f"{socket_path(directory)} is too long for the name of a socket, which has at most "
            f"{MAX_SOCKET_PATH_BYTES} bytes; set XDG_RUNTIME_DIR to a directory with a shorter name"
        )
    return directory


def socket_path(directory: Path) -> Path:
    """Return the name of the socket."""
    return directory / "monitor.sock"


def lock_path(directory: Path) -> Path:
    """Return the name of the file that the daemon locks and writes its number to."""
    return directory / "monitor.pid"


def make_private(directory: Path) -> None:
    """Make the directory, or see that an existing one belongs to this user alone.

    Raises:
        EnvironmentUnusableError: somebody else could enter it, or has made it.
        OSError: it cannot be made.
    """
    with suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    info = directory.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid() or stat.S_IMODE(info.st_mode) & 0o077:
        raise EnvironmentUnusableError(
            f"{directory} is no directory that only this user can enter; remove it, or set XDG_RUNTIME_DIR"
        )


def holder(directory: Path) -> str | None:
    """Return the number of the process that holds the lock of a directory, "unknown" where it has not written it yet.

    None where nobody holds it.

    Raises:
        OSError: the file cannot be opened.
    """
    try:
        fd = os.open(lock_path(directory), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _owner(fd)
    finally:
        os.close(fd)
    return None


def _owner(fd: int) -> str:
    return os.pread(fd, 20, 0).decode("ascii", "replace").strip() or "unknown"


class Lock:
    """Held by the one daemon of a directory; the kernel lets go of it when the daemon ends, however it ends.

    Args:
        directory: a private directory.

    Raises:
        EnvironmentUnusableError: another daemon holds it.
        OSError: the file cannot be opened.
    """

    def __init__(self, directory: Path) -> None:
        self._path = lock_path(directory)
        for attempt in range(_NUM_ATTEMPTS):
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                owner = _owner(self._fd)
                os.close(self._fd)
                if attempt < _NUM_LOOKS:  # whoever looks for a holder holds it for a moment
                    time.sleep(_LOOK_S)
                    continue
                raise EnvironmentUnusableError(f"a daemon runs already, process {owner}") from error
            if self._is_current():
                os.ftruncate(self._fd, 0)
                os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)
                return
            # Its former holder removed the file between the two calls.
            os.close(self._fd)
        raise EnvironmentUnusableError(f"{self._path} is removed again and again by somebody else")

    def release(self) -> None:
        """Remove the file and let go of it."""
        with suppress(OSError):
            self._path.unlink()
        os.close(self._fd)

    def _is_current(self) -> bool:
        try:
            return os.path.samestat(os.fstat(self._fd), self._path.stat())
        except FileNotFoundError:
            return False
