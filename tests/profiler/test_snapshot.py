"""What the agent says of a process's devices, be it one, several, or another than the current one; and its states."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lucid_profiler import session as session_module
from lucid_profiler import snapshot
from lucid_profiler.digest import digest_state
from lucid_profiler.hooks import TorchHooks
from lucid_profiler.journal import Guard
from lucid_profiler.session import ProcessSession

GIB = 2**30


@dataclass(kw_only=True)
class _Cards:
    """CUDA devices, of which device 0 is the current one."""

    reserved: list[int]
    has_uuid: bool = True
    keeps_statistics: bool = True
    contexts: tuple[int, ...] = (0,)
    events: list[str] = field(default_factory=list)

    def has_context(self, index: int) -> bool:
        return index in self.contexts

    def memory_reserved(self, index: int | None = None) -> int:
        if not self.keeps_statistics:
            raise RuntimeError("this allocator keeps no statistics")
        return self.reserved[index or 0]

    def max_memory_allocated(self, index: int | None = None) -> int:
        return self.memory_reserved(index) // 2

    def get_device_properties(self, index: int) -> SimpleNamespace:
        uuid = {"uuid": f"0000-{index}"} if self.has_uuid else {}
        return SimpleNamespace(name=self.get_device_name(index), total_memory=80 * GIB, **uuid)

    def get_device_name(self, index: int | None = None) -> str:
        return f"Card {index or 0}"

    def synchronize(self, index: int | None = None) -> None:
        self.events.append(f"waited for {index or 0}")

    def install(self, monkeypatch: pytest.MonkeyPatch) -> "_Cards":
        for name in (
            "memory_reserved",
            "max_memory_allocated",
            "get_device_properties",
            "get_device_name",
            "synchronize",
        ):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(torch.cuda, "max_memory_reserved", self.memory_reserved)
        monkeypatch.setattr(torch._C, "_cuda_hasPrimaryContext", self.has_context, raising=False)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(self.reserved))
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        return self


@pytest.mark.parametrize(
    ("busy", "peaks"),
    [([], (1, 2)), ([0], (1, 2)), ([1], (4, 8)), ([0, 1, 2], (4, 8)), ([2], (3, 6))],
)
def test_peaks_are_those_of_the_devices_that_are_trained_on(
    monkeypatch: pytest.MonkeyPatch, busy: list[int], peaks: tuple[int, int]
) -> None:
    """Of several the largest of one, and of none the current device's."""
    _Cards(reserved=[2 * GIB, 8 * GIB, 6 * GIB, 40 * GIB]).install(monkeypatch)
    guard = Guard()
    memory = snapshot.memory(busy, guard)
    assert (memory["peak_allocated_bytes"], memory["peak_reserved_bytes"]) == tuple(peak * GIB for peak in peaks)
    assert guard.errors == []


@pytest.mark.parametrize(
    ("busy", "has_uuid", "name", "uuid"),
    [
        ([], True, "Card 0", "0000-0"),
        ([0], True, "Card 0", "0000-0"),
        ([1], True, "Card 1", "0000-1"),
        ([0, 2], True, "Card 0, Card 2", "0000-0, 0000-2"),
        ([], False, "Card 0", ""),
        ([0], False, "Card 0", ""),
        ([0, 1], False, "Card 0, Card 1", "unknown, unknown"),
    ],
)
def test_the_identity_names_the_devices_that_are_trained_on(
    monkeypatch: pytest.MonkeyPatch, busy: list[int], has_uuid: bool, name: str, uuid: str
) -> None:
    """One by itself, several in a row, and without any the current one."""
    _Cards(reserved=[GIB] * 3, has_uuid=has_uuid).install(monkeypatch)
    guard = Guard()
    identity = snapshot.environment(busy, guard)["identity"]
    assert (identity["gpu_name"], identity["gpu_uuid"]) == (name, uuid)
    assert list(identity)[-3:] == ["cudnn", "gpu_name", "gpu_uuid"]
    assert guard.errors == []


