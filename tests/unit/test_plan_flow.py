"""Flow routing: peers on a lossy network agree on as many lanes as fit, and on cheap ones; and the yardsticks."""

from __future__ import annotations

import random
from collections import Counter
from itertools import combinations_with_replacement, pairwise, product

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flow_network import LossyNetwork, draw
from talkoot.plan.flow import FlowNode, Settings, flows
from talkoot.plan.flow_bounds import FlowProblem, max_flow, min_cost, min_largest_lane
from talkoot.plan.flow_build import Pending
from talkoot.plan.flow_messages import (
    Cancel,
    Card,
    Check,
    Cost,
    End,
    Exchange,
    FlowMessage,
    Introduce,
    Link,
    Offer,
    Place,
    Reject,
    Request,
)
from talkoot.plan.flow_moves import Side, Taste, astray_here, claimed, middles_of, paired, rearrange, undouble

COLD = Settings(heat=0.0)
KINDS = [(1, "relays"), (1, "origins"), (2, "relays"), (2, "origins")]


def settled(network: LossyNetwork) -> list[float]:
    """Costs of the lanes when nobody has anything left to try; checks all that must hold then."""
    assert network.settle()
    assert network.one_sided() == []
    assert network.overfull() == []
    lanes = network.lanes()
    used = Counter(peer for lane in lanes for peer in lane)
    assert all(count <= network.problem.slots[peer] for peer, count in used.items())
    assert len(lanes) == max_flow(network.problem)
    return network.costs()


# -- what comes out ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("origins", "limit"), KINDS)
def test_peers_reach_the_maximum_flow_over_a_lossy_network(seed, origins, limit):
    settled(LossyNetwork(draw(seed, origins, relays=4, stages=4, limit=limit), seed, COLD))


@pytest.mark.parametrize(("origins", "limit"), KINDS)
def test_annealed_lanes_are_near_the_optimum(origins, limit):
    problem = draw(origins, origins, relays=5, stages=4, limit=limit)
    by_max = settled(LossyNetwork(problem, 1, Settings(objective="max", decay=0.8)))
    assert max(by_max) <= 1.2 * min_largest_lane(problem).lower_s
    by_sum = settled(LossyNetwork(problem, 1, Settings(objective="sum", decay=0.8)))
    assert sum(by_sum) <= 1.2 * min_cost(problem).cost_s


def test_thirty_six_relays_in_six_stages():
    problem = draw(4, 2)
    costs = settled(LossyNetwork(problem, 4))
    assert max(costs) <= 1.2 * min_largest_lane(problem).lower_s


@pytest.mark.parametrize("stages", [1, 2, 9])
def test_any_number_of_stages_will_do(stages):
    settled(LossyNetwork(draw(7, 2, relays=3, stages=stages), 7, COLD))


def test_large_stages_meet_in_groups():
    settled(LossyNetwork(draw(3, 2, relays=11, stages=2), 3, COLD))


@pytest.mark.parametrize("seed", range(2))
def test_peers_that_know_few_get_to_know_all_they_need(seed):
    settled(LossyNetwork(draw(seed, 2, relays=4, stages=4), seed, COLD, knows=0.2))


def test_the_same_seed_gives_the_same_lanes_and_another_seed_another_history():
    problem = draw(1, 2, relays=3, stages=3)
    histories = set()
    for seed in (5, 5, 6):
        network = LossyNetwork(problem, seed, COLD)
        settled(network)
        histories.add((tuple(network.lanes()), network.sent.total()))
    assert len(histories) == 2


# -- churn ------------------------------------------------------------------------------------------------------------


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 2), st.sampled_from(["relays", "origins"]), st.data())
def test_after_losses_at_any_time_the_flow_is_the_maximum_of_what_remains(seed, origins, limit, data):
    network = LossyNetwork(draw(seed, origins, relays=3, stages=3, limit=limit), seed, COLD, loss=0.1, repeat=0.2)
    for _ in range(data.draw(st.integers(1, 3))):
        network.run(network.now + data.draw(st.floats(0.1, 40.0)), lambda: check_places(network))
        relays = [peer for stage in network.problem.stages[1:] if len(stage) > 1 for peer in stage]
        network.lose(data.draw(st.sampled_from(relays)))
    settled(network)


