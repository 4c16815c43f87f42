"""How a plan on a network is told: as data, and as tables for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from talkoot.cli.output import print_table
from talkoot.plan.playback import play, rtt
from talkoot.plan.problem import Problem, Routes
from talkoot.plan.profile import Profile
from talkoot.plan.search import FailureCost, Plan

WORTH = 0.02  # a gain below this share is not worth a word


def plan_view(profile: Profile, problem: Problem, plan: Plan) -> dict[str, Any]:
    """A plan as plain data, by the nodes' names; ``placement`` is what --placement reads."""
    names, routes = problem.names, plan.routes
    return {
        "seconds": plan.seconds,
        "lower_bound_s": plan.bound_s,
        "gap_to_bound": plan.gap,
        "fluid_bound_s": plan.fluid_bound_s,
        "all_reduce_s": plan.all_reduce_s,
        "bound_by": plan.binding,
        "violations": list(plan.violations),
        "placement": [[names[node] for node in group] for group in routes.groups],
        "holders": _holders(profile, problem, plan),
        "lanes": _lanes(problem, routes),
        "microbatches_per_origin": dict(sorted(_sent(problem, routes).items())),
    }


def failure_views(problem: Problem, costs: Sequence[FailureCost]) -> list[dict[str, Any]]:
    """What the loss of each node costs, the dearest first, and before these what cannot be borne at all."""
    ordered = sorted(costs, key=lambda cost: -(cost.seconds or float("inf")))
    return [
        {
            "node": problem.names[cost.node],
            "seconds": cost.seconds,
            "times_as_long": cost.ratio,
            "impossible_because": cost.why or None,
        }
        for cost in ordered
    ]


def _holders(profile: Profile, problem: Problem, plan: Plan) -> list[dict[str, Any]]:
    busy = play(problem, plan.routes).busy_share()
    lanes = Counter(node for lane in plan.routes.lanes if lane.count for node in (lane.origin, *lane.relays))
    return [
        {
            "stage": stage,
            "node": problem.names[node],
            "location": profile.nodes[node].location,
            "slots": problem.slots[node],
            "lanes": lanes[node],
            "busy_share": busy.get(node, 0.0),
        }
        for stage, group in enumerate(plan.routes.groups)
        for node in group
    ]


def _lanes(problem: Problem, routes: Routes) -> list[dict[str, Any]]:
    stage_of = routes.stage_of()
    return [
        {
            "path": [problem.names[node] for node in path],
            "stages": [stage_of[node] for node in path],
            "microbatches": lane.count,
            "round_trip_s": rtt(problem, routes.groups, lane.origin, lane.relays),
        }
        for lane in routes.lanes
        for path in ((lane.origin, *lane.relays),)
        if lane.count
    ]


def _sent(problem: Problem, routes: Routes) -> Counter[str]:
    sent: Counter[str] = Counter({problem.names[node]: 0 for node in routes.groups[0]})
    for lane in routes.lanes:
        sent[problem.names[lane.origin]] += lane.count
    return sent


def show(answer: Mapping[str, Any], views: Mapping[str, Mapping[str, Any]]) -> None:
    """Print the answer: all plans side by side, then who holds and does what in the first."""
    print(
        f"{answer['network']}: {answer['nodes']} nodes, {answer['stages']} stages, of which a microbatch visits "
        f"{answer['visits']}; {answer['microbatches']} microbatches per iteration; seed {answer['seed']}\n"
    )
    _compare(views)
    first, *others = views
    print(f"\nwho holds which stage ({first} quotas)")
    rows = [
        (
            row["stage"],
            row["node"],
            row["location"],
            f"{row['lanes']} of {row['slots']}",
            f"{row['busy_share']:.0%}",
        )
        for row in views[first]["holders"]
    ]
    print_table(rows, ("stage", "node", "place", "slots used", "busy"))
    print(f"\nwhich ways microbatches take ({first} quotas)")
    print_table(_ways(views[first]["lanes"]), ("path", "stages", "lanes", "microbatches", "alone"))
    if "failures" in views[first]:
        print(f"\nwhat the loss of one node costs ({first} quotas)")
        _show_failures(views[first]["failures"])
    for other in others:
        _recommend(views[first], views[other])


def _compare(views: Mapping[str, Mapping[str, Any]]) -> None:
    rows = [
        ("iteration", *(f"{view['seconds']:.2f} s" for view in views.values())),
        ("proven lower bound", *(f"{view['lower_bound_s']:.2f} s" for view in views.values())),
        ("  if lanes could mix paths", *(f"{view['fluid_bound_s']:.2f} s" for view in views.values())),
        ("gap to the bound", *(f"{max(view['gap_to_bound'], 0.0):.1%}" for view in views.values())),
        ("microbatches per origin", *(_span(view["microbatches_per_origin"].values()) for view in views.values())),
    ]
    if any("step_seconds" in view for view in views.values()):
        steps = (f"{view['step_seconds']:.2f} s" if "step_seconds" in view else "" for view in views.values())
        rows.append(("step, gradients mixed", *steps))
    print_table(rows, ("", *(f"{quotas} quotas" for quotas in views)))
    for quotas, view in views.items():
        print(f"what binds, {quotas} quotas: {view['bound_by']}")
        if view["violations"]:
            print(f"INVALID: {'; '.join(view['violations'])}")


def _span(values: Any) -> str:
    least, most = min(values), max(values)
    return f"{least}" if least == most else f"{least} to {most}"


def _ways(lanes: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, int, int, str]]:
    """One row per path, however many lanes take it."""
    found: dict[str, tuple[str, int, int, str]] = {}
    for lane in lanes:
        path = " > ".join(lane["path"])
        _, lanes_so_far, microbatches, _ = found.get(path, ("", 0, 0, ""))
        stages, alone = " ".join(map(str, lane["stages"])), f"{lane['round_trip_s']:.2f} s"
        found[path] = (stages, lanes_so_far + 1, microbatches + lane["microbatches"], alone)
    return [(path, *rest) for path, rest in found.items()]


def _show_failures(rows: Sequence[Mapping[str, Any]]) -> None:
    cells = [
        (row["node"], f"cannot go on: {row['impossible_because']}", "")
        if row["seconds"] is None
        else (row["node"], f"{row['seconds']:.2f} s", f"{row['times_as_long'] - 1:+.0%}")
        for row in rows
    ]
    print_table(cells, ("without", "iteration", "longer"))


def _recommend(first: Mapping[str, Any], free: Mapping[str, Any]) -> None:
    gain = 1 - free["seconds"] / first["seconds"]
    if gain < WORTH:
        print(f"\nrecommended: equal quotas; free ones save {f'{gain:.1%}' if gain > 0 else 'nothing'} here")
        return
    print(
        f"\nrecommended: free quotas, {gain:.0%} less time. A microbatch's data does not depend on its origin; equal "
        "quotas are\nfor origins that must each contribute as much. To see and keep that plan: --quotas free"
    )
