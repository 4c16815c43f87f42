"""Evaluation against numbers worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from talkoot.core.errors import TalkootError
from talkoot.tune import evaluate as module
from talkoot.tune.completion import Completion, Sampling
from talkoot.tune.evaluate import evaluate
from talkoot.tune.tasks import Item
from talkoot.tune.tasks.addition import Addition

SAMPLING = Sampling(max_new_tokens=9, temperature=0.7)


class Characters:
    """Ids are code points; 0 ends."""

    vocab_size = 128
    eos_ids = (0,)

    def encode(self, text):
        return [ord(character) for character in text]

    def decode(self, ids):
        return "".join(chr(number) for number in ids if number)

    def digest(self):
        return "0" * 64


class Scripted:
    """Answers from a table: prompt -> what its samples say, then what the greedy one says. A '~': cut off."""

    coder = Characters()
    max_positions = 100

    def __init__(self, script: dict[str, list[str]]) -> None:
        self.script, self.calls = script, []

    def prompt_ids(self, prompt):
        return self.coder.encode(prompt)

    def generate(self, prompts, seeds, sampling):
        self.calls.append((len(prompts), seeds, sampling))
        greedy = sampling.temperature == 0
        groups = []
        for prompt, row in zip(prompts, seeds, strict=True):
            said = self.script[self.coder.decode(prompt)]
            groups.append([completion(text) for text in (said[-1:] if greedy else said[: len(row)])])
        return groups


def completion(text):
    cut = text.endswith("~")
    ids = tuple(ord(character) for character in text.rstrip("~")) + (() if cut else (0,))
    return Completion(ids, (0.0,) * len(ids), "length" if cut else "stop")


class Three(Addition):
    """Addition with three problems."""

    def size(self, split):
        return {"held_out": 3, "train": 0, "shifted": 1}[split]

    def index(self, split, number):
        return [1111, 2222, 4785][number]


SCRIPT = {
    "11+11=": ["22", "23", "22", "9", "22"],  # 2 of 4, majority right, greedy right
    "22+22=": ["44", "45", "45", "44", "45"],  # 2 of 4, a tie, greedy wrong
    "47+85=": ["132~", "1", "x", "132", "132~"],  # 1 of 4, one right vote against one wrong: a tie; greedy cut off
}


def run(**change: Any):
    policy: Any = Scripted(SCRIPT)
    arguments = {"samples": 4, "sampling": SAMPLING, **change}
    return policy, evaluate(policy, Three(), "held_out", **arguments)


def test_the_measures_are_those_worked_out_by_hand():
    _, result = run()
    assert (result.problems, result.samples, result.split) == (3, 4, "held_out")
    assert result.avg == pytest.approx((2 + 2 + 1) / 12)
    assert result.reward == result.avg
    assert result.passed == 1.0
    assert result.majority == pytest.approx(1 / 3)
    assert result.greedy == pytest.approx(1 / 3)
    assert result.length == pytest.approx((3 + 3 + 3 + 2 + 3 * 4 + 3 + 2 + 2 + 4) / 12)
    assert result.cut_off == pytest.approx(1 / 12)
    assert result.reasons == {"cut off": 1, "no answer": 1, "right": 5, "wrong": 5}


def test_a_problem_counts_once_however_many_wrong_answers_agree():
    _, result = run(samples=1)
    assert (result.avg, result.passed, result.majority) == (pytest.approx(2 / 3), pytest.approx(2 / 3), 2 / 3)


def test_seeds_are_fixed_and_differ_between_samples_problems_and_runs(monkeypatch):
    policy, result = run(seed=5)
    again, same = run(seed=5)
    other, _ = run(seed=6)
    assert policy.calls == again.calls
    assert result == same
    seeds = [row for _, rows, sampling in policy.calls if sampling.temperature for row in rows]
    flat = [seed for row in seeds for seed in row]
    assert len(set(flat)) == 12
    assert not set(flat) & {s for _, rows, sampling in other.calls if sampling.temperature for row in rows for s in row}
    monkeypatch.setattr(module, "BATCH", 4)  # one problem at a time
    small, alone = run(seed=5)
    assert alone == result
    assert [count for count, _, _ in small.calls] == [1, 1, 1, 3]
    assert all(sampling.max_new_tokens == 9 for _, _, sampling in small.calls)


def test_nothing_to_evaluate_is_an_error():
    policy: Any = Scripted(SCRIPT)
    with pytest.raises(TalkootError, match="no train problems"):
        evaluate(policy, Three(), "train", sampling=SAMPLING)
    with pytest.raises(ValueError, match="0 samples"):
        run(samples=0)


def test_a_sum_of_parts_is_a_reward_but_not_right():
    class Half(Three):
        """Pays half for anything."""

        def reward(self, item: Item, completion: str, finished: bool):
            return type(super().reward(item, completion, finished))(0.5, "half")

    policy: Any = Scripted(SCRIPT)
    result = evaluate(policy, Half(), "held_out", samples=4, sampling=SAMPLING)
    assert (result.reward, result.avg, result.majority) == (0.5, 0.0, 0.0)
