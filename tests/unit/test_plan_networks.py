"""Named networks: the published figures to the last digit, and random ones that look like the published."""

from __future__ import annotations

import math
from itertools import combinations
from statistics import fmean

import pytest

from talkoot.core.errors import Exit, TalkootError
from talkoot.plan.networks import all_cities, great_circle_m, named_network, random_network
from talkoot.plan.profile import outliers, to_problem

ACTIVATION = 2 * 16_777_324  # bytes of the published schedule

# Seconds between nodes i and j of the 20-node schedule that gensyn-ai/skippipe published (schedule.json, "delays").
PUBLISHED = {
    (0, 1): 1.9615622573571703,
    (0, 2): 0.4828668089306232,
    (0, 11): 3.659144695021351,
    (0, 12): 0.3666251005828381,  # two nodes in Belgium
    (2, 10): 0.5221639796857014,
    (3, 7): 0.7152481729043496,
    (4, 9): 0.7765216355596161,
    (5, 7): 0.6260474232226765,
    (1, 8): 3.074605201141865,
    (8, 9): 0.8781342168623645,
    (9, 10): 3.9472608712427624,
    (11, 19): 2.5513470662434896,
    (13, 17): 1.409006591796875,
    (16, 18): 3.2052987977383984,
}


def test_gcp12_gives_the_published_delays():
    problem = to_problem(
        named_network("gcp12", 20), activation_bytes=ACTIVATION, gradient_bytes=1e9, stage_layers=[1], samples=8
    )
    for (i, j), seconds in PUBLISHED.items():
        assert problem.hop_s[i][j] == pytest.approx(seconds, abs=1e-9)
        assert problem.hop_s[j][i] == problem.hop_s[i][j]
    assert problem.layer_s == (pytest.approx(0.44),) * 20
    slow = 132.3144123449581  # what the unit error made of NL-London
    assert problem.hop_s[6][10] == pytest.approx(0.3548 + (slow - 0.3548) / 1024, abs=1e-4)


def test_gcp12_is_complete_and_deals_nodes_in_the_published_order():
    profile = named_network("gcp12", 20)
    order = ["Belgium", "Canada", "Germany", "Iowa", "Japan", "LA", "NL", "Oregon", "Singapore", "Taiwan"]
    order += ["London", "Australia"]
    assert [node.location for node in profile.nodes] == order + order[:8]
    assert len({node.name for node in profile.nodes}) == 20
    assert len(profile.links) == 66
    assert profile.link("LA", "Oregon-2") == profile.link("Oregon", "LA-2")
    assert profile.link("NL", "NL-2") == profile.local


@pytest.mark.parametrize("name", ["gcp12", "dtfm", "random:1", "random:1:unlike"])
@pytest.mark.parametrize("nodes", [None, 1, 2, 13, 40])
def test_a_named_network_has_as_many_nodes_as_wanted_and_no_outliers(name, nodes):
    profile = named_network(name, nodes)
    assert len(profile.nodes) == (nodes or 12)
    assert profile.name == name
    assert outliers(profile) == []


def test_dtfm_is_in_bits_per_second_and_its_gaps_are_filled_by_the_shortest_detour():
    profile = named_network("dtfm")
    assert profile.link("Frankfurt", "Ireland").bytes_per_s == 1.08e9 / 8
    assert profile.link("Oregon", "Frankfurt").latency_s == 0.143
    names = [node.name for node in profile.nodes]
    for far in ("Amsterdam", "Sofia"):
        detours = [
            (a.latency_s + b.latency_s, min(a.bytes_per_s, b.bytes_per_s))
            for via in names
            if via not in ("Ireland", far)
            for a, b in [(profile.link("Ireland", via), profile.link(via, far))]
        ]
        latency, rate = min(detours)
        assert profile.link("Ireland", far).latency_s == pytest.approx(latency)
        assert profile.link("Ireland", far).bytes_per_s == rate


def test_a_random_network_is_a_function_of_its_seed_whatever_the_number_of_nodes():
    assert random_network(3, 20) == random_network(3, 20)
    assert named_network("random:3", 20) == random_network(3, 20)
    assert random_network(3).links == random_network(3, 40).links
    assert random_network(3).nodes == random_network(3, 40).nodes[:12]
    assert random_network(3) != random_network(4)


def test_random_networks_keep_to_physics_and_to_the_published_relation():
    cities, ours = all_cities(), []
    for seed in range(50):
        profile = random_network(seed)
        assert len({node.location for node in profile.nodes}) == 12
        for one, other in combinations(profile.nodes, 2):
            link = profile.link(one.name, other.name)
            assert link.latency_s > great_circle_m(cities[one.name], cities[other.name]) / 2e8
            assert 1e6 < link.bytes_per_s <= 0.2425 * 2**30
            ours.append(math.log(link.latency_s * link.bytes_per_s))
        assert outliers(profile) == []
    theirs = [math.log(x.latency_s * x.bytes_per_s) for x in named_network("gcp12").links.values()]
    assert fmean(ours) == pytest.approx(fmean(theirs), abs=0.2)


def test_great_circles_have_their_known_lengths():
    cities = all_cities()
    assert great_circle_m(cities["London"], cities["Sydney"]) == pytest.approx(16_990e3, rel=0.01)
    assert great_circle_m((0, 0), (0, 180)) == pytest.approx(math.pi * 6_371_000)
    assert all(-60 < latitude < 70 and -180 <= longitude <= 180 for latitude, longitude in cities.values())


def test_unlike_machines_differ_in_speed_and_memory():
    nodes = random_network(0, 40, unlike=True).nodes
    assert 0.0275 <= min(node.layer_sample_s for node in nodes) < 0.04
    assert 0.075 < max(node.layer_sample_s for node in nodes) <= 0.11
    assert {node.slots for node in nodes} == {1, 2, 3, 4}
    assert random_network(0, 40, unlike=True).links == random_network(0, 40).links


@pytest.mark.parametrize(
    ("name", "nodes", "why"),
    [
        ("gcp21", None, "'gcp12'"),
        ("random", None, "SEED"),
        ("random:x", None, "SEED"),
        ("random:1:alike", None, "SEED"),
        ("gcp12", 0, "at least 1"),
        ("random:1", -3, "at least 1"),
    ],
)
def test_a_network_that_does_not_exist_is_refused(name, nodes, why):
    with pytest.raises(TalkootError) as caught:
        named_network(name, nodes)
    assert caught.value.code == Exit.BAD_INPUT
    assert why in caught.value.why
    assert caught.value.next


def test_no_more_cities_are_drawn_than_there_are():
    with pytest.raises(TalkootError):
        random_network(0, cities=1000)
