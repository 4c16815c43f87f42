"""What a plan predicts, against the shipping lead and peers in virtual time, who run the planned recipe."""

from __future__ import annotations

import msgspec
import pytest

from talkoot.plan import published
from talkoot.plan.networks import named_network
from talkoot.plan.placement import group_sizes, place
from talkoot.plan.playback import play
from talkoot.plan.problem import Routes, Rules
from talkoot.plan.search import find_routes
from talkoot.train.planned import planned_recipe, recipe_problem
from talkoot.train.prepare import model_config
from talkoot.train.recipe import Model, Recipe, Train
from talkoot.train.rehearse import Rehearsal, rehearse


class Compared(msgspec.Struct, frozen=True):
    """An iteration as predicted, and as rehearsed from the first forward to the last backward; the whole step."""

    predicted_s: float
    rehearsed_s: float
    step_s: float
    mixing_s: float


def compare(network: str, nodes: int, stages: int, rules: Rules, microbatches: int, routes: Routes | int) -> Compared:
    """Compare given routes, or those that a short search finds from a seed."""
    profile = named_network(network, nodes)
    recipe = Recipe(
        model=Model(depth=2 * stages, context=128),
        train=Train(steps=2, microbatches=microbatches, microbatch_size=4, evaluate_every=0, checkpoint_every=0),
    )
    config = model_config(recipe)
    problem = recipe_problem(recipe, config, profile, stages)
    if isinstance(routes, int):
        groups = place(problem, group_sizes(nodes, stages, rules.visits), seed=routes, effort=64)
        routes = find_routes(problem, groups, rules, microbatches, seed=routes, effort=300)
    found = rehearse(planned_recipe(recipe, config, profile, routes, rules), config, diary=True)
    share = max(problem.share_s[a][b] for group in routes.groups for a in group for b in group)
    return Compared(play(problem, routes).seconds, iteration_s(found), found.step_seconds, share)


def iteration_s(rehearsal: Rehearsal) -> float:
    """Seconds from the first forward to the last backward of the second step."""
    work = [one for one in rehearsal.computations if phase(one.work) in ("forward", "loss", "backward")]
    second = work[len(work) // 2 :]
    return max(one.end for one in second) - min(one.start for one in second)


def phase(work: object) -> str:
    return getattr(getattr(work, "func", None), "__name__", "")


CASES = {"gcp12": (20, 6, 4, 30), "random:3": (20, 6, 4, 30), "random:5:unlike": (8, 4, 3, 12), "dtfm": (12, 4, 4, 12)}


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("network", CASES)
def test_peers_take_as_long_as_a_searched_plan_predicts(network, seed):
    nodes, stages, visits, microbatches = CASES[network]
    found = compare(network, nodes, stages, Rules(visits=visits), microbatches, seed)
    assert found.rehearsed_s == pytest.approx(found.predicted_s, rel=0.01)
    assert 0 < found.step_s - found.rehearsed_s < 4 * found.mixing_s + 1, "the gradients' two exchanges, and the lead"


@pytest.mark.parametrize(
    ("routes", "visits"),
    [(published.avoiding_routes(), 4), (published.colliding_routes(), 4), (published.full_routes(), 6)],
)
def test_the_published_routes_take_as_long_as_predicted(routes, visits):
    found = compare("gcp12", 20, 6, Rules(visits=visits), routes.num_microbatches, routes)
    assert found.rehearsed_s == pytest.approx(found.predicted_s, rel=0.03)
