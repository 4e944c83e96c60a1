"""The verdict of a comparison in one sentence, and each warning in another."""

from collections.abc import Callable, Mapping

from lucid_cli.reporters.words import counted, counted_reasons, interval, level, percent, reason_words
from lucid_profiler.compare import Analysis, Difference
from lucid_profiler.drift import AnalysisWarning, WarningCode
from lucid_profiler.pairs import MAX_PAIRS_NEEDED

NO_CUDA = "capture needs a CUDA device: both arms ran the native path, so there is no speed verdict"

_PARITY = {"equal": "equal", "different": "different", "undecidable": "undecidable", "not_observed": "not observed"}

__all__ = [
    "NO_CUDA",
    "base_runs",
    "difference_warnings",
    "parity_code",
    "parity_status",
    "verdict_sentence",
    "warning_sentence",
]


def verdict_sentence(analysis: Analysis, *, alpha: float = 0.05) -> str:
    """Return what the comparison comes to, or why it comes to nothing; `alpha` is the rate of its intervals."""
    verdict = analysis.verdict
    if verdict.reason == "control":
        return _noise_floor(analysis)
    if analysis.parity.status == "different":
        # Also where there are too few pairs for a verdict on speed.
        return _parity_failed(analysis)
    if verdict.decision in {"better", "worse"}:
        return _speed(analysis, level(alpha))
    if verdict.decision == "inconclusive":
        return _inconclusive(analysis, level(alpha))
    if verdict.decision == "undecidable":
        return _undecidable(analysis)
    return _withheld(analysis)


def difference_warnings(difference: Difference) -> list[str]:
    """Return a sentence for each warning of two reports: what bends one of them bends what they differ by."""
    both = (("a", difference.analysis_a), ("b", difference.analysis_b))
    return [f"{name}: {warning_sentence(one, analysis)}" for name, analysis in both for one in analysis.warnings]


def warning_sentence(warning: AnalysisWarning, analysis: Analysis) -> str:
    """Return what a reader of the effect should know, with its numbers."""
    return _WARNINGS[warning.code](analysis, warning.numbers)


def parity_code(analysis: Analysis) -> str:
    """Return the code of whether both arms ended in the same state; `not_asked` of an arm that computes otherwise."""
    return "not_asked" if analysis.is_different else analysis.parity.status


def parity_status(analysis: Analysis, words: Mapping[str, str] = _PARITY) -> str:
    """Return whether both arms ended in the same state, by `words`; of one that is not asked, whether the base repeats.

    Every text says it with this function: the parity of such an arm is that of the base's runs among themselves.
    """
    if not analysis.is_different:
        return words[analysis.parity.status]
    runs = base_runs(analysis)
    return f"not asked (base runs {runs})" if runs in {"agree", "differ"} else "not asked"


def base_runs(analysis: Analysis) -> str:
    """Return whether the base's runs `agree` or `differ`, or are `not_repeated` or `not_observed`."""
    parity = analysis.parity
    if parity.status == "undecidable":
        return "differ"
    if parity.status == "not_observed":
        return "not_observed"
    return "agree" if parity.num_base_runs > 1 else "not_repeated"


def _drift(analysis: Analysis, at: dict[str, float]) -> str:
    return (
        f"drift: {analysis.verdict.metric} changes by {percent(at['per_run'])} % a run, {percent(at['total'])} % over "
        "all, whatever the arm: look for clocks, heat and other users"
    )


def _step(analysis: Analysis, at: dict[str, float]) -> str:
    return f"step: {analysis.verdict.metric} is {percent(at['size'])} % from run {at['run']:.0f} on, whatever the arm"


def _two_modes(analysis: Analysis, at: dict[str, float]) -> str:
    num_high = at["num_high_base"] + at["num_high_other"]
    return (
        f"two modes: {num_high:.0f} of {at['num_runs']:.0f} runs are {percent(at['size'])} % apart in "
        f"{analysis.verdict.metric} ({at['num_high_base']:.0f} {analysis.base}, {at['num_high_other']:.0f} "
        f"{analysis.other}), which the t interval cannot know"
    )


def _order_effect(analysis: Analysis, at: dict[str, float]) -> str:
    return f"order: pairs that began with {analysis.base} differ by {percent(at['difference'])} % from the others"


def _outlying_pair(_analysis: Analysis, at: dict[str, float]) -> str:
    return (
        f"outlier: pair {at['pair']:.0f} with {percent(at['effect'])} % is far from the others, which have "
        f"{percent(at['mean_without'])} % on average; it stays in the statistics"
    )


def _drift_explains(analysis: Analysis, at: dict[str, float]) -> str:
    return (
        f"order: {analysis.base} began {at['num_base_first']:.0f} pairs and {analysis.other} "
        f"{at['num_other_first']:.0f}, so drift moves the effect, by {percent(at['shift'])} %; without it the interval "
        f"is {interval(at['low'], at['high'])} %"
    )


def _control_differs(analysis: Analysis, at: dict[str, float]) -> str:
    between = f" by {percent(at['effect'])} % {interval(at['low'], at['high'])} %" if "effect" in at else ""
    return (
        f"control: over {at['num_pairs']:.0f} pairs {analysis.base} differs from itself{between} in "
        f"{analysis.verdict.metric}: the machine shows a difference where there is none"
    )


def _order_untested(analysis: Analysis, at: dict[str, float]) -> str:
    return (
        f"order: {analysis.base} began {counted(int(at['num_base_first']), 'pair')} and {analysis.other} "
        f"{at['num_other_first']:.0f}, so what a first run leaves to the second was not tested: that takes two of each"
    )


