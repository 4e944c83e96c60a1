"""Disables each guard of capture in turn and checks that the guard's own regression test then fails.

A guard is a line of lucid_optim without which a recording would be replayed where it must not be. For each one the
named tests are run, in a process of its own, on a copy of the package with that line changed: they must fail. They must
pass with nothing changed, which is checked first.
"""

import argparse
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "packages" / "optim" / "src" / "lucid_optim"
REPLAY, CAPTURE, GRAPHS = (f"tests/optim/test_{name}.py" for name in ("update_replay", "capture", "graphs"))


@dataclass(frozen=True, slots=True)
class Guard:
    """One guard.

    Attributes:
        name: What it guards against.
        module: Where it stands.
        line: Its source, which must occur exactly once.
        disabled: What takes its place.
        tests: Expressions for pytest, `file::test`; at least one of them must fail.
        gpu: Whether they need a device.
    """

    name: str
    module: str
    line: str
    disabled: str
    tests: tuple[str, ...]
    gpu: bool = False


def _replay(*names: str) -> tuple[str, ...]:
    return tuple(f"{REPLAY}::test_{name}" for name in names)


def _capture(*names: str) -> tuple[str, ...]:
    return tuple(f"{CAPTURE}::test_{name}" for name in names)


def _graphs(*names: str) -> tuple[str, ...]:
    return tuple(f"{GRAPHS}::test_{name}" for name in names)


