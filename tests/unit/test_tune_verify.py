"""What a post-training log can prove: each thing that honest peers cannot get wrong, done wrong once."""

from __future__ import annotations

import sqlite3

import msgspec
import pytest
from tune_tale import TuneTale, eventful, policy

from talkoot.core.errors import Exit, TalkootError
from talkoot.core.keys import Key
from talkoot.core.log import Log
from talkoot.run.records import Joined
from talkoot.tune.records import Updated
from talkoot.tune.verify import examine, verify


def pair(**recipe: object) -> TuneTale:
    tale = TuneTale(("alder", "birch"), **recipe)
    tale.round()
    return tale


def only(tale: TuneTale) -> str:
    """The one thing that is wrong."""
    found = examine(tale.entries)
    assert len(found) == 1, found
    return found[0]


def test_a_run_with_losses_a_killed_lead_and_lonely_rounds_is_fine(tmp_path):
    tale = eventful(Log(tmp_path / "log.sqlite"))
    tale.log.close()
    assert verify(tmp_path / "log.sqlite") == []


def test_a_run_under_way_may_cite_records_that_are_not_reported_yet():
    tale = pair()
    own = tale.generate("alder")
    tale.update("alder", [own, "f" * 64])
    assert examine(tale.entries) == []  # birch sent its record to alder and did not report yet
    tale.end()
    assert "1 cited records are not in the log, and only 0 peers broke off" in only(tale)


def test_a_lost_peer_s_last_record_may_be_missing_but_not_two():
    tale = pair()
    tale.update("alder", [tale.generate("alder"), "e" * 64])
    tale.lose("birch", "unplugged")
    tale.update("alder", [tale.generate("alder")])
    tale.end("interrupted")
    assert examine(tale.entries) == []
    tale = pair()
    tale.update("alder", [tale.generate("alder"), "e" * 64])
    tale.update("alder", [tale.generate("alder"), "f" * 64])
    tale.lose("birch", "unplugged")
    tale.end("interrupted")
    assert "2 cited records are not in the log, and only 1 peers broke off" in only(tale)


def test_an_update_begins_with_its_own_completions_of_that_round():
    tale = pair()
    made = {name: tale.generate(name) for name in ("alder", "birch")}
    tale.update("alder", [made["birch"], made["alder"]])
    tale.update("birch", [made["birch"]])
    found = examine(tale.entries)
    assert any("does not begin with its own completions" in text for text in found)
    assert any("cites a second record of its own" in text for text in found)
    tale = pair()
    tale.update("alder", [])
    assert "does not begin with its own completions" in only(tale)


def test_cited_records_are_at_most_the_lag_away():
    for lag, wrong in ((0, 1), (1, 0)):
        tale = pair(exchange={"split": "vertical", "max_lag": lag})
        early = tale.generate("birch")
        tale.update("birch", [early])
        tale.update("alder", [tale.generate("alder")])
        tale.update("birch", [tale.generate("birch")])
        tale.update("alder", [tale.generate("alder"), early])
        found = examine(tale.entries)
        assert len(found) == wrong
        assert all("cites a record of round 1, more than 0 rounds away" in text for text in found)


def test_nobody_learns_from_a_record_twice():
    tale = pair(exchange={"split": "vertical", "max_lag": 1})
    theirs = tale.generate("birch")
    tale.update("birch", [theirs])
    for _ in range(2):
        tale.update("alder", [tale.generate("alder"), theirs])
    assert "learns from a record that it learned from before" in only(tale)


def test_policies_follow_from_one_another():
    tale = pair()
    tale.policies["alder"] = policy("somebody else", 1)
    tale.round()
    assert "were not made with the policy that its last update left" in only(tale)
    tale = pair()
    own = tale.generate("alder")
    tale.policies["alder"] = policy("somebody else", 1)
    tale.update("alder", [own])
    assert "began from another policy than its completions were made with" in only(tale)


def test_after_a_new_start_a_peer_may_have_another_policy():
    tale = pair()
    tale.lose("birch", "unplugged")
    tale.round()
    tale.join("birch", since=3)
    tale.publish()
    while tale.rounds["alder"] < 3:
        tale.round()
    tale.round()
    tale.end("interrupted")
    assert examine(tale.entries) == []


def test_what_a_receipt_names_twice_must_agree():
    tale = pair()
    own = tale.generate("alder")
    tale.write(
        "tune.update",
        msgspec.structs.replace(_updated(tale), policy="a" * 64),
        tale.keys["alder"],
        1,
        inputs={"policy": tale.policies["alder"]},
        outputs={"policy": "b" * 64},
        parents=(own,),
    )
    assert "names two policies that came out of it" in only(tale)
    tale = pair()
    tale.generate("alder", round=2)
    assert "are of round 2, but stand at round 1" in only(tale)


def _updated(tale: TuneTale) -> Updated:
    return Updated(round=tale.rounds["alder"], policy="", version=1, reward=0.5, learned={}, solo=True)


def test_rounds_have_no_gaps():
    tale = pair()
    tale.rounds["alder"] = 2
    tale.update("alder", [tale.generate("alder")])
    assert "alder's update of round 2: round 1 was next" in only(tale)


def test_a_peer_that_no_view_names_does_no_round():
    tale = pair()
    tale.join("cedar", since=0)
    tale.update("cedar", [tale.generate("cedar")])
    assert "it is in no view" in only(tale)


def test_strangers_are_named():
    tale = pair()
    stranger = tale.keys["alder"] = Key.derived("stranger")
    tale.generate("alder")
    found = examine(tale.entries)
    assert (
        f"receipt {len(tale.entries)}: {stranger.peer[:8]}'s completions come from somebody who is not there" in found
    )


@pytest.mark.parametrize("reward", [1.5, -0.1, float("nan")])
def test_a_reward_outside_of_0_and_1_ends_the_check(reward: float):
    tale = pair()
    tale.update("alder", [tale.generate("alder")], reward=reward)
    assert "tune.update cannot follow what was before" in only(tale)


def test_a_figure_that_is_no_number_ends_the_check():
    tale = pair()
    tale.update("alder", [tale.generate("alder")], learned={"loss": float("inf")})
    assert "loss is inf" in only(tale)


def test_only_the_lead_says_who_joins():
    tale = pair()
    tale.write("peer.join", Joined(peer="x" * 64, name="elm"), tale.keys["alder"])
    assert "is the lead's to state" in only(tale)


def test_a_record_altered_after_the_fact_does_not_verify(tmp_path):
    path = tmp_path / "log.sqlite"
    tale = TuneTale(("alder", "birch"), Log(path))
    tale.round()
    tale.log.close()
    with sqlite3.connect(path) as database:
        (raw,) = database.execute("SELECT raw FROM receipts WHERE position = 6").fetchone()
        database.execute("UPDATE receipts SET raw = ? WHERE position = 6", (raw.replace(b"tale", b"tali"),))
    database.close()
    with pytest.raises(TalkootError) as caught:
        verify(path)
    assert caught.value.code == Exit.FAILED_CHECK
