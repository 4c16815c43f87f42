"""Pages of a run that makes experts: jobs, plan, cross table, what came afterwards; and nothing of them for others."""

from __future__ import annotations

import json
import math
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import tune_tale
from blend_tale import BlendTale, eventful, planned_tale, recipe_of
from fixture_run import eventful as trained

from talkoot.blend.train.jobs import Class
from talkoot.blend.train.records import Planned
from talkoot.core.log import Log
from talkoot.plan.experts import Assigned
from talkoot.serve import draw_blended, draw_tuned
from talkoot.serve.blended import (
    MAX_CHANGES,
    MAX_COLUMNS,
    MAX_CURVES,
    MAX_DOMAINS,
    MAX_MIXTURES,
    is_blending,
    perplexity,
)
from talkoot.serve.follow import Follower
from talkoot.serve.render import fragments
from talkoot.serve.report import report_page
from talkoot.serve.view import View, view_of

HOSTILE = "</svg><script>alert(1)</script>"


def shown(tale: BlendTale) -> dict:
    view = view_of(tale.entries)
    json.dumps(view, allow_nan=False)
    return view


def row(view: dict, domain: str) -> dict:
    return next(one for one in view["blend"]["rows"] if one["domain"] == domain)


def texts(view: dict, kind: str) -> list[str]:
    return [event["text"] for event in view["events"] if event["kind"] == kind]


def test_a_recipe_says_what_kind_of_run_it_is():
    assert is_blending({"experts": {}})
    assert not is_blending({"train": {"steps": 3}})
    assert not is_blending({"experts": 3})


def test_a_whole_run_is_told_in_numbers():
    view = shown(eventful())
    told = view["blend"]
    assert told["jobs"]["done"] == told["jobs"]["all"] == 15
    assert told["jobs"]["share"] == 1.0
    assert {one["kind"]: one["all"] for one in told["jobs"]["kinds"]} == dict.fromkeys(
        ("general", "trial", "expert", "count", "score"), 3
    )
    assert told["best"] == {"domain": "plays", "loss": 3.0}
    assert told["worst"] == {"domain": "mail", "loss": 3.5}
    assert told["off"] == pytest.approx(0.004)
    assert told["tokens"] == view["progress"]["tokens"] == 4 * 64 * (3 * 20 + 3 * 8 + 30 + 40 + 50)
    assert view["progress"]["step"] == view["progress"]["steps"] == 3 * 20 + 3 * 8 + 30 + 40 + 50
    assert view["session"]["status"] == "done"


def test_the_heading_and_the_tiles_say_so_in_words():
    view = shown(eventful())
    assert draw_blended.facts(view) == [
        "3 domains: plays, python, mail",
        "sizes-and-steps allocation",
        "feed-forward layers trained",
        "small, medium, large models",
    ]
    assert "15 of 15 jobs" in draw_blended.progress(view)
    tiles = re.sub(r"<[^>]+>", " ", draw_blended.tiles(view))
    assert "20.1" in tiles  # e to the 3.0
    assert "plays, held out" in tiles
    assert "+0.40 % of equal" in tiles
    assert "1 lost" in tiles


def test_before_the_plan_only_what_leads_to_it_is_counted():
    tale = BlendTale()
    tale.whole("alder", "general/medium")
    view = shown(tale)
    assert view["blend"]["jobs"]["done"] == 1
    assert view["blend"]["jobs"]["all"] == 4  # with a trial of each domain
    assert view["progress"]["steps"] is None
    assert "then experts are planned" in draw_blended.progress(view)
    assert "to be tried" in draw_blended.plan(view)
    assert "not planned yet" in draw_blended.tiles(view)
    assert "as soon as all of them are trained" in draw_blended.cross(view)
    assert "Nothing yet" in draw_blended.afterwards(view)


