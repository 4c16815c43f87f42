"""What an update is made of: whose completions are used, in which numbers, and what the receipts say about it."""

from __future__ import annotations

import pytest
from test_tune_kit import recipe, run

from talkoot.core.errors import TalkootError
from talkoot.run.records import Warned
from talkoot.tune import tuner
from talkoot.tune.records import Generated

ALIKE = [{"name": name} for name in ("alder", "birch")]
ADDS = {"task": "addition:1", "model": {"tokenizer": "characters"}}


def parents(done, name: str) -> list[int]:
    """How many of others' records each update of a peer cites."""
    found = [e.receipt for e in done.entries if e.receipt.op == "tune.update"]
    return [len(one.parents) - 1 for one in found if done.tuned.names[one.peer] == name]


def test_peers_with_their_own_number_of_samples_hear_each_other():
    peers = [{"name": "alder", "rollout": {"samples": 12, "prompts": 5}}, {"name": "birch"}]
    done = run(recipe(peers=peers))
    assert done.rejected == {}
    for update in done.updates("birch"):
        assert update.counts["external_groups"] == 5
        assert (update.absent, update.solo) == ((), False)


def test_a_completion_that_is_too_long_for_the_learner_is_left_out_alone():
    peers = [{"name": "alder", "rollout": {"max_new_tokens": 30}}, {"name": "birch", "rollout": {"max_new_tokens": 5}}]
    done = run(recipe(peers=peers))
    accounts = done.facts("tune.generate", Generated)
    for number, update in enumerate(done.updates("birch")):
        (alders,) = [facts for facts in accounts if facts.round == number and facts.sampling.max_new_tokens == 30]
        long = sum(length > 5 for lengths in alders.lengths for length in lengths)
        assert update.rejected == {"too long": long}
        assert 0 < long < 18
        assert update.absent == ()
        assert not update.solo


def test_a_text_that_its_reader_has_no_room_for_is_left_out_alone():
    wide = {"tokenizer": "characters:0123456789=éü"}  # two of them are two bytes each
    narrow = {"tokenizer": "bytes", "context": 16, "width": 8}
    peers = [{"name": "alder", "model": wide}, {"name": "birch", "model": narrow}]
    done = run(recipe(peers=peers, correction={"rule": "none"}, rollout={"samples": 12}, tune={"rounds": 2}))
    assert all(update.rejected["too long"] > 0 for update in done.updates("birch"))
    assert done.result.finished


def test_who_sent_what_could_not_be_used_was_not_absent(monkeypatch):
    from talkoot.tune import peer

    honest = peer.pack

    def pack(world, step, facts, groups, texts, started):
        signed, frames = honest(world, step, facts, groups, texts, started)
        return signed, frames if world.name == "alder" else [frames[0][4:], *frames[1:]]

    monkeypatch.setattr(peer, "pack", pack)
    done = run(recipe())
    for update in done.updates("alder"):
        assert (update.absent, update.solo, update.rejected) == ((), True, {"length mismatch": 1})


def test_an_update_cites_nobody_whose_groups_it_did_not_choose():
    done = run(recipe(exchange={"external": 0}))
    assert parents(done, "alder") == [0, 0, 0, 0]
    assert all(update.solo and update.counts["external_groups"] == 0 for update in done.updates("alder"))
    assert done.tuned.peers["alder"].alone == 4


def test_an_update_that_learns_from_its_own_tokens_only_cites_nobody():
    critic = {"critic": {"kind": "arithmetic"}, "distillation": {"divergence": "pg"}}
    done = run(recipe(**ADDS, **critic, rollout={"samples": 2, "max_new_tokens": 16}))
    assert parents(done, "alder") == [0, 0, 0, 0]
    for update in done.updates("alder"):
        assert update.solo
        assert (update.counts["own_groups"], update.counts["external_groups"]) == (3, 0)
        assert update.counts["tokens"] > 0