@pytest.mark.parametrize(
    ("reserved", "busy", "expected"),
    [([0], [], [0]), ([GIB], [0], [0]), ([0, GIB, 0, 1], [], [0, 1, 3]), ([GIB, GIB, 0], [2], [0, 1, 2])],
)
def test_devices_in_use_are_those_with_memory_and_the_current_one(
    monkeypatch: pytest.MonkeyPatch, reserved: list[int], busy: list[int], expected: list[int]
) -> None:
    """One without memory is left alone, for it may have no context."""
    _Cards(reserved=reserved).install(monkeypatch)
    guard = Guard()
    assert snapshot.devices_in_use(busy, guard) == expected
    assert guard.errors == []


def test_a_current_device_without_a_context_gets_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that trains on another has queued nothing there; a wait would take memory for a context of its own."""
    cards = _Cards(reserved=[0, GIB], contexts=(1,)).install(monkeypatch)
    assert snapshot.devices_in_use([], Guard()) == [1]
    cards.contexts = (0, 1)
    assert snapshot.devices_in_use([], Guard()) == [0, 1]


def test_without_statistics_the_devices_that_are_known_are_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program may bring an allocator of its own; then a fault is counted, where there is more than one device."""
    guard = Guard()
    _Cards(reserved=[GIB], keeps_statistics=False).install(monkeypatch)
    assert snapshot.devices_in_use([0], guard) == [0]
    assert guard.num_errors == 0
    _Cards(reserved=[GIB] * 3, keeps_statistics=False).install(monkeypatch)
    assert snapshot.devices_in_use([1], guard) == [0, 1]
    assert guard.num_errors == 1


def test_before_cuda_is_in_use_no_device_is() -> None:
    """Nothing is asked, so that nothing is begun."""
    assert snapshot.devices_in_use([], Guard()) == []


def _trained(state: dict[Any, Any], **settings: Any) -> Any:
    """Return what the digests know of an optimizer with one parameter and this state of it."""
    parameter = torch.nn.Parameter(torch.ones(1))
    groups = [{"params": [parameter], "lr": 0.1, **settings}]
    return SimpleNamespace(index=0, optimizer=SimpleNamespace(param_groups=groups, state={parameter: state}))


def _state(tracked: Any, name: str = "weight") -> Any:
    parameters = tracked.optimizer.param_groups[0]["params"]
    return snapshot.optimizer_state([tracked], {id(parameter): name for parameter in parameters})["optimizer0"]


@pytest.mark.parametrize("is_reversed", [False, True])
def test_keys_of_one_spelling_keep_both_their_values(is_reversed: bool) -> None:
    """In the state and the settings alike, under the same names whatever the order of the keys."""
    items: list[tuple[Any, Any]] = [(0, b"number"), ("0", b"text"), (None, b"none"), ("None", b"text"), (1, b"alone")]
    items += [("0 (int)", b"taken")]
    mapping = dict(reversed(items) if is_reversed else items)
    expected = {
        "0": b"text",
        "0 (2)": b"number",
        "0 (int)": b"taken",
        "1": b"alone",
        "None": b"text",
        "None (NoneType)": b"none",
    }
    found = _state(_trained(mapping, **{"2": b"text"}))
    assert found["state"] == {"weight": expected}
    tracked = _trained({})
    tracked.optimizer.param_groups[0].update(mapping)
    assert _state(tracked)["groups"] == [{"lr": 0.1, **expected}]


def test_one_flipped_bit_under_a_key_that_is_spelt_like_another_is_seen() -> None:
    """No digest says equal while something that was trained differs."""
    digests = {
        digest_state(_state(_trained({0: torch.tensor([number]), "0": torch.tensor([text])}))).digest
        for number, text in ((0.0, 0.0), (-0.0, 0.0), (0.0, -0.0))
    }
    assert len(digests) == 3