def test_a_job_that_goes_on_counts_for_what_is_done_of_it():
    tale = planned_tale()
    before = shown(tale)
    tale.slice("alder", "expert/python", 10)
    view = shown(tale)
    grown = view["blend"]["jobs"]["share"] - before["blend"]["jobs"]["share"]
    assert grown == pytest.approx(10 / 40 / 15, rel=1e-3)
    assert view["blend"]["tokens"] - before["blend"]["tokens"] == 10 * 4 * 64
    assert (row(view, "python")["state"], row(view, "mail")["state"]) == ("under way", "waits")
    assert row(view, "python")["of"] == 40
    assert "10 of 40" in draw_blended.plan(view)
    doing = {one["name"]: one["doing"] for one in view["blend"]["by_peer"]}
    assert doing == {"alder": "the expert of python", "birch": ""}


def test_given_classes_need_no_trials():
    tale = BlendTale(difficulty="medium")
    tale.plan()
    assert [one["kind"] for one in shown(tale)["blend"]["jobs"]["kinds"]] == ["general", "expert", "count", "score"]


def test_the_best_of_a_row_is_marked_and_the_own_expert_too():
    tale = planned_tale(domains=("plays", "python"))
    for job in list(tale.jobs):
        if job.startswith("expert/"):
            tale.whole("alder", job)
    tale.done("alder", "score/plays", losses={"plays": 3.0, "python": 5.0})
    tale.done("alder", "score/python", losses={"plays": 2.0, "python": 2.05})
    table = ET.fromstring(draw_blended.cross(shown(tale)))
    cells = [[td.get("class").split() for td in tr.iter("td")] for tr in table.iter("tr")][1:]
    assert cells == [
        [["n", "heat4", "best", "own"], ["n", "heat0"]],
        [["n", "heat4", "best"], ["n", "heat3", "own"]],
    ]


def test_every_expert_has_a_curve_and_general_models_are_drawn_apart():
    figure = ET.fromstring(draw_blended.losses(shown(eventful())).partition("<ul")[0])
    lines = [path for path in figure.iter("path") if path.get("class") != "grid"]
    assert sorted(path.get("class") for path in lines) == [
        *("earned h0", "earned h1", "earned h2"),
        *("scored hn", "scored hn", "scored hn"),
    ]
    numbers = [float(number) for path in lines for number in re.findall(r"[\d.]+", path.get("d"))]
    assert all(0 <= number <= 100 for number in numbers)


def test_a_single_slice_is_a_dot():
    tale = BlendTale()
    tale.slice("alder", "general/medium", 10)
    assert "dots hn" in draw_blended.losses(shown(tale))


def test_events_tell_who_did_what():
    view = shown(eventful())
    assert texts(view, "plan") == ["3 experts were planned (sizes-and-steps), +0.40 % of equal compute."]
    assert "alder tried plays for 8 steps to see how it is learned." in texts(view, "evaluate")
    assert "birch trained the expert of mail: 50 steps, held-out perplexity 33.1." in texts(view, "checkpoint")
    assert "birch compared the experts on plays: plays is best, perplexity 20.1." in texts(view, "evaluate")
    assert texts(view, "recover") == ["birch went on with the expert of mail where alder had left it, after 10 steps."]
    assert any("alder was lost" in text for text in texts(view, "lost"))
    assert "mail was removed." in texts(view, "lost")
    assert "poems was added." in texts(view, "join")


def test_what_came_afterwards_is_told_and_is_not_the_run_s_time():
    view = shown(eventful())
    assert view["progress"]["elapsed"] < 60
    after = view["blend"]["after"]
    assert after["router"]["rule"] == "bigram"
    assert [one["rule"] for one in after["router"]["accuracy"]] == ["bigram", "votes"]
    assert [one["name"] for one in after["changes"]] == ["poems", "mail"]
    card = draw_blended.afterwards(view)
    assert "bigram (used)" in card
    assert "1.2 M parameters: forced to one expert it is that expert to the bit" in card
    assert "no router knows it" in card


