"""What values an optimizer accepts, and the sentences with which it refuses the others."""

import math
from collections.abc import Callable, Mapping
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from lucid_optim.layout import is_dense
from lucid_optim.rule import Group, Hyperparameter, Rule

__all__ = [
    "check_group",
    "check_state",
    "finite",
    "flag",
    "host_value",
    "non_negative",
    "positive_int",
    "unit_interval",
]


def finite(value: Any) -> str | None:
    """Ask for a finite number."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return "must be a number"
    return None if math.isfinite(value) else "must be finite"


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


def _check_parameter(label: str, parameter: Tensor) -> None:
    if not parameter.is_floating_point():
        raise ValueError(f"{label} is {parameter.dtype}; only real floating-point parameters can be optimized")
    if parameter.layout != torch.strided:
        raise ValueError(f"{label} has layout {parameter.layout}; only dense storage can be optimized")
    if not is_dense(parameter) and _overlaps_itself(parameter):
        raise ValueError(f"{label} is an expanded tensor whose elements share memory; pass a .clone() of it")


def _overlaps_itself(tensor: Tensor) -> bool:
    return any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def label(position: int, index: int, group: Group) -> str:
    """Name a parameter by its group, place and, where the group knows it, its name."""
    names = group.get("param_names")
    name = f" ({names[index]})" if names else ""
    return f"group {position}, parameter {index}{name} of shape {tuple(group['params'][index].shape)}"


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
        _check_parameter(label(position, index, group), parameter)
        refusal = rule.refuses(parameter, group)
        if refusal is not None:
            raise ValueError(f"{label(position, index, group)} {refusal}")


def check_state(rule: Rule, position: int, group: Group, state: Mapping[Any, dict[str, Any]]) -> None:
    """Check that the state of a group's parameters is one that `rule` could have left.

    A parameter without an entry, or whose buffer is absent or None, is accepted: it starts from zero.

    Raises:
        ValueError: If an entry holds a key that the rule does not know, or a buffer that does not fit its parameter.
    """
    buffers = rule.buffers(group)
    for index, parameter in enumerate(group["params"]):
        entry = state.get(parameter, {})
        unknown = sorted(set(entry) - set(buffers))
        if unknown:
            raise ValueError(
                f"{label(position, index, group)}: state holds {', '.join(map(repr, unknown))}, which this optimizer "
                f"does not have (it keeps {', '.join(map(repr, buffers))}); it was saved by another optimizer"
            )
        for name, buffer in entry.items():
            if buffer is not None:
                check_buffer(f"{label(position, index, group)}: {name}", buffer, parameter)


def check_buffer(name: str, buffer: Any, parameter: Tensor, error: Callable[[str], Exception] = ValueError) -> None:
    """Check that a buffer is a dense tensor of its parameter's shape.

    Raises:
        ValueError: Or `error`, naming the buffer, where it is not.
    """
    if not isinstance(buffer, Tensor) or buffer.layout != torch.strided:
        raise error(f"{name} must be a dense tensor, got {type(buffer).__name__}")
    if buffer.shape != parameter.shape:
        raise error(f"{name} has shape {tuple(buffer.shape)}, its parameter {tuple(parameter.shape)}")
    if not buffer.is_floating_point():
        raise error(f"{name} has dtype {buffer.dtype}, its parameter {parameter.dtype}")