_WARNINGS: dict[WarningCode, Callable[[Analysis, dict[str, float]], str]] = {
    "drift": _drift,
    "step": _step,
    "two_modes": _two_modes,
    "order_effect": _order_effect,
    "outlying_pair": _outlying_pair,
    "drift_explains": _drift_explains,
    "control_differs": _control_differs,
    "order_untested": _order_untested,
}


def _parity_failed(analysis: Analysis) -> str:
    parity, base = analysis.parity, analysis.base
    if parity.difference is None:
        return "parity failed: no speed verdict is given"
    found = f"parity failed: {parity.difference.text}"
    if parity.difference.is_missing:
        return f"{found}, so it cannot be compared, and no speed verdict is given"
    if parity.difference.is_renamed:
        return f"{found}: without names in common nothing can be compared, and no speed verdict is given"
    if parity.num_base_runs < 2:
        return (
            f"{found}; the states differ, and with one {base} run nothing shows whether {base} runs repeat, so this "
            "may be nondeterminism: run more pairs; no speed verdict is given"
        )
    return f"{found}; this is not the same computation, and no speed verdict is given"


def _undecidable(analysis: Analysis) -> str:
    difference = analysis.parity.difference
    if difference is not None and difference.is_missing:
        return f"undecidable: {difference.text}, so the {analysis.base} runs cannot be held against each other"
    return (
        f"undecidable: the {analysis.base} runs differ among themselves ({analysis.verdict.detail}); "
        "make the training repeatable first"
    )


def _speed(analysis: Analysis, level: str) -> str:
    verdict = analysis.verdict
    effect = analysis.metrics[verdict.metric].effect
    words = {"better": "faster", "worse": "slower"} if verdict.metric == "wall" else {}
    word = words.get(verdict.decision, verdict.decision)
    if analysis.is_different:
        word += ", not the same computation"
    if effect is None:
        return f"{analysis.other} is {word}"
    between = interval(effect.t_low, effect.t_high)
    equal = "" if analysis.is_different else f"; {_equal_parts(verdict.parts)}"
    return (
        f"{analysis.other} is {word}: {percent(effect.mean)} % {verdict.metric} on average over {effect.n} pairs, "
        f"{level} interval {between} %{equal}"
    )


def _noise_floor(analysis: Analysis) -> str:
    """Say how far apart runs of the base are."""
    metric = analysis.metrics.get(analysis.verdict.metric)
    against = f"{analysis.base} against itself"
    if metric is None or metric.effect is None:
        return f"{against}: no pair has a value of {analysis.verdict.metric}"
    effect = metric.effect
    between = f" {interval(effect.t_low, effect.t_high)} %" if effect.n > 1 else ""
    floor = f"{against}: {percent(effect.mean)} %{between} {analysis.verdict.metric}, n = {effect.n}"
    return f"{floor}: what the machine does to equal runs"


def _equal_parts(parts: tuple[str, ...]) -> str:
    return f"equal to the last bit: {', '.join(parts)}"


def _inconclusive(analysis: Analysis, level: str) -> str:
    verdict = analysis.verdict
    effect = analysis.metrics[verdict.metric].effect
    if effect is None or verdict.reason == "no_difference":
        return f"inconclusive: {verdict.metric} is the same in every pair"
    between = interval(effect.t_low, effect.t_high)
    if verdict.reason == "control_differs":
        return (
            f"inconclusive: the {level} interval {between} % of {verdict.metric} excludes 0, but {verdict.detail}; "
            "find what bends the runs before believing either"
        )
    if verdict.reason == "drift_explains":
        return (
            f"inconclusive: the {level} interval {between} % of {verdict.metric} excludes 0, but {verdict.detail}; "
            "an even number of pairs in ABBA order cancels it"
        )
    if verdict.pairs_needed is None:
        needed = f"not even {MAX_PAIRS_NEEDED:,} pairs would settle it"
    else:
        needed = f"about {verdict.pairs_needed} pairs would settle it if mean and spread stay"
    return f"inconclusive: the {level} interval {between} % of {verdict.metric} includes 0; {needed}"


def _withheld(analysis: Analysis) -> str:
    verdict = analysis.verdict
    if verdict.reason == "no_replays":
        return _no_replays(analysis)
    sentences = {
        "no_pairs": "no verdict: no pair of successful runs is in the statistics",
        "too_few_pairs": f"no verdict: {verdict.detail}",
        "parity_not_observed": "no speed verdict: no run left a digest of its state, so nothing says that the "
        "computation is the same",
        "parity_incomplete": f"no speed verdict: not all that was trained is in a digest ({verdict.detail}), so "
        "nothing says that the computation is the same",
        "walls_differ": f"no speed verdict: {verdict.detail}, so the walls do not compare; mark the same work in every "
        "arm with lucid_profiler.fit()",
        "native_replayed": f"no speed verdict: {verdict.detail}, so the arms are not what their names say",
    }
    return sentences.get(verdict.reason, f"no verdict: {verdict.detail or reason_words(verdict.reason)}")


def _no_replays(analysis: Analysis) -> str:
    told = (analysis.verdict.detail or "").partition(":")[0]
    arm = next((arm for arm in analysis.capture if told.endswith(f" {arm} runs replayed nothing")), analysis.other)
    captured = analysis.capture[arm]
    if captured.reasons.keys() == {"no_cuda"} and not captured.replays:
        return NO_CUDA
    num_native = captured.num_runs - captured.num_replaying
    return (
        f"no speed verdict: {num_native} of {counted(captured.num_runs, f'{arm} run')} replayed nothing: "
        f"{counted_reasons(captured.reasons) or 'no reason given'}"
    )
