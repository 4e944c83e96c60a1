"""What values an optimizer accepts, and the sentences with which it refuses the others."""

import math
from collections.abc import Hashable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from lucid_optim.layout import is_dense
from lucid_optim.rule import Group, Hyperparameter, Rule

__all__ = [
    "check_group",
    "check_saved_buffers",
    "check_state",
    "check_tensors",
    "check_values",
    "finite",
    "flag",
    "host_value",
    "non_negative",
    "positive_int",
    "three_numbers",
    "unit_interval",
]

FLOAT32_MAX = torch.finfo(torch.float32).max
# What the operations of a step exist for.
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def finite(value: Any) -> str | None:
    """Ask for a finite number."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return "must be a number"
    try:
        return None if math.isfinite(value) else "must be finite"
    except OverflowError:
        return "must be finite"


def non_negative(value: Any) -> str | None:
    """Ask for a finite number of at least 0; the sign of zero is free."""
    return finite(value) or (None if value >= 0 else "must be non-negative")


def unit_interval(value: Any) -> str | None:
    """Ask for a number in [0, 1)."""
    return finite(value) or (None if 0 <= value < 1 else "must be in [0, 1)")


def positive_int(value: Any) -> str | None:
    """Ask for an integer of at least 1; a bool is none."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        return "must be an int"
    return None if int(value) >= 1 else "must be positive"


def flag(value: Any) -> str | None:
    """Ask for True or False."""
    return None if isinstance(value, bool) else "must be True or False"


def three_numbers(value: Any) -> str | None:
    """Ask for a tuple or list of three finite numbers."""
    if isinstance(value, tuple | list) and len(value) == 3 and all(finite(number) is None for number in value):
        return None
    return "must be three finite numbers"


def host_value(value: Any) -> Any:
    """Return the number that a one-element tensor holds, and anything else as it is."""
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def _check_hyperparameter(name: str, value: Any, hyperparameter: Hyperparameter) -> None:
    if isinstance(value, Tensor) and not (hyperparameter.tensor and value.numel() == 1):
        wanted = "a number or a one-element tensor" if hyperparameter.tensor else "a number"
        raise TypeError(f"{name} must be {wanted}, got a tensor of shape {tuple(value.shape)}")
    complaint = hyperparameter.check(host_value(value))
    if complaint is not None:
        error = TypeError if complaint in {"must be a number", "must be an int"} else ValueError
        raise error(f"{name} {complaint}, got {value!r}")


def _overlaps_itself(tensor: Tensor) -> bool:
    return any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _parameter_complaint(parameter: Tensor) -> str | None:
    """Return why no rule can update this parameter, or None."""
    if parameter.dtype not in DTYPES:
        return f"is {parameter.dtype}; only real floating-point parameters of 16, 32 or 64 bits can be optimized"
    if parameter.layout != torch.strided:
        return f"has layout {parameter.layout}; only dense storage can be optimized"
    if not is_lazy(parameter) and parameter.is_neg():
        return "is a lazily negated view; pass a .resolve_neg() of it"
    if not is_lazy(parameter) and not is_dense(parameter) and _overlaps_itself(parameter):
        return "is an expanded tensor whose elements share memory; pass a .clone() of it"
    return None


def label(position: int, index: int, group: Group) -> str:
    """Name a parameter by its group, place and, where the group knows it, its name."""
    names = group.get("param_names") or ()
    name = f" ({names[index]})" if index < len(names) else ""
    parameter = group["params"][index]
    shape = "unknown shape" if is_lazy(parameter) else f"shape {tuple(parameter.shape)}"
    return f"group {position}, parameter {index}{name} of {shape}"


def check_group(rule: Rule, position: int, group: Group) -> None:
    """Check the values and the parameters of one param group.

    Raises:
        ValueError: If a key is missing, a value out of range, or a parameter of a kind that cannot be updated.
        TypeError: If a value has the wrong type.
    """
    missing = [name for name in rule.hyperparameters if name not in group]
    if missing:
        raise ValueError(f"group {position} lacks {', '.join(map(repr, missing))}")
    for name, hyperparameter in rule.hyperparameters.items():
        _check_hyperparameter(f"group {position}: {name}", group[name], hyperparameter)
    for index, parameter in enumerate(group["params"]):
        complaint = _parameter_complaint(parameter)
        if complaint is None and not is_lazy(parameter):
            complaint = rule.refuses(parameter, group)
        if complaint is not None:
            raise ValueError(f"{label(position, index, group)} {complaint}")


def check_state(rule: Rule, position: int, group: Group, state: Mapping[Any, Any]) -> None:
    """Check that the state of a group's parameters is one that `rule` could have left.

    A parameter without an entry, or whose buffer is absent or None, is accepted: it starts from zero. Keys beside the
    rule's own are kept, for subclasses that have some.

    Raises:
        ValueError: If an entry holds other keys and none of the rule's, or a buffer that does not fit its parameter.
    """
    buffers = rule.buffers(group)
    for index, parameter in enumerate(group["params"]):
        entry = state.get(parameter, {})
        if entry and not any(name in entry for name in buffers):
            raise ValueError(
                f"{label(position, index, group)}: state holds {', '.join(map(repr, sorted(entry)))} and none of "
                f"{', '.join(map(repr, buffers))}; it was saved by another optimizer"
            )
        for name in buffers:
            complaint = _buffer_complaint(entry.get(name), parameter)
            if complaint is not None:
                raise ValueError(f"{label(position, index, group)}: {name} {complaint}")


