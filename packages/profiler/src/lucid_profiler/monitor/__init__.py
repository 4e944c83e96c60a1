"""The monitor: a process of its own that follows a training process and records what NVML and /proc say about it."""
