"""Scores, bars and rows of the upcycling bench, on made-up log-probabilities; no training."""

from __future__ import annotations

import math

import numpy as np
import pytest

from talkoot.bench.peer_upcycle import Arm, Setting, Trial
from talkoot.bench.upcycle import BASELINES, OURS, bars, notes, outcome, rows, score, shares, table

SETTING = Setting(domains=("a", "b"), prompt=2)
METHODS = ("seed", "weight average", "oracle", "prompt", "random gates", "paper", "token", "mean", "naive-bayes", OURS)
TRAINED = ("trained from random gates", "trained from closed form")


def scores(perplexity, late=None):
    """Windows of four tokens, each as likely as the perplexity says; the last two by ``late``."""
    early = -math.log(perplexity)
    line = [early, early, *[early if late is None else -math.log(late)] * 2]
    return {name: np.array([line, line], dtype=np.float32) for name in SETTING.domains}


def arm(**changes):
    shown = {
        "own": scores(10.0),
        "expert a": scores(16.0),
        "expert b": scores(40.0),
        "oracle, pinned trunk": scores(12.5),
    }
    shown |= {name: scores(20.0) for name in (*METHODS, *TRAINED)}
    shown |= {"paper": scores(10.8), "oracle": scores(10.0), "prompt": scores(50.0, 10.1), OURS: scores(10.1)}
    facts = {"accuracy": {OURS: 0.9}, "exact": True, "difference": 0.0, "cost": {"token, windows": 1.1}, "cpu_s": 1.0}
    return Arm(**{"scores": shown | changes.pop("scores", {}), **facts, **changes})


def trials(**changes):
    return [Trial(seed=1, arms={"mlp": arm(**changes), "all": arm()}, cpu_s=2.0)]


def failed(**changes):
    return [bar.text for bar in bars(SETTING, trials(**changes), False) if not bar.holds]


def test_a_share_is_the_own_experts_perplexity_over_the_methods():
    assert shares(SETTING, arm(), "weight average") == pytest.approx({"a": 50.0, "b": 50.0})
    assert score(SETTING, arm(), "best single expert") == pytest.approx(62.5)


def test_a_prompts_own_tokens_are_not_scored():
    assert score(SETTING, arm(), "prompt") == pytest.approx(100 / 1.01, rel=1e-4)
    assert score(SETTING, arm(), "prompt", 0) < 60


def test_all_bars_hold_where_everything_is_as_claimed():
    assert failed() == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"exact": False}, "forced experts"),
        ({"difference": 1e-4}, "forced experts"),
        ({"cost": {"mean, windows": 1.3}}, "CPU-seconds"),
        ({"scores": {"paper": scores(11.2)}}, "91"),
        ({"scores": {OURS: scores(10.3)}}, "97.6"),
        ({"scores": {"weight average": scores(10.05)}}, "weight average"),
        ({"scores": {"expert a": scores(10.05)}}, "best single expert"),
        ({"scores": {TRAINED[0]: scores(10.05)}}, "trained from random gates"),
    ],
)
def test_every_bar_can_fail(changes, words):
    found = failed(**changes)
    assert len(found) == 1
    assert words in found[0]


def test_the_worst_seed_counts():
    several = [*trials(), *trials(scores={"paper": scores(11.2)})]
    assert [bar.text for bar in bars(SETTING, several, False) if not bar.holds]


def test_a_quick_run_requires_no_shares_and_still_beats_every_baseline():
    found = [bar.text for bar in bars(SETTING, trials(), True)]
    assert not any("97.6" in text or "91" in text for text in found)
    assert all(any(name in text for text in found) for name in BASELINES)


def test_rows_and_notes_say_what_was_scored():
    found = {row.name: row for row in rows(SETTING, trials())}
    assert found[f"MLP-only: {OURS}"].note.endswith("90 % of choices right")
    assert found["all weights: best single expert"].values == pytest.approx((62.5,))
    assert not any("own" in name for name in found)
    text = " ".join(notes(SETTING, trials()))
    assert "0.0 points with the mean trunk, 20.0 with the seed's" in text
    assert "10.0" in text


def test_the_outcome_can_be_kept(tmp_path):
    made = outcome(SETTING, trials(), False)
    assert made.passed
    assert {path.name for path in made.save(tmp_path)} == {"upcycle.json", "upcycle.svg", "upcycle-domains.json"}
    assert table(SETTING, trials())["mlp"][OURS]["a"] == pytest.approx([100 / 1.01], rel=1e-4)