def test_all_kinds_of_state_without_a_digest_are_told() -> None:
    """Also where their keys are spelt alike; the same kind under the same name once."""
    tracked = _trained({0: {1.5: 1}, "0": frozenset(), "again": object()}, again=object())
    told = snapshot.undigested(tracked)
    assert told == ["'again' of class object", "'0' of class dict", "'0' of class frozenset"]


def test_state_that_is_named_like_a_parameter_keeps_the_parameter_s() -> None:
    """A text key beside the parameters has its own name."""
    tracked = _trained({"step": 1})
    tracked.optimizer.state |= {"weight": {"step": 2}, "other": {"step": 3}}
    assert _state(tracked)["state"] == {"weight (Parameter)": {"step": 1}, "weight": {"step": 2}, "other": {"step": 3}}


def test_parameters_of_one_name_are_all_there() -> None:
    """Each once, also where two groups have it."""
    first, second = (torch.nn.Parameter(torch.tensor([number])) for number in (1.0, 2.0))
    optimizer = SimpleNamespace(param_groups=[{"params": [first, second]}, {"params": [first]}])
    names = {id(first): "weight", id(second): "weight"}
    found = snapshot.parameters([SimpleNamespace(optimizer=optimizer)], names)  # type: ignore[list-item]
    assert [*map(id, found.values())] == [id(first), id(second)]
    assert list(found) == ["weight (Parameter)", "weight (2)"]


def _cycle() -> dict[str, Any]:
    found: dict[str, Any] = {}
    found["again"] = [found, found]
    return found


def test_state_with_a_cycle_is_refused_by_its_depth(tmp_path: Path) -> None:
    """With the reason that the digest documents, and without a fault of the agent's."""
    guard = Guard()
    hooks = TorchHooks(tmp_path / "steps.ring", guard=guard)
    hooks.install()
    session = ProcessSession(tmp_path, hooks=hooks, guard=guard, environ={})
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    optimizer.step()
    optimizer.state[weight]["graph"] = _cycle()
    session.finish()
    (note,) = [json.loads(line)["text"] for line in _lines(tmp_path) if '"note"' in line]
    assert note.startswith("no digest of 'optimizer_state': the state is nested deeper than 100 levels at ")
    assert note.endswith(": a cycle?")
    assert guard.errors == []


def _lines(run_dir: Path) -> list[str]:
    (path,) = run_dir.glob("agent-*.jsonl")
    return path.read_text().splitlines()


def _entries(run_dir: Path) -> dict[str, dict[str, Any]]:
    return {entry["kind"]: entry for entry in map(json.loads, _lines(run_dir))}


def test_a_fit_on_another_than_the_current_device_is_waited_for_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both its ends come after the waits, nothing is waited for in between, and a third device is left alone."""
    cards = _Cards(reserved=[0, 8 * GIB, 0]).install(monkeypatch)
    monkeypatch.setattr(session_module, "mark_monitor", lambda _run_dir, name: cards.events.append(name))
    monkeypatch.setattr("lucid_profiler.hooks.devices_in_use", lambda _optimizer: (1,))
    guard = Guard()
    hooks = TorchHooks(tmp_path / "steps.ring", guard=guard)
    hooks.install()
    hooks._is_cuda_in_use = lambda: True
    session = ProcessSession(tmp_path, hooks=hooks, guard=guard, environ={"LUCID_ALLOCATOR_INTERVAL_S": "0"})
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    with session.fit():
        cards.events.append("begun")
        for _ in range(3):
            weight.sum().backward()
            optimizer.step()
        cards.events.append("ending")
    waits = ["waited for 0", "waited for 1"]
    assert cards.events == [*waits, "fit begin", "begun", "ending", *waits, "fit end"]
    session.finish()
    entries = _entries(tmp_path)
    assert entries["memory"]["peak_reserved_bytes"] == 8 * GIB
    assert (entries["device"]["device"], entries["device"]["uuid"]) == (1, "0000-1")
    assert entries["env"]["identity"]["gpu_uuid"] == "0000-1"
    assert guard.errors == []
