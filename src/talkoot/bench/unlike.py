"""Unlike models that learn from each other's completions: what is gained, when it goes wrong, and what holds.

Three pairs and a control. ``pair``: a model and a weaker one with other habits, whose completions begin with letters
that the first has never seen, each with 16 problems a round. ``flood``: the same at twice the rate, but the first
answers 4 problems a round and hears 16 of the other's: uncorrected, it is pulled away from what it knows. ``bytes``:
characters against bytes, which share texts and have one ratio per completion. ``twins``: two copies of one model,
whose ratio must be 1 and whose divergence must be 0.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean

import msgspec

from talkoot.bench.chart import chart
from talkoot.bench.outcome import Bar, Options, Outcome, Row
from talkoot.bench.peer_unlike import Arm, Base, Point, Setting, Side, Told, Trial, learn_all

CLAIM = "Unlike models improve each other by their completions alone; uncorrected exchange can ruin one, F-TIS does not"

GAMMA = 5.0  # nats per completion of some 24 tokens: about what 50 is at 200
STRONG = Base(name="strong")
LETTERS = Base(name="letters", width=64, habits={"swapped": 0.8, "letters": "abcdefgh", "prefix": 4})
BYTES = Base(name="bytes", width=64, tokenizer="bytes", habits={"swapped": 0.8})
ALDER, BIRCH = "alder", "birch"
PAIR = Setting(name="pair", sides={ALDER: Side(base=STRONG), BIRCH: Side(base=LETTERS)})
FLOOD = Setting(
    name="flood",
    sides={ALDER: Side(base=STRONG, prompts=4), BIRCH: Side(base=LETTERS)},
    rounds=60,
    rate=2e-4,
)
UNLIKE_TOKENS = Setting(name="bytes", sides={ALDER: Side(base=STRONG), BIRCH: Side(base=BYTES)})
TWINS = Setting(name="twins", sides={ALDER: Side(base=STRONG), BIRCH: Side(base=STRONG)}, rounds=1, problems=16)

ALONE = Arm(name="alone", correction=None)
NONE = Arm(name="none", correction={"rule": "none"})
FTIS = Arm(name="ftis", correction={"rule": "ftis", "gamma": GAMMA})
WHOLE = Arm(name="ftis, per completion", correction={"rule": "ftis", "gamma": GAMMA, "is_level": "sequence"})
OTHERS = (
    Arm(name="vis", correction={"rule": "vis"}),
    Arm(name="tis", correction={"rule": "tis"}),
    Arm(name="filter", correction={"rule": "filter", "gamma": GAMMA}),
    Arm(name="opsm", correction={"rule": "opsm"}),
)
ARMS = (ALONE, NONE, *OTHERS, FTIS, WHOLE)
WORSE = 0.02  # that a peer may be below training alone
COLLAPSE, HELD = 0.15, 0.05  # below alone: a collapse, and what is none
SAME = 1e-5  # of ratio 1 and divergence 0

Score = Callable[[Point], float]
Trials = Mapping[tuple[str, str], Sequence[Trial]]  # by setting and arm


def measure(options: Options) -> Outcome:
    """All arms of all pairs, for each seed; ``quick``: the flood, shorter, and the twins, with one seed."""
    seeds = range(1, 2 if options.quick else options.seeds + 1)
    plan = [(setting, arm, seed) for setting, arms in settings(options.quick) for arm in arms for seed in seeds]
    with tempfile.TemporaryDirectory() as folder:
        trials, warmed_s = learn_all(plan, Path(folder))
    found: dict[tuple[str, str], list[Trial]] = {}
    for trial in trials:
        found.setdefault((trial.setting, trial.arm), []).append(trial)
    spent_s = warmed_s + sum(trial.cpu_s for trial in trials)
    return Outcome(
        name="unlike",
        claim=CLAIM,
        world=f"additions, models of 0.23 and 0.10 million parameters, {spent_s:,.0f} CPU-seconds",
        unit="held-out greedy accuracy",
        rows=tuple(rows(found)),
        bars=tuple(bars(found, options.quick)),
        notes=tuple(notes(found)),
        extras={
            "unlike-trials.json": json.dumps([msgspec.to_builtins(trial) for trial in trials], indent=1) + "\n",
            "unlike-flood.svg": curves(found, FLOOD.name, ALDER),
        },
    )


def settings(quick: bool) -> tuple[tuple[Setting, tuple[Arm, ...]], ...]:
    """Pairs with their arms."""
    if quick:
        small = Base(name="strong", steps=250)
        other = msgspec.structs.replace(LETTERS, steps=150)
        sides = {
            ALDER: msgspec.structs.replace(FLOOD.sides[ALDER], base=small),
            BIRCH: msgspec.structs.replace(FLOOD.sides[BIRCH], base=other),
        }
        flood = msgspec.structs.replace(FLOOD, sides=sides, rounds=40, problems=128)
        twins = msgspec.structs.replace(TWINS, sides={name: Side(base=small) for name in TWINS.sides})
        return (flood, (ALONE, NONE, FTIS)), (twins, (FTIS,))
    return (PAIR, ARMS), (FLOOD, ARMS), (UNLIKE_TOKENS, (ALONE, NONE, WHOLE)), (TWINS, (FTIS,))


def rows(found: Trials) -> Iterator[Row]:
    """Each arm's held-out accuracy by peer, over seeds; what is not its accuracy stands in the note."""
    for (setting, arm), trials in found.items():
        if setting == TWINS.name:
            continue
        for name in trials[0].peers:
            ends = [trial.peers[name].last for trial in trials]
            others = {
                "Avg@4": fmean(end.avg for end in ends),
                "shifted": fmean(end.shifted for end in ends),
                "shifted Avg@4": fmean(end.shifted_avg for end in ends),
            }
            yield Row(
                name=f"{setting}, {name}: {arm}",
                values=tuple(end.greedy for end in ends),
                note=", ".join(f"{key} {value:.3f}" for key, value in others.items()),
            )


