"""In which step a loss, or a parameter, first was not finite: NaN or infinite.

Values on a device are judged there. What is known so far is one number a stream, the smallest (step, place) found; it
is read once, at the end, so that no step waits for the device.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

from lucid_profiler.hooks import MAX_OPTIMIZERS

_PLACE_BITS = 32
_NONE_FOUND = 2**62
_MAX_STEP = 2**29
_MAX_OPTIMIZERS = 64

__all__ = ["Finding", "LossCheck", "ParameterCheck"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What the checks of one kind have found.

    Attributes:
        what: "loss" or "parameters".
        optimizer: index of the optimizer whose parameters were checked; None for the loss.
        name: the first parameter that was not finite; None where none was, or where it cannot be told.
        step: the step of that optimizer after which it first was not; for a loss the number of the call, from 1. None
            if all that was checked was finite.
        num_checked: steps or calls that were checked.
        num_skipped: those that were not: inside captures, or calls with something that is no loss.
        num_unjudged: parameters that no step could judge, such as those of tensor subclasses or without storage.
    """

    what: str
    optimizer: int | None = None
    name: str | None
    step: int | None
    num_checked: int
    num_skipped: int
    num_unjudged: int = 0


class _FirstBad:
    """The first (step, place) that was not finite, over all devices and streams."""

    __slots__ = ("_folded", "_on_host")

    def __init__(self) -> None:
        self._folded: dict[tuple[tuple[int, ...], Any], Any] = {}
        self._on_host: tuple[int, int] | None = None

    def add(self, step: int) -> None:
        """Take a finding that the host knows."""
        self._on_host = min(self._on_host or (step, 0), (step, 0))

    def fold(self, is_bad: Any, places: tuple[int, ...], *, stream: Any, step: int) -> None:
        """Take findings that a device knows; nothing waits for it.

        Args:
            is_bad: bool (len(places),), True where a place is not finite; on any device.
            places: ascending.
            stream: what names the order of work in which `is_bad` was computed.
            step: the step of all of them.
        """
        index = is_bad.byte().argmax()  # the first one
        found = _NONE_FOUND - is_bad.any() * (_NONE_FOUND - (step << _PLACE_BITS) - index)
        known = self._folded.get((places, stream))
        # Out of place: a tensor made in inference mode could not be written outside it.
        self._folded[places, stream] = found if known is None else sys.modules["torch"].minimum(known, found)

    def read(self) -> tuple[int, int] | None:
        """Return step and place, None if there is none; waits for the device."""
        found = [self._on_host] if self._on_host is not None else []
        for (places, _), folded in self._folded.items():
            code = int(folded.item())
            if code < _NONE_FOUND:
                found.append((code >> _PLACE_BITS, places[code & (2**_PLACE_BITS - 1)]))
        return min(found, default=None)


class LossCheck:
    """Judges the losses that a script hands over."""

    def __init__(self) -> None:
        self._first = _FirstBad()
        self._num_calls = 0
        self._num_skipped = 0

    def add(self, value: Any) -> None:
        """Judge one loss: a tensor of any shape, or what `float()` takes.

        Raises:
            Exception: it is neither, or it has no values; whatever reading it raised.
        """
        self._num_calls += 1
        self._num_skipped += 1
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(value, torch.Tensor):
            if not self._judge(torch, value):
                return
        elif not isinstance(value, int) and not math.isfinite(float(value)):
            self._first.add(self._num_calls)
        self._num_skipped -= 1

    def findings(self) -> list[Finding]:
        """Return what was found, nothing if no loss was handed over; waits for the device."""
        if not self._num_calls:
            return []
        first = self._first.read()
        return [
            Finding(
                what="loss",
                name=None,
                step=first[0] if first else None,
                num_checked=self._num_calls - self._num_skipped,
                num_skipped=self._num_skipped,
            )
        ]

    def _judge(self, torch: Any, value: Any) -> bool:
        """Judge a tensor where it is; return whether that could be done.

        Raises:
            TypeError: it wraps others, as a DTensor does: whoever asks for its values may wait for other processes.
        """
        if hasattr(type(value), "__tensor_flatten__"):
            raise TypeError(f"a {type(value).__name__} may be spread over processes; hand over its local tensor")
        if self._num_calls > _MAX_STEP or _is_capturing(torch, value.device):
            return False
        with torch.no_grad():
            is_bad = torch.isfinite(value).all().logical_not()
            if value.device.type != "cpu":
                stream = _stream(torch, value.device)
                self._first.fold(is_bad.reshape(1), (0,), stream=stream, step=self._num_calls)
            elif bool(is_bad):
                self._first.add(self._num_calls)
        return True


