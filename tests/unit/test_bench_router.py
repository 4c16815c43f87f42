"""The parts of the router bench, on toy corpora; its figures, and its verdict on made-up trials."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import msgspec
import pytest
import torch

from talkoot.bench import peer_router, peer_router_rivals
from talkoot.bench.peer_router import (
    PROMPT,
    Setting,
    Trial,
    added_and_removed,
    area_under_curve,
    calibration_error,
    federated,
    normalised_score,
    split_of,
    try_once,
)
from talkoot.bench.router import bars, notes, rows
from talkoot.blend.router import Decision, Router
from talkoot.blend.statistics import Features, count
from talkoot.core.keys import Key

torch.set_num_threads(1)

WORDS = {
    "sea": "ship sail wave harbour anchor tide gull mast storm island crew deck",
    "kitchen": "bread salt oven butter spoon onion soup plate flour kettle pepper pan",
    "forest": "oak moss fern deer path birch owl stream root pine fox mushroom",
    "lake": "ship wave heron reed perch otter rowing swan jetty trout ripple shore",
    "sky": "cloud star comet moon sun dusk planet orbit meteor aurora eclipse dawn",
}
SETTING = Setting(
    domains=("sea", "kitchen"),
    probes=("sky",),
    late=("forest",),
    general=("lake",),
    megabytes=0.1,
    general_megabytes=0.1,
    held_out=0.25,
    prompts=30,
    neighbours=0,
    steps=(3, 3),
)


@pytest.fixture(autouse=True)
def toys(monkeypatch):
    def read(source: str) -> list[str]:
        chance, words = random.Random(source), WORDS[source.removeprefix("corpus:")].split()
        return [" ".join(chance.choices([*words, "the", "of", "and"], k=150)) for _ in range(60)]

    monkeypatch.setattr(peer_router, "read_documents", read)
    caches = (peer_router.corpus, peer_router.tokenizer_of, peer_router.encoded)
    for one in caches:
        one.cache_clear()
    yield
    for one in caches:
        one.cache_clear()


def test_a_trial_measures_all_rules_on_documents_that_nobody_counted():
    trial = try_once(SETTING, 1)
    assert set(trial.accuracy) == {"all", "average", "bigram", "chunk", "naive-bayes", "votes"}
    assert trial.accuracy[trial.chosen][PROMPT] > 95
    assert len(trial.decisions) == 60
    assert len(trial.strangers["sky"]) == 30
    accuracy, traceless = trial.later
    assert accuracy > 90
    assert traceless
    assert trial.wide_votes > 50
    sides = split_of(SETTING, "sea", 1)
    texts = [{tuple(one.tolist()) for one in side} for side in (sides.train, sides.validation, sides.test)]
    assert all(texts)
    assert not texts[0] & texts[1]
    assert not texts[2] & (texts[0] | texts[1])


def test_another_seed_splits_otherwise():
    first, again, second = (split_of(SETTING, "sea", seed) for seed in (1, 1, 2))
    assert [one.tolist() for one in first.test] == [one.tolist() for one in again.test]
    assert [one.tolist() for one in first.test] != [one.tolist() for one in second.test]


@pytest.mark.parametrize("peers", [1, 3])
def test_sums_of_peers_are_compared_bit_for_bit(peers, monkeypatch):
    assert federated(SETTING, peers, 0, documents=9)
    merged = peer_router.merge

    def careless(parts):
        whole = merged(parts)
        whole.histogram.bigrams[0] += 1
        return whole

    monkeypatch.setattr(peer_router, "merge", careless)
    assert not federated(SETTING, peers, 0, documents=9)


def test_a_domain_that_left_a_trace_would_be_noticed(monkeypatch):
    splits = {name: split_of(SETTING, name, 0) for name in SETTING.domains}
    features = Features.random(peer_router.tokenizer_of(SETTING))
    counted = {name: count(name, one.train, features, Key.derived("x")) for name, one in splits.items()}
    router = Router.fit(counted, features)
    assert added_and_removed(SETTING, router, splits, 0)[1]
    monkeypatch.setattr(Router, "without", lambda router, name: router)
    assert not added_and_removed(SETTING, router, splits, 0)[1]


def test_experts_score_the_routers_that_choose_among_them():
    splits = {name: split_of(SETTING, name, 0) for name in SETTING.domains}
    features = Features.random(peer_router.tokenizer_of(SETTING))
    counted = {name: count(name, one.train, features, Key.derived("x")) for name, one in splits.items()}
    setting = msgspec.structs.replace(SETTING, steps=(3, 12))
    found = peer_router_rivals.routed_score(setting, splits, {"bigram": Router.fit(counted, features)}, 0)
    assert found["bigram"] == pytest.approx(100, abs=1)
    assert found["best expert for each text"] >= found["bigram"]


def test_an_expert_knows_its_own_domain_best():
    splits = {name: split_of(SETTING, name, 0) for name in SETTING.domains}
    stages = peer_router_rivals.experts(msgspec.structs.replace(SETTING, steps=(3, 12)), splits, 0)
    rows = torch.stack(peer_router.draw_prompts(splits["sea"].test, 100, 10, 0))
    own, other = (float(peer_router_rivals._log_probs(stage, rows).mean()) for stage in stages)
    assert own > other


def decided(expert: str, confidence: float, familiarity: float = -3.0, known: bool = True) -> Decision:
    return Decision(expert=expert, scores={}, confidence=confidence, known=known, familiarity=familiarity)


def test_calibration_error_is_the_gap_between_confidence_and_success():
    honest = [("a", decided("a" if i < 8 else "b", 0.8)) for i in range(10)]
    assert calibration_error(honest) == pytest.approx(0)
    boastful = [("a", decided("a" if i < 8 else "b", 0.99)) for i in range(10)]
    assert calibration_error(boastful) == pytest.approx(0.19)
    both = [*honest, *boastful]
    assert calibration_error(both) == pytest.approx(0.095)
    assert calibration_error([("a", decided("a", 1.0)), ("a", decided("b", 0.5))]) == pytest.approx(0.25)


def test_area_under_the_curve_counts_pairs_in_order():
    assert area_under_curve([3, 4], [1, 2]) == 1
    assert area_under_curve([1, 2], [3, 4]) == 0
    assert area_under_curve([1, 2], [1, 2]) == 0.5
    assert area_under_curve([1, 3], [2]) == 0.5
    assert area_under_curve([2, 3], [2]) == 0.75


def test_the_normalised_score_compares_perplexities_domain_by_domain():
    log_probs = torch.tensor([[-1.0, -2.0], [-1.0, -2.0], [-3.0, -2.0]])
    assert normalised_score([0, 0, 1], [0, 0, 1], log_probs) == pytest.approx(100)
    assert normalised_score([0, 0, 1], [1, 1, 1], log_probs) == pytest.approx(50 + 50 * math.exp(-1))
    assert normalised_score([0, 0, 1], [0, 1, 1], log_probs) == pytest.approx(50 + 50 * math.exp(-0.5))


def trial(**changes: object) -> Trial:
    accuracy = {rule: {PROMPT: right} for rule, right in {"bigram": 98.0, "votes": 60.0}.items()}
    good = Trial(
        accuracy=accuracy,
        chosen="bigram",
        decisions=[("sea", decided("sea", 0.99))] * 50,
        strangers={"sky": [decided("sea", 0.5, -9.0, False)] * 5},
        wide_votes=70.0,
        later=(97.0, True),
        seconds={"counting": 1.0},
    )
    return replace(good, **changes)


GOOD = {"scores": {"bigram": 99.0}, "exact": {1: True, 3: True}, "route_s": 3e-4, "fit_s": {"chunk": 0.5}}
BROKEN = {
    "right": ([trial(accuracy={"bigram": {PROMPT: 96.9}})], {}),
    "score": ([trial()], {"scores": {"bigram": 98.3}}),
    "calibration": ([trial(decisions=[("sea", decided("sea", 0.9))] * 50)], {}),
    "under the curve": ([trial(strangers={"sky": [decided("sea", 0.5, -2.0)] * 5})], {}),
    "routing": ([trial()], {"route_s": 2e-3}),
    "fitting": ([trial()], {"fit_s": {"chunk": 0.5, "votes": 2.1}}),
    "peers": ([trial()], {"exact": {1: True, 3: False}}),
    "trace": ([trial(later=(97.0, False))], {}),
}


def test_good_trials_hold_every_bar():
    assert all(bar.holds for bar in bars([trial(), trial()], *GOOD.values()))


@pytest.mark.parametrize("word", sorted(BROKEN))
def test_each_bar_fails_by_itself_and_the_worst_seed_decides(word):
    trials, changes = BROKEN[word]
    failed = [bar.text for bar in bars([trial(), *trials], *(GOOD | changes).values()) if not bar.holds]
    assert len(failed) == 1
    assert word in failed[0]


def test_rows_are_the_rules_from_best_to_worst_and_then_the_baselines():
    shown = rows([trial()], 89.0)
    assert [row.name for row in shown] == ["bigram", "votes", "votes, one-hot", "nearest neighbours", "oracle"]
    assert "nearest neighbours" not in [row.name for row in rows([trial()], None)]
    assert "chosen" in shown[0].note


def test_notes_tell_what_abstention_costs():
    mixed = trial(decisions=[("sea", decided("sea", 0.9)), ("kitchen", decided("sea", 0.4, -5.0, False))] * 5)
    text = " ".join(notes(SETTING, [mixed], GOOD["scores"], 3e-4, {"chunk": 0.5}))
    assert "50.0 % of known domains' prompts are answered, 0.00 % of all go to a wrong" in text
    assert "sky 0.0 %" in text
    assert "sea 100.0, kitchen 0.0" in text
