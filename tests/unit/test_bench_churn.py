"""The churn bench: fates that all contenders share, spared stages, and bars that can fail."""

from __future__ import annotations

from collections import Counter

import pytest

from talkoot.bench import churn
from talkoot.bench.churn import CONTENDERS, GREEDY, OURS, RATES, WEIGHTED, Trial
from talkoot.bench.peer_churn import GROUPS, Draw, Size, draw, recipe_of
from talkoot.train.compute import hop_bytes, stage_flops
from talkoot.train.prepare import cut_stages


def crashes(machines: Draw, rate: float) -> list[set[tuple[str, float]]]:
    return [{(crash.name, crash.fraction) for crash in each} for each in machines.crashes(rate)]


def test_a_draw_is_its_seed_and_longer_ones_begin_alike():
    assert draw(3, 2) == draw(3, 2) != draw(4, 2)
    assert draw(3, 5).fates[:2] == draw(3, 2).fates
    assert draw(3, 5).profile == draw(3, 2).profile


def test_who_crashes_at_ten_per_cent_does_at_twenty_at_the_same_moment():
    few, many = (crashes(draw(1, 200), rate) for rate in (0.1, 0.2))
    assert all(a <= b for a, b in zip(few, many, strict=True))
    relays = sum(GROUPS[1:]) * 200
    assert sum(map(len, few)) / relays == pytest.approx(0.1, abs=0.015)
    assert sum(map(len, many)) / relays == pytest.approx(0.2, abs=0.02)
    assert all(0 <= when < 1 for each in many for _, when in each)


def test_the_last_relay_of_a_stage_is_spared_and_data_peers_never_crash():
    machines = draw(2, 20)
    home = recipe_of(machines, Size(), OURS).swarm.peers
    for each in machines.crashes(1.0):
        assert Counter(home[crash.name] for crash in each) == {stage: GROUPS[stage] - 1 for stage in range(1, 5)}


def test_sizes_are_the_published_ones():
    size, machines = Size(), draw(0, 1)
    recipe = recipe_of(machines, size, OURS)
    assert hop_bytes(size.config, recipe) == 4 * 2 * 4096 * 1024
    cut = cut_stages(size.config, recipe)
    assert [last - first for first, last in cut[1:]] == [4, 4, 4, 4]
    data_peer_s = stage_flops(size.config, *cut[1], recipe)[0] / recipe.swarm.flops / recipe.swarm.speed(0)
    assert data_peer_s == pytest.approx(0.44, rel=0.01)
    assert all(0 < speed <= 1 for speed in recipe.swarm.speeds)
    assert {node.slots for node in machines.profile.nodes[2:]} <= {1, 2, 3}


def trials(seconds: dict[str, float], wasted_s: dict[str, float]) -> churn.Trials:
    def one(name: str) -> list[Trial]:
        wasted = wasted_s.get(name, 1.0)
        parts = {"useful_s": 80.0, "died_s": 1.0, "repeated_s": wasted, "reopened_s": 0.0}
        return [Trial(seconds=seconds.get(name, 100.0) + k, mixing_s=1.0, crashes=1.0, **parts) for k in range(3)]

    return {(contender.name, rate): one(contender.name) for contender in CONTENDERS for rate in RATES}


def test_bars_hold_where_they_should_and_fail_one_by_one():
    good = {OURS.name: 50.0, WEIGHTED.name: 70.0, GREEDY.name: 100.0}
    waste = {OURS.name: 0.1, WEIGHTED.name: 1.0}
    assert [bar.holds for bar in churn.bars(trials(good, waste))] == [True] * 8
    assert [bar.holds for bar in churn.bars(trials(good | {WEIGHTED.name: 60.0}, waste))] == [False] * 3 + [True] * 5
    assert [bar.holds for bar in churn.bars(trials(good | {GREEDY.name: 90.0}, waste))] == [
        *[True] * 3,
        *[False] * 3,
        *[True] * 2,
    ]
    assert [bar.holds for bar in churn.bars(trials(good, waste | {OURS.name: 0.3}))] == [True] * 6 + [False] * 2
    assert all(list(churn.notes(trials(good, waste))))
