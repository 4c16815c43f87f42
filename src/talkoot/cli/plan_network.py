"""``talkoot plan --network``: who holds which stage, which ways microbatches take, and how good that is."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import cast

import msgspec

from talkoot.cli.output import print_json, say
from talkoot.cli.plan_losses import losses_view, show_losses
from talkoot.cli.plan_request import QUOTAS, Quotas, Request, bad
from talkoot.cli.plan_show import failure_views, plan_view, show
from talkoot.core.errors import TalkootError
from talkoot.core.plain import read_plain
from talkoot.model.config import ModelConfig
from talkoot.plan.placement import check_placement, group_sizes
from talkoot.plan.playback import play
from talkoot.plan.problem import Problem, Routes, Rules
from talkoot.plan.profile import Profile, load_profile
from talkoot.plan.routes_space import Space
from talkoot.plan.search import Plan, failure_costs, make_plan
from talkoot.serve.timeline import chrome_trace, timeline_html
from talkoot.train.planned import dump_recipe, planned_recipe, recipe_problem, usual_problem
from talkoot.train.recipe import Recipe
from talkoot.train.rehearse import NEVER, rehearse

WAVES = 2  # microbatches per lane where nobody says how many


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """What is planned: machines, costs, rules; sizes of the stages' groups, or the groups themselves."""

    profile: Profile
    problem: Problem
    rules: Rules
    groups: tuple[int, ...] | tuple[tuple[int, ...], ...]
    num_microbatches: int
    seed: int


def run(request: Request, *, recipe: Recipe | None, config: ModelConfig | None, as_json: bool) -> None:
    """Plan, write the files that were asked for, and print the answer."""
    if request.out is not None and (recipe is None or config is None):
        why = "without a recipe nobody says which model is to be trained on what"
        raise bad("--out", why, "name a recipe: talkoot plan RECIPE.toml --network ... --out FILE.toml")
    case = case_of(request, recipe, config)
    began_s = time.monotonic()
    wanted: tuple[Quotas, ...] = QUOTAS if request.quotas is None else (cast("Quotas", request.quotas),)
    budget_s = None if request.budget_s is None else request.budget_s / len(wanted)
    plans: dict[Quotas, Plan] = {
        quotas: search(case, quotas, contention=request.contention, budget_s=budget_s) for quotas in wanted
    }
    planning_s = time.monotonic() - began_s
    views = {quotas: plan_view(case.profile, case.problem, plan) for quotas, plan in plans.items()}
    routes = plans[wanted[0]].routes
    if request.failures:
        for quotas, plan in plans.items():
            costs = failure_costs(case.problem, plan.routes, case.rules, quotas=quotas, contention=request.contention)
            views[quotas]["failures"] = failure_views(case.problem, costs)
    if recipe is not None and config is not None:
        planned = planned_recipe(recipe, config, case.profile, routes, case.rules)
        views[wanted[0]]["step_seconds"] = iteration_s = step_seconds(planned, config)
        if request.failures:
            views[wanted[0]]["recovery"] = losses_view(planned, config, iteration_s)
        if request.out is not None:
            about = f"# {views[wanted[0]]['seconds']:.2f} s per iteration predicted; planned on {case.profile.name}\n"
            request.out.write_text(about + dump_recipe(planned), encoding="utf-8")
    if request.timeline is not None:
        request.timeline.write_text(timeline(request, case, routes), encoding="utf-8")
    answer = {
        "network": case.profile.name,
        "nodes": len(case.profile.nodes),
        "stages": case.problem.num_stages,
        "visits": case.rules.visits,
        "microbatches": case.num_microbatches,
        "seed": case.seed,
        "contention": request.contention,
        "planning_s": planning_s,
        "quotas": wanted[0],
        **views[wanted[0]],
        **views,
    }
    if as_json:
        print_json(answer)
    else:
        show(answer, views)
        if "recovery" in answer:
            show_losses(answer["recovery"])
    for path in (request.out, request.timeline):
        if path is not None:
            say(f"wrote {path}")


