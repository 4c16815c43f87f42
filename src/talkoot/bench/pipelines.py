"""Routes that skip, swap and avoid each other, against every other way to run the same model on the same machines.

The case is the published one of 20 nodes in 12 places, 6 stages of which 4 are visited, 30 microbatches of 8 sequences
(:mod:`talkoot.plan.published`, with the one slip of a unit corrected: no published route takes that link). All
contenders hold the published placement, so that routes are compared with routes; the rows "DT-FM placement" place the
nodes themselves. Every iteration is played by the same event simulation.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from itertools import pairwise

import msgspec

from talkoot.bench.outcome import Bar, Options, Outcome, Row
from talkoot.plan import published
from talkoot.plan.baselines import cost_aware, naive_skipping, straight
from talkoot.plan.networks import named_network
from talkoot.plan.placement import group_sizes, place
from talkoot.plan.playback import makespan, play
from talkoot.plan.problem import Problem, Routes
from talkoot.plan.search import find_routes, make_plan
from talkoot.serve.timeline import chrome_trace, timeline_html
from talkoot.train.planned import usual_problem

CLAIM = "Routed pipelines that skip a third of the stages take less than half the time of full ones"
NODES, STAGES = 20, 6
SAMPLES = (4, 8, 16)  # sequences of 1024 tokens per microbatch; the published case has 8
NAIVE_S = 48.9  # published; its random paths are not
AVOIDED, NAIVE_RATIO, CUT, FREE_GAIN, DEVIATION = 0.04, 0.70, 0.55, 0.20, 0.03
NEAR, MOST_NEAR, MOST_CPU_S = 0.15, 0.80, 60.0


class Effort(msgspec.Struct, frozen=True):
    """How long to search: iterations played per plan, and numbers of seeds, naive draws and random networks."""

    played: int
    seeds: int
    draws: int
    networks: int


class Random(msgspec.Struct, frozen=True):
    """A plan on a random network: its distance from the bound, whether it is valid, and what it took."""

    gap: float
    valid: bool
    cpu_s: float
    wall_s: float


def measure(options: Options) -> Outcome:
    """Play all contenders on the published case; then plan on random networks."""
    effort = Effort(2_500, 1, 5, 6) if options.quick else Effort(12_000, options.seeds, 15, 50)
    problem = usual_problem(named_network("gcp12", NODES), STAGES)
    routes = contenders(problem, effort)
    seconds = {name: [makespan(problem, one) for one in found] for name, found in routes.items()}
    cuts = {samples: cut(samples, effort) for samples in SAMPLES}
    found = [plan_random(seed, effort) for seed in range(effort.networks)]
    return Outcome(
        name="pipelines",
        claim=CLAIM,
        world=f"{NODES} nodes in 12 places, {STAGES} stages, {published.MICROBATCHES} microbatches; simulated",
        unit="seconds per iteration",
        rows=tuple(Row(name=name, values=tuple(values), note=NOTES.get(name, "")) for name, values in seconds.items()),
        bars=tuple(bars(seconds, cuts, found)),
        notes=tuple(notes(seconds, cuts, found)),
        extras=drawings(problem, {"ours": routes[EQUAL][0], "free": routes[FREE][0], "full": routes[FULL][0]}),
    )


FULL, NAIVE, BLIND, EQUAL, FREE = (
    "full pipeline, 1F1B",
    "naive skipping",
    "no collision avoidance",
    "ours, equal quotas",
    "ours, free quotas",
)
THEIR_FULL, THEIR_BLIND, THEIRS = "published full pipeline", "published, colliding", "published routes"
REPORTED = {THEIR_FULL: "full pipeline", THEIR_BLIND: "colliding", THEIRS: "avoiding"}
NOTES = {
    **{name: f"published {published.REPORTED_S[key]:.2f}" for name, key in REPORTED.items()},
    THEIR_FULL: f"published {published.REPORTED_S['full pipeline']:.2f}, for 27 microbatches",
    NAIVE: f"published {NAIVE_S}",
    FULL: "our matchings on the published placement, 30 microbatches",
}


def contenders(problem: Problem, effort: Effort) -> dict[str, list[Routes]]:
    """Routes by name, for each of the seeds."""
    groups, rules, count, seeds = published.GROUPS, published.RULES, published.MICROBATCHES, range(effort.seeds)
    placed = [place(problem, group_sizes(NODES, STAGES, rules.visits), seed=seed) for seed in seeds]

    def ours(where: Sequence[Sequence[int]], quotas: str, seed: int) -> Routes:
        free = "free" if quotas == "free" else "equal"
        return find_routes(problem, where, rules, count, seed=seed, effort=effort.played, quotas=free)

    return {
        THEIR_FULL: [published.full_routes()],
        FULL: [straight(problem, groups, count)],
        "DT-FM placement, full pipeline": [straight(problem, where, count) for where in placed],
        NAIVE: [naive_skipping(problem, groups, rules, count, seed=seed) for seed in range(effort.draws)],
        THEIR_BLIND: [published.colliding_routes()],
        BLIND: [cost_aware(problem, groups, rules, count, seed=seed) for seed in seeds],
        THEIRS: [published.avoiding_routes()],
        EQUAL: [ours(groups, "equal", seed) for seed in seeds],
        FREE: [ours(groups, "free", seed) for seed in seeds],
        "ours, DT-FM placement": [ours(where, "equal", seed) for seed, where in enumerate(placed)],
        "ours, DT-FM placement, free": [ours(where, "free", seed) for seed, where in enumerate(placed)],
    }


def cut(samples: int, effort: Effort) -> float:
    """Share of the full pipeline's time that skipping saves where microbatches have so many sequences."""
    problem = usual_problem(named_network("gcp12", NODES), STAGES, samples)
    full = makespan(problem, straight(problem, published.GROUPS, published.MICROBATCHES))
    rules, count = published.RULES, published.MICROBATCHES
    ours = find_routes(problem, published.GROUPS, rules, count, seed=0, effort=min(effort.played, 5_000))
    return 1 - makespan(problem, ours) / full