REPLAYED = [
    # What the last relay gave back was never heard of by the one before: the notice was lost, and its own questions
    # came seldom, were lost too, or came always just when the relay waited for a host.
    (14691, 1, "origins", [(1.875, "r2.0"), (8.875, "r3.1")]),
    (293107, 1, "relays", [(7.59463303251445, "r2.0"), (1.4538408529194835, "r1.1"), (0.5995909173029051, "r3.0")]),
    (393935, 1, "relays", [(5.961407241286792, "r3.2"), (11.80138388220204, "r3.0")]),
    (771431, 1, "relays", [(10.587897379873523, "r2.2"), (20.008579522449498, "r1.0")]),
    # A host gave a link away, its former holder never heard of that, and another host gave it both.
    (169319, 2, "relays", [(12.483847354521984, "r3.1")]),
]


@pytest.mark.parametrize(("seed", "origins", "limit", "losses"), REPLAYED)
def test_losses_that_once_left_links_with_one_end(seed, origins, limit, losses):
    network = LossyNetwork(draw(seed, origins, relays=3, stages=3, limit=limit), seed, COLD, loss=0.1, repeat=0.2)
    for after_s, peer in losses:
        network.run(network.now + after_s)
        network.lose(peer)
    settled(network)


def check_places(network: LossyNetwork) -> None:
    assert network.overfull(settled=False) == []


def test_a_lost_data_node_leaves_its_places_to_the_other():
    network = LossyNetwork(draw(2, 2, relays=3, stages=3), 2, COLD)
    settled(network)
    before = Counter(lane[0] for lane in network.lanes())
    network.lose("d0")
    settled(network)
    after = Counter(lane[0] for lane in network.lanes())
    assert after["d0"] == 0 < before["d0"]
    assert after["d1"] > before["d1"]


def test_a_newcomer_in_the_bottleneck_raises_the_flow():
    problem = draw(0, 1, relays=3, stages=3)
    full = max_flow(problem)
    narrowest = min(problem.stages[1:], key=lambda stage: sum(problem.slots[peer] for peer in stage))
    network = LossyNetwork(problem, 0, COLD)
    late = network.nodes.pop(narrowest[0])
    network.run(40.0)
    for peer in list(network.nodes):
        network.send(peer, network.nodes[peer].forget(late.me, network.now))
    network.run(80.0)
    assert len(network.lanes()) < full
    network.nodes[late.me] = late
    network.at(network.now, late.me)
    for peer in network.nodes:
        if peer in late.stages:
            network.meet(peer, late.me)
    assert len(settled(network)) == full


# -- improving --------------------------------------------------------------------------------------------------------


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 2), st.sampled_from(["max", "sum"]))
def test_without_a_temperature_costs_fall_but_for_moves_of_two_hosts_at_once(seed, origins, objective):
    problem = draw(seed, origins, relays=4, stages=4)
    network = LossyNetwork(
        problem, seed, Settings(objective=objective, heat=0.0), loss=0, repeat=0, delay_s=(0.0, 0.01)
    )
    wanted, measure = max_flow(problem), {"max": max, "sum": sum}[objective]
    seen: list[float] = []

    def look() -> None:
        costs = network.costs()
        if len(costs) == wanted and network.one_sided() == []:
            seen.append(measure(costs))

    while network.now < 60:
        network.run(network.now + 1.0)
        look()
    assert seen
    # In 11 of 480 draws they rise on the way, in one of them (33, 2, "max") by 5 % until the end.
    assert seen[-1] <= 1.05 * seen[0]


def lane_place(up: str, down: str, head_s: float, tail_s: float, home: str = "d") -> Place:
    """A place on a whole lane from ``up`` to ``down``."""
    return Place(
        Link(f"{up}>", End(up, 1, head_s, home), End("me", 1, tail_s, home)),
        Link(f">{down}", End("me", 1, head_s, home), End(down, 1, tail_s, home)),
    )


