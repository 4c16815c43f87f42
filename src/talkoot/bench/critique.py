"""Learning from feedback instead of rewards: does a critique that follows one's own steps teach more than a solution?

All arms start from the same base and learn from the same number of rollouts, on additions where every column carries.
``binary``: GRPO in groups of 8. ``reference``: a self-teacher sees a worked solution, by an author whose order of
operands varies as the demonstrators' did; ``in one order``: always the task's own. ``step-aligned``: it sees the
rollout's right steps verbatim and the first wrong one corrected. The localisation is measured on the base's rollouts,
before anything is learned (arXiv 2606.11173 published the first three on another model and task).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from statistics import fmean

import msgspec

from talkoot.bench.chart import chart
from talkoot.bench.outcome import Bar, Options, Outcome, Row
from talkoot.bench.peer_critique import ALIGNED, BINARY, FORWARD, ONE_ORDER, REFERENCE, Setting, Trial, learn_all

CLAIM = "Critiques that follow one's own steps blame the first mistake alone, and teach more than rewards do"
MOST_AT_MISTAKE, MOST_BLAMED = -1.0, 0.10
PUBLISHED = (
    "published (Qwen3-1.7B, 30 problems, best checkpoints; Pass, Maj, Avg@12 in %): GRPO 76.7, 26.7, 19.7; reference "
    "86.7, 43.3, 30.6; step-aligned 90.0, 56.7, 35.8"
)


def measure(options: Options) -> Outcome:
    """All arms for each seed; ``quick``: three of them, a shorter warm start, a quarter of the rollouts, one seed."""
    if options.quick:
        setting = Setting(warm_steps=400, marks=(320,), problems=48, blamed=4)
        trials = learn_all(setting, (BINARY, REFERENCE, ALIGNED), [1])
    else:
        setting = Setting()
        arms = (BINARY, REFERENCE, ONE_ORDER, ALIGNED, *FORWARD)
        trials = learn_all(setting, arms, range(1, options.seeds + 1))
    found: dict[str, list[Trial]] = {}
    for trial in trials:
        found.setdefault(trial.condition, []).append(trial)
    return Outcome(
        name="critique",
        claim=CLAIM,
        world=f"additions where every column carries, 0.23 million parameters, "
        f"{sum(trial.cpu_s for trial in trials):,.0f} CPU-seconds of learning",
        unit=f"held-out accuracy after {setting.marks[-1]:,} rollouts; nats",
        rows=tuple(_rows(found)),
        bars=tuple(_bars(found, options.quick)),
        notes=tuple(_notes(found)),
        extras={
            "critique-trials.json": json.dumps([msgspec.to_builtins(trial) for trial in trials], indent=1) + "\n",
            "critique-curves.svg": chart(
                f"Avg@{setting.samples} on held-out problems",
                "rollouts",
                {name: [[(p.rollouts, p.avg) for p in trial.curve] for trial in runs] for name, runs in found.items()},
            ),
        },
    )


def _rows(found: Mapping[str, Sequence[Trial]]) -> list[Row]:
    rows: list[Row] = []
    for name, runs in found.items():
        last = [trial.curve[-1] for trial in runs]
        rows.append(Row(name=f"{name}: Avg@12", values=tuple(point.avg for point in last)))
        rows.append(Row(name=f"{name}: Pass@12", values=tuple(point.passed for point in last)))
        rows.append(Row(name=f"{name}: Maj@12", values=tuple(point.majority for point in last)))
        places = [trial.localisation for trial in runs]
        at = tuple(one.first_wrong for one in places if one.first_wrong is not None)
        blamed = tuple(one.prefix_blamed for one in places if one.prefix_blamed is not None)
        if at and blamed:
            rows.append(Row(name=f"{name}: A at the first wrong token", values=at))
            rows.append(Row(name=f"{name}: share of the right prefix below -0.1", values=blamed))
    return rows


def _bars(found: Mapping[str, Sequence[Trial]], quick: bool) -> list[Bar]:
    places = [trial.localisation for trial in found[ALIGNED.name]]
    at = max(one.first_wrong if one.first_wrong is not None else 0.0 for one in places)
    blamed = max(one.prefix_blamed if one.prefix_blamed is not None else 1.0 for one in places)
    bars = [
        Bar(
            text=f"step-aligned: A at the first wrong token < {MOST_AT_MISTAKE}",
            measured=at,
            holds=at < MOST_AT_MISTAKE,
        ),
        Bar(
            text=f"step-aligned: right prefix below -0.1 <= {MOST_BLAMED}", measured=blamed, holds=blamed <= MOST_BLAMED
        ),
    ]
    if quick:  # one seed and a quarter of the rollouts do not tell the arms apart
        return bars
    mean = {name: fmean(trial.curve[-1].avg for trial in runs) for name, runs in found.items()}
    gain, more = mean[REFERENCE.name] - mean[BINARY.name], mean[ALIGNED.name] - mean[REFERENCE.name]
    return [
        *bars,
        Bar(text="Avg@12, reference - binary > 0 (means)", measured=gain, holds=gain > 0),
        Bar(text="Avg@12, step-aligned - reference > 0 (means)", measured=more, holds=more > 0),
    ]


def _notes(found: Mapping[str, Sequence[Trial]]) -> list[str]:
    first = next(iter(found.values()))
    marks = [point.rollouts for point in first[0].curve]
    curves = [
        f"{name}: Avg@12 after "
        + ", ".join(f"{mark}: {fmean(t.curve[at].avg for t in runs):.3f}" for at, mark in enumerate(marks))
        for name, runs in found.items()
    ]
    order = sorted(found, key=lambda name: -fmean(trial.curve[-1].avg for trial in found[name]))
    return [*curves, f"the measured order: {' > '.join(order)}", PUBLISHED]