GUARDS = (
    # Independent
    Guard(
        "which parameters have gradients",
        "certificate",
        "        if members.places != self._places:\n",
        "        if False:\n",
        _replay("freezing_and_new_groups", "random_histories_have_the_native_bytes"),
    ),
    Guard(
        "identity of parameters",
        "certificate",
        "if not _are_same(members.params, self.params) or",
        "if",
        _replay("a_parameter_is_exchanged"),
    ),
    Guard(
        "address of a parameter",
        "certificate",
        " and are_at(tensors, self._addresses, self._places)",
        "",
        _replay("parameters_move"),
    ),
    Guard(
        "strides of a tensor",
        "certificate",
        "return self._layouts.hold(tensors) and",
        "return",
        _replay("strides_change_under_one_address", "strides_of_a_buffer_change_under_one_address"),
    ),
    Guard(
        "state entries",
        "certificate",
        "is_same_state = _are_same(self._keys, list(state)) and _are_same(self._entries, list(state.values()))",
        "is_same_state = True",
        _replay("a_state_entry_is_replaced_by_hand"),
    ),
    Guard(
        "identity of buffers",
        "certificate",
        "        if not _are_same(buffers, self.buffers) or not self._buffer_places.hold(self.buffers):\n",
        "        if not self._buffer_places.hold(self.buffers):\n",
        _replay("a_buffer_is_replaced_by_hand"),
    ),
    Guard(
        "place of buffers",
        "certificate",
        "        if not _are_same(buffers, self.buffers) or not self._buffer_places.hold(self.buffers):\n",
        "        if not _are_same(buffers, self.buffers):\n",
        _replay("strides_of_a_buffer_change_under_one_address"),
    ),
    Guard(
        "kind of gradients",
        "certificate",
        "        if not is_same_kind and not self._are_usable(gradients):\n",
        "        if False:\n",
        _replay("a_float64_gradient_is_native", "a_gradient_tensor_subclass_is_native"),
    ),
    Guard(
        "gradients whose values are the negatives of what lies there",
        "certificate",
        "gradient.device, gradient.is_neg())",
        "gradient.device, False)",
        _replay("a_lazily_negated_gradient_is_native"),
    ),
    Guard(
        "gradients on written memory",
        "certificate",
        "                if ranges.meet_bytes(address, address + num_bytes):\n",
        "                if False:\n",
        _replay("a_gradient_on_written_memory_is_native"),
    ),
    Guard(
        "gradients of another layout at a known address",
        "certificate",
        "self.gradient_addresses = []  # first",
        "pass  # first",
        _replay("a_gradient_that_reaches_written_memory_by_its_strides_is_native"),
    ),
    Guard(
        "gradients that moved",
        "certificate",
        "are_at(gradients, self.gradient_addresses, self._every_place):\n",
        "True:\n",
        _replay("a_gradient_on_written_memory_is_native"),
    ),
    Guard(
        "written tensors that overlap, across groups",
        "certificate",
        "        if self.has_overlap:\n",
        "        if False:\n",
        _replay("overlap_across_groups_is_native", "overlapping_parameters_are_native"),
    ),
    Guard(
        "float32",
        "certificate",
        "    if tensor.dtype != torch.float32:\n",
        "    if False:\n",
        _replay("other_dtypes_run_natively_beside_a_recording"),
    ),
    Guard(
        "dense memory",
        "certificate",
        'return None if is_dense(tensor) and not tensor.is_neg() else "layout"',
        "return None",
        _replay("gaps_in_memory_are_native"),
    ),
    Guard(
        "a device that has graphs",
        "certificate",
        "    if not graphs.can_capture(device):\n",
        "    if False:\n",
        ("tests/optim/test_optimizer.py::test_capture_on_the_cpu_answers_native_with_a_counted_reason",),
    ),
    # Signature
    Guard(
        "structure",
        "capture",
        "if signature[position] != self._signature.get(position) or identity",
        "if identity",
        _replay("ns_steps_is_recorded_anew", "decay_comes_and_goes", "muon_s_flags_are_recorded_anew"),
    ),
    Guard(
        "types and signs in the structure",
        "capture",
        "        return {position: repr(structure) for position, structure in self.structures.items()}\n",
        "        return dict(self.structures)\n",
        _replay("the_sign_of_a_structural_zero_is_recorded_anew"),
    ),
    Guard(
        "numeric modes",
        "capture",
        "                elif modes != self._modes:\n",
        "                elif False:\n",
        _capture("a_numeric_mode_is_recorded_anew", "a_variable_that_chooses_kernels_is_recorded_anew"),
    ),
    Guard(
        "TF32",
        "context",
        "        _float32_precision(),\n",
        "",
        _capture("a_numeric_mode_is_recorded_anew", "modes_are_read_without_raising"),
    ),
    Guard(
        "reduced precision in float16",
        "context",
        "        matmul.allow_fp16_reduced_precision_reduction,\n",
        "",
        _capture("a_numeric_mode_is_recorded_anew"),
    ),
    Guard(
        "reduced precision in bfloat16",
        "context",
        "        matmul.allow_bf16_reduced_precision_reduction,\n",
        "",
        _capture("a_numeric_mode_is_recorded_anew"),
    ),
    Guard(
        "deterministic algorithms",
        "context",
        "        torch.are_deterministic_algorithms_enabled(),\n",
        "",
        _capture("a_numeric_mode_is_recorded_anew"),
    ),
    Guard(
        "the preferred BLAS",
        "context",
        "        torch.backends.cuda.preferred_blas_library(),\n",
        "",
        _capture("the_preferred_blas_is_a_mode"),
    ),
    Guard(
        "cuBLAS workspaces",
        "context",
        '        os.environ.get("CUBLAS_WORKSPACE_CONFIG"),\n',
        "",
        _capture("a_variable_that_chooses_kernels_is_recorded_anew"),
    ),
    Guard(
        "grouped kernels",
        "context",
        "        grouped.is_requested(),\n",
        "",
        _capture("a_variable_that_chooses_kernels_is_recorded_anew"),
    ),
    Guard(
        "which rule it is",
        "capture",
        " or identity(step.rule) != self._rule:\n",
        ":\n",
        _capture("an_exchanged_rule_is_another_rule"),
    ),
    Guard(
        "methods set on the rule itself",
        "optimizer",
        " and not vars(self.rule).keys() & set(RULE_METHODS)",
        "",
        _capture("an_exchanged_rule_is_another_rule"),
    ),
    Guard(
        "hyperparameters on written memory",
        "capture",
        "            if any(map(self.certificate.meets, step.scalar_tensors(position))):\n",
        "            if False:\n",
        _capture("a_learned_learning_rate_is_native"),
    ),
    Guard(
        "hyperparameters of groups outside the recording",
        "capture",
        "            if any(map(self.certificate.meets, step.scalar_tensors(position))):\n",
        "            if position not in self.ineligible and any(\n"
        "                map(self.certificate.meets, step.scalar_tensors(position))\n"
        "            ):\n",
        _capture("a_native_group_s_learning_rate_on_replayed_memory_is_native"),
    ),
    Guard(
        "a first graph without operations",
        "recording",
        "        if not self._inputs.submit():\n",
        "        self._inputs.submit()\n        if False:\n",
        _capture("no_recording_is_empty"),
    ),
    Guard(
        "the default dtype",
        "recording",
        "torch.zeros(len(names), dtype=torch.float32, device=device)",
        "torch.zeros(len(names), device=device)",
        _capture("the_default_dtype_does_not_matter"),
    ),
    Guard(
        "schemes of unknown dependence",
        "orthogonalization",
        ' if type(scheme) is NewtonSchulz else "scheme"',
        "",
        _capture("an_orthogonalisation_that_cannot_be_recorded_is_native"),
    ),
    Guard(
        "values of scalars",
        "recording",
        "            if self._last.get(name) != key:\n",
        "            if name not in self._last:\n",
        _replay("rewritten_scalars_are_live", "one_scalar_at_a_time_is_live"),
    ),
    Guard(
        "the sign of a zero scalar",
        "recording",
        "            key = (scalar, math.copysign(1.0, scalar))\n",
        "            key = (scalar, 1.0)\n",
        _replay("the_sign_of_a_zero_scalar_is_uploaded"),
    ),
    Guard(
        "types that raise",
        "optimizer",
        "            position: check_values(self.rule, position, group) for",
        "            position: self.rule.structure({**group, 'ns_steps': int(group['ns_steps'])}) for",
        _replay("a_float_count_raises_as_natively"),
    ),
    # Context
    Guard(
        "inference mode",
        "context",
        "    if torch.is_inference_mode_enabled():\n",
        "    if False:\n",
        _capture("a_forbidding_context_is_native_for_its_step"),
    ),
    Guard(
        "autocast",
        "context",
        "    if torch.is_autocast_enabled(device.type):\n",
        "    if False:\n",
        _capture("a_forbidding_context_is_native_for_its_step", "a_fallback_is_logged_once_a_reason"),
    ),
    Guard(
        "dispatch modes",
        "context",
        "    if has_dispatch_mode():\n",
        "    if False:\n",
        _capture("a_forbidding_context_is_native_for_its_step"),
    ),
    Guard(
        "tracing",
        "context",
        "    if torch.compiler.is_compiling():\n",
        "    if False:\n",
        _capture("a_traced_step_is_native"),
    ),
    Guard(
        "autograd",
        "orthogonalization",
        'return "autograd" if needs_graph(updates) else forbidding_mode(device)',
        "return forbidding_mode(device)",
        _capture("orthogonalisations_under_autograd_are_not_replayed"),
    ),
    Guard(
        "overridden methods",
        "capture",
        "        if not is_own:\n",
        "        if False:\n",
        _capture("overriding_classes_run_natively", "an_overriding_instance_runs_natively"),
    ),
    Guard(
        "rules that promise nothing",
        "optimizer",
        'vars(type(self.rule)).get("is_capturable")',
        "self.rule.is_capturable",
        _capture("overriding_classes_run_natively"),
    ),
    # The same certificate spares native steps their checks
    Guard(
        "dtypes that no step can use",
        "certificate",
        "gradient.layout == torch.strided and gradient.is_floating_point() and",
        "gradient.layout == torch.strided and",
        _capture("a_familiar_group_of_the_cpu_is_still_checked"),
    ),
    Guard(
        "parameters without elements",
        "optimizer",
        "places = members.left_out if is_known else None",
        "places = () if is_known else None",
        _capture("a_sparse_gradient_of_an_empty_parameter_is_still_found"),
    ),
    Guard(
        "another set of buffers",
        "certificate",
        "        if members.names != self._names:\n",
        "        if False:\n",
        _capture("buffers_that_depend_on_the_group_are_made_when_asked_for"),
    ),
    Guard(
        "gradients that nobody needs any more",
        "optimizer",
        "            self._familiar.dismiss()\n",
        "            pass\n",
        _capture("gradients_are_let_go_after_the_step"),
    ),
    # Span and life cycle
    Guard(
        "groups held back by another",
        "capture",
        'reasons={position: own.get(position, "held_back") for position in positions},',
        "reasons={position: own.get(position) for position in positions},",
        _replay("a_buffer_is_replaced_by_hand"),
    ),
    Guard(
        "loading",
        "optimizer",
        "            self._start_capture()\n        self.release()\n",
        "            self._start_capture()\n",
        _replay("loading_drops_recordings"),
    ),
    Guard(
        "new groups",
        "optimizer",
        "            raise\n        self.release()\n",
        "            raise\n",
        _capture("adding_a_group_drops_the_recording"),
    ),
    Guard(
        "owned results of the orthogonalisation",
        "orthogonalization",
        "            results = [torch.empty_like(result) for result in self._graph.result]\n",
        "            results = self._graph.result\n",
        _capture("replayed_orthogonalisations_never_alias"),
    ),
    # The graphs themselves
    Guard(
        "an enclosing capture",
        "context",
        '    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():\n',
        "    if False:\n",
        _graphs("an_enclosing_capture_succeeds"),
        gpu=True,
    ),
    Guard(
        "steps on another stream",
        "graphs",
        "            stream.wait_event(lane.done)\n",
        "            pass\n",
        _replay("unordered_streams_do_not_share_owned_inputs"),
        gpu=True,
    ),
    Guard(
        "the allocator's belief in a capture",
        "graphs",
        "    abandon_pool(",
        "    (lambda *_: None)(",
        _graphs("a_recording_that_fails_leaves_no_trace", "repeated_failures_keep_no_memory"),
        gpu=True,
    ),
    Guard(
        "generators left in a capture",
        "graphs",
        "            _heal(device, lane.streams[0])\n",
        "            pass\n",
        _graphs("a_recording_that_fails_leaves_no_trace"),
        gpu=True,
    ),
    Guard(
        "captures that disturb other threads",
        "graphs",
        'graph.capture_begin(pool=pool, capture_error_mode="thread_local")',
        'graph.capture_begin(pool=pool, capture_error_mode="global")',
        _graphs("pinned_memory_in_another_thread_does_not_matter", "a_sampling_thread_survives"),
        gpu=True,
    ),
    Guard(
        "the collector",
        "graphs",
        "    gc.disable()\n    try:\n",
        "    try:\n",
        _graphs("garbage_is_not_collected_while_recording"),
        gpu=True,
    ),
    Guard(
        "forked children",
        "graphs",
        "os.register_at_fork(after_in_child=_leak_all)\n",
        "",
        _graphs("a_process_with_live_graphs_ends"),
        gpu=True,
    ),
)


