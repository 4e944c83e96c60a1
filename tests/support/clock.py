"""Clocks that move only when a test says so."""


class ManualClock:
    """Four clocks in ns that start at values of their own. `read_ns` passes at every reading of the monotonic one."""

    def __init__(self, *, read_ns: int = 0) -> None:
        self.mono = 5_000_000_000
        self.wall = 1_700_000_000_000_000_000
        self.boot = 9_000_000_000
        self.cpu = 0
        self._read_ns = read_ns

    def mono_ns(self) -> int:
        now = self.mono
        self.pass_ns(self._read_ns)
        return now

    def wall_ns(self) -> int:
        return self.wall

    def boot_ns(self) -> int:
        return self.boot

    def cpu_ns(self) -> int:
        return self.cpu

    def pass_ns(self, duration_ns: int) -> None:
        """Let time pass while the machine is awake."""
        self.mono += duration_ns
        self.wall += duration_ns
        self.boot += duration_ns

    def pass_s(self, duration_s: float) -> None:
        """Let seconds pass while the machine is awake."""
        self.pass_ns(round(duration_s * 1e9))

    def sleep_s(self, duration_s: float) -> None:
        """Let the machine sleep."""
        self.wall += round(duration_s * 1e9)
        self.boot += round(duration_s * 1e9)