def test_a_group_that_several_made_cites_all_of_them():
    done = run(recipe(peers=[*ALIKE, {"name": "cedar"}], exchange={"split": "horizontal"}, correction={"rule": "none"}))
    assert parents(done, "alder") == [2, 2, 2, 2]


@pytest.mark.parametrize(("own", "external"), [(2, -1), (0, -1), (1, 0), (-1, 1)])
def test_a_count_is_exact_where_the_other_side_is_not_counted(own: int, external: int):
    done = run(recipe(exchange={"own": own, "external": external}, rollout={"samples": 12}))
    for update in (*done.updates("alder"), *done.updates("birch")):
        assert update.counts["own_groups"] == (3 if own < 0 else own)
        if external >= 0:
            assert update.counts["external_groups"] == external
        else:
            assert update.counts["external_groups"] == 3


def test_a_lack_of_groups_is_made_up_for_where_both_sides_are_counted():
    done = run(recipe(peers=[{"name": "alder"}], exchange={"own": 1, "external": 2}))
    assert [update.counts["own_groups"] for update in done.updates("alder")] == [3, 3, 3, 3]


def test_a_policy_that_has_diverged_is_an_error_with_a_remedy():
    with pytest.raises(TalkootError, match="diverged") as caught:
        run(recipe(optimizer={"learning_rate": 1e38}))
    assert caught.value.where.startswith("peer ")
    assert "round" in caught.value.where
    assert "optimizer.learning_rate" in caught.value.next


def test_generating_takes_virtual_time_whoever_says_how_long_completions_may_be():
    times = []
    for length in (64, 0):  # 64 is what stands in where neither recipe nor task say
        done = run(recipe(model={"context": 128}, rollout={"max_new_tokens": length}, tune={"rounds": 1}))
        made = [entry.receipt for entry in done.entries if entry.receipt.op == "tune.generate"]
        times.append([receipt.ended - receipt.started for receipt in made])
    assert times[0] == times[1]
    assert min(times[0]) > 0


def test_a_peer_with_a_stored_state_is_not_warmed_up_again(tmp_path, monkeypatch):
    honest, warmed = tuner.warm_start, []

    def warm_start(policy, *rest):
        warmed.append(policy.size)
        return honest(policy, *rest)

    monkeypatch.setattr(tuner, "warm_start", warm_start)
    warm = {"warm": {"steps": 2, "batch": 4}, "objective": {"kl_beta": 0.1}, "rollout": {"max_new_tokens": 8}}
    run(recipe(**ADDS, **warm), tmp_path / "run")
    assert len(warmed) == 2
    more = run(recipe(**ADDS, **warm, tune={"rounds": 6}), tmp_path / "run")
    assert len(warmed) == 2
    assert more.hashes == run(recipe(**ADDS, **warm, tune={"rounds": 6})).hashes


def test_a_reward_is_the_mean_of_all_that_was_answered_whatever_dynamic_sampling_leaves_out():
    always = {"objective": {"dynamic_sampling": True}, "exchange": {"refills": 0}}
    first = [run(recipe(**changes)).updates("alder")[0] for changes in ({}, always)]
    assert first[0].counts["own_groups"] == 3
    assert first[1].counts["own_groups"] < 3
    assert first[0].reward == first[1].reward


def test_a_horizontal_peer_that_is_started_again_is_said_to_have_other_weights():
    fault = {"peer": "birch", "step": 1, "phase": "generate"}
    alike = {"peers": ALIKE, "exchange": {"split": "horizontal"}, "correction": {"rule": "none"}}
    done = run(recipe(**alike, faults=[fault], tune={"rounds": 8}))
    assert len(set(done.hashes.values())) == 2
    (warned,) = done.facts("run.warning", Warned)
    assert "birch has missed rounds" in warned.text


def test_what_is_perhaps_not_meant_is_a_warning_of_the_run():
    done = run(recipe(peers=[{"name": "alder"}, {"name": "birch", "from_round": 4}]))
    assert [one.text for one in done.facts("run.warning", Warned)] == [
        "birch never comes: its from_round is 4, and the run has 4 rounds"
    ]
