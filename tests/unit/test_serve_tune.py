"""Pages of a post-training run: curves, sums, who is alone, what strangers write; and nothing of them for training."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from itertools import pairwise
from pathlib import Path

import pytest
from fixture_run import eventful as trained
from tune_tale import TuneTale, eventful, score

from talkoot.core.log import Log
from talkoot.core.receipt import Receipt, Task, body
from talkoot.serve import draw_tuned
from talkoot.serve.dashboard import metrics
from talkoot.serve.follow import Follower
from talkoot.serve.render import fragments
from talkoot.serve.report import report_page
from talkoot.serve.tuned import MAX_CURVES, MAX_PEERS, Tuned, is_tuning, terms
from talkoot.serve.view import View, view_of
from talkoot.tune.records import Updated

HOSTILE = "</svg><script>alert(1)</script>"


def shown(tale: TuneTale) -> dict:
    view = view_of(tale.entries)
    json.dumps(view, allow_nan=False)
    return view


def peer(view: dict, name: str) -> dict:
    return next(one for one in view["tune"]["by_peer"] if one["name"] == name)


def texts(view: dict, kind: str) -> list[str]:
    return [event["text"] for event in view["events"] if event["kind"] == kind]


def test_a_recipe_says_what_kind_of_run_it_is():
    assert is_tuning({"tune": {"rounds": 3}})
    assert not is_tuning({"train": {"steps": 3}})
    assert not is_tuning({"tune": 3})
    assert terms({"tune": {"rounds": 3}, "critic": {"kind": "aligned"}})["critic"] == "aligned"
    assert terms({"tune": {"rounds": "x"}, "exchange": 3, "objective": None})["rounds"] is None


def test_curves_go_back_with_the_run_and_come_again():
    tale = TuneTale(("alder", "birch"))
    for _ in range(4):
        tale.round()
    tale.keep()
    for _ in range(3):
        tale.round()
    assert peer(shown(tale), "alder")["rewards"]["round"] == [1, 2, 3, 4, 5, 6, 7]
    tale.resume(4)
    view = shown(tale)
    assert peer(view, "alder")["rewards"]["round"] == [1, 2, 3, 4]
    assert view["progress"]["undone"] == 3
    assert view["tune"]["round"] == view["progress"]["step"] == 4
    tale.round()
    assert peer(shown(tale), "alder")["rewards"]["round"] == [1, 2, 3, 4, 5]


def test_held_out_scores_are_drawn_and_others_only_listed():
    tale = TuneTale(("alder",))
    tale.round()
    tale.round(evaluations=(score("train", 0.9), score("held_out", 0.5)))
    view = shown(tale)
    assert peer(view, "alder")["held_out"] == {"round": [2], "greedy": [0.5]}
    assert [one["split"] for one in peer(view, "alder")["scores"]] == ["train", "held out"]
    assert view["tune"]["greedy"]["mean"] == 0.5
    assert texts(view, "evaluate") == ["alder after 2 rounds, greedily right: 90.0 % train, 50.0 % held out."]


def test_being_alone_is_told_once_per_time_and_counted_each_time():
    tale = TuneTale(("alder", "birch"))
    tale.round()
    tale.lonely_round()
    tale.lonely_round()
    view = shown(tale)
    assert peer(view, "alder")["alone"] == 2
    assert peer(view, "alder")["alone_now"]
    assert view["tune"]["alone"] == {"rounds": 4, "of": 6, "share": pytest.approx(2 / 3, rel=1e-4)}
    assert "alder learned alone in round 2: nothing came from birch." in texts(view, "alone")
    assert len(texts(view, "alone")) == 2
    assert "alone-now" in draw_tuned.peers(view)
    assert "tile caution" in draw_tuned.tiles(view)
    tale.round()
    assert "alone-now" not in draw_tuned.peers(shown(tale))


def test_a_single_peer_is_said_to_be_alone_without_alarm():
    tale = TuneTale(("alder",))
    tale.round()
    view = shown(tale)
    assert "one peer, alone" in draw_tuned.facts(view)
    assert "tile caution" not in draw_tuned.tiles(view)
    assert texts(view, "alone") == []


def test_an_update_that_moved_nothing_says_why():
    tale = TuneTale(("alder",))
    tale.round(reason="all rewards are equal")
    tale.round(reason="all rewards are equal")
    view = shown(tale)
    assert texts(view, "problem") == ["alder did not change in round 1: all rewards are equal."]
    assert "Did not change, because" in draw_tuned.health(view)


def test_known_figures_have_plain_names_and_others_their_own():
    table = draw_tuned.health(shown(eventful()))
    assert "Above the cap" in table
    assert "Dropped by the correction, from birch" in table
    assert "moon phase" in table
    tale = TuneTale(("alder",))
    tale.round(learned={"localisation first_wrong": -7.3, "advantage": -0.5}, counts={"feedback first_error": 3})
    table = draw_tuned.health(shown(tale))
    assert "Advantage at the first wrong token" in table
    assert "-7.3" in table
    assert "Feedback: first error" in table


def test_events_tell_of_losses_joins_warnings_rollbacks_and_stored_states():
    view = shown(eventful())
    assert any("cedar was lost" in text for text in texts(view, "lost"))
    assert texts(view, "rollback") == ["The run went back to round 8: the lead was started again."]
    assert "the critic answers slowly" in texts(view, "problem")
    assert "All peers stored their states after round 24." in texts(view, "checkpoint")


def test_the_clock_follows_half_of_the_peers_not_a_single_one():
    tale = TuneTale(("alder", "birch", "cedar"))
    tale.round()
    before = shown(tale)["progress"]["elapsed"]
    tale.update("alder", [tale.generate("alder")], {"ended": tale.now + 1e6})
    assert shown(tale)["progress"]["elapsed"] == before
    tale.update("birch", [tale.generate("birch")], {"ended": tale.now + 1.0})
    assert before < shown(tale)["progress"]["elapsed"] < before + 3


def test_rounds_that_a_peer_was_away_for_do_not_lower_its_mean_reward():
    tale = TuneTale(("alder", "birch"))
    tale.round(reward=0.5)
    tale.keep()
    tale.lose("birch", "unplugged")
    tale.round(reward=0.5)
    tale.round(reward=0.5)
    tale.join("birch", since=3)
    tale.publish()
    tale.round(reward=0.5)
    view = shown(tale)
    assert peer(view, "birch")["rounds"] == 4
    assert peer(view, "birch")["mean_reward"] == 0.5
    assert view["tune"]["alone"] == {"rounds": 2, "of": 6, "share": pytest.approx(1 / 3, rel=1e-4)}
    tale.resume(1)
    assert peer(shown(tale), "birch")["mean_reward"] == 0.5


def test_waiting_is_a_share_of_the_rounds_by_the_world_s_clock():
    tale = TuneTale(("alder", "birch"))
    tale.round(waited_s=0.3, busy_s=50.0)  # in a simulated world work is measured by another clock
    assert peer(shown(tale), "alder")["waiting"] == pytest.approx(0.25)
    tale.round(waited_s=1e9)
    assert peer(shown(tale), "alder")["waiting"] == pytest.approx(0.625)


def test_before_the_first_round_the_cards_say_so():
    view = shown(TuneTale())
    assert "No round is over yet" in draw_tuned.rewards(view)
    assert "Nobody has been evaluated yet" in draw_tuned.scores(view)
    assert "Nobody has learned yet" in draw_tuned.health(view)
    assert "Round 0 of 24" in draw_tuned.progress(view)


def test_the_figure_stays_within_its_frame():
    tale = TuneTale(("alder", "birch"))
    tale.round(reward=0.0)
    tale.round(reward=1.0)
    figure = ET.fromstring(draw_tuned.rewards(shown(tale)).partition("<ul")[0])
    paths = [path.get("d") for path in figure.iter("path") if "earned" in path.get("class")]
    numbers = [float(number) for d in paths for number in re.findall(r"[\d.]+", d)]
    assert len(paths) == 2
    assert all(0 <= number <= 100 for number in numbers)


def test_a_training_run_has_no_cards_of_post_training_and_the_other_way_round(tmp_path: Path):
    story = trained(tmp_path, steps=20)
    view = view_of(story.log.entries())
    story.log.close()
    assert view["tune"] is None
    assert all(fragments(view)[name] == "" for name in draw_tuned.CARDS)
    parts = fragments(shown(eventful()))
    assert all(parts[name] == "" for name in ("ways", "routes", "wayshint", "mixing"))
    assert all(parts[name] for name in draw_tuned.CARDS)
    assert set(parts) == set(fragments(view))  # a page that waits for its run can become either


def test_the_headline_numbers_are_there_for_monitors():
    lines = metrics(shown(eventful())).splitlines()
    assert "talkoot_step 24" in lines
    assert "talkoot_rounds_alone 3" in lines
    assert "talkoot_refused_total 12" in lines
    assert any(line.startswith("talkoot_reward 0.8") for line in lines)


def test_a_live_page_becomes_one_of_post_training_when_the_run_begins(tmp_path: Path):
    follower = Follower(tmp_path)
    waiting = follower.picture
    assert waiting.parts["tuned"] == ""
    tale = TuneTale(("alder", "birch"), Log(tmp_path / "log.sqlite"))
    tale.round()
    follower.picture = follower._look()
    news = follower.picture.news(waiting)["fragments"]
    assert "Reward by round" in news["tuned"]
    assert "Round 1 of 24" in news["progress"]
    tale.round()
    tale.log.close()
    after = follower._look().news(follower.picture)["fragments"]
    assert "Round 2 of 24" in after["progress"]
    assert "heading" not in after  # only what changed is sent


def test_what_strangers_write_stays_text():
    tale = TuneTale((HOSTILE, "birch"), critic={"kind": HOSTILE}, task=HOSTILE)
    tale.round(
        rejected={HOSTILE * 9: 3},
        absent=(HOSTILE,),
        reason=HOSTILE,
        learned={HOSTILE: 1.0, "filtered_by_peer " + HOSTILE: 0.5},
        counts={"skipped " + HOSTILE: 2},
        evaluations=(score(HOSTILE, 0.5),),
    )
    tale.warn(HOSTILE)
    text = report_page(shown(tale))
    assert "<script>alert" not in text
    assert not re.search(r"\b(nan|inf)\b", text.split("</style>")[-1].split("<script")[0])


def test_a_receipt_that_cannot_be_read_is_a_problem_and_no_end():
    tale = TuneTale(("alder",))
    tale.round(learned={"loss": float("nan")})
    tale.rounds["alder"] = 0
    tale.round()
    view = shown(tale)
    assert any("cannot be read" in text for text in texts(view, "problem"))
    assert view["tune"]["round"] == 1


def test_scores_that_are_no_numbers_do_not_break_the_page():
    tale = TuneTale(("alder",))
    tale.round(evaluations=(score("held_out", float("nan")),), waited_s=float("inf"), busy_s=float("nan"))
    report_page(shown(tale))


def test_two_thousand_rounds_make_a_page_of_bounded_size():
    tuned = Tuned({"tune": {"rounds": 2000}})
    tale = TuneTale(("alder",))
    for entry in tale.entries:
        tuned.take(entry.receipt) if entry.receipt.op != "run.start" else None
    sizes = []
    key = tale.keys["alder"]
    for number in range(2000):
        facts = Updated(round=number, policy="p", version=number, reward=(number % 7) / 7, learned={}, solo=True)
        receipt = Receipt(
            run="tale", generation=0, step=number, peer=key.peer, task=Task(op="tune.update"), body=body(facts)
        )
        tuned.take(receipt)
        if number % 500 == 499:
            sizes.append(len(json.dumps(tuned.snapshot())))
    assert max(sizes) < 12_000
    rewards = tuned.snapshot()["by_peer"][0]["rewards"]
    assert rewards["round"][-1] == 2000
    assert max(rewards["reward"]) == pytest.approx(6 / 7, rel=1e-4)


def test_many_peers_make_a_page_of_bounded_size():
    tale = TuneTale(tuple(f"peer{index:02}" for index in range(80)))
    for name in tale.names:
        tale.update(name, [tale.generate(name)])
    view = view_of(tale.entries)
    assert len(view["tune"]["by_peer"]) == MAX_PEERS
    assert sum(bool(one["rewards"]["round"]) for one in view["tune"]["by_peer"]) == MAX_CURVES
    assert len(report_page(view)) < 500_000


def test_the_view_moves_on_receipt_by_receipt():
    tale, view = eventful(), View()
    seen = []
    for entry in tale.entries:
        view.advance(entry)
        seen.append(view.step)
    assert seen[-1] == 24
    assert max(b - a for a, b in pairwise(seen)) == 1
