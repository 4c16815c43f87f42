"""What mixing costs, against closed forms, published simulations, and the codecs themselves."""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from talkoot.plan.exchange import (
    balanced_steps,
    binomial_tree,
    lasting_speeds,
    sync_on,
    sync_times,
    waiting,
)
from talkoot.plan.mixing import Mixture, message_bytes, outlook, sent_bytes, way
from talkoot.plan.networks import named_network
from talkoot.plan.profile import to_network
from talkoot.train.mixing import mixing_rules
from talkoot.train.mixing.codecs import codecs
from talkoot.train.sections import Mixing
from talkoot.world.links import Link, Network

TWELVE = to_network(named_network("gcp12", 12), names := [f"peer-{index}" for index in range(12)])


def mixture(**changes: object) -> Mixture:
    usual = Mixture(
        speeds=dict.fromkeys(names, 1.0),
        network=TWELVE,
        step_s=0.2,
        inner_steps=50,
        how="pair",
        wires=("float32",),
        values=1_000_000,
        density=1 / 64,
        law="heavy-ball",
        momentum=0.5,
        outer_rate=0.7,
        pull=0.7,
    )
    return msgspec.structs.replace(usual, **changes)


def idle_share(*arguments: Any, **options: Any) -> float:
    return waiting(*arguments, **options).idle_share


def wall(*arguments: Any, **options: Any) -> float:
    """Time per computing time, as published figures have it."""
    return 1 / (1 - idle_share(*arguments, **options))


# -- bytes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wire", ["float32", "bfloat16", "int8", "sparse"])
@settings(max_examples=40, deadline=None)
@given(count=st.integers(0, 9000), density=st.floats(1e-4, 1))
def test_a_message_is_as_long_as_its_codec_makes_it(wire, count, density):
    frame = codecs[wire].encode(torch.arange(float(count)), Mixing(density=density))
    assert message_bytes(wire, count, density) == len(frame)


def test_known_sizes():
    assert message_bytes("int8", 512, 1) == 512 + 2 * 4
    assert message_bytes("int8", 513, 1) == 513 + 3 * 4
    assert message_bytes("sparse", 4096, 1 / 64) == 4 + 64 * 14 // 8
    assert message_bytes("sparse", 4097, 1 / 64) == 4 + 64 * 14 // 8 + 4 + 2  # at least one number of each chunk
    with pytest.raises(ValueError, match="float64"):
        message_bytes("float64", 1, 1)


def test_the_fused_message_is_half_of_the_literal_one_and_no_more_than_an_all_reduce_once_there_are_two():
    fused, literal = sent_bytes("pair", 64, 2 * 1000), sent_bytes("pair", 64, 2 * 2 * 1000)
    assert (fused, literal) == (2000, 4000)
    assert sent_bytes("ring", 64, 2000) == sent_bytes("tree", 64, 2000) == pytest.approx(2 * 2000 * 63 / 64)
    assert sent_bytes("gather", 64, 50) == 50 * 63
    assert sent_bytes("none", 64, 2000) == 0
    assert sent_bytes("pair", 5, 1000) == 800  # the odd one out sends nothing


def test_rules_find_their_way():
    local = {name: rule for name in mixing_rules if (rule := mixing_rules[name]).local is True}
    found = {name: way(rule.partners, "tree", gather=rule.gather) for name, rule in local.items()}
    assert found["noloco"] == "pair"
    assert found["diloco"] == "tree"
    assert found["sparseloco"] == "gather"
    assert found["none"] == "none"
    with pytest.raises(ValueError, match="broadcast"):
        way("all", "broadcast", gather=False)


# -- latencies ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("spread", "ratios"), [(0.5, (7.4, 11.9, 16.7, 21.4)), (1.0, (8.1, 14.9, 24.1, 33.6))])
def test_an_all_reduce_along_a_tree_takes_as_many_swaps_as_published_simulations_say(spread, ratios):
    for replicas, ratio in zip((16, 64, 256, 1024), ratios, strict=True):
        found = sync_times(replicas, spread)
        assert found.over_pair["binary tree"] == pytest.approx(ratio, rel=0.08)
        assert 0.8 * ratio < found.over_pair["tree"] < found.over_pair["binary tree"]
    assert found.over_pair["tree"] > 10  # the bar at 1,024
    assert sync_times(64, spread).over_pair["tree"] > 6  # and at 64


