"""Post-training in virtual time: who learns from whom, what survives losses, and what a run is a function of."""

from __future__ import annotations

import pytest
from test_tune_kit import SMALL, recipe, run

from talkoot.core.errors import TalkootError
from talkoot.run.records import Gone, Warned
from talkoot.tune.records import Generated, Kept
from talkoot.tune.verify import verify
from talkoot.world.faults import Fault

ALIKE = [{"name": name} for name in ("alder", "birch", "cedar")]


def test_peers_learn_from_each_other():
    done = run(recipe())
    assert done.result.finished
    for name in ("alder", "birch"):
        assert len(done.updates(name)) == 4
        assert not any(update.solo for update in done.updates(name))
    assert done.rejected == {}


def test_a_run_is_a_function_of_its_seed():
    assert run(recipe()).hashes == run(recipe()).hashes
    assert run(recipe()).hashes != run(recipe(seed=4)).hashes


def test_every_update_names_the_completions_that_it_learned_from():
    done = run(recipe())
    generated = {e.id: e.receipt for e in done.entries if e.receipt.op == "tune.generate"}
    for entry in done.entries:
        if entry.receipt.op == "tune.update":
            parents = [generated[parent] for parent in entry.receipt.parents]
            assert [p.peer == entry.receipt.peer for p in parents] == [True, False]
            assert {p.step for p in parents} == {entry.receipt.step}


def test_a_peer_without_others_learns_alone_and_says_so():
    done = run(recipe(peers=[{"name": "alder"}]))
    assert done.result.finished
    assert all(update.solo for update in done.updates("alder"))
    assert done.tuned.peers["alder"].alone == 4


def test_horizontal_peers_with_one_model_keep_the_same_weights():
    done = run(recipe(peers=ALIKE, exchange={"split": "horizontal"}, correction={"rule": "none"}))
    assert len(set(done.hashes.values())) == 1
    drawn = done.facts("tune.generate", Generated)
    assert {len(samples) for facts in drawn for samples in facts.samples} == {2}  # 6 samples, dealt to 3 peers


def test_horizontal_groups_have_samples_of_everybody():
    done = run(recipe(exchange={"split": "horizontal"}))
    prompts = {facts.round: set() for facts in done.facts("tune.generate", Generated)}
    for facts in done.facts("tune.generate", Generated):
        prompts[facts.round].add(facts.prompts)
    assert all(len(found) == 1 for found in prompts.values())


def test_peers_with_other_tokenizers_exchange_texts():
    unlike = [{"name": "alder"}, {"name": "birch", "model": {"tokenizer": "bytes"}}]
    done = run(recipe(peers=unlike, correction={"rule": "ftis", "is_level": "sequence"}))
    assert done.result.finished
    assert all(update.counts["external_groups"] for update in done.updates("birch"))
    assert done.tuned.peers["alder"].rejected.keys() == {"outside the vocabulary"}  # an untrained model writes any byte


def test_ratios_per_token_between_unlike_tokenizers_are_an_error():
    unlike = [{"name": "alder"}, {"name": "birch", "model": {"tokenizer": "bytes"}}]
    with pytest.raises(TalkootError, match="another tokenizer"):
        run(recipe(peers=unlike, correction={"rule": "tis", "is_level": "token"}, seed=5))


@pytest.mark.parametrize("phase", ["generate", "publish", "gather", "update", "report", "idle"])
def test_a_peer_killed_anywhere_comes_back_and_the_others_go_on(phase: str):
    fault = Fault(peer="birch", step=1, phase=phase)
    done = run(recipe(faults=[{"peer": "birch", "step": 1, "phase": phase}], tune={"rounds": 8}))
    assert fault.kind == "kill"
    assert [gone.name for gone in done.facts("peer.lost", Gone)] == ["birch"]
    assert done.result.finished
    assert [update.round for update in done.updates("alder")] == list(range(8))
    assert done.updates("birch")[-1].round == 7
    assert max(update.waited_s for update in done.updates("alder")) < 10


def test_somebody_who_comes_later_takes_part_from_then_on():
    late = [{"name": "alder"}, {"name": "birch", "from_round": 3}]
    done = run(recipe(peers=late, tune={"rounds": 40}))
    assert done.result.finished
    assert [update.round for update in done.updates("alder")] == list(range(40))
    first = done.updates("birch")[0].round
    assert 3 < first < 38
    alone = [update.solo for update in done.updates("alder")]
    assert first <= alone.index(False) < 39  # it catches up first: rounds here are as short as a message's way
    assert not any(alone[alone.index(False) :])
    assert max(update.waited_s for update in done.updates("birch")) < 10


def test_a_run_with_a_late_peer_resumes(tmp_path):
    late = [{"name": "alder"}, {"name": "birch", "from_round": 3}]
    first = run(recipe(peers=late, tune={"rounds": 10}), tmp_path / "run", stop_after=4)
    assert not first.result.finished
    again = run(recipe(peers=late, tune={"rounds": 10}), tmp_path / "run")
    assert again.result.finished
    assert again.updates("alder")[0].round >= 2  # not from the start


