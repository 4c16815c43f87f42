"""The parts of the critique bench, with a model that was hardly trained, and its verdict on made-up trials."""

from __future__ import annotations

from functools import cache

import msgspec
import pytest
import torch

from talkoot.bench.critique import bars, notes, rows
from talkoot.bench.peer_critique import (
    ALIGNED,
    BINARY,
    ONE_ORDER,
    REFERENCE,
    Condition,
    Manner,
    Point,
    Setting,
    Trial,
    collect,
    fresh_policy,
    learn,
    manner,
)
from talkoot.tune.distil.localise import Localisation
from talkoot.tune.objective.scored import Sample, ScoredGroup
from talkoot.tune.tasks.addition import Addition
from talkoot.tune.tasks.task import Item
from talkoot.tune.tasks.traces import judge

torch.set_num_threads(1)
SETTING = Setting(swapped=0.5, marks=(8,), batch=4, group=4, blamed=1, problems=1, samples=2)


@cache
def tried(condition: Condition) -> Trial:
    """An untrained policy's arm."""
    return learn(SETTING, condition, fresh_policy(0).state(), 0)


def test_all_arms_learn_from_the_same_number_of_rollouts_and_start_from_the_same_policy():
    trials = [tried(arm) for arm in (BINARY, ALIGNED)]
    assert [[point.rollouts for point in trial.curve] for trial in trials] == [[0, 8]] * 2
    assert len({(trial.curve[0], trial.before) for trial in trials}) == 1
    assert [trial.localisation.rollouts for trial in trials] == [0, 4]


def test_an_arm_with_the_same_seed_is_the_same_to_the_last_bit():
    again = learn(SETTING, ALIGNED, fresh_policy(0).state(), 0)
    assert msgspec.structs.replace(tried(ALIGNED), cpu_s=0.0) == msgspec.structs.replace(again, cpu_s=0.0)


@pytest.mark.parametrize("group", [1, 4])
def test_an_update_has_as_many_rollouts_however_they_are_grouped(group: int):
    policy = fresh_policy(0)
    items, groups = collect(SETTING, policy, 3, group, 7)
    assert sum(len(one.samples) for one in groups) == SETTING.batch
    assert {len(one.samples) for one in groups} == {group}
    assert collect(SETTING, policy, 3, group, 7) == (items, groups)
    assert collect(SETTING, policy, 4, group, 7)[0] != items


@pytest.mark.parametrize("one_order", [False, True])
def test_reference_solutions_are_right_and_in_one_order_only_where_that_is_asked_for(one_order: bool):
    setting = msgspec.structs.replace(SETTING, batch=96)
    hard, (items, _) = Addition(2, hard=True), collect(setting, fresh_policy(0), 0, 1, 0, one_order)
    assert all(judge(item.prompt, item.solution).status == "right" for item in items)
    plain = {hard.item(hard.index("train", n)).prompt: hard.item(hard.index("train", n)).solution for n in range(1929)}
    same = sum(plain[item.prompt] == item.solution for item in items) / len(items)
    # a quarter, where each of two steps is swapped half the time
    assert same == 1 if one_order else 0.1 < same < 0.5


def test_the_manner_of_writing_counts_right_and_wrong_steps_in_both_orders(monkeypatch: pytest.MonkeyPatch):
    policy = fresh_policy(0)
    texts = ["4+7+0=11;3+8+1=13;131", "7+4+0=11;3+8+1=12;121", "4+7+0=11;8+3+1=13;131", "12"]
    samples = [Sample(tuple(policy.coder.encode(text)), 0.0, "stop", None, 0.0) for text in texts]
    groups = [ScoredGroup((), (sample,), "own", True) for sample in samples]
    items = [Item(prompt="34+87=", answer="121", solution="")] * len(texts)
    monkeypatch.setattr("talkoot.bench.peer_critique.collect", lambda *_: (items, groups))
    assert manner(SETTING, policy, 0, 0) == Manner(swapped=2 / 6, right_plain=3 / 4, right_swapped=1 / 2)


def trial(condition: Condition, seed: int, avg: float, first: float = -7.0, blamed: float = 0.01) -> Trial:
    """A made-up one."""
    critic = condition.critic != "none"
    return Trial(
        condition=condition.name,
        swapped=0.2,
        seed=seed,
        curve=tuple(Point(rollouts=n, avg=avg, passed=1.0, majority=1.0, greedy=1.0) for n in (0, 320)),
        localisation=Localisation(
            rollouts=9 if critic else 0,
            first_wrong=first if critic else None,
            prefix=0.05 if critic else None,
            prefix_blamed=blamed if critic else None,
        ),
        before=Manner(swapped=0.2, right_plain=0.5, right_swapped=0.5),
        after=Manner(swapped=0.0, right_plain=0.9, right_swapped=None),
        cpu_s=1.0,
    )


def trials(aligned: float, binary: float, **blame: float) -> dict[tuple[float, str], list[Trial]]:
    scores = {
        BINARY: (binary, binary),
        REFERENCE: (0.78, 0.78),
        ONE_ORDER: (0.9, 0.9),
        ALIGNED: (aligned, aligned + 0.1),
    }
    return {
        (0.2, arm.name): [trial(arm, seed, avg, **(blame if arm is ALIGNED else {})) for seed, avg in enumerate(both)]
        for arm, both in scores.items()
    }


def test_the_bench_fails_where_critiques_teach_less_than_rewards_or_blame_what_was_right():
    assert all(bar.holds for bar in bars(trials(0.75, 0.7), quick=False))
    for bad in (trials(0.6, 0.7), trials(0.75, 0.7, first=-0.9), trials(0.75, 0.7, blamed=0.11)):
        assert [bar.holds for bar in bars(bad, quick=False)].count(False) == 1
    assert all(bar.holds for bar in bars(trials(0.61, 0.7), quick=True))


def test_the_order_is_told_with_what_the_seeds_say_of_it():
    told = "\n".join(notes(trials(0.75, 0.7)))
    assert "step-aligned critique - binary reward: points after 320: +10.0 (+5.0, +15.0): the same sign" in told
    assert "step-aligned critique - reference solution: points after 320: +2.0 (-3.0, +7.0): not the same sign" in told
    assert "0.000 of the steps swapped, 0.900 of the plain right, - of those" in told
    assert [row.median for row in rows(trials(0.75, 0.7))] == pytest.approx([0.7, 0.78, 0.9, 0.8])
