"""The parts of the bench of unlike pairs: tiny models that were hardly trained, and figures made up."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from talkoot.bench.peer_unlike import Base, Point, Setting, Side, Told, Trial, learn, warm
from talkoot.bench.unlike import (
    ALDER,
    ALONE,
    ARMS,
    BIRCH,
    FLOOD,
    FTIS,
    NONE,
    TWINS,
    UNLIKE_TOKENS,
    WHOLE,
    bars,
    rows,
    settings,
)

torch.set_num_threads(1)
TINY = Base(name="tiny", width=16, steps=2)
OTHER = Base(name="other", width=8, steps=1, tokenizer="bytes")
SETTING = Setting(
    name="small",
    sides={ALDER: Side(base=TINY, prompts=1), BIRCH: Side(base=TINY, prompts=3)},
    rounds=2,
    problems=2,
    samples=2,
)
TEXTS = msgspec.structs.replace(SETTING, sides={ALDER: Side(base=TINY, prompts=1), BIRCH: Side(base=OTHER, prompts=3)})


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bases")
    for base in (TINY, OTHER):
        warm(base, 1, folder)
    return folder


def made_up(setting: str, arm: str, greedy: float, ratio: float = 1.0, divergence: float = 0.0) -> Trial:
    end = Point(round=1, greedy=greedy, avg=greedy, shifted=greedy, shifted_avg=greedy)
    first = {"ratio_max": ratio, "kl_naive": divergence, "kl_nonnegative": divergence}
    told = Told(curve=(end,), generated=1, own=1, external=1, facts=first, first=first, rejected=0)
    return Trial(setting=setting, arm=arm, seed=1, peers={ALDER: told, BIRCH: told}, cpu_s=1.0)


def quick(alone: float, none: float, ftis: float, ratio: float = 1.0, divergence: float = 0.0) -> list[bool]:
    scores = {ALONE.name: alone, NONE.name: none, FTIS.name: ftis}
    found = {(FLOOD.name, arm): [made_up(FLOOD.name, arm, score)] for arm, score in scores.items()}
    found[TWINS.name, FTIS.name] = [made_up(TWINS.name, FTIS.name, 0.0, ratio, divergence)]
    return [bar.holds for bar in bars(found, quick=True)]


def test_alone_uses_nothing_of_the_other_and_answers_the_same_problems(root: Path):
    alone, none = (learn(SETTING, arm, 1, root) for arm in (ALONE, NONE))
    assert [alone.peers[name].external for name in SETTING.sides] == [0, 0]
    assert [none.peers[name].external for name in SETTING.sides] == [3, 1]
    assert [none.peers[name].own for name in SETTING.sides] == [1, 3]
    assert all(point.round in (1, 2) for told in none.peers.values() for point in told.curve)


def test_models_with_unlike_tokenizers_learn_from_each_others_texts(root: Path):
    reader = learn(TEXTS, WHOLE, 1, root).peers[BIRCH]
    assert (reader.external, reader.rejected) == (1, 0)


def test_a_run_with_the_same_seed_is_the_same_to_the_last_bit(root: Path):
    first, again = (msgspec.structs.replace(learn(SETTING, NONE, 1, root), cpu_s=0.0) for _ in range(2))
    assert first == again


def test_quick_bars_hold_where_they_should():
    assert quick(0.9, 0.5, 0.9) == [True, True, True]
    assert quick(0.9, 0.9, 0.5) == [False, True, True]
    assert quick(0.9, 0.5, 0.9, ratio=1.001) == [True, False, True]
    assert quick(0.9, 0.5, 0.9, divergence=-0.001) == [True, True, False]


def test_what_was_never_measured_holds_no_bar():
    trial = made_up(TWINS.name, FTIS.name, 0.0)
    bare = {name: msgspec.structs.replace(told, first={}) for name, told in trial.peers.items()}
    found = {(FLOOD.name, arm.name): [made_up(FLOOD.name, arm.name, 0.5)] for arm in (ALONE, NONE, FTIS)}
    found[TWINS.name, FTIS.name] = [msgspec.structs.replace(trial, peers=bare)]
    assert [bar.holds for bar in bars(found, quick=True)] == [True, False, False]


def test_the_whole_bench_has_every_arm_of_the_pair_and_no_ratio_per_token_across_tokenizers():
    arms = {setting.name: {arm.name for arm in arms} for setting, arms in settings(quick=False)}
    assert {"alone", "none", "vis", "tis", "filter", "opsm", "ftis"} <= arms["pair"] == {arm.name for arm in ARMS}
    assert FTIS.name not in arms[UNLIKE_TOKENS.name]


def test_rows_are_named_by_pair_peer_and_arm_and_leave_the_twins_out():
    found = {(one, FTIS.name): [made_up(one, FTIS.name, 0.5)] for one in (FLOOD.name, TWINS.name)}
    assert [row.name for row in rows(found)] == ["flood, alder: ftis", "flood, birch: ftis"]
