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
