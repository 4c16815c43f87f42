"""From a plan to a recipe: the same seconds, the same links, the same routes, and a file that says all of it."""

from __future__ import annotations

import math
import random
import tomllib
from itertools import permutations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from talkoot.core.errors import TalkootError
from talkoot.core.toml import to_toml
from talkoot.plan.networks import random_network
from talkoot.plan.problem import Lane, Problem, Routes, Rules
from talkoot.plan.profile import Node, Profile
from talkoot.train.compute import BlankStage, hop_bytes
from talkoot.train.planned import (
    dump_recipe,
    peer_names_of,
    planned_recipe,
    recipe_problem,
    ring_stages,
    stage_parameters,
)
from talkoot.train.prepare import cut_stages, model_config
from talkoot.train.recipe import Data, Model, Recipe, Swarm, Train, build_recipe, load_recipe
from talkoot.world.faults import Fault
from talkoot.world.links import Link

# -- TOML ---------------------------------------------------------------------------------------------------------

scalars = st.one_of(
    st.text(), st.integers(-(2**63), 2**63 - 1), st.booleans(), st.floats(allow_nan=False, allow_infinity=False)
)
plain = st.recursive(
    scalars, lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(), inner, max_size=4))
)


@settings(max_examples=200)
@given(st.dictionaries(st.text(), plain, max_size=5))
def test_what_is_written_as_toml_is_read_back_equal(tree):
    assert tomllib.loads(to_toml(tree)) == tree


def test_toml_leaves_out_what_it_cannot_say_and_refuses_what_no_number_is():
    assert tomllib.loads(to_toml({"a": None, "b": {"c": None, "d": 1}})) == {"b": {"d": 1}}
    with pytest.raises(ValueError, match="not JSON compliant"):
        to_toml({"a": math.nan})


# -- names --------------------------------------------------------------------------------------------------------


@given(st.lists(st.text(alphabet="ab ->2-lead\t\u00a0", max_size=8), max_size=8))
def test_peers_get_names_that_a_recipe_takes_and_nobody_gets_two(names):
    found = peer_names_of(names)
    assert len(set(found)) == len(found) == len(names)
    if found:
        Recipe(swarm=Swarm(layout="ring", groups=(len(found),), names=tuple(found)))


def test_good_names_are_kept_and_others_are_like_them():
    assert peer_names_of(["Iowa", "New York", "New York", "lead", "a - > b"]) == [
        "Iowa",
        "New-York",
        "New-York-2",
        "lead-2",
        "a-----b",
    ]


# -- costs and recipes --------------------------------------------------------------------------------------------

BASE = Recipe(
    name="planned",
    model=Model(depth=5, context=64),
    train=Train(steps=3, microbatches=6, microbatch_size=2, full_every=4),
    faults=(Fault(peer="alder", step=1, phase="mix"),),
)
CONFIG = model_config(BASE)
RULES = Rules(visits=3)
ROUTES = Routes(
    groups=((3, 0), (1, 6), (2,), (5,)),  # node 4 stays idle
    lanes=(Lane(0, (1, 2), 2), Lane(3, (2, 6), 0), Lane(3, (6, 5), 2), Lane(0, (2, 5), 2)),
)


def profile_of(seed: int = 1) -> Profile:
    profile = random_network(seed, 7, unlike=True)
    nodes = list(profile.nodes)
    nodes[0] = msgspec.structs.replace(nodes[0], name="two words")
    nodes[5] = msgspec.structs.replace(nodes[5], name="lead")
    one_way = {f"{nodes[1].location}->{nodes[2].location}": Link(latency_s=0.3, bytes_per_s=1e6)}
    back = {f"{nodes[2].location}->{nodes[1].location}": Link(latency_s=0.1, bytes_per_s=2e6)}
    return msgspec.structs.replace(profile, nodes=tuple(nodes), links={**profile.links, **one_way, **back})


def planned(profile: Profile | None = None, base: Recipe = BASE) -> tuple[Recipe, Problem, Profile]:
    profile = profile or profile_of()
    config = model_config(base)
    return (
        planned_recipe(base, config, profile, ROUTES, RULES),
        recipe_problem(base, config, profile, 4),
        profile,
    )