def test_without_noise_times_are_numbers_of_hops():
    found = sync_times(1024, 0.0, trials=2)
    assert found.over_pair == {"pair": 1, "ring": 2 * 1023, "tree": 20, "binary tree": 20}
    assert found.median == pytest.approx(found.over_pair)


def test_the_swap_is_the_larger_of_two_messages():
    mean = (1 + math.erf(1 / 2)) * math.exp(1 / 2)  # of the larger of two log-normal ones
    median = math.exp(NormalDist().inv_cdf(math.sqrt(0.5)))  # both are below it half of the time
    assert sync_times(512, 1.0).median["pair"] == pytest.approx(median, rel=0.02)
    assert sync_times(512, 1.0).over_pair["ring"] * mean > 2 * 511 * math.exp(1 / 2)  # waits add to the mean hop
    with pytest.raises(ValueError, match="nobody"):
        sync_times(1, 1.0)


def test_a_binomial_tree_is_as_deep_as_its_doublings():
    parents = binomial_tree(13)
    assert parents[1:5] == [0, 0, 2, 0]
    assert parents[12] == 8
    for node in range(13):
        depth, at = 0, node
        while at:
            at, depth = parents[at], depth + 1
        assert depth == node.bit_count()


def test_exchanges_on_equal_links_follow_the_arithmetic():
    network, peers = Network(default=Link(latency_s=0.1, bytes_per_s=1e6)), names[:8]
    assert sync_on(network, peers, 8e6, "pair") == pytest.approx(0.1 + 8)
    assert sync_on(network, peers, 8e6, "ring") == pytest.approx(14 * (0.1 + 1))
    assert sync_on(network, peers, 8e6, "tree") == pytest.approx(6 * (0.1 + 8))
    assert sync_on(network, peers, 8e6, "direct") == pytest.approx(2 * (0.1 + 1))
    assert sync_on(network, peers, 8e6, "gather") == pytest.approx(0.1 + 8)
    assert sync_on(network, peers, 8e6, "none") == sync_on(network, peers[:1], 8e6, "ring") == 0


def test_losses_and_jitter_count_on_average():
    network = Network(default=Link(latency_s=0.1, bytes_per_s=1e6, jitter_s=0.04, loss=0.2))
    assert sync_on(network, names[:2], 0, "pair") == pytest.approx(0.1 + 0.02 + 2 * 0.1 * 0.25)


def test_a_swap_between_cities_is_much_shorter_than_a_ring_or_a_tree():
    times = {how: sync_on(TWELVE, names, 4e6, how) for how in ("pair", "ring", "tree", "direct")}
    assert times["pair"] < min(times["ring"], times["tree"]) / 2
    worst = max(sync_on(TWELVE, [one, other], 4e6, "pair") for one in names for other in names if one != other)
    assert times["pair"] < worst < times["tree"]


# -- waiting --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("replicas", "inner_steps", "spread", "barrier", "pairs"),
    [(1024, 100, math.sqrt(0.5), 1.300, 1.092), (64, 50, 0.5, 1.192, 1.079), (8, 50, 0.5, 1.120, 1.071)],
)
def test_waits_for_all_and_for_partners_are_the_published_ones(replicas, inner_steps, spread, barrier, pairs):
    speeds = [1.0] * replicas
    assert wall(speeds, inner_steps, "ring", step_spread=spread) - 1 == pytest.approx(barrier - 1, rel=0.12)
    assert wall(speeds, inner_steps, "pair", step_spread=spread) - 1 == pytest.approx(pairs - 1, rel=0.12)
    assert idle_share(speeds, inner_steps, "none", step_spread=spread) == 0


