"""``talkoot plan`` on replicas that mix after rounds: what it says, and what it refuses."""

from __future__ import annotations

import json
from typing import Any

import pytest

from talkoot.cli.plan import run
from talkoot.cli.plan_request import Request
from talkoot.core.errors import TalkootError
from talkoot.train.recipe import load_recipe

EIGHT = {"swarm.stages": 1, "swarm.replicas": 8, "data.tokenizer": "bytes", "model.depth": 2}


@pytest.fixture
def plan(capsys):
    """Plans the usual recipe with one rule: the JSON, or the text."""

    def ask(rule: str, request: Request | None = None, *, as_json: bool = True, **changes: object) -> Any:
        settings = {**EIGHT, "mixing.rule": rule, **{key.replace("__", "."): value for key, value in changes.items()}}
        sets = tuple(f"{key}={value}" for key, value in settings.items())
        run(request or Request(), recipe=None, sets=sets, as_json=as_json)
        text = capsys.readouterr().out
        return json.loads(text) if as_json else text

    return ask


def test_a_plan_says_what_mixing_sends_and_how_far_replicas_drift_apart(plan):
    view = plan("noloco")
    mixing, values = view["mixing"], view["stages"][0]["parameters"]
    assert mixing["sent_bytes_per_round"] == 4 * values
    assert mixing["sent_bytes_per_inner_step"] == 4 * values / 50
    assert mixing["ddp_sent_bytes_per_step"] == pytest.approx(2 * 4 * values * 7 / 8)
    assert mixing["spread"]["ratio"] == pytest.approx(0.926, abs=0.001)
    assert mixing["spread"]["largest_pull"] == pytest.approx(1.5)
    assert set(mixing["inner_steps"].values()) == {50}
    busy = [peer["busy_share"] for peer in view["peers"].values()]
    assert sum(busy) / 8 == pytest.approx(1 - mixing["idle_share"])
    assert view["predicted_step_seconds"] == pytest.approx(mixing["round_s"] / 50)
    assert view["stages"][0]["state_bytes"] == (16 + 12) * values  # slow weights, velocity, rounding


@pytest.mark.parametrize("rule", ["noloco", "noloco-literal", "noloco-nesterov", "epidemic", "diloco", "streaming"])
def test_the_text_has_a_section_for_every_rule(plan, rule):
    text = plan(rule, as_json=False)
    assert "\nMixing\n" in text
    assert "per inner step" in text
    assert ("least spread at" in text) == (rule not in ("diloco", "streaming"))


def test_replicas_that_never_talk_send_nothing(plan):
    view = plan("none")
    assert view["mixing"]["sent_bytes_per_round"] == view["mixing"]["idle_share"] == 0
    assert "sent per replica" not in plan("none", as_json=False)


def test_rules_differ_in_bytes_as_their_messages_do(plan):
    sent = {
        name: plan(rule, **changes)["mixing"]["sent_bytes_per_round"]
        for name, rule, changes in (
            ("fused", "noloco", {}),
            ("literal", "noloco-literal", {}),
            ("mixed", "noloco-literal", {"mixing__wire": "bfloat16", "mixing__wire_gradient": "int8"}),
            ("ring", "diloco", {}),
            ("sparse", "sparseloco", {}),
        )
    }
    assert sent["literal"] == 2 * sent["fused"]
    assert sent["mixed"] / sent["fused"] == pytest.approx(3 / 4, rel=0.01)
    assert sent["ring"] == pytest.approx(2 * 7 / 8 * sent["fused"])
    assert sent["sparse"] < sent["fused"] / 15


def test_slow_replicas_wait_less_where_rounds_are_balanced(plan):
    speeds = "[1.0, 0.9, 0.8, 0.7, 0.6, 1.0, 0.9, 0.5]"
    balanced = plan("noloco", swarm__speeds=speeds)["mixing"]
    equal = plan("noloco", swarm__speeds=speeds, mixing__balance="false")["mixing"]
    assert sorted(balanced["inner_steps"].values()) == [25, 30, 35, 40, 45, 45, 50, 50]
    assert balanced["idle_share"] < 0.05 < equal["idle_share"]


def test_on_a_named_network_swaps_are_shorter_than_a_ring(plan):
    view = plan("noloco", Request(network="gcp12"))["mixing"]
    assert view["links"] == "gcp12"
    assert 0.05 < view["exchange_s"] < view["ring_s"] / 4


def test_the_ablation_without_a_pull_says_that_nothing_bounds_the_spread(plan):
    assert plan("noloco", mixing__pull=0.0)["mixing"]["spread"]["ratio"] is None
    assert "nothing pulls replicas together" in plan("noloco", as_json=False, mixing__pull=0.0)
    assert "CAUTION" in plan("noloco", as_json=False, mixing__pull=1.45)


@pytest.mark.parametrize(
    ("changes", "request_", "what"),
    [
        ({"swarm__stages": 2}, None, r"swarm\.stages"),
        ({"swarm__replicas": 1}, None, r"swarm\.replicas"),
        ({}, Request(network="gcp12", stages=3), "--stages"),
        ({}, Request(failures=True), "--failures"),
        ({}, Request(network="gcp12", nodes=5), "--nodes"),
    ],
)
def test_what_replicas_cannot_do_is_refused(plan, changes, request_, what):
    with pytest.raises(TalkootError, match=what):
        plan("noloco", request_, **changes)


def test_a_plan_on_a_network_is_a_recipe_with_its_links(plan, tmp_path):
    out = tmp_path / "planned.toml"
    plan("noloco", Request(network="gcp12", nodes=8, out=out))
    written = load_recipe(out)
    assert written.mixing.rule == "noloco"
    assert len(written.network.links) == 8 * 7
    with pytest.raises(TalkootError, match="cannot be made") as caught:
        plan("noloco", Request(network="gcp12", nodes=9, out=out))
    assert "swarm.replicas" in caught.value.next