def _use_copy(folder: Path, guard: Guard) -> None:
    """Make this process and those that it starts import a copy of the package without the guard."""
    copy = folder / PACKAGE.name
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    module = copy / f"{guard.module}.py"
    module.write_text(module.read_text(encoding="utf-8").replace(guard.line, guard.disabled), encoding="utf-8")
    sys.path.insert(0, str(folder))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])


def _run_tests(guard: Guard | None, tests: tuple[str, ...], *, gpu: bool) -> tuple[int, str]:
    """Run tests in a forked child, under a disabled guard where there is one.

    Returns:
        Pytest's exit code, negative where a signal ended the child, and what it printed.
    """
    with tempfile.TemporaryFile() as output, tempfile.TemporaryDirectory() as folder:
        child = os.fork()
        if child == 0:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            if guard is not None:
                _use_copy(Path(folder), guard)
            options = ["-x", "-q", "-p", "no:cacheprovider", "-m", "gpu" if gpu else "not gpu"]
            code = int(pytest.main([*options, *tests]))
            sys.stdout.flush()
            os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        output.seek(0)
        return code, output.read().decode(errors="replace")


def _complaint(guard: Guard) -> str | None:
    """Return why a guard's regression cannot be trusted, or None."""
    found = (PACKAGE / f"{guard.module}.py").read_text(encoding="utf-8").count(guard.line)
    if found != 1:
        return f"its line occurs {found} times in {guard.module}.py"
    code, _ = _run_tests(guard, guard.tests, gpu=guard.gpu)
    if code < 0:  # the process died of it, which a run of the tests would have shown
        return None
    return None if code == pytest.ExitCode.TESTS_FAILED else f"its tests ended with {pytest.ExitCode(code).name}"