class _Watched:
    """The parameters of one optimizer, and what is known of them."""

    def __init__(self) -> None:
        self.first = _FirstBad()
        self.parameters: Sequence[Any] = ()  # held: the identity of one that is freed may be another's at the end
        self.have_changed = False
        self.num_checked = 0
        self.num_skipped = 0
        self.num_unjudged = 0

    def hold(self, parameters: Sequence[Any]) -> None:
        """Hold what is checked now, nothing any more where it is not what was checked before."""
        if self.num_checked and not self.have_changed:
            known = self.parameters
            self.have_changed = len(known) != len(parameters) or not all(map(is_, known, parameters))
        self.parameters = () if self.have_changed else parameters

    def let_go(self) -> None:
        """Hold the parameters no longer; whether later ones are the same cannot be told, nor their names."""
        self.have_changed |= self.num_checked > 0
        self.parameters = ()

    def finding(self, index: int, names: Mapping[int, str]) -> Finding:
        """Return what was found in the parameters of optimizer `index`; waits for the device."""
        step, place = self.first.read() or (None, None)
        is_named = place is not None and not self.have_changed
        return Finding(
            what="parameters",
            optimizer=index,
            name=names.get(id(self.parameters[place])) if place is not None and is_named else None,
            step=step,
            num_checked=self.num_checked,
            num_skipped=self.num_skipped,
            num_unjudged=self.num_unjudged,
        )


class ParameterCheck:
    """Judges the parameters of each optimizer after each of its steps; this adds work to the device.

    Those of the last eight optimizers that stepped are held, as the optimizers themselves are, so that what is named is
    what was found. Weak references would not do: torch refuses to swap a tensor that has one.
    """

    def __init__(self) -> None:
        self._watched: dict[int, _Watched] = {}
        self._recent: dict[int, None] = {}  # the optimizers that stepped last, the latest at the end

    def after_step(self, optimizer: Any, *, index: int, step: int) -> None:
        """Judge the parameters of an optimizer that stepped, of the first 64 optimizers.

        Args:
            optimizer: read only.
            index: of the optimizer.
            step: number of its step, from 1.

        Raises:
            RuntimeError: torch cannot judge them.
        """
        torch = sys.modules["torch"]
        self._let_go_before(index)
        if index not in self._watched and len(self._watched) >= _MAX_OPTIMIZERS:
            return
        watched = self._watched.setdefault(index, _Watched())
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        places_by_kind, watched.num_unjudged = _by_kind(torch, parameters)
        if step > _MAX_STEP or any(_is_capturing(torch, device) for device, _ in places_by_kind):
            watched.num_skipped += 1
            return
        watched.hold(parameters)
        watched.num_checked += 1
        with torch.no_grad():
            for (device, dtype), places in places_by_kind.items():
                is_bad = _are_not_finite(torch, [parameters[place] for place in places])
                watched.first.fold(is_bad, tuple(places), stream=(dtype, _stream(torch, device)), step=step)

    def findings(self, names: Mapping[int, str]) -> list[Finding]:
        """Return what was found, an entry an optimizer; waits for the device, and lets go of the parameters.

        Args:
            names: of parameters that are alive, by identity.
        """
        found = [watched.finding(index, names) for index, watched in sorted(self._watched.items())]
        for watched in self._watched.values():
            watched.let_go()
        return found

    def _let_go_before(self, index: int) -> None:
        """Let go of the parameters of the optimizer that stepped longest ago, if that of `index` is one too many."""
        self._recent.pop(index, None)
        self._recent[index] = None
        if len(self._recent) > MAX_OPTIMIZERS:
            oldest = next(iter(self._recent))
            del self._recent[oldest]
            if oldest in self._watched:
                self._watched[oldest].let_go()


def _by_kind(torch: Any, parameters: Sequence[Any]) -> tuple[dict[tuple[Any, Any], list[int]], int]:
    """Return the places that can be judged together, by device and dtype, and how many cannot be judged."""
    places_by_kind: dict[tuple[Any, Any], list[int]] = {}
    num_unjudged = 0
    for place, parameter in enumerate(parameters):
        if not (parameter.is_floating_point() or parameter.is_complex()):
            continue
        # What a subclass does may be anything, communication among processes included.
        is_plain = type(parameter) in (torch.nn.Parameter, torch.Tensor) and parameter.layout is torch.strided
        if not is_plain or parameter.is_meta or parameter.element_size() == 1 or _is_freed(parameter):
            num_unjudged += 1
        elif parameter.numel():
            places_by_kind.setdefault((parameter.device, parameter.dtype), []).append(place)
    return places_by_kind, num_unjudged


def _is_freed(parameter: Any) -> bool:
    """Return whether the storage of a parameter has been let go; torch would read it all the same, which is fatal."""
    has_storage = parameter.numel() and parameter.device.type in ("cpu", "cuda")
    return bool(has_storage) and parameter.untyped_storage().nbytes() == 0


def _are_not_finite(torch: Any, tensors: list[Any]) -> Any:
    """Return bool (len(tensors),), True for a tensor that holds a NaN or an infinity.

    The largest magnitude of a tensor is NaN or infinite where a value is, and cannot overflow as a sum can.
    """
    largest = torch._foreach_norm(tensors, math.inf)  # noqa: SLF001 - of all tensors at once, which has no public name
    return torch.isfinite(torch.stack(largest)).logical_not()


def _is_capturing(torch: Any, device: Any) -> bool:
    return device.type == "cuda" and bool(torch.cuda.is_current_stream_capturing())


def _stream(torch: Any, device: Any) -> tuple[str, int]:
    """Return what names the order of work on a device: its current stream."""
    return str(device), int(torch.cuda.current_stream(device).cuda_stream) if device.type == "cuda" else 0