@pytest.mark.parametrize("kind", ["stop", "partition"])
def test_a_frozen_or_cut_off_peer_is_replaced(kind: str):
    done = run(recipe(faults=[{"peer": "birch", "step": 1, "phase": "gather", "kind": kind}], tune={"rounds": 8}))
    assert done.result.finished
    assert done.facts("peer.lost", Gone)[0].name == "birch"
    assert [update.round for update in done.updates("alder")] == list(range(8))


def test_a_record_damaged_on_its_way_is_dropped_with_its_reason():
    done = run(
        recipe(faults=[{"peer": "birch", "step": 1, "phase": "publish", "kind": "corrupt"}], exchange={"wait_s": 5})
    )
    assert done.result.finished
    hurt = done.updates("alder")[1]
    assert hurt.solo
    assert hurt.absent == ("birch",)
    assert sum(hurt.rejected.values()) == 1


def test_a_slow_peer_is_waited_for_only_so_long():
    delay = {"peer": "birch", "step": 1, "phase": "publish", "kind": "delay", "seconds": 50}
    done = run(recipe(faults=[delay], exchange={"wait_s": 5}))
    assert done.updates("alder")[1].absent == ("birch",)
    assert done.updates("alder")[1].waited_s == pytest.approx(5, abs=0.5)
    assert done.result.finished


def test_nobody_waits_where_that_is_asked_for():
    done = run(recipe(exchange={"wait_s": 0, "max_lag": 3}, tune={"rounds": 8}))
    assert done.result.finished
    assert sum(update.waited_s for name in ("alder", "birch") for update in done.updates(name)) == 0
    assert any(not update.solo for name in ("alder", "birch") for update in done.updates(name))


def test_own_and_external_groups_come_in_the_shares_that_are_asked_for():
    done = run(recipe(exchange={"own": 1, "external": 2}))
    for update in done.updates("alder"):
        assert update.counts["own_groups"] + update.counts["external_groups"] <= 3


def test_an_interrupted_run_resumes_with_the_same_bits(tmp_path):
    whole = run(recipe(tune={"rounds": 6}), tmp_path / "whole")
    first = run(recipe(tune={"rounds": 6}), tmp_path / "parts", stop_after=2)
    assert not first.result.finished
    assert first.result.round < 6
    second = run(recipe(tune={"rounds": 6}), tmp_path / "parts")
    assert second.result.finished
    assert second.hashes == whole.hashes
    again = second.updates("alder")
    assert [u.learned for u in again] == [u.learned for u in whole.updates("alder")][-len(again) :]
    assert run(recipe(tune={"rounds": 6}), tmp_path / "parts").result.already


def test_a_finished_run_goes_on_when_more_rounds_are_asked_for(tmp_path):
    run(recipe(), tmp_path / "run")
    more = run(recipe(tune={"rounds": 6}), tmp_path / "run")
    assert more.result.round == 6
    assert more.hashes == run(recipe(tune={"rounds": 6})).hashes


def test_a_peer_that_was_lost_long_ago_does_not_take_the_others_back_with_it(tmp_path):
    gone = {"peer": "birch", "step": 3, "phase": "generate"}
    tune = {"rounds": 10, "checkpoint_every": 1, "respawn": False}
    assert run(recipe(faults=[gone], tune=tune), tmp_path / "run").result.finished
    more = run(recipe(faults=[gone], tune={**tune, "rounds": 12}), tmp_path / "run")
    assert more.result.finished
    assert [update.round for update in more.updates("alder")] == [10, 11]
    assert [update.round for update in more.updates("birch")] == [10, 11]  # from its own state after round 3
    assert any("birch is behind" in one.text for one in more.facts("run.warning", Warned))
    assert not any(update.solo for update in more.updates("alder"))


@pytest.mark.parametrize("rounds", [1, 2])
def test_a_rehearsal_resumes_at_the_same_round_as_often_as_it_is_stopped(tmp_path, rounds: int):
    never = recipe(tune={"rounds": 6, "checkpoint_every": 0})
    for _ in range(3):
        stopped = run(never, tmp_path / "run", stop_after=rounds)
        for blob in (tmp_path / "run" / "blobs").iterdir():  # as after a kill: nothing was stored
            blob.unlink()
        assert not stopped.result.finished
    done = run(never, tmp_path / "run")
    assert done.result.finished
    assert done.hashes == run(never).hashes
    assert verify(tmp_path / "run" / "log.sqlite") == []


def test_whoever_is_asked_to_stop_stores_its_state_however_far_ahead_it_is(tmp_path):
    free = recipe(
        exchange={"wait_s": 0, "max_lag": 3},
        tune={"rounds": 60, "checkpoint_every": 0},
        peers=[{"name": "alder"}, {"name": "birch", "speed": 0.1, "model": {"seed": 5}}],
        rollout={"prompts": 3, "samples": 6, "max_new_tokens": 12},
    )
    stopped = run(free, tmp_path / "run", stop_after=20)
    rounds = {name: peer.rounds for name, peer in stopped.tuned.peers.items()}
    assert rounds["birch"] < 15  # it does not have to catch up
    assert rounds["alder"] >= 20
    assert {name: peer.kept[-1][0] for name, peer in stopped.tuned.peers.items()} == rounds
    more = run(free, tmp_path / "run")
    assert more.result.finished
    assert more.updates("alder")[0].round == rounds["alder"]
    assert more.updates("birch")[0].round == rounds["birch"]