def test_the_clock_follows_those_who_work():
    tale = planned_tale(names=("alder", "birch", "cedar"))
    tale.slice("alder", "expert/plays", 10)
    tale.slice("birch", "expert/python", 10)
    before = shown(tale)["progress"]["elapsed"]
    tale.slice("birch", "expert/python", 20, ended=tale.now + 1e6)
    assert shown(tale)["progress"]["elapsed"] == before  # one of two
    tale.slice("alder", "expert/plays", 20)
    assert before < shown(tale)["progress"]["elapsed"] < 60
    lanes = {lane["name"]: lane["spans"] for lane in shown(tale)["timeline"]["lanes"]}
    assert len(lanes["alder"]) > len(lanes["birch"]) > 0
    assert not lanes["cedar"]


def test_a_resumed_run_goes_on_where_it_stopped():
    tale = planned_tale()
    tale.slice("alder", "expert/plays", 10)
    before = shown(tale)
    tale.resume()
    tale.slice("birch", "expert/plays", 20)
    view = shown(tale)
    assert view["session"]["sessions"] == 2
    assert view["progress"]["steps"] == before["progress"]["steps"]
    assert view["blend"]["curves"][-1]["step"] == [10, 20]


def test_a_blend_of_experts_from_elsewhere_has_no_cards_of_training():
    tale = BlendTale(names=(), recipe={"experts": {}})
    tale.add("poems", statistics="d" * 64)
    view = shown(tale)
    assert view["session"]["status"] == "done"
    parts = fragments(view)
    assert [parts[name] for name in ("blended", "assigned", "crossed", "tiles")] == [""] * 4
    assert "poems" in parts["made"]
    assert "with statistics" in parts["made"]
    assert "trained elsewhere" in parts["heading"]
    report_page(view)


def test_a_recipe_of_another_version_is_shown_as_far_as_it_is_known():
    recipe = {"experts": {"allocation": "by-moon-phase"}, "domains": [{"name": "plays"}]}
    tale = BlendTale(domains=("plays",), recipe=recipe)
    tale.whole("alder", "general/medium")
    view = shown(tale)
    assert view["blend"]["jobs"]["done"] == view["blend"]["jobs"]["all"] == 1
    tale.plan()
    view = shown(tale)
    assert row(view, "plays")["size"] == "small"
    report_page(view)


def test_other_kinds_of_run_have_no_cards_of_experts_and_the_other_way_round(tmp_path: Path):
    story = trained(tmp_path, steps=20)
    training = view_of(story.log.entries())
    story.log.close()
    tuning = view_of(tune_tale.eventful().entries)
    for view in (training, tuning):
        assert view["blend"] is None
        assert all(fragments(view)[name] == "" for name in draw_blended.CARDS)
    blending = fragments(shown(eventful()))
    assert all(blending[name] for name in draw_blended.CARDS)
    assert all(blending[name] == "" for name in (*draw_tuned.CARDS, "ways", "routes", "wayshint", "mixing"))
    assert set(blending) == set(fragments(training)) == set(fragments(tuning))


def test_a_live_page_becomes_one_of_experts_when_the_run_begins(tmp_path: Path):
    follower = Follower(tmp_path)
    waiting = follower.picture
    assert waiting.parts["blended"] == ""
    tale = BlendTale(log=Log(tmp_path / "log.sqlite"))
    tale.slice("alder", "general/medium", 10)
    follower.picture = follower._look()
    news = follower.picture.news(waiting)["fragments"]
    assert "Training loss of each job" in news["blended"]
    assert "0 of 4 jobs" in news["progress"]
    tale.done("alder", "general/medium")
    tale.log.close()
    after = follower._look().news(follower.picture)["fragments"]
    assert "1 of 4 jobs" in after["progress"]
    assert "heading" not in after  # only what changed is sent


def test_a_log_takes_the_whole_tale(tmp_path: Path):
    tale = eventful(Log(tmp_path / "log.sqlite"))
    assert len(tale.log) == len(tale.entries)
    tale.log.close()


