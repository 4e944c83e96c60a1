"""`python -m lucid_profiler.monitor`: the monitor as `process.launch` starts it, with an inherited connection."""

import argparse
import socket
import sys
from pathlib import Path

from lucid_profiler.errors import EnvironmentUnusableError
from lucid_profiler.monitor.daemon import Daemon
from lucid_profiler.monitor.protocol import encode


def main() -> int:
    """Run the monitor to its end and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m lucid_profiler.monitor", description=__doc__)
    parser.add_argument("--control", type=int, required=True, metavar="FD", help="inherited connection to the launcher")
    parser.add_argument("--launcher", type=int, metavar="PID", help="end when this process ends")
    parser.add_argument("--directory", type=Path, help="private directory to listen in; the launcher may end then")
    arguments = parser.parse_args()
    control = socket.socket(fileno=arguments.control)
    try:
        daemon = Daemon(control=control, launcher_pid=arguments.launcher, directory=arguments.directory)
    except (EnvironmentUnusableError, OSError) as error:
        control.setblocking(True)
        control.sendall(encode({"ok": False, "error": str(error)}))
        control.close()
        return 1
    daemon.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