@pytest.mark.parametrize("damage", [b"", b"not what it was"])
def test_a_damaged_state_is_passed_over_for_an_older_one(tmp_path, damage: bytes):
    often = recipe(tune={"rounds": 10, "checkpoint_every": 1})
    whole = run(often)
    first = run(often, tmp_path / "run", stop_after=4)
    newest = first.tuned.peers["alder"].kept[-1]
    (tmp_path / "run" / "blobs" / newest[1]).write_bytes(damage)
    again = run(often, tmp_path / "run")
    assert again.result.finished
    assert again.updates("alder")[0].round == newest[0] - 1
    assert again.hashes == whole.hashes


def test_peers_with_equal_states_do_not_drop_each_others(tmp_path):
    alike = [{"name": "alder"}, {"name": "birch", "speed": 0.2}]
    never = recipe(
        peers=alike,
        optimizer={"learning_rate": 1e-30},
        exchange={"wait_s": 0, "external": 0},
        tune={"rounds": 12, "checkpoint_every": 1},
    )
    done = run(never, tmp_path / "run")
    assert done.result.finished
    assert done.facts("peer.lost", Gone) == []


def test_a_peer_lost_before_the_beginning_is_not_waited_for():
    slow = [{"name": "alder"}, {"name": "birch"}]
    fault = {"peer": "birch", "at_s": 0.0005, "kind": "kill"}
    done = run(recipe(peers=slow, faults=[fault], tune={"rounds": 4, "respawn": False, "patience_s": 30}))
    assert done.result.finished
    assert len(done.updates("alder")) == 4


def test_a_state_that_was_stored_is_not_warmed_up_again(tmp_path, monkeypatch):
    warm = recipe(task="addition:1", model={"tokenizer": "characters"}, warm={"steps": 2}, tune={"rounds": 2})
    run(warm, tmp_path / "run")
    monkeypatch.setattr("talkoot.tune.tuner.warm_start", lambda *_: pytest.fail("it was warmed up again"))
    more = recipe(task="addition:1", model={"tokenizer": "characters"}, warm={"steps": 2}, tune={"rounds": 3})
    assert run(more, tmp_path / "run").result.finished


def test_another_recipe_is_refused(tmp_path):
    run(recipe(), tmp_path / "run")
    with pytest.raises(TalkootError, match="another run") as refused:
        run(recipe(optimizer={"learning_rate": 2e-3}), tmp_path / "run")
    assert "optimizer.learning_rate" in refused.value.why


def test_stored_states_are_pruned(tmp_path):
    done = run(recipe(tune={"rounds": 12, "checkpoint_every": 1}), tmp_path / "run")
    wanted = {blob for peer in done.tuned.peers.values() for _, blob in peer.kept}
    assert {path.name for path in (tmp_path / "run" / "blobs").iterdir()} == wanted
    assert len(done.facts("tune.kept", Kept)) == 24


def test_learning_from_a_critic_is_one_flag():
    done = run(
        recipe(
            task="addition:1",
            model={"tokenizer": "characters"},
            critic={"kind": "arithmetic"},
            rollout={"samples": 1, "max_new_tokens": 16},
        )
    )
    assert done.result.finished
    assert all(update.counts.get("tokens", 0) > 0 for update in done.updates("alder"))


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"task": "addishun:2"}, "task"),
        ({"rollout": {"samples": 1}}, "rollout.samples"),
        ({"critic": {"kind": "arithmetik"}}, "critic"),
        ({"correction": {"rule": "fist"}}, "correction"),
        ({"objective": {"algorithm": "gpro"}}, "algorithm"),
        ({"objective": {"clip_hi": 0.3}}, "objective"),
        ({"peers": [{"name": "a"}, {"name": "a"}]}, "peers"),
        ({"peers": [{"name": "a", "model": {"widht": 3}}]}, "model"),
        ({"exchange": {"wait_s": -1}}, "wait_s"),
        ({"peers": [{"name": "a/b"}]}, "peers.name"),
        ({"peers": [{"name": "lead"}]}, "peers.name"),
        ({"peers": []}, "peers"),
        ({"peers": [{"count": 300}]}, "300"),
        ({"peers": [{"from_round": 2}]}, "round 0"),
        ({"rollout": {"temperature": float("nan")}}, "temperature"),
        ({"faults": [{"peer": "zelkova", "step": 1, "phase": "update"}]}, "faults"),
    ],
)
def test_a_wrong_recipe_is_refused_by_name(changes, where):
    with pytest.raises(TalkootError) as refused:
        run(recipe(**changes))
    text = str(refused.value)
    assert where in text
    assert refused.value.next


def test_the_small_recipe_is_small():
    assert SMALL["model"]["width"] == 16