def test_what_strangers_write_stays_text():
    tale = BlendTale(domains=("plays",), names=(HOSTILE, "birch"))
    tale.slice(HOSTILE, "general/" + HOSTILE, 10)
    tale.slice("birch", "expert/" + HOSTILE, 10)
    tale.slice(HOSTILE, "expert/" + HOSTILE, 20)
    tale.done("birch", HOSTILE, losses={HOSTILE: 1.0})
    tale.done("birch", "score/plays", losses={HOSTILE: 1.0, "plays": 900.0})
    tale.plan(allocation=HOSTILE)
    tale.route(rule=HOSTILE, router=HOSTILE, accuracy={HOSTILE: float("nan")}, domains=(HOSTILE,))
    tale.upcycle(gate=HOSTILE, format=HOSTILE)
    tale.add(HOSTILE)
    tale.remove(HOSTILE * 2)
    text = report_page(shown(tale))
    assert "&lt;script&gt;alert" in text
    assert "<script>alert" not in text
    assert not re.search(r"\b(nan|inf)\b", text.split("</style>")[-1].split("<script")[0])


@pytest.mark.parametrize("changes", [{"loss": float("nan")}, {"steps": 5}])
def test_a_receipt_that_cannot_follow_is_a_problem_and_no_end(changes: dict):
    tale = BlendTale()
    tale.slice("alder", "general/medium", 10)
    tale.slice("alder", "general/medium", **{"steps": 20, **changes})
    view = shown(tale)
    assert any("cannot be read" in text for text in texts(view, "problem"))
    assert view["blend"]["curves"][0]["step"] == [10]


def test_a_plan_that_its_own_classes_do_not_fit_is_a_problem_and_no_end():
    recipe = recipe_of(("plays", "python")).plain()
    tale = BlendTale(domains=("plays", "python"), recipe=recipe | {"experts": recipe["experts"] | {"lanes": True}})
    classes = (Class("plays", "easy"), Class("python", "easy"))
    plan = (Assigned("plays", "small", 30, 1e9),)  # python would go on where plays ends
    tale.write("blend.plan", Planned(allocation="steps", classes=classes, plan=plan, flops=1e9, budget=1e9))
    view = shown(tale)
    assert len(texts(view, "problem")) == 1
    report_page(view)


def test_figures_that_no_number_can_hold_have_no_perplexity():
    assert perplexity(3.0) == pytest.approx(math.e**3)
    assert perplexity(1e9) is None
    assert perplexity(None) is None


def test_four_thousand_slices_make_a_page_of_bounded_size():
    view = View()
    tale = BlendTale(domains=("plays",))
    sizes = []
    for number in range(1, 4001):
        tale.slice("alder", "general/medium", number, loss=float(number % 7))
        if number % 1000 == 0:
            view.advance_all(tale.entries[view.position :])
            sizes.append(len(json.dumps(view.snapshot())))
    assert max(sizes) - min(sizes) < 12_000
    curve = view.snapshot()["blend"]["curves"][0]
    assert len(curve["step"]) < 400
    assert curve["step"][-1] == 4000
    assert max(curve["loss"]) == 6.0


def test_many_domains_and_changes_make_a_page_of_bounded_size():
    domains = tuple(f"domain{index:03}" for index in range(100))
    tale = planned_tale(domains=domains)
    for domain in domains:
        tale.slice("alder", f"expert/{domain}", 10)
        tale.done("alder", f"score/{domain}")
        tale.add(f"extra-{domain}")
        tale.upcycle()
    view = shown(tale)
    told = view["blend"]
    assert len(told["rows"]) == len(told["cross"]["rows"]) == MAX_DOMAINS
    assert len(told["cross"]["columns"]) == MAX_COLUMNS
    assert told["cross"]["more"] == 100 - MAX_COLUMNS
    assert len(told["curves"]) == MAX_CURVES
    assert len(told["after"]["changes"]) == MAX_CHANGES
    assert len(told["after"]["mixtures"]) == MAX_MIXTURES
    assert told["domains"] == 100
    page = report_page(view)
    assert "36 more are not listed" in page
    assert len(page) < 600_000