def sides() -> list[Side]:
    """Two peers, each between the wrong neighbours."""
    a = Side("a", {"u": 1.0, "v": 5.0, "x": 1.0, "y": 5.0}, [lane_place("u", "y", 1.0, 1.0)])
    b = Side("b", {"u": 5.0, "v": 1.0, "x": 5.0, "y": 1.0}, [lane_place("v", "x", 1.0, 1.0)])
    return [a, b]


def test_peers_exchange_what_follows_when_that_is_cheaper():
    found = sides()
    assert rearrange(found, Taste("max", 0.0, random.Random(0)))
    downs = [side.places[0].down for side in found]
    assert [down.down.peer for down in downs if down] == ["x", "y"]
    assert not rearrange(found, Taste("max", 0.0, random.Random(0)))


def test_lanes_of_unlike_data_nodes_never_exchange_what_follows():
    found = sides()
    found[1].places[0] = lane_place("v", "x", 1.0, 1.0, "other")
    for seed in range(20):
        rearrange(found, Taste("sum", 5.0, random.Random(seed)))
        assert not any(astray_here(place) for side in found for place in side.places)


def test_lanes_that_went_astray_exchange_back_at_any_cost():
    found = [
        Side("a", {"u": 1.0, "x": 1.0, "y": 99.0}, [lane_place("u", "x", 1.0, 1.0)]),
        Side("b", {"v": 1.0, "y": 1.0, "x": 99.0}, [lane_place("v", "y", 1.0, 1.0, "other")]),
    ]
    (a,), (b,) = found[0].places, found[1].places
    found[0].places[0], found[1].places[0] = Place(a.up, b.down), Place(b.up, a.down)
    assert rearrange(found, Taste("max", 0.0, random.Random(0)))
    assert not any(astray_here(place) for side in found for place in side.places)


def test_data_nodes_hand_each_other_whole_lanes():
    first = Link("first", End("d0", 1, 0.0, "d0", "first"), End("r", 1, 4.0, "d0", "last"))
    last = Link("last", End("s", 1, 9.0, "d0", "first"), End("d0", 1, 0.0, "d0", "last"))
    far, near = ({"r": 5.0, "s": 5.0}, [Place(last, first)]), ({"r": 1.0, "s": 1.0}, [Place()])
    middles = middles_of([far, near])
    assert middles == {"last": 4.0}
    found = [Side("d0", *far, middles), Side("d1", *near, middles)]
    assert rearrange(found, Taste("sum", 0.0, random.Random(0)))
    (place,) = claimed(found[1])
    assert place.up is not None
    assert place.down is not None
    assert place.up.down == End("d1", 2, 0.0, "d1", "last")
    assert place.down.up == End("d1", 2, 0.0, "d1", "first")


@given(st.permutations(range(4)), st.integers(0, 4), st.integers(0, 4))
def test_ways_out_stand_beside_the_ways_home_that_they_lead_to(order, outs, homes):
    ups = [Link(f"h{k}", End("s", 1), End("d", 1)) if k < homes else None for k in range(4)]
    downs = [Link(f"o{k}", End("d", 1), End("r", 1, 0.0, "d", f"h{k}")) if k < outs else None for k in range(4)]
    places = paired([Place(ups[k], downs[order[k]]) for k in range(4)])
    assert [place.up for place in places] == ups
    assert Counter(place.down for place in places) == Counter(downs)
    assert all(places[k].down is downs[k] for k in range(min(outs, homes)))


def test_of_two_holders_of_a_link_the_later_writer_keeps_it():
    old, new = (Link("l", End("u", 1, 1.0), End(peer, version)) for peer, version in (("b", 3), ("a", 4)))
    follows = Link("f", End("b", 1), End("x", 1, 1.0))
    sides = [Side("a", {"u": 1.0}, [Place(new), Place()]), Side("b", {"u": 1.0, "x": 1.0}, [Place(old, follows)])]
    assert undouble(sides)
    assert [side.places for side in sides] == [[Place(new), Place()], [Place(None, follows)]]
    assert not undouble(sides)


