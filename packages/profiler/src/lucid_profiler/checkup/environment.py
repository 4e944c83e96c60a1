"""What an interpreter told about its torch, and what its environment's variables say, as findings. Pure."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lucid_profiler.checkup.driver import DriverFacts
from lucid_profiler.checkup.finding import Finding, Level, unknown
from lucid_profiler.checkup.interpreter import Told

__all__ = ["environment_findings"]

OLDEST_TORCH = (2, 4)
_SLOW = ("CUDA_LAUNCH_BLOCKING", "PYTORCH_NO_CUDA_MEMORY_CACHING")
_WORKSPACES = frozenset({":4096:8", ":16:8"})
"""The two that make cuBLAS repeat its results: https://docs.nvidia.com/cuda/cublas/index.html#results-reproducibility"""
_REASONS = {
    "not_started": "it cannot be started",
    "timeout": "it took too long",
    "child_failed": "it failed",
}


def environment_findings(
    told: Told,
    *,
    python: str,
    environ: Mapping[str, str],
    directory: Path,
    driver: DriverFacts,
    requires_gpu: bool,
) -> list[Finding]:
    """Return the findings about a program's interpreter.

    Args:
        told: What it told.
        python: Its name, as the user gave it.
        environ: Environment of the program.
        directory: From which paths below it are shown.
        driver: What the driver knows.
        requires_gpu: A program that could not use a GPU cannot be measured.
    """
    findings = [_interpreter(told, python, directory)]
    if "python" in told.steps:
        findings.append(_torch(told))
    settings = told.steps.get("settings")
    if settings is not None:
        findings += [
            _cuda(settings, driver, requires_gpu=requires_gpu),
            *_cuda_driver(settings, driver),
            _cudnn(settings),
            _determinism(settings),
            _float32_precision(settings),
            _workspace(environ, settings),
        ]
    elif _has_torch(told):
        findings.append(_untold("cuda", told, level="problem"))
    findings.append(_slow_variables(environ))
    if settings is not None:
        findings += [_optimizer(told), _capture(told)]
    return findings


def _has_torch(told: Told) -> bool:
    return bool(told.steps.get("torch", {}).get("version"))


def _untold(code: str, told: Told, *, level: Level) -> Finding:
    """Return the finding for a step that the interpreter did not come to."""
    reason = told.reason or "child_failed"
    return unknown(code, reason, f"{_REASONS.get(reason, reason)}: {told.detail}", level=level)


def _interpreter(told: Told, python: str, directory: Path) -> Finding:
    step = told.steps.get("python")
    if step is None:
        reason = told.reason or "child_failed"
        words = f"{python}: {_REASONS.get(reason, reason)}: {told.detail}"
        return Finding(code="interpreter", level="problem", found=words, reason=reason, subject=python)
    executable = Path(step["executable"] or python)
    shown = executable.relative_to(directory) if executable.is_relative_to(directory) else executable
    words = f"Python {step['version']}, {shown}"
    return Finding(code="interpreter", level="ok", found=words, value=dict(step), subject=python)


def _torch(told: Told) -> Finding:
    step = told.steps.get("torch")
    if step is None:
        return _untold("torch", told, level="problem")
    version = step["version"]
    if version is None:
        reason = "not_found" if step["is_missing"] else "raised"
        words = "not installed there" if step["is_missing"] else f"cannot be imported: {step['error']}"
        return Finding(code="torch", level="problem", found=words, reason=reason)
    is_old = (numbers := _numbers(version)) is not None and numbers < OLDEST_TORCH
    return Finding(code="torch", level="warning" if is_old else "ok", found=f"torch {version}", value=version)


def _cuda(settings: Mapping[str, Any], driver: DriverFacts, *, requires_gpu: bool) -> Finding:
    num, build, error = settings["num_devices"], settings["cuda_build"], settings["cuda_error"]
    built = f"built for CUDA {build}" if build else "built for ROCm" if settings["hip_build"] else "built without CUDA"
    value = {"build": build, "num_devices": num, "devices": settings["devices"], "error": error}
    if num:
        names = ", ".join(settings["devices"])
        return Finding(
            code="cuda", level="ok", found=f"{built}, {num} device{'s' if num != 1 else ''}: {names}", value=value
        )
    has_gpus = driver.num_gpus != 0
    level: Level = "problem" if requires_gpu else "warning" if has_gpus else "note"
    words = f"{built}, no device" + (f": {error}" if build and error else "")
    return Finding(code="cuda", level=level, found=words, value=value)


