"""What an optimizer says of itself: hyperparameters, buffers, and the phases of a step.

A rule is stateless and knows nothing of batching, capture or checks; the optimizer that runs it supplies those.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

__all__ = ["Batch", "Group", "Hyperparameter", "Orthogonalize", "Phase", "Rule", "Scalar", "Scalars", "live"]

Group = dict[str, Any]
# `orthogonalize_all`, or something with its results.
Orthogonalize = Callable[[Sequence[Tensor], Callable[[Tensor], Tensor]], list[Tensor]]
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
        orthogonalize: What `Phase.prepare` calls in place of `orthogonalize_all`.
    """

    params: list[Tensor]
    grads: list[Tensor]
    state: Mapping[str, list[Tensor]]
    orthogonalize: Orthogonalize


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """One preparation and the write that follows it: `p <- p + factor * update`.

    Attributes:
        prepare: From a batch, the group's structure and its live scalars to one update a parameter, with the
            parameter's shape. It may write the batch's buffers and nothing else.
        factor: The write's factor from the group's current values, for instance `-lr`. It is read at every step and is
            never part of a recording.
    """

    prepare: Callable[[Batch, Any, Scalars], list[Tensor]]
    factor: Callable[[Group], Scalar]


class Rule(ABC):
    """The mathematics of one optimizer, apart from all bookkeeping.

    A preparation sees its batch, its group's structure and live scalars, nothing else of the group: so a recording of
    it is right as long as the structure is the same and the scalars are uploaded.

    Attributes:
        hyperparameters: Keys that a param group must hold, with their checks.
        is_capturable: Whether preparations may be recorded, which takes that they keep to the contract of `Phase`,
            read nothing on the host that changes between steps, and read no tensor back. A class says so for its own
            body only: a subclass that overrides a method has to say it anew.
    """

    hyperparameters: ClassVar[Mapping[str, Hyperparameter]]
    is_capturable: ClassVar[bool] = False

    @abstractmethod
    def buffers(self, group: Group) -> tuple[str, ...]:
        """Return the state keys of the group's parameters, each a `zeros_like(p)` at the first gradient."""

    @abstractmethod
    def scalars(self, group: Group) -> dict[str, Scalar]:
        """Return the live scalars of a preparation: values that enter by one multiplication of their own.

        A derived factor such as `1 - momentum` is computed here, on the host in double precision.
        """

    @abstractmethod
    def structure(self, group: Group) -> Hashable:
        """Return what decides which operations a preparation runs, as opposed to the values they run on.

        Two structures are one if their `repr` is: that tells types and the sign of zero apart, so it has to show
        everything that matters.

        Raises:
            TypeError: If a value has a type that the preparation could not run with.
        """

    @abstractmethod
    def prepare(self, batch: Batch, structure: Any, scalars: Scalars) -> list[Tensor]:
        """Return one update a parameter, as `Phase.prepare` does: the preparation of a rule with a single phase."""

    def phases(self, structure: Any) -> tuple[Phase, ...]:  # noqa: ARG002 - for rules whose groups differ
        """Return the phases of the step of a group with this structure, in their order.

        Unless overridden it is one: `prepare`, then a write with the factor `-lr`. A later phase reads parameters that
        an earlier one has written.
        """
        return (Phase(prepare=self.prepare, factor=lambda group: -group["lr"]),)

    def refuses(self, parameter: Tensor, group: Group) -> str | None:  # noqa: ARG002 - for rules that take some shapes
        """Return why the rule cannot update this parameter, or None."""
        return None
