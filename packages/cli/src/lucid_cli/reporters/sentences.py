"""The verdict of a report in one sentence."""

from lucid_cli.reporters.words import interval, percent, reason_words
from lucid_profiler.compare import Analysis
from lucid_profiler.pairs import MAX_PAIRS_NEEDED

NO_CUDA = "capture needs a CUDA device: both arms ran the native path, so there is no speed verdict"

__all__ = ["NO_CUDA", "verdict_sentence"]


def verdict_sentence(analysis: Analysis) -> str:
    """Return what the report comes to, or why it comes to nothing."""
    verdict = analysis.verdict
    if analysis.parity.status == "different" and analysis.parity.difference is not None:
        # Also where there are too few pairs for a verdict on speed.
        found = analysis.parity.difference.text
        return f"parity failed: {found}; this is not the same computation, and no speed verdict is given"
    if verdict.decision in {"better", "worse"}:
        return _speed(analysis)
    if verdict.decision == "inconclusive":
        return _inconclusive(analysis)
    if verdict.decision == "undecidable":
        return (
            f"undecidable: the {analysis.base} runs differ among themselves ({verdict.detail}); "
            "make the training repeatable first"
        )
    return _withheld(analysis)


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
    if verdict.pairs_needed is None:
        needed = f"not even {MAX_PAIRS_NEEDED:,} pairs would settle it"
    else:
        needed = f"about {verdict.pairs_needed} pairs would settle it if mean and spread stay"
    between = interval(effect.t_low, effect.t_high)
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
    counted = ", ".join(f"{reason_words(reason)} ({count})" for reason, count in captured.reasons.items())
    num_native = captured.num_runs - captured.num_replaying
    return (
        f"no speed verdict: {num_native} of {captured.num_runs} {analysis.other} runs replayed nothing: "
        f"{counted or 'no reason given'}"
    )