def test_lasting_differences_make_pairs_wait_like_everybody_and_balanced_rounds_mend_that():
    def mean(how: str, **options: Any) -> float:
        return float(np.mean([wall(lasting_speeds(64, 0.2, seed=s), 50, how, seed=s, **options) for s in range(12)]))

    assert mean("ring", step_spread=0.5) == pytest.approx(1.614, rel=0.04)
    assert mean("pair", step_spread=0.5) == pytest.approx(1.567, rel=0.04)
    assert mean("pair", balance=True) < 1.05
    assert mean("ring", balance=True) < 1.05
    assert mean("pair", step_spread=0.5, balance=True) < 1.13


def test_a_round_takes_as_long_as_its_slowest_replica():
    together, balanced = waiting([1, 0.5], 40, "pair"), waiting([1, 0.5], 40, "pair", balance=True)
    assert together.round_steps == 80
    assert together.idle == (0.5, 0)
    assert balanced.round_steps == 40
    assert balanced.idle == (0, 0)
    assert waiting([1, 0.5], 40, "none").idle == (0, 0)


def test_slower_replicas_take_fewer_steps_and_at_least_one():
    assert [balanced_steps(50, speed) for speed in (1, 0.8, 0.5, 0.001)] == [50, 40, 25, 1]


def test_what_a_message_takes_is_waited_for_and_overlap_hides_it():
    assert idle_share([1, 1], 50, "pair", hop_steps=10) == pytest.approx(10 / 60)
    assert idle_share([1, 1], 50, "ring", hop_steps=10) == pytest.approx(10 / 60)
    assert idle_share([1, 1], 50, "pair", hop_steps=-5) == 0
    early = idle_share([1, 0.8], 50, "pair", hop_steps=np.array([[0, 10.0], [0, 0]]))
    assert early == pytest.approx(idle_share([1, 0.8], 50, "pair"))  # the fast one's message comes before it is needed


# -- outlook --------------------------------------------------------------------------------------------------


def test_an_outlook_on_pairs_between_twelve_cities():
    seen = outlook(mixture())
    assert seen.sent_bytes_per_round == 4e6
    assert seen.sent_bytes_per_inner_step == 4e6 / 50
    assert seen.ddp_sent_bytes_per_step == pytest.approx(2 * 4e6 * 11 / 12)
    assert seen.exchange_s == pytest.approx(sync_on(TWELVE, names, 4e6, "pair"))
    assert seen.ring_s is not None
    assert seen.ring_s > 2 * seen.exchange_s
    assert 10 < seen.round_s < 10 / (1 - 2 * seen.idle_share)
    assert set(seen.idle) == set(names)
    assert 0 < seen.idle_share < seen.uneven_idle_share < 0.15
    assert seen.spread is not None
    assert seen.spread.ratio is not None
    assert 0.8 < seen.spread.ratio < 1.31  # of twelve; 1.31 is that of many
    assert seen.spread.largest_pull == pytest.approx(1.5)
    assert not seen.spread.near_the_limit


def test_pairs_wait_less_than_rings_and_overlap_hides_a_ring():
    pairs, ring = outlook(mixture()), outlook(mixture(how="ring", law=""))
    assert pairs.idle_share < ring.idle_share
    assert ring.ring_s is None
    assert ring.spread is None
    hidden = outlook(mixture(how="ring", law="", overlap=40))
    assert hidden.idle_share < ring.idle_share / 2
    assert outlook(mixture(how="ring", law="", fragments=3, overlap=48)).idle_share == 0
    assert hidden.sent_bytes_per_round == ring.sent_bytes_per_round


def test_an_outlook_says_when_the_spread_has_no_bound_or_is_near_it():
    ablation = outlook(mixture(pull=0.0)).spread
    assert ablation is not None
    assert ablation.ratio is None
    near = outlook(mixture(pull=1.45)).spread
    assert near is not None
    assert near.near_the_limit


def test_outlooks_are_the_same_every_time():
    one, other = (outlook(mixture(speeds=dict(zip(names, lasting_speeds(12, 0.2), strict=True)))) for _ in range(2))
    assert one == other
