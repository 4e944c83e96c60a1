"""Every code that a finding may have: the area it belongs to, why it matters, and the remedy."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

__all__ = ["CATALOGUE", "Area", "Entry"]

Area = Literal["driver", "gpu", "host", "python"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What is always true of one code."""

    area: Area
    why: str
    remedy: str


def _entries(area: Area, **texts: tuple[str, str]) -> dict[str, Entry]:
    return {code: Entry(area=area, why=why, remedy=remedy) for code, (why, remedy) in texts.items()}


_DRIVER = _entries(
    "driver",
    nvml=(
        "without the driver's management library no GPU memory, power, clock or foreign process is recorded",
        "on a machine with an NVIDIA GPU, install or reload its driver; start a container with `--gpus all`",
    ),
    gpus_visible=(
        "only the GPUs that CUDA shows the program are read, and a program that sees none trains on the processor",
        "set CUDA_VISIBLE_DEVICES to the UUID of the GPU to measure on, or unset it",
    ),
)
_GPU = _entries(
    "gpu",
    gpu_readings=(
        "what the driver does not tell is missing from the report",
        "ask for the permission where it is refused, or update the driver; what a product lacks stays unknown",
    ),
    gpu_processes=(
        "another program on the GPU takes time and memory from every run, and not the same from each",
        "end or move the other programs; `nvidia-smi` lists them",
    ),
    gpu_clocks=(
        "clocks that are held down change the time of every kernel, and may change between two runs",
        "let the GPU cool down or lift the cause; `nvidia-smi -q -d CLOCK,PERFORMANCE` has the details",
    ),
    gpu_power_cap=(
        "a GPU under a lower power cap than its product's runs slower and is not comparable with others of its name",
        "have an administrator restore it: `nvidia-smi -pl WATTS`; else compare only under the same cap",
    ),
    gpu_persistence=(
        "without it the driver lets go of an idle GPU, and each fresh process pays for its start anew",
        "have an administrator run nvidia-persistenced, or `nvidia-smi -pm 1`",
    ),
    gpu_ecc=(
        "error correction costs memory and bandwidth on some products; a change takes effect at the next reset",
        "keep it as it is for all runs that are compared; `nvidia-smi -e 0` or `-e 1` and a reset settle a change",
    ),
    gpu_mig=(
        "instances of one GPU share its power and clocks, which are told for the whole GPU only",
        "name the instance by its UUID in CUDA_VISIBLE_DEVICES and keep the others idle, or switch MIG off",
    ),
)
_HOST = _entries(
    "host",
    cpu_governor=(
        "a governor that saves power changes the processor's clock between runs; a training step waits for the host",
        "have an administrator choose it: `cpupower frequency-set -g performance`",
    ),
    cpu_load=(
        "other work on the processors makes runs slower, and not all of them by the same amount",
        "wait until the machine is idle, or measure more pairs",
    ),
    clock_source=(
        "a slow clock source makes every time stamp a system call of its own",
        "boot without `clocksource=` or `notsc`, so that the kernel takes the processor's own counter",
    ),
    memory_free=(
        "a machine that is short of memory swaps or ends the run",
        "end other programs, or raise the limit of the container",
    ),
    cpu_limit=(
        "a processor quota stops all threads of the run for the rest of each period once it is used up",
        "give the container whole processors (`--cpuset-cpus`) in place of a quota, and as many threads as processors",
    ),
    memory_limit=(
        "a container is ended at its own limit, however much memory the machine has",
        "raise the limit (`--memory`), or lower the batch size and the number of loader processes",
    ),
    disk_reports=(
        "the report is written to the current directory, record by record, while the runs go on",
        "free some space, or name a file elsewhere with `-o`",
    ),
    disk_temp=(
        "each run keeps its time stamps, digests and samples in a temporary directory until they are read",
        "free some space, or set TMPDIR to a directory that can be written",
    ),
    proc_access=(
        "processor time, memory and children of a run are read from /proc",
        "mount /proc without `hidepid`, or join the group that its `gid=` names",
    ),
    pid_namespace=(
        "the driver may name processes by numbers of another namespace, and their GPU memory is then unknown",
        "start the container in the host's namespace: `--pid=host`",
    ),
)
_PYTHON = _entries(
    "python",
    interpreter=(
        "the agent, which sees steps and digests, runs in the program's own interpreter",
        "name with --python the interpreter that runs the training: Python 3.10 or newer",
    ),
    torch=(
        "steps, states and captures are torch's: without it there is nothing to compare",
        "install torch 2.4 or newer into that interpreter, or name another one with --python",
    ),
    cuda=(
        "without CUDA the program trains on the processor, and nothing can be captured",
        "install a CUDA build of torch, and see that the program is shown a GPU",
    ),
    cuda_driver=(
        "a driver older than the CUDA that torch was built for refuses to start it, or lacks parts of it",
        "update the driver, or install a torch that was built for an older CUDA",
    ),
    cudnn=(
        "convolutions that are chosen by timing differ from process to process, and so do their bytes",
        "in the script: `torch.backends.cudnn.benchmark = False` and `torch.backends.cudnn.deterministic = True`",
    ),
    determinism=(
        "two native runs whose bytes differ leave the comparison with a captured one undecidable",
        "in the script: `torch.use_deterministic_algorithms(True)`; docs/determinism.md has the whole recipe",
    ),
    float32_precision=(
        "float32 products that are rounded to TF32 are faster and have other bytes: both arms need the same",
        "set it in the script, once, before the first step",
    ),
    cublas_workspace=(
        "cuBLAS picks how it splits a product by the workspace it has; its size decides the bytes",
        "`export CUBLAS_WORKSPACE_CONFIG=:4096:8` before the program starts",
    ),
    slow_variables=(
        "these variables make CUDA programs slower than they are",
        "unset them before measuring",
    ),
    optimizer=(
        "the captured arm needs an optimizer that can capture, in the program's own interpreter",
        "install it there, or compare arms of your own",
    ),
    capture=(
        "this is what the captured arm does: record a step, replay it, and leave the same bytes",
        "see its reasons in docs/capture.md; without CUDA there is nothing to record",
    ),
)

CATALOGUE: Mapping[str, Entry] = MappingProxyType({**_DRIVER, **_GPU, **_HOST, **_PYTHON})
"""Code: its entry, in the order in which findings are shown."""