def test_a_peer_hands_over_all_when_the_other_is_better_placed():
    far = Side("a", {"u": 9.0, "x": 9.0}, [lane_place("u", "x", 1.0, 1.0)])
    near = Side("b", {"u": 1.0, "x": 1.0}, [Place(), Place()])
    assert rearrange([far, near], Taste("max", 0.0, random.Random(0)))
    assert far.places == [Place()]
    assert sum(place != Place() for place in near.places) == 1


# -- messages ---------------------------------------------------------------------------------------------------------

ends = st.builds(End, st.sampled_from("abc"), st.integers(0, 5), st.none() | st.floats(0, 9))


def told(end: End) -> End:
    """A register has a single writer: the same peer and version always say the same."""
    return End(end.peer, end.version, float(end.version))


links = st.builds(lambda up, down: Link("l", told(up), told(down)), ends, ends)


@given(links, links, links)
def test_copies_of_a_link_merge_in_any_order(a, b, c):
    assert a.merged(b) == b.merged(a)
    assert a.merged(b).merged(c) == a.merged(b.merged(c))
    assert a.merged(a) == a
    assert a.merged(b).merged(b) == a.merged(b)


@given(ends, ends, st.dictionaries(st.text(max_size=3), st.floats(0, 9), max_size=3))
def test_messages_survive_both_encodings(up, down, offers):
    link = Link("l", up, down)
    place = Place(link, None)
    for message in (
        Request(link, ""),
        Reject("l", offers),
        Check(link, True),
        Cost(3, offers),
        Offer(1, (place,), offers),
        Exchange(1, (place,), given=(link,), group=("a",)),
        Introduce((Card("a", 1),)),
    ):
        for codec in (msgspec.msgpack, msgspec.json):
            assert codec.decode(codec.encode(message), type=FlowMessage) == message


def node(stage: int = 1, slots: int = 2) -> FlowNode:
    """A relay that knows one peer on each side and one of its own stage."""
    made = FlowNode(Card("me", stage), 3, slots, chance=random.Random(0), settings=COLD)
    made.met("origin", 0, 1.0)
    made.met("mate", 1)
    made.met("next", 2, 1.0)
    return made


def test_a_repeated_offer_gets_the_same_answer_and_an_older_one_none():
    me = node()
    (first,) = me.receive("mate", Offer(5, (Place(),), {}), 0.0)
    assert first[0] == "mate"
    assert first in me.receive("mate", Offer(5, (Place(),), {}), 1.0)
    assert me.receive("mate", Offer(4, (Place(),), {}), 1.0) == []


def test_strangers_and_wrong_stages_get_nothing():
    me = node()
    link = Link("l", End("stranger", 1), End("me", 0))
    assert [type(m) for _, m in me.receive("stranger", Request(link, ""), 0.0)] == [Reject]
    assert [isinstance(m, Exchange) and m.busy for _, m in me.receive("next", Offer(1, (), {}), 0.0)] == [True]
    me.receive("origin", Cost(1, {"d": 0.0}), 0.0)  # not the next stage: nothing to ask it for
    assert not any(isinstance(message, Request) for _, message in me.tick(1.0))


def test_an_answer_to_a_question_never_asked_is_ignored():
    me = node()
    foreign = Link("x", End("me", 1, 0.0), End("next", 1, 0.0))
    me.receive("mate", Exchange(9, (Place(None, foreign), Place())), 0.0)
    assert me.places == [Place(), Place()]


def test_a_peer_denies_what_it_does_not_hold():
    me = node()
    link = Link("x", End("origin", 1, 0.0), End("me", 3, 1.0))
    answers = me.receive("origin", Check(link, True), 0.0)
    assert [(to, type(m).__name__) for to, m in answers] == [("origin", "Cancel")]


