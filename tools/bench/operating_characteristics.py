"""How often reports of a known truth come to a verdict, a warning, and an interval that holds the truth.

`python tools/bench/operating_characteristics.py` prints the tables of docs/statistics.md: 2,000 reports a row, seeded
by the row's setting, so that every call prints the same. Needs neither torch nor a GPU.
"""

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # run as a script, only this file's folder is on the path

from tools.bench.simulated import Order, Setting, Tally, tally  # noqa: E402

NUM_REPORTS = 2000
EFFECTS = (0.0, -0.005, -0.01, -0.1)
DISTURBED = (
    Setting(name="independent noise"),
    Setting(name="drift, +0.4 % a run", drift=0.004),
    Setting(name="drift, +2 % a run", drift=0.02),
    Setting(name="a step of +15 %", step=0.15),
    Setting(name="two modes, +5 % in half of the runs", mode=0.05),
    Setting(name="first run +10 %, in the discarded pair", first=0.1),
    Setting(name="first run +10 %, no pair discarded", first=0.1, num_discarded=0),
)
SIZES = tuple(Setting(name="independent noise", num_pairs=n) for n in (3, 4, 5, 6, 8, 10))
ORDER_NAMES: dict[Order, str] = {"random": "order drawn for each pair", "base_first": "base always first"}
ORDERS = tuple(
    Setting(name=f"{words}, drift +{100 * drift:g} % a run", drift=drift, order=order, num_pairs=n)
    for order, words in ORDER_NAMES.items()
    for drift in (0.004, 0.02)
    for n in (3, 6)
)
MODES = (
    *(Setting(name="slow mode in half of the runs", mode=0.05, num_pairs=n) for n in (3, 6, 10)),
    Setting(name="slow mode in 20 % of the runs", mode=0.05, mode_shares=(0.2, 0.2)),
    Setting(name="slow mode in 20 % of the other arm's runs, none of the base's", mode=0.05, mode_shares=(0.0, 0.2)),
)
CONTROLS = tuple(
    Setting(name=name, effect=effect, bias=bias, num_controls=n)
    for name, effect, bias in (
        ("independent noise", 0.0, 0.0),
        ("independent noise", -0.01, 0.0),
        ("second names cost +1 %", 0.0, 0.01),
    )
    for n in (0, 4, 6)
)
CODES = ("drift", "step", "two_modes", "order_effect", "outlying_pair", "drift_explains")

Column = tuple[str, Callable[[Tally], str]]


def _rate(pick: Callable[[Tally], int]) -> Callable[[Tally], str]:
    return lambda counts: f"{100 * pick(counts) / counts.num_reports:.1f}"


NAME: Column = ("runs", lambda counts: counts.setting.name)
PAIRS: Column = ("pairs", lambda counts: str(counts.setting.num_pairs))
EFFECT: Column = ("effect %", lambda counts: f"{100 * counts.setting.effect:+.1f}" if counts.setting.effect else "0")
FOUND: Column = ("found", _rate(lambda counts: counts.found))
FALSE: Column = ("false", _rate(lambda counts: counts.false))
UNWARNED: Column = ("false, no warning", _rate(lambda counts: counts.unwarned_false))
NUM_CONTROLS: Column = ("control pairs", lambda counts: str(counts.setting.num_controls))
TAKEN_BACK: Column = ("found, taken back", _rate(lambda counts: counts.taken_back))
WARNED: Column = ("warned", _rate(lambda counts: counts.warned))
T: Column = ("t holds truth", _rate(lambda counts: counts.t_covers))
RANGE: Column = ("range holds truth", _rate(lambda counts: counts.range_covers))
STATED: Column = ("range's label", lambda counts: f"{100 * (1 - 2.0 ** (1 - counts.setting.num_pairs)):.1f}")


def _code(code: str) -> Column:
    return f"`{code}`", _rate(lambda counts: counts.codes[code])


def table(tallies: Iterable[Tally], columns: Sequence[Column]) -> list[str]:
    """Return the lines of a Markdown table, a row a setting."""
    rows = [[head for head, _ in columns], ["---"] * len(columns)]
    rows += [[show(counts) for _, show in columns] for counts in tallies]
    return [f"| {' | '.join(row)} |" for row in rows]


def main(argv: Sequence[str] | None = None) -> int:
    """Print every table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reports", type=int, default=NUM_REPORTS, help="simulated reports a row")
    num = parser.parse_args(argv).reports
    if num < 1:
        parser.error(f"--reports is {num}, at least 1 is needed")
    effects = [replace(setting, effect=effect) for setting in DISTURBED for effect in EFFECTS]
    sections: list[tuple[str, Iterable[Setting], list[Column]]] = [
        ("Verdicts", effects, [NAME, EFFECT, FOUND, FALSE, UNWARNED, WARNED, T, RANGE]),
        ("False alarms", SIZES, [PAIRS, FALSE, WARNED, *map(_code, CODES), T, RANGE, STATED]),
        ("One-sided orders", ORDERS, [NAME, PAIRS, FALSE, UNWARNED, WARNED, _code("drift_explains"), T]),
        ("Controls", CONTROLS, [NAME, NUM_CONTROLS, EFFECT, FOUND, FALSE, _code("control_differs"), TAKEN_BACK]),
        ("Modes", MODES, [NAME, PAIRS, FALSE, UNWARNED, WARNED, _code("two_modes"), T, RANGE, STATED]),
    ]
    for title, settings, columns in sections:
        print(f"{title}, percent of {num:,} reports:\n")
        print(*table((tally(setting, num) for setting in settings), columns), sep="\n", end="\n\n", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
