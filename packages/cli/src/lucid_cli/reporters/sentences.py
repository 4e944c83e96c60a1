"""The verdict of a report in one sentence."""

from lucid_cli.reporters.words import counted, interval, percent, reason_words
from lucid_profiler.compare import Analysis
from lucid_profiler.drift import AnalysisWarning
from lucid_profiler.pairs import MAX_PAIRS_NEEDED

NO_CUDA = "capture needs a CUDA device: both arms ran the native path, so there is no speed verdict"

__all__ = ["NO_CUDA", "verdict_sentence", "warning_sentence"]


def verdict_sentence(analysis: Analysis) -> str:
    """Return what the report comes to, or why it comes to nothing."""
    verdict = analysis.verdict
    if analysis.parity.status == "different":
        # Also where there are too few pairs for a verdict on speed.
        return _parity_failed(analysis)
    if verdict.decision in {"better", "worse"}:
        return _speed(analysis)
    if verdict.decision == "inconclusive":
        return _inconclusive(analysis)
    if verdict.decision == "undecidable":
        return _undecidable(analysis)
    return _withheld(analysis)


def warning_sentence(warning: AnalysisWarning, analysis: Analysis) -> str:
    """Return what a reader of the effect should know, with its numbers."""
    metric, base, other, at = analysis.verdict.metric, analysis.base, analysis.other, warning.numbers
    if warning.code == "drift":
        return (
            f"drift: {metric} changes by {percent(at['per_run'])} % a run, {percent(at['total'])} % over all, whatever "
            "the arm: look for clocks, heat and other users"
        )
    if warning.code == "step":
        return f"step: {metric} is {percent(at['size'])} % from run {at['run']:.0f} on, whatever the arm"
    if warning.code == "two_modes":
        num_high = at["num_high_base"] + at["num_high_other"]
        return (
            f"two modes: {num_high:.0f} of {at['num_runs']:.0f} runs are {percent(at['size'])} % apart in {metric} "
            f"({at['num_high_base']:.0f} {base}, {at['num_high_other']:.0f} {other}), which the t interval cannot know"
        )
    if warning.code == "order_effect":
        return f"order: pairs that began with {base} differ by {percent(at['difference'])} % from the others"
    if warning.code == "outlying_pair":
        return (
            f"outlier: pair {at['pair']:.0f} with {percent(at['effect'])} % is far from the others, which have "
            f"{percent(at['mean_without'])} % on average; it stays in the statistics"
        )
    return (
        f"order: {base} began {at['num_base_first']:.0f} pairs and {other} {at['num_other_first']:.0f}, so drift moves "
        f"the effect, by {percent(at['shift'])} %; without it the interval is {interval(at['low'], at['high'])} %"
    )


def _parity_failed(analysis: Analysis) -> str:
    parity, base = analysis.parity, analysis.base
    if parity.difference is None:
        return "parity failed: no speed verdict is given"
    found = f"parity failed: {parity.difference.text}"
    if parity.difference.is_missing:
        return f"{found}, so it cannot be compared, and no speed verdict is given"
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


def _speed(analysis: Analysis) -> str:
    verdict = analysis.verdict
    effect = analysis.metrics[verdict.metric].effect
    words = {"better": "faster", "worse": "slower"} if verdict.metric == "wall" else {}
    word = words.get(verdict.decision, verdict.decision)
    if effect is None:
        return f"{analysis.other} is {word}"
    between = interval(effect.t_low, effect.t_high)
    return (
        f"{analysis.other} is {word}: {percent(effect.median)} % {verdict.metric} over {effect.n} pairs, "
        f"95 % interval {between} %; {_equal_parts(verdict.parts)}"
    )


def _equal_parts(parts: tuple[str, ...]) -> str:
    return f"equal to the last bit: {', '.join(parts)}"


def _inconclusive(analysis: Analysis) -> str:
    verdict = analysis.verdict
    effect = analysis.metrics[verdict.metric].effect
    if effect is None or verdict.reason == "no_difference":
        return f"inconclusive: {verdict.metric} is the same in every pair"
    between = interval(effect.t_low, effect.t_high)
    if verdict.reason == "drift_explains":
        return (
            f"inconclusive: the 95 % interval {between} % of {verdict.metric} excludes 0, but {verdict.detail}; "
            "an even number of pairs in ABBA order cancels it"
        )
    if verdict.pairs_needed is None:
        needed = f"not even {MAX_PAIRS_NEEDED:,} pairs would settle it"
    else:
        needed = f"about {verdict.pairs_needed} pairs would settle it if mean and spread stay"
    return f"inconclusive: the 95 % interval {between} % of {verdict.metric} includes 0; {needed}"


def _withheld(analysis: Analysis) -> str:
    verdict = analysis.verdict
    if verdict.reason == "no_replays":
        return _no_replays(analysis)
    sentences = {
        "no_pairs": "no verdict: no pair of successful runs is in the statistics",
        "too_few_pairs": f"no verdict: {verdict.detail}",
        "parity_not_observed": "no speed verdict: no run left a digest of its state, so nothing says that the "
        "computation is the same",
        "native_replayed": f"no speed verdict: {verdict.detail}, so the arms are not what their names say",
    }
    return sentences.get(verdict.reason, f"no verdict: {verdict.detail or reason_words(verdict.reason)}")


def _no_replays(analysis: Analysis) -> str:
    captured = analysis.capture[analysis.other]
    if captured.reasons.keys() == {"no_cuda"} and not captured.replays:
        return NO_CUDA
    reasons = ", ".join(f"{reason_words(reason)} ({count})" for reason, count in captured.reasons.items())
    num_native = captured.num_runs - captured.num_replaying
    return (
        f"no speed verdict: {num_native} of {counted(captured.num_runs, f'{analysis.other} run')} replayed nothing: "
        f"{reasons or 'no reason given'}"
    )