def greedy(point: Point) -> float:
    """Held-out greedy accuracy."""
    return point.greedy


def mean(found: Trials, setting: str, arm: Arm, name: str, score: Score = greedy) -> float:
    """Over seeds, of a peer's score at the end."""
    return fmean(score(trial.peers[name].last) for trial in found[setting, arm.name])


def gain(found: Trials, setting: str, arm: Arm, name: str, score: Score = greedy) -> float:
    """How far an arm's score is above training alone, mean over seeds."""
    return mean(found, setting, arm, name, score) - mean(found, setting, ALONE, name, score)


def bars(found: Trials, quick: bool) -> Iterator[Bar]:
    """The requirements."""
    if not quick:
        for name in PAIR.sides:
            below = -gain(found, PAIR.name, FTIS, name)
            yield _bar(f"pair, {name}: alone - ftis <= {WORSE}", below, below <= WORSE)
        above = gain(found, PAIR.name, FTIS, BIRCH)
        yield _bar("pair, the weaker: ftis - alone > 0", above, above > 0)
        drops = _drops(found, NONE)
        yield _bar(f"flood, mean: alone - none >= {COLLAPSE}", fmean(drops), fmean(drops) >= COLLAPSE)
        drops = _drops(found, FTIS)
        yield _bar(f"flood, mean: alone - ftis <= {HELD}", fmean(drops), fmean(drops) <= HELD)
    better = mean(found, FLOOD.name, FTIS, ALDER) - mean(found, FLOOD.name, NONE, ALDER)
    yield _bar("flood: ftis - none >= 0", better, better >= 0)
    firsts = [told.first for trial in found[TWINS.name, FTIS.name] for told in trial.peers.values()]
    ratio = max(abs(facts.get("ratio_max", math.inf) - 1) for facts in firsts)
    yield _bar(f"twins: |ratio - 1|, largest of all tokens, <= {SAME}", ratio, ratio <= SAME)
    apart = max(abs(facts.get(key, math.inf)) for facts in firsts for key in ("kl_naive", "kl_nonnegative"))
    yield _bar(f"twins: divergence <= {SAME}", apart, apart <= SAME)


def _drops(found: Trials, arm: Arm) -> list[float]:
    """Of the flooded peer below training alone, by seed."""
    pairs = zip(found[FLOOD.name, ALONE.name], found[FLOOD.name, arm.name], strict=True)
    return [alone.peers[ALDER].last.greedy - other.peers[ALDER].last.greedy for alone, other in pairs]


def _bar(text: str, measured: float, holds: bool) -> Bar:
    return Bar(text=text, measured=measured, holds=holds)


def notes(found: Trials) -> Iterator[str]:
    """How far the peers are from each other, what was left out, and gains and losses out of distribution."""
    for (setting, arm), trials in found.items():
        for name in trials[0].peers:
            yield f"{setting}, {name}, {arm}: " + _facts([trial.peers[name] for trial in trials])


def _facts(told: Sequence[Told]) -> str:
    """Means over seeds, of means over rounds."""
    names = ("ratio_median", "ratio_90", "ratio_99", "ratio_max", "above_cap_share", "kl_naive", "kl_nonnegative")
    filtered = {name for one in told for name in one.facts if name.startswith("filtered_by_peer")}
    means = {
        name: fmean(one.facts[name] for one in told if name in one.facts)
        for name in (*names, *sorted(filtered))
        if any(name in one.facts for one in told)
    }
    groups = f"{fmean(one.own for one in told):.0f} own and {fmean(one.external for one in told):.0f} external groups"
    return ", ".join([groups, *(f"{name} {value:.4g}" for name, value in means.items())])


def curves(found: Trials, setting: str, name: str) -> str:
    """A peer's held-out accuracy against rounds, all arms."""
    lines = {
        arm: [[(point.round, point.greedy) for point in trial.peers[name].curve] for trial in trials]
        for (which, arm), trials in found.items()
        if which == setting
    }
    return chart(f"Held-out greedy accuracy of {name}, {setting}", "rounds", lines)
