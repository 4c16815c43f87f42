"""Post-training recipes: what is refused before anything starts, and under which key."""

from __future__ import annotations

from typing import Any

import pytest

from talkoot.core.errors import TalkootError
from talkoot.core.plain import build
from talkoot.tune.recipe import TuneRecipe, load_tune_recipe

HUGE = 99999999999999999999999


def recipe(**tree: Any) -> TuneRecipe:
    return build({"task": "addition:1", **tree}, TuneRecipe, what="the test's recipe", where="here")


def refusal(**tree: Any) -> TalkootError:
    with pytest.raises(TalkootError) as caught:
        recipe(**tree).check()
    assert caught.value.next
    return caught.value


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("warm", "batch", 0),
        ("warm", "batch", 2**40),
        ("warm", "learning_rate", float("nan")),
        ("warm", "learning_rate", -1.0),
        ("warm", "steps", -1),
        ("rollout", "prompts", 0),
        ("rollout", "samples", 0),
        ("rollout", "samples", 1),
        ("rollout", "samples", 2**40),
        ("rollout", "top_p", 0.0),
        ("model", "width", 2**40),
        ("model", "heads", 5),
    ],
)
def test_a_peers_own_keys_are_checked_like_those_of_all(section: str, key: str, value: object):
    assert f"{section}.{key}" in refusal(**{section: {key: value}}).where
    own = refusal(peers=[{"name": "alder"}, {"name": "birch", section: {key: value}}])
    assert "birch" in own.where
    assert f"{section}.{key}" in own.where


@pytest.mark.parametrize("value", [HUGE, -HUGE, 2**40])
@pytest.mark.parametrize(
    "path",
    [
        "tune.rounds",
        "tune.threads",
        "tune.evaluate_items",
        "rollout.max_new_tokens",
        "exchange.max_lag",
        "exchange.refills",
        "optimizer.warmup",
        "update.updates_per_round",
        "update.microbatch_tokens",
        "distillation.top_k",
        "critic.max_tokens",
    ],
)
def test_an_integer_that_nobody_could_mean_is_refused_by_its_key(path: str, value: int):
    section, _, key = path.partition(".")
    assert refusal(**{section: {key: value}}).where.endswith(path)


@pytest.mark.parametrize(
    "tree",
    [
        {"seed": HUGE},
        {"objective": {"max_length": HUGE}},
        {"peers": [{"name": "alder", "model": {"seed": HUGE}}]},
        {"optimizer": {"learning_rate": HUGE * 10**400}},
        {"faults": [{"peer": "alder", "step": HUGE, "phase": "update"}]},
    ],
)
def test_an_integer_of_more_than_64_bits_is_refused_wherever_it_stands(tree: dict[str, Any]):
    assert "64 bits" in refusal(**tree).why


def test_a_number_of_thousands_of_digits_is_refused():
    with pytest.raises(TalkootError, match="rounds"):
        load_tune_recipe(None, ("tune.rounds=" + "9" * 5000,))


def test_peers_are_counted_before_they_get_names():
    assert "count" in refusal(peers=[{"count": 300_000_000_000}]).where
    assert refusal(peers=[{"count": 200}, {"count": 200}]).why.startswith("it is 400")


def test_peers_without_a_name_get_trees_that_nobody_has():
    assert recipe(peers=[{"count": 2}, {"name": "alder"}, {"count": 2}]).names == (
        "birch",
        "cedar",
        "alder",
        "dogwood",
        "elm",
    )
    assert recipe(peers=[{"name": "p", "count": 2}, {}]).names == ("p1", "p2", "alder")
    assert "'p2'" in refusal(peers=[{"name": "p", "count": 2}, {"name": "p2"}]).why


HORIZONTAL = {"exchange": {"split": "horizontal"}, "correction": {"rule": "none"}}
TWO = [{"name": "alder"}, {"name": "birch"}]


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"peers": [TWO[0], {"name": "birch", "rollout": {"prompts": 3}}]}, "peer birch, key rollout.prompts"),
        ({"peers": [TWO[0], {"name": "birch", "rollout": {"samples": 3}}]}, "peer birch, key rollout.samples"),
        ({"peers": [TWO[0], {"name": "birch", "rollout": {"max_new_tokens": 9}}]}, "rollout.max_new_tokens"),
        ({"peers": [TWO[0], {"name": "birch", "from_round": 2}]}, "peer birch, key from_round"),
        ({"rollout": {"samples": 2}, "peers": [{"count": 3}]}, "rollout.samples"),
        ({"exchange": {"split": "horizontal", "own": 2}}, "exchange.own"),
        ({"exchange": {"split": "horizontal", "external": 0}}, "exchange.external"),
        ({"exchange": {"split": "horizontal", "max_lag": 1}}, "exchange.max_lag"),
        ({"critic": {"kind": "arithmetic"}, "distillation": {"divergence": "pg"}}, "distillation.divergence"),
    ],
)
def test_what_makes_no_sense_where_all_share_their_groups_is_refused_by_name(changes: dict[str, Any], where: str):
    recipe(peers=TWO, **HORIZONTAL).check()
    found = refusal(**{"peers": TWO, **HORIZONTAL, **changes})
    assert found.where.endswith(where)
    assert "vertical" in found.next


def test_a_task_without_a_problem_to_train_on_is_refused(tmp_path):
    path = tmp_path / "held.jsonl"
    path.write_text('{"prompt": "1+1=", "answer": "2", "split": "held_out"}\n')
    assert "no problem to train on" in refusal(task=f"jsonl:{path}").why


@pytest.mark.parametrize(
    ("changes", "doubt"),
    [
        ({"peers": [TWO[0], {"name": "birch", "from_round": 30}]}, "birch never comes: its from_round is 30"),
        ({**HORIZONTAL, "correction": {"rule": "ftis"}}, "correction.rule is not none"),
        ({**HORIZONTAL, "peers": [TWO[0], {"name": "birch", "model": {"seed": 2}}]}, "begin with other weights"),
        ({"rollout": {"temperature": 0.0}, "peers": [{}]}, "alder's own completions of a prompt are all the same"),
        ({"rollout": {"top_k": 1}, "peers": [{}]}, "rollout.top_k is 1"),
    ],
)
def test_what_is_perhaps_not_meant_is_said(changes: dict[str, Any], doubt: str):
    made = recipe(**{"peers": TWO, **changes})
    made.check()
    (said,) = made.doubts()
    assert doubt in said
    assert not list(recipe(peers=TWO, **HORIZONTAL).doubts())


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"update": {"temperature": 0.7}}, "update.temperature"),
        ({"exchange": {"own": 0, "external": 0}}, "exchange.own"),
        ({"objective": {"overlong": "soft"}, "rollout": {"max_new_tokens": 1}}, "objective.overlong"),
        ({"peers": [{"name": ".."}]}, "peers.name"),
    ],
)
def test_what_could_not_do_what_it_says_is_refused_by_the_key_that_was_set(changes: dict[str, Any], where: str):
    assert refusal(**changes).where == where
