"""The parts of the critique bench, with a model that was hardly trained."""

from __future__ import annotations

import msgspec
import pytest
import torch

from talkoot.bench.peer_critique import (
    ALIGNED,
    BINARY,
    REFERENCE,
    Setting,
    base,
    collect,
    learn,
    policy_of,
    tasks,
)
from talkoot.tune.tasks.traces import judge

torch.set_num_threads(1)
SETTING = Setting(swapped=0.5, warm_steps=2, warm_batch=4, marks=(8, 16), batch=8, blamed=2, problems=2, samples=2)


def test_all_arms_learn_from_the_same_number_of_rollouts_and_start_from_the_same_policy():
    trials = [learn(SETTING, arm, base(SETTING, 0), 0) for arm in (BINARY, REFERENCE, ALIGNED)]
    assert [[point.rollouts for point in trial.curve] for trial in trials] == [[0, 8, 16]] * 3
    assert len({trial.curve[0] for trial in trials}) == 1
    assert [trial.localisation.rollouts for trial in trials] == [0, 16, 16]


def test_an_arm_with_the_same_seed_is_the_same_to_the_last_bit():
    first, again = (learn(SETTING, ALIGNED, base(SETTING, 0), 1) for _ in range(2))
    assert msgspec.structs.replace(first, cpu_s=0.0) == msgspec.structs.replace(again, cpu_s=0.0)


@pytest.mark.parametrize("group", [1, 4])
def test_an_update_has_as_many_rollouts_however_they_are_grouped(group: int):
    policy = policy_of(base(SETTING, 0))
    items, groups = collect(SETTING, policy, 3, group, 7)
    assert sum(len(one.samples) for one in groups) == SETTING.batch
    assert {len(one.samples) for one in groups} == {group}
    assert collect(SETTING, policy, 3, group, 7) == (items, groups)
    assert collect(SETTING, policy, 4, group, 7)[0] != items


def test_reference_solutions_are_right_and_not_all_in_one_order():
    policy = policy_of(base(SETTING, 0))
    items = [item for number in range(12) for item in collect(SETTING, policy, number, 1, 0)[0]]
    assert all(judge(item.prompt, item.solution).status == "right" for item in items)
    _, hard = tasks()
    plain = {hard.item(hard.index("train", n)).prompt: hard.item(hard.index("train", n)).solution for n in range(2134)}
    same = sum(plain[item.prompt] == item.solution for item in items)
    assert 0.1 < same / len(items) < 0.5  # a quarter, where each of two steps is swapped half the time
