"""Runs in the interpreter of a program: tells its torch, its settings, and what a tiny capture comes to.

`python -m lucid_profiler.checkup.probe --optimizer MODULE:CLASS --device KIND` writes one line a step to standard
output as soon as it is known, since what comes next may crash.
"""

import argparse
import hashlib
import importlib
import platform
import sys
from collections.abc import Sequence
from typing import Any

from lucid_profiler import jsonio

__all__ = ["main", "try_capture"]

_KIND = "lucid.checkup"
_SHAPES = ((8, 4), (4, 8), (4, 2, 3, 3), (5,))
_NUM_STEPS = 16
_MAX_WORDS = 500


def main(arguments: Sequence[str]) -> int:
    """Tell everything, step by step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--optimizer", required=True, metavar="MODULE:CLASS")
    parser.add_argument("--device", default="cuda", metavar="KIND")
    options = parser.parse_args(arguments)
    _tell("python", version=platform.python_version(), executable=sys.executable, prefix=sys.prefix)
    try:
        import torch  # noqa: PLC0415 - the interpreter need not have it
    except Exception as error:  # noqa: BLE001 - a broken torch raises anything; the step says what
        missing = isinstance(error, ModuleNotFoundError) and error.name == "torch"
        _tell("torch", version=None, is_missing=missing, error=_words(error))
    else:
        _tell("torch", version=str(torch.__version__), file=str(torch.__file__))
        _tell("settings", **_settings(torch))
        _tell("optimizer", **_optimizer(options.optimizer))
        _tell("capture", **_capture(options.optimizer, options.device))
    _tell("end")
    return 0


def try_capture(optimizer: Any, device: str) -> dict[str, Any]:
    """Train a tiny model natively and captured, and compare its bytes.

    Args:
        optimizer: The class; takes `capture_updates` and has a `capture_report`.
        device: Where the parameters are.

    Returns:
        `is_equal`, `num_replays`, and `reasons`: steps that ran natively although capture was on, counted by reason.
    """
    native, _ = _train(optimizer, device, captures=False)
    captured, report = _train(optimizer, device, captures=True)
    reasons: dict[str, int] = {}
    for group in report["groups"]:
        for reason, count in group["reasons"].items():
            reasons[reason] = reasons.get(reason, 0) + count
    num_replays = max(group["replays"] for group in report["groups"])
    return {"is_equal": native == captured, "num_replays": num_replays, "num_steps": _NUM_STEPS, "reasons": reasons}


def _train(optimizer: Any, device: str, *, captures: bool) -> tuple[str, dict[str, Any]]:
    """Return the digest of the parameters after some steps with given gradients, and the optimizer's report."""
    import torch  # noqa: PLC0415 - see main

    generator = torch.Generator().manual_seed(1)
    params = [torch.nn.Parameter(torch.randn(shape, generator=generator).to(device)) for shape in _SHAPES]
    made = optimizer(params, lr=0.05, capture_updates=captures)
    for _ in range(_NUM_STEPS):
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator).to(device)
        made.step()
    digest = hashlib.sha256()
    for param in params:
        digest.update(bytes(param.detach().cpu().reshape(-1).view(torch.uint8).tolist()))
    report: dict[str, Any] = made.capture_report().as_dict()
    made.release()
    return digest.hexdigest(), report


def _settings(torch: Any) -> dict[str, Any]:
    """Return how a fresh process of this interpreter is set up; reading CUDA's state may take seconds."""
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    return {
        "cuda_build": torch.version.cuda,
        "hip_build": getattr(torch.version, "hip", None),
        **_cuda(torch),
        "cudnn_version": cudnn.version() if cudnn.is_available() else None,
        "cudnn_benchmark": bool(cudnn.benchmark),
        "cudnn_deterministic": bool(cudnn.deterministic),
        # Once `fp32_precision` has been set, reading `allow_tf32` raises; older versions have only the latter.
        "matmul_precision": str(matmul.fp32_precision) if hasattr(matmul, "fp32_precision") else None,
        "matmul_tf32": None if hasattr(matmul, "fp32_precision") else bool(matmul.allow_tf32),
        "deterministic_algorithms": bool(torch.are_deterministic_algorithms_enabled()),
    }


def _cuda(torch: Any) -> dict[str, Any]:
    try:
        torch.cuda.init()
        num_devices = int(torch.cuda.device_count())
        names = [str(torch.cuda.get_device_name(index)) for index in range(num_devices)]
    except Exception as error:  # noqa: BLE001 - a build without CUDA asserts, a driver raises; the words say which
        return {"num_devices": 0, "devices": [], "cuda_error": _words(error)}
    return {"num_devices": num_devices, "devices": names, "cuda_error": None}


def _optimizer(name: str) -> dict[str, Any]:
    module_name, _, class_name = name.partition(":")
    try:
        module = importlib.import_module(module_name)
        getattr(module, class_name)
    except Exception as error:  # noqa: BLE001 - importing runs anything; the step says what it raised
        missing = isinstance(error, ModuleNotFoundError) and error.name == module_name.partition(".")[0]
        return {"version": None, "is_missing": missing, "error": _words(error)}
    return {"version": str(getattr(module, "__version__", "unknown")), "error": None}


def _capture(name: str, device: str) -> dict[str, Any]:
    import torch  # noqa: PLC0415 - see main

    module_name, _, class_name = name.partition(":")
    try:
        optimizer = getattr(importlib.import_module(module_name), class_name)
    except Exception:  # noqa: BLE001 - the step before has said what it raised
        return {"reason": "no_optimizer"}
    if device == "cuda" and not torch.cuda.is_available():
        return {"reason": "no_cuda"}
    try:
        return try_capture(optimizer, device)
    except Exception as error:  # noqa: BLE001 - out of memory, a driver's fault, …: all of them are the answer
        return {"reason": "raised", "error": _words(error)}


def _words(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:_MAX_WORDS]


def _tell(step: str, **told: Any) -> None:
    # What startup files have printed may lack its newline.
    sys.stdout.buffer.write(b"\n" + jsonio.dumps({"kind": _KIND, "step": step, "told": told}) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