def plan_random(seed: int, effort: Effort) -> Random:
    """A whole plan, placement included, for 20 nodes in 12 cities drawn by ``seed``."""
    problem = usual_problem(named_network(f"random:{seed}", NODES), STAGES)
    sizes = group_sizes(NODES, STAGES, published.RULES.visits)
    cpu_s, wall_s = time.process_time(), time.monotonic()
    plan = make_plan(problem, sizes, published.RULES, published.MICROBATCHES, seed=seed, effort=effort.played)
    cpu_s, wall_s = time.process_time() - cpu_s, time.monotonic() - wall_s
    return Random(plan.gap, not plan.violations, cpu_s, wall_s)


def percentile_95(values: Sequence[float]) -> float:
    """The value that 95 % do not exceed."""
    return sorted(values)[-(-95 * len(values) // 100) - 1]


def bars(seconds: dict[str, list[float]], cuts: dict[int, float], found: Sequence[Random]) -> list[Bar]:
    """The requirements, by medians."""
    middle = {name: statistics.median(values) for name, values in seconds.items()}
    off = max(abs(middle[name] / published.REPORTED_S[key] - 1) for name, key in REPORTED.items())
    naive, saved = middle[EQUAL] / middle[NAIVE], 1 - middle[EQUAL] / middle[FULL]
    avoided = 1 - middle[THEIRS] / middle[THEIR_BLIND]
    gain = 1 - middle[FREE] / middle[EQUAL]
    falls = min(before - after for before, after in pairwise(cuts[samples] for samples in sorted(cuts)))
    near = sum(one.gap <= NEAR for one in found) / len(found)
    invalid, cpu_s = sum(not one.valid for one in found), percentile_95([one.cpu_s for one in found])
    return [
        Bar(text="published rows, largest deviation <= 3 %", measured=off, holds=off <= DEVIATION),
        Bar(text=f"ours / naive skipping <= {NAIVE_RATIO}", measured=naive, holds=naive <= NAIVE_RATIO),
        Bar(text="collision avoidance, published routes >= 4 %", measured=avoided, holds=avoided >= AVOIDED),
        Bar(text="cut against the full pipeline >= 55 %", measured=saved, holds=saved >= CUT),
        Bar(text="the cut shrinks from each number of tokens to the next > 0", measured=falls, holds=falls > 0),
        Bar(text="free quotas against equal ones >= 20 %", measured=gain, holds=gain >= FREE_GAIN),
        Bar(text=f"{len(found)} random networks: share within 15 % >= 80 %", measured=near, holds=near >= MOST_NEAR),
        Bar(text="random networks: invalid plans = 0", measured=invalid, holds=invalid == 0),
        Bar(
            text="random networks: processor s in which 95 % are planned < 60", measured=cpu_s, holds=cpu_s < MOST_CPU_S
        ),
    ]


def notes(seconds: dict[str, list[float]], cuts: dict[int, float], found: Sequence[Random]) -> list[str]:
    """What the bars leave out."""
    gaps = sorted(one.gap for one in found)
    middle = {name: statistics.median(values) for name, values in seconds.items()}
    return [
        "cut against the full pipeline by tokens per microbatch: "
        + ", ".join(f"{1024 * samples:,}: {share:.1%}" for samples, share in cuts.items()),
        f"ours / published naive skipping ({NAIVE_S} s): {middle[EQUAL] / NAIVE_S:.3f}",
        f"collision avoidance saves {1 - middle[EQUAL] / middle[BLIND]:.1%} against our own routes without it, which "
        f"are {1 - middle[BLIND] / middle[THEIR_BLIND]:.1%} shorter than the published ones without it",
        f"published full pipeline for 30 microbatches instead of 27: "
        f"{makespan(published.published_problem(), published.full_routes(30)):.1f} s",
        f"random networks: gap to the bound median {statistics.median(gaps):.1%}, largest {gaps[-1]:.1%}; "
        f"95 % planned in {percentile_95([one.wall_s for one in found]):.1f} s of wall time beside whatever else ran",
        "gaps are to a bound that is proven, not to the optimum, which is not known",
    ]


TITLES = {"ours": "Skipping, equal quotas", "free": "Skipping, free quotas", "full": "Full pipeline"}


def drawings(problem: Problem, routes: dict[str, Routes]) -> dict[str, str]:
    """A page and a trace of an iteration of each."""
    files: dict[str, str] = {}
    for name, one in routes.items():
        iteration = play(problem, one)
        title = f"{TITLES[name]}: {NODES} nodes in 12 places"
        page = timeline_html(title, problem.names, iteration.spans, one.groups)
        files[f"pipelines-{name}.html"] = page
        files[f"pipelines-{name}.trace.json"] = json.dumps(chrome_trace(problem.names, iteration.spans, one.groups))
    return files
