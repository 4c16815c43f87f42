"""What the recovery bench takes for granted: exact rungs leave no trace, and its trainer is a swarm, bit for bit."""

from __future__ import annotations

import pytest

from talkoot.bench.peer_lost_stages import Setting
from talkoot.bench.peer_recovery_checks import exact_rungs, same_trajectory
from talkoot.train.recipe import Recovery

SMALL = Setting(width=32, blocks=1, context=16, samples=2)


def test_a_stage_brought_back_by_what_others_keep_leaves_no_trace():
    assert exact_rungs(SMALL, [("shadow",), ("journal",)], ["bfloat16"]) == {
        "shadow, bfloat16": True,
        "journal, bfloat16": True,
    }


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize(
    "rule", [{"moments": "reset"}, {"moments": "neighbours", "bump_decay": 0.5}, {"merge": "random"}]
)
def test_the_trainer_has_the_losses_of_a_swarm_that_loses_and_blends_stages(swapped, rule):
    assert same_trajectory(SMALL, Recovery(ladder=("blend",), **rule), swapped=swapped)


def test_another_rule_has_other_losses():
    found = Recovery(ladder=("blend",), merge="uniform")
    assert same_trajectory(SMALL, found, swapped=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("talkoot.bench.peer_recovery_checks.follow", _other)
        assert not same_trajectory(SMALL, found, swapped=False)


def _other(setting, train, way, seed, lost, **more):
    from talkoot.bench.peer_lost_stages import Way, follow

    return follow(setting, train, Way(swapped=way.swapped, recovery=Recovery(merge="copy")), seed, lost, **more)