@pytest.mark.parametrize("depth", [3, 5, 8])
def test_a_peers_work_takes_the_seconds_of_the_plan(depth):
    base = msgspec.structs.replace(BASE, model=Model(depth=depth, context=64))
    recipe, problem, profile = planned(base=base)
    config = model_config(base)
    cut = cut_stages(config, recipe)
    assert cut == ring_stages(base, config, 4)
    block = profile.nodes[1].layer_sample_s * base.train.microbatch_size
    node = iter([node for group in ROUTES.groups for node in group])
    for index, (name, stage) in enumerate(recipe.swarm.peers.items()):
        place = next(node)
        work = BlankStage(config, *cut[stage], recipe)
        rate = recipe.swarm.flops * recipe.swarm.speed(index)
        assert name in (profile.nodes[place].name, "two-words", "lead-2")
        assert problem.forward_s(place, stage) == pytest.approx(work.forward_flops / rate, abs=2e-6)
        assert problem.backward_s(place, stage) == pytest.approx(2 * work.forward_flops / rate, abs=2e-6)
        assert problem.loss_s(place) == pytest.approx(work.loss_flops / rate) or stage
        if place == 1:
            assert problem.forward_s(1, stage) == pytest.approx(block * (cut[stage][1] - cut[stage][0]))
    assert max(recipe.swarm.speeds) == 1.0
    if depth == 3:
        assert cut[0] == (-1, 1), "a first stage without any block"


def test_links_between_peers_take_the_seconds_of_the_plan():
    recipe, problem, _ = planned()
    names = list(recipe.swarm.peers)
    nodes = [node for group in ROUTES.groups for node in group]
    size = hop_bytes(CONFIG, recipe)
    for (one, a), (other, b) in permutations(zip(names, nodes, strict=True), 2):
        link = recipe.network.link(one, other)
        assert link.latency_s + size / link.bytes_per_s == pytest.approx(problem.hop_s[a][b], rel=1e-12)
    assert problem.hop_s[1][2] != problem.hop_s[2][1]
    pairs = len(names) * (len(names) - 1) // 2
    assert len(recipe.network.links) == pairs + 1, "one direction stands for both, but where they differ"
    largest = 4 * max(stage_parameters(BASE, CONFIG, 4))
    link = recipe.network.link(names[0], names[1])
    assert problem.share_s[3][0] == pytest.approx(link.latency_s + largest / link.bytes_per_s, rel=1e-12)


def test_routes_slots_and_everything_else_of_the_recipe_are_kept():
    recipe, _, profile = planned()
    assert recipe.swarm.layout == "ring"
    assert recipe.swarm.sizes == (2, 2, 1, 1)
    assert recipe.swarm.slots == tuple(profile.nodes[node].slots for node in (3, 0, 1, 6, 2, 5))
    ways = [(profile.nodes[0].name, 1, 2), (profile.nodes[3].name, 6, 5), (profile.nodes[0].name, 2, 5)]
    names = {node: peer_names_of([n.name for n in profile.nodes])[node] for node in range(7)}
    assert [(route.peers, route.count) for route in recipe.routes] == [
        ((peer_names_of([origin])[0], *(names[node] for node in relays)), 2) for origin, *relays in ways
    ]
    assert (recipe.train.planner, recipe.train.visits, recipe.train.microbatches) == ("routes", 3, 6)
    assert (recipe.train.steps, recipe.train.full_every, recipe.name) == (3, 4, "planned")
    assert (recipe.data, recipe.model, recipe.faults) == (BASE.data, BASE.model, ())


@settings(max_examples=20)
@given(st.integers(0, 10**6), st.integers(2, 5))
def test_the_written_recipe_is_read_back_equal(seed, stages):
    chance = random.Random(seed)
    profile = random_network(seed % 50, 8, unlike=True)
    nodes = list(range(8))
    chance.shuffle(nodes)
    groups = tuple(tuple(nodes[stage:8:5]) for stage in range(stages))
    lanes = tuple(Lane(node, tuple(group[0] for group in groups[1:]), chance.randint(1, 3)) for node in groups[0])
    data = Data(source='a "quoted" path\\with\nall', tokenizer="bytes")
    base = msgspec.structs.replace(BASE, data=data, seed=seed)
    recipe = planned_recipe(base, CONFIG, profile, Routes(groups=groups, lanes=lanes), Rules(visits=stages))
    assert build_recipe(tomllib.loads(dump_recipe(recipe)), "memory") == recipe


def test_a_file_is_read_back_through_the_door_that_users_take(tmp_path):
    recipe, _, _ = planned()
    (tmp_path / "planned.toml").write_text(dump_recipe(recipe))
    assert load_recipe(tmp_path / "planned.toml") == recipe
    jittery = msgspec.structs.replace(profile_of(), local=Link(latency_s=0.1, bytes_per_s=1e6, jitter_s=0.01))
    same_place = [Node(name=f"n{i}", location="here", layer_sample_s=0.1, slots=2) for i in range(7)]
    recipe, _, _ = planned(msgspec.structs.replace(jittery, nodes=tuple(same_place), links={}))
    assert build_recipe(tomllib.loads(dump_recipe(recipe)), "memory") == recipe
    assert all(link.jitter_s == 0.01 for link in recipe.network.links.values())


def test_more_stages_than_the_model_has_layers_are_refused():
    with pytest.raises(TalkootError, match="cannot be cut") as refusal:
        recipe_problem(BASE, CONFIG, profile_of(), 7)
    assert "7 stages" in refusal.value.why