def _checked(guard: Guard) -> tuple[str | None, float]:
    """Return the complaint about a guard, and how many seconds it took to find out."""
    begin = time.monotonic()
    return _complaint(guard), time.monotonic() - begin


def main() -> int:
    """Check every guard; return the number of those whose tests do not notice."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--gpu", action="store_true", help="the guards that need a CUDA device, in place of the others")
    parser.add_argument("--only", default="", metavar="TEXT", help="only guards whose name holds TEXT")
    options = parser.parse_args()
    os.chdir(ROOT)
    torch.set_num_threads(1)
    guards = [guard for guard in GUARDS if guard.gpu is options.gpu and options.only in guard.name]
    tests = tuple(dict.fromkeys(test for guard in guards for test in guard.tests))
    code, output = _run_tests(None, tests, gpu=options.gpu)
    if code != pytest.ExitCode.OK:
        print(output)
        print(f"the tests of the guards do not pass with nothing changed: {code}")
        return 1
    num_unnoticed = 0
    # A device is shared badly: what one test leaves there would be another's memory.
    num_workers = 1 if options.gpu else os.cpu_count() or 1
    with multiprocessing.get_context("fork").Pool(num_workers) as pool:
        for guard, (complaint, seconds) in zip(guards, pool.imap(_checked, guards), strict=True):
            num_unnoticed += complaint is not None
            print(f"{complaint or 'noticed':40} {seconds:5.1f} s  {guard.name}", flush=True)
    print(f"{len(guards) - num_unnoticed} of {len(guards)} guards have a test that fails without them")
    return min(num_unnoticed, 1)


if __name__ == "__main__":
    sys.exit(main())