def _cuda_driver(settings: Mapping[str, Any], driver: DriverFacts) -> Iterator[Finding]:
    """Compare what torch was built for with what the driver knows; nothing where either has no CUDA at all."""
    build = _numbers(settings["cuda_build"])
    if build is None or driver.num_gpus == 0:
        return
    if driver.cuda.value is None:
        reason = driver.cuda.reason or "gap"
        yield unknown("cuda_driver", reason, "the driver does not tell the newest CUDA that it knows")
        return
    known = driver.cuda.value
    words = f"torch was built for CUDA {build[0]}.{build[1]}, the driver knows {known[0]}.{known[1]}"
    value = {"build": list(build), "driver": list(known)}
    # https://docs.nvidia.com/deploy/cuda-compatibility/: within a major version an older driver will do.
    level: Level = "warning" if known[0] < build[0] else "note" if known < build else "ok"
    yield Finding(code="cuda_driver", level=level, found=words, value=value)


def _cudnn(settings: Mapping[str, Any]) -> Finding:
    value = {name: settings[f"cudnn_{name}"] for name in ("version", "benchmark", "deterministic")}
    if value["version"] is None:
        return unknown("cudnn", "not_found", "torch has no cuDNN here")
    words = f"cuDNN {value['version']}, benchmark {_on(value['benchmark'])}, deterministic "
    level: Level = "warning" if value["benchmark"] else "ok" if value["deterministic"] else "note"
    return Finding(code="cudnn", level=level, found=f"{words}{_on(value['deterministic'])} at start", value=value)


def _determinism(settings: Mapping[str, Any]) -> Finding:
    is_on = settings["deterministic_algorithms"]
    words = f"deterministic algorithms {_on(is_on)} at start; the script may set them"
    return Finding(code="determinism", level="ok" if is_on else "note", found=words, value=is_on)


def _float32_precision(settings: Mapping[str, Any]) -> Finding:
    precision = settings["matmul_precision"]
    uses_tf32 = settings["matmul_tf32"] if precision is None else precision == "tf32"
    words = f"products {'are rounded to TF32' if uses_tf32 else 'keep float32'} at start; the script may set it"
    level: Level = "note" if uses_tf32 else "ok"
    return Finding(code="float32_precision", level=level, found=words, value={"tf32": uses_tf32, "mode": precision})


def _workspace(environ: Mapping[str, str], settings: Mapping[str, Any]) -> Finding:
    text = environ.get("CUBLAS_WORKSPACE_CONFIG")
    is_used = bool(settings["num_devices"])
    found = "not set" if text is None else repr(text)
    level: Level = "ok" if text in _WORKSPACES or not is_used else "note" if text is None else "warning"
    words = found if is_used else f"{found}; no device uses it"
    return Finding(code="cublas_workspace", level=level, found=words, value=text)


def _slow_variables(environ: Mapping[str, str]) -> Finding:
    found = {name: environ[name] for name in _SLOW if environ.get(name, "0") not in {"", "0"}}
    words = ", ".join(f"{name}={text!r}" for name, text in found.items()) or "none"
    return Finding(code="slow_variables", level="warning" if found else "ok", found=words, value=found)


def _optimizer(told: Told) -> Finding:
    step = told.steps.get("optimizer")
    if step is None:
        return _untold("optimizer", told, level="warning")
    if step["error"] is not None:
        reason = "not_found" if step["is_missing"] else "raised"
        words = "not installed there" if step["is_missing"] else f"cannot be imported: {step['error']}"
        return Finding(code="optimizer", level="warning", found=words, reason=reason)
    return Finding(code="optimizer", level="ok", found=f"version {step['version']}", value=step["version"])


def _capture(told: Told) -> Finding:
    step = told.steps.get("capture")
    if step is None:
        return _untold("capture", told, level="warning")
    reason = step.get("reason")
    if reason == "raised":
        return Finding(code="capture", level="warning", found=f"it raised {step['error']}", reason=reason)
    if reason is not None:
        words = {"no_cuda": "torch sees no CUDA device", "no_optimizer": "the optimizer cannot be imported"}
        return unknown("capture", reason, f"not tried, {words.get(reason, reason)}")
    return _captured(step)


def _captured(step: Mapping[str, Any]) -> Finding:
    value = dict(step)
    words = f"{step['num_replays']} of {step['num_steps']} steps replayed"
    if not step["is_equal"]:
        return Finding(
            code="capture", level="problem", found=f"{words}, bytes DIFFER from the native ones", value=value
        )
    counted = ", ".join(f"{name} {count}" for name, count in sorted(step["reasons"].items()))
    level: Level = "ok" if step["num_replays"] else "warning"
    return Finding(
        code="capture", level=level, found=f"{words}, bytes equal to the native ones ({counted})", value=value
    )


def _on(is_on: bool) -> str:
    return "on" if is_on else "off"


def _numbers(version: str | None) -> tuple[int, int] | None:
    match = re.match(r"(\d+)\.(\d+)", version or "")
    return (int(match[1]), int(match[2])) if match else None