def check_saved_buffers(rule: Rule, group: Group, state: Mapping[Any, Any]) -> None:
    """Check saved buffers before they are cast to their parameters' dtype and device.

    Args:
        rule: Whose buffers they are.
        group: A group of the optimizer that loads.
        state: The `state` of a state_dict.

    Raises:
        ValueError: If a buffer is no real floating-point tensor with data.
    """
    for key, entry in state.items():
        for name in rule.buffers(group) if isinstance(entry, Mapping) else ():
            buffer = entry.get(name)
            if isinstance(buffer, Tensor) and (not buffer.is_floating_point() or buffer.is_meta):
                what = "on the meta device, without data" if buffer.is_meta else f"{buffer.dtype}"
                raise ValueError(f"state {key}: {name} is {what}; a real floating-point tensor is needed")


def _buffer_complaint(buffer: Any, parameter: Tensor) -> str | None:
    """Return what is wrong with a buffer, or None; None itself is a buffer that is still to be made."""
    if buffer is None:
        return None
    if not isinstance(buffer, Tensor) or buffer.layout != torch.strided:
        return f"must be a dense tensor, got {type(buffer).__name__}"
    if buffer.shape != parameter.shape:
        return f"has shape {tuple(buffer.shape)}, its parameter {tuple(parameter.shape)}"
    if not buffer.is_floating_point():
        return f"has dtype {buffer.dtype}, its parameter {parameter.dtype}"
    return None


def check_values(rule: Rule, position: int, group: Group) -> Hashable:
    """Raise for a group's value that would make its step fail halfway; return its structure.

    Ranges are not checked: a scheduler may set what it likes.

    Raises:
        TypeError: If a value has a type or form that the operations cannot run with.
        ValueError: Likewise, for values that decide which operations run.
    """
    for name, hyperparameter in rule.hyperparameters.items():
        if not hyperparameter.tensor:
            _check_hyperparameter(f"group {position}: {name}", group[name], hyperparameter)
        elif not _is_number(group[name]):
            raise TypeError(
                f"group {position}: {name} must be a float32 number or a one-element tensor, got {group[name]!r}"
            )
    return rule.structure(group)


def check_tensors(
    rule: Rule,
    position: int,
    group: Group,
    state: Mapping[Tensor, Mapping[str, Any]],
    places: Sequence[int] | None = None,
) -> None:
    """Raise for a parameter, gradient or buffer that would make a group's step fail halfway.

    Args:
        rule: Of the group.
        position: Of the group.
        group: The group.
        state: The optimizer's.
        places: Of the parameters to look at; None is all.

    Raises:
        RuntimeError: If one cannot be used; the message names it.
    """
    names = rule.buffers(group)
    params = group["params"]
    for index in range(len(params)) if places is None else places:
        parameter = params[index]
        gradient = parameter.grad
        if gradient is None:
            continue
        complaint = _parameter_complaint(parameter) or _gradient_complaint(gradient, parameter)
        if complaint is None:
            entry = state.get(parameter, {})
            complaint = next(filter(None, (_live_complaint(name, entry.get(name), parameter) for name in names)), None)
        if complaint is not None:
            raise RuntimeError(f"{label(position, index, group)}: {complaint}")


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        is_real = not value.is_complex() and value.dtype != torch.bool
        return value.layout == torch.strided and value.numel() == 1 and is_real and not value.is_meta
    if isinstance(value, str | bytes | bytearray | bool):
        return False
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return False
    return not math.isfinite(number) or abs(number) <= FLOAT32_MAX


def _gradient_complaint(gradient: Tensor, parameter: Tensor) -> str | None:
    if gradient.layout != torch.strided or not gradient.is_floating_point():
        kind = f"of layout {gradient.layout}" if gradient.layout != torch.strided else f"of dtype {gradient.dtype}"
        return f"its gradient is {kind}; only dense real ones can be used"
    if gradient.shape != parameter.shape:
        return f"its gradient has shape {tuple(gradient.shape)}; set it to None or compute it anew"
    return None


def _live_complaint(name: str, buffer: Any, parameter: Tensor) -> str | None:
    """Return why a buffer cannot be updated in place now, or None."""
    if buffer is None:
        return None
    complaint = _buffer_complaint(buffer, parameter)
    if complaint is not None:
        return f"{name} {complaint}"
    if buffer.device != parameter.device:
        return f"{name} is on {buffer.device}, its parameter on {parameter.device}; load_state_dict moves it"
    if not is_dense(buffer) and _overlaps_itself(buffer):
        return f"{name} is an expanded tensor whose elements share memory; replace it by a clone"
    if buffer.is_inference() and not torch.is_inference_mode_enabled():
        return f"{name} was made in inference mode and cannot be updated outside it; replace it by a clone"
    return None