def test_what_is_given_back_is_said_again_and_again_but_not_for_ever():
    me = node()
    me.put(0, False, Link("x", End("origin", 1, 0.0, "origin"), End("me", 1)))
    said = [k * 0.25 for k in range(400) for _, message in me.tick(k * 0.25) if isinstance(message, Cancel)]
    assert me.places == [Place(), Place()]
    assert 4 <= len(said) <= 8
    assert [b - a for a, b in pairwise(said)] == [0.25 * 2**k for k in range(len(said) - 1)]


def test_who_waits_for_a_host_denies_later_what_it_does_not_hold():
    me = node()
    me.pending = Pending("mate", Offer(1, tuple(me.places), {}), 0.0, 0.0)
    link = Link("x", End("origin", 1, 0.0), End("me", 3, 1.0))
    assert me.receive("origin", Check(link, True), 0.1) == []
    assert ("origin", Cancel("x", False, 3)) in me.receive("mate", Exchange(1), 0.2)


def test_who_gets_it_from_a_host_denies_it_no_more():
    me = node()
    me.pending = Pending("mate", Offer(1, tuple(me.places), {}), 0.0, 0.0)
    link = Link("x", End("origin", 1, 0.0), End("me", 3, 1.0))
    me.receive("origin", Check(link, True), 0.1)
    answer = Exchange(1, (Place(link), Place()))
    assert not any(isinstance(message, Cancel) for _, message in me.receive("mate", answer, 0.2))
    assert me.find("x", False) is not None


def test_a_ring_needs_two_stages():
    with pytest.raises(ValueError, match="no ring"):
        FlowNode(Card("a", 3), 3, 1, chance=random.Random(0))


def test_halves_of_lanes_do_not_count():
    network = LossyNetwork(draw(0, 1, relays=2, stages=2), 0, COLD)
    settled(network)
    holdings = [member.holding() for member in network.nodes.values()]
    assert flows(holdings)
    assert flows([holding for holding in holdings if holding.stage != 2]) == []


# -- yardsticks -------------------------------------------------------------------------------------------------------


def all_flows(problem: FlowProblem, count: int) -> list[list[float]]:
    """The lane costs of every way to run ``count`` lanes at once; by brute force."""
    lanes = list(product(*problem.stages))
    found = []
    for chosen in combinations_with_replacement(lanes, count):
        used = Counter(peer for lane in chosen for peer in lane)
        if all(used[peer] <= problem.slots[peer] for peer in used):
            found.append([problem.cost_of(lane) for lane in chosen])
    return found


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 2), st.sampled_from(["relays", "origins"]))
def test_central_optima_equal_brute_force(seed, origins, limit):
    problem = draw(seed, origins, relays=2, stages=2, limit=limit)
    problem = FlowProblem(
        stages=problem.stages, slots={k: min(v, 2) for k, v in problem.slots.items()}, costs=problem.costs
    )
    lanes = max_flow(problem)
    assert all_flows(problem, lanes + 1) == []
    every = all_flows(problem, lanes)
    best = min_cost(problem)
    assert best.lanes == lanes
    assert best.cost_s == pytest.approx(min(map(sum, every)))
    largest = min_largest_lane(problem)
    assert largest.lower_s <= largest.upper_s == pytest.approx(min(map(max, every)))


def test_lanes_never_come_home_to_a_stranger():
    costs = {"a": {"r": 1.0}, "b": {"s": 1.0}, "r": {"b": 1.0}, "s": {"a": 1.0}}
    problem = FlowProblem(stages=(("a", "b"), ("r", "s")), slots=dict.fromkeys("abrs", 1), costs=costs)
    assert max_flow(problem) == 0


def test_too_many_lanes_are_refused():
    names = [tuple(f"{stage}.{k}" for k in range(40)) for stage in range(5)]
    costs = {i: dict.fromkeys(b, 1.0) for a, b in zip(names, [*names[1:], names[0]], strict=True) for i in a}
    problem = FlowProblem(stages=(names[0][:1], *names[1:]), slots=dict.fromkeys(sum(names, ()), 1), costs=costs)
    with pytest.raises(ValueError, match="more than"):
        min_largest_lane(problem)
