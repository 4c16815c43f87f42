"""The view: what a log says, in one bounded piece of plain data."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from fixture_run import TOKENS, Story, crew, eventful

from talkoot.core.log import Log
from talkoot.serve.view import View, view_of
from talkoot.train import records


@pytest.fixture
def story() -> Story:
    made = Story(Log(None), steps=40)
    made.begin()
    crew(made)
    yield made
    made.log.close()


def shown(story: Story) -> dict:
    view = view_of(story.log.entries())
    json.dumps(view, allow_nan=False)
    return view


def test_an_empty_log_has_a_view():
    view = View().snapshot()
    assert view["session"]["status"] == "waiting"
    assert view["curve"]["step"] == []


def test_a_run_is_described(story: Story):
    story.run_to(30)
    view = shown(story)
    assert view["run"]["name"] == "neighbours"
    assert view["run"]["world"] == "simulated"
    assert view["run"]["steps"] == 40
    assert view["progress"]["step"] == 30
    assert view["progress"]["tokens"] == 30 * TOKENS
    assert view["progress"]["eta"] == pytest.approx(10 * view["progress"]["seconds_per_step"], rel=1e-4)
    assert view["curve"]["step"] == list(range(1, 31))
    assert view["held_out"]["step"] == [15, 30]
    assert view["receipts"]["count"] == len(story.log)
    assert view["receipts"]["head"] == story.state.chain
    cedar = next(row for row in view["peers"]["rows"] if row["name"] == "cedar")
    assert (cedar["stage"], cedar["state"], cedar["speed"]) == (1, "present", 0.5)
    assert 0 < cedar["busy"] <= 1
    routes = view["routes"]
    assert routes["step"] == 30
    assert sorted(i for path in routes["paths"] for i in path["microbatches"]) == list(range(8))


def test_the_view_agrees_with_the_folded_state(tmp_path: Path):
    story = eventful(tmp_path)
    view, state = shown(story), story.state
    assert view["progress"]["step"] == state["train"].step
    assert view["progress"]["loss"] == pytest.approx(state["train"].loss, rel=1e-5)
    assert view["progress"]["held_out"] == pytest.approx(state["train"].held_out, rel=1e-5)
    assert view["progress"]["rollbacks"] == state["train"].rollbacks
    assert view["peers"]["joined"] == state["peers"].joined
    assert view["peers"]["lost"] == state["peers"].lost
    assert view["session"]["state_hash"] == state["run"].state_hash
    story.log.close()


def test_a_rollback_takes_commits_off_the_curve_but_stays_an_event(story: Story):
    story.run_to(20)
    before = shown(story)
    story.commit(loss=50.0)
    story.commit(loss=60.0)
    story.roll_back(20, "no replica")
    view = shown(story)
    assert view["curve"]["step"] == list(range(1, 21))
    assert view["curve"]["loss"] == before["curve"]["loss"]
    assert view["progress"]["tokens"] == before["progress"]["tokens"]
    assert view["progress"]["undone"] == 2
    assert view["events"][0]["text"] == "The run went back to step 20 (2 steps undone): no replica"
    undone = [span for lane in view["timeline"]["lanes"] for span in lane["spans"] if span[3]]
    assert undone
    assert all(span[4] >= 20 for span in undone)
    story.run_to(22)
    again = shown(story)
    assert again["curve"]["step"] == list(range(1, 23))
    assert max(again["curve"]["loss"]) < 50
    assert again["curve"]["seconds"] == sorted(again["curve"]["seconds"])


def test_held_out_points_after_a_rollback_are_gone(story: Story):
    story.run_to(17)
    story.roll_back(10, "no survivor")
    view = shown(story)
    assert view["held_out"]["step"] == []
    assert view["progress"]["step"] == 10


def test_a_resumed_run_does_not_count_the_night(story: Story):
    story.run_to(3)
    stopped = shown(story)["progress"]["elapsed"]
    story.write("run.end", records.End(reason="interrupted"))
    assert {row["state"] for row in shown(story)["peers"]["rows"]} == {"left"}
    story.now += 50_000
    story.write("run.resume", records.Resume(world="simulated", talkoot="0.1.0"))
    assert shown(story)["progress"]["elapsed"] == pytest.approx(stopped)
    story.peers.clear()
    crew(story)
    story.run_to(6)
    assert shown(story)["progress"]["elapsed"] < stopped + 20
    assert shown(story)["session"] == {
        "status": "running",
        "reason": "",
        "sessions": 2,
        "state_hash": "",
        "approximate": "",
    }


def test_advancing_bit_by_bit_gives_the_same_view(tmp_path: Path):
    story = eventful(tmp_path, steps=40)
    view = View()
    for entry in story.log.entries():
        view.advance(entry)
        view.snapshot()
    assert view.snapshot() == shown(story)
    story.log.close()


def test_entries_out_of_place_are_refused(story: Story):
    entries = list(story.log.entries())
    view = View()
    view.advance(entries[0])
    with pytest.raises(ValueError, match="does not follow"):
        view.advance(entries[2])
    with pytest.raises(ValueError, match="does not follow"):
        view.advance(entries[0])


def test_a_body_that_cannot_be_read_is_reported_not_fatal(story: Story):
    story.write("train.recover", records.Resume(world="x", talkoot="y"))
    story.commit()
    view = shown(story)
    assert any("cannot be read" in event["text"] for event in view["events"])
    assert view["progress"]["step"] == 1


def test_figures_that_are_none_become_gaps(story: Story):
    story.commit()
    story.commit(loss=math.nan)
    story.commit(loss=math.inf)
    view = shown(story)
    assert view["curve"]["loss"][1:] == [None, None]
    assert view["progress"]["loss"] is None
    assert any("not a number" in event["text"] for event in view["events"])


def test_a_liar_cannot_stretch_time(story: Story):
    story.commit()
    liar = story.peers[0]
    facts = records.Worked(stage=0, microbatches=(0,), sent_bytes=-5, busy_s=math.inf)
    now, story.now = story.now, 1e15
    story.write("train.step", facts, key=liar.key, took=1e15)
    story.now = now
    story.commit()
    view = shown(story)
    assert view["timeline"]["end"] < 100
    spans = [span for lane in view["timeline"]["lanes"] for span in lane["spans"]]
    assert all(0 <= start <= end <= view["timeline"]["end"] for start, end, *_ in spans)


def test_hostile_text_is_cut_and_made_visible(story: Story):
    story.join("evil\u202e\x00name" + "x" * 500, 1)
    for index in range(300):
        story.write(f"odd.{index}", records.Facts())
    view = shown(story)
    name = next(row["name"] for row in view["peers"]["rows"] if row["name"].startswith("evil"))
    assert len(name) <= 40
    assert name.isprintable()
    assert len(view["receipts"]["by_operation"]) <= 41


def test_a_world_that_nobody_knows_is_not_believed():
    story = Story(Log(None), world="totally real")
    story.begin()
    assert shown(story)["run"]["world"] == "unknown"
    story.log.close()


def test_odd_recipes_do_no_harm():
    for recipe in ({}, {"swarm": 3, "train": {"steps": "many"}}, {"swarm": {"stages": 10**9, "speeds": [1]}}):
        story = Story(Log(None))
        story.begin(recipe=recipe or {"name": None})
        assert shown(story)["run"]["steps"] is None
        story.log.close()


def test_a_long_run_with_many_peers_stays_small():
    story = Story(Log(None), steps=3000)
    story.begin()
    crew(story)
    view = View()
    for round_ in range(300):
        story.join(f"guest{round_}", 1)
        story.lose(f"guest{round_}", "left")
    story.peers = story.peers[::2]
    while story.step < 1500:
        story.commit()
        story.checkpoint()
    view.advance_all(story.log.entries())
    text = json.dumps(view.snapshot())
    assert len(text) < 400_000
    assert len(view.snapshot()["events"]) <= 200
    story.log.close()
