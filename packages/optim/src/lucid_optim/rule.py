"""What an optimizer says of itself: hyperparameters, buffers, and the phases of a step.

A rule is stateless and knows nothing of batching, capture or checks; the optimizer that runs it supplies those.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

__all__ = ["Batch", "Group", "Hyperparameter", "Phase", "Rule", "Scalar", "Scalars", "live"]

Group = dict[str, Any]
Scalar = float | Tensor
Scalars = Mapping[str, Scalar]


def live(value: Any) -> Scalar:
    """Return a group's value as a preparation multiplies by it: a device tensor as it is, anything else as a float."""
    return value.reshape(()) if isinstance(value, Tensor) and value.is_cuda else float(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hyperparameter:
    """A key that every param group of a rule holds.

    Attributes:
        check: Returns what the value must be where it is not ("must be non-negative"), else None. It is given the host
            value of a tensor.
        tensor: Whether a one-element tensor is accepted in place of a number.
    """

    check: Callable[[Any], str | None]
    tensor: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Parameters of one group that are updated together; one device, one dtype.

    Attributes:
        params: Live parameters; `Phase.prepare` reads them and never writes them.
        grads: This step's gradients with the parameters' strides; read only, they may alias `.grad`.
        state: For each buffer of the rule, its live tensors in the order of `params`; `Phase.prepare` updates them.
    """

    params: list[Tensor]
    grads: list[Tensor]
    state: Mapping[str, list[Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """One preparation and the write that follows it: `p <- p + factor * update`.

    Attributes:
        prepare: From a batch, its group and its live scalars to one update a parameter, with the parameter's shape. It
            may write the batch's buffers and nothing else.
        factor: The write's factor from the group's current values, for instance `-lr`. It is read at every step and is
            never part of a recording.
    """

    prepare: Callable[[Batch, Group, Scalars], list[Tensor]]
    factor: Callable[[Group], Scalar]


class Rule(ABC):
    """The mathematics of one optimizer, apart from all bookkeeping."""

    @property
    @abstractmethod
    def hyperparameters(self) -> Mapping[str, Hyperparameter]:
        """Keys that a param group must hold, with their checks."""

    @abstractmethod
    def buffers(self, group: Group) -> tuple[str, ...]:
        """Return the state keys of the group's parameters, each a `zeros_like(p)` at the first gradient."""

    @abstractmethod
    def scalars(self, group: Group) -> dict[str, Scalar]:
        """Return the live scalars of a preparation: values that enter by one multiplication of their own.

        A derived factor such as `1 - momentum` is computed here, on the host in double precision.
        """

    @abstractmethod
    def structure(self, group: Group) -> tuple[object, ...]:
        """Return what decides which operations a preparation runs, as opposed to the values they run on.

        Raises:
            TypeError: If a value has a type that the preparation could not run with.
        """

    @abstractmethod
    def prepare(self, batch: Batch, group: Group, scalars: Scalars) -> list[Tensor]:
        """Return one update a parameter, as `Phase.prepare` does: the preparation of a rule with a single phase."""

    def phases(self, group: Group) -> tuple[Phase, ...]:  # noqa: ARG002 - for rules whose groups differ
        """Return the phases of a group's step in their order.

        Unless overridden it is one: `prepare`, then a write with the factor `-lr`. A later phase reads parameters that
        an earlier one has written.
        """
        return (Phase(prepare=self.prepare, factor=lambda group: -group["lr"]),)

    def refuses(self, parameter: Tensor, group: Group) -> str | None:  # noqa: ARG002 - for rules that take some shapes
        """Return why the rule cannot update this parameter, or None."""
        return None