def case_of(request: Request, recipe: Recipe | None, config: ModelConfig | None) -> Case:
    """The machines, costs and rules that a command line and a recipe describe.

    Without a recipe, costs are those of :func:`talkoot.train.planned.usual_problem`.

    Raises:
        TalkootError: whatever does not fit together.
    """
    profile = load_profile(request.network or "", request.nodes, accept_outliers=request.accept_outliers)
    if request.slots is not None:
        nodes = tuple(msgspec.structs.replace(node, slots=request.slots) for node in profile.nodes)
        profile = msgspec.structs.replace(profile, nodes=nodes)
    stages = request.stages or (recipe.swarm.num_stages if recipe else 0)
    if not stages:
        raise bad("--stages", "nobody says into how many stages the model is cut", "add --stages S, or name a recipe")
    visits = request.visits or (recipe.train.visits if recipe else 0) or stages
    sizes = group_sizes(len(profile.nodes), stages, visits)
    if recipe is not None and config is not None:
        problem = recipe_problem(recipe, config, profile, stages)
    else:
        problem = usual_problem(profile, stages)
    groups = sizes if request.placement is None else check_placement(problem, read_placement(request.placement))
    rules = Rules(visits=visits)
    usual = recipe.train.microbatches if recipe else WAVES * _origin_slots(problem, groups)
    microbatches = request.microbatches or usual
    if request.placement is None:  # what no placement could mend is said before the search for one
        ends = [0, *accumulate(sizes)]
        Space(problem, [range(*ends[stage : stage + 2]) for stage in range(stages)], rules, microbatches)
    return Case(
        profile=profile,
        problem=problem,
        rules=rules,
        groups=groups,
        num_microbatches=microbatches,
        seed=request.seed if request.seed is not None else recipe.seed if recipe else 0,
    )


def read_placement(text: str) -> Sequence[Sequence[int | str]]:
    """Nodes of each stage: ``A,B/C/D,E``, or a TOML or JSON file with the key ``placement``, such as --json prints.

    Raises:
        TalkootError: the file is no such file.
    """
    path = Path(text)
    if not (path.suffix in (".toml", ".json") or path.is_file()):
        return [[name.strip() for name in stage.split(",") if name.strip()] for stage in text.split("/")]
    what = "the placement cannot be used"
    tree = read_plain(path, what)
    try:
        return msgspec.convert(tree.get("placement"), list[list[int | str]])
    except msgspec.ValidationError as problem:
        why = f"its key 'placement' is no list of a list of nodes per stage: {problem}"
        raise TalkootError(what, where=str(path), why=why, next='write placement = [["A", "B"], ["C"]]') from problem


def search(case: Case, quotas: Quotas, *, contention: bool, budget_s: float | None) -> Plan:
    """The best plan found for such quotas."""
    return make_plan(
        case.problem,
        case.groups,
        case.rules,
        case.num_microbatches,
        seed=case.seed,
        quotas=quotas,
        budget_s=budget_s,
        contention=contention,
    )


def step_seconds(planned: Recipe, config: ModelConfig) -> float:
    """Seconds of a whole step of the planned recipe, gradients mixed and committed, rehearsed without tensors."""
    short = msgspec.structs.replace(
        planned.train, steps=2, checkpoint_every=NEVER, evaluate_every=0, full_every=0, warmup=0
    )
    return rehearse(msgspec.structs.replace(planned, train=short), config).step_seconds


def timeline(request: Request, case: Case, routes: Routes) -> str:
    """The iteration on a time axis, as a page or as a trace, by the file's ending."""
    spans = play(case.problem, routes, contention=request.contention).spans
    names = case.problem.names
    if request.timeline is not None and request.timeline.suffix == ".json":
        return json.dumps(chrome_trace(names, spans, routes.groups))
    title = f"One iteration on {case.profile.name}"
    notes = (f"{case.rules.visits} of {case.problem.num_stages} stages visited", f"seed {case.seed}")
    return timeline_html(title, names, spans, routes.groups, notes)


def _origin_slots(problem: Problem, groups: Sequence[int] | Sequence[Sequence[int]]) -> int:
    """Slots of all origins, or of as many usual nodes as there will be origins."""
    first = groups[0]
    if isinstance(first, int):
        return first * sorted(problem.slots)[len(problem.slots) // 2]
    return sum(problem.slots[node] for node in first)
