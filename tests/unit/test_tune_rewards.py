"""Rewards by exact text, number and pattern. Programs: tests/proc/test_tune_sandbox.py."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from talkoot.core.errors import TalkootError
from talkoot.tune.rewards import comparisons
from talkoot.tune.rewards.answer import answer_in
from talkoot.tune.rewards.numeric import number_in, parse_number
from talkoot.tune.rewards.regex import quick


def earned(kind, answer, completion):
    compare = comparisons[kind]
    compare.check(answer)
    result = compare.reward(answer, compare.extract(completion))
    assert result.value in (0.0, 1.0)
    return result.value


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("<answer>4</answer>", "4"),
        ("<answer>3</answer> no: <answer> 4 </answer> so", "4"),
        ("thinking\n\n 4 \n\n", "4"),
        ("4", "4"),
        ("", ""),
        ("</answer>4", "</answer>4"),
        ("<answer>4", "<answer>4"),
        ("x" * 2000, ""),
    ],
)
def test_the_answer_is_in_the_last_tag_or_line(completion, answer):
    assert answer_in(completion) == answer


@pytest.mark.parametrize(
    ("kind", "answer", "completion", "value"),
    [
        ("exact", "a  b", "so\na b", 1.0),
        ("exact", "a b", "A b", 0.0),
        ("exact", "12", "112", 0.0),
        ("numeric", "1234", "The answer is 1,234.", 1.0),
        ("numeric", "1234", "1,23,4", 0.0),
        ("numeric", "1234", "12 34", 0.0),
        ("numeric", "0.5", "1/2", 1.0),
        ("numeric", "1/3", "0.3333", 0.0),
        ("numeric", "0.333333333", "1/3", 1.0),
        ("numeric", "100", "1e2", 1.0),
        ("numeric", "1e9", "9e99999", 0.0),
        ("numeric", "-7", "x = -7", 1.0),
        ("numeric", "7", "10-7", 1.0),  # the last number, and that minus is an operation
        ("numeric", "-7", "\u22127", 1.0),
        ("numeric", "3.14 +- 0.01", "3.149", 1.0),
        ("numeric", "3.14 \u00b1 0.01", "3.151", 0.0),
        ("numeric", "5", "five", 0.0),
        ("numeric", "5", "5/0", 0.0),
        ("numeric", "5", "__import__('os')", 0.0),
        ("numeric", "5", "$5", 1.0),
        ("regex", "[0-9]+ apples?", "7 apples", 1.0),
        ("regex", "[0-9]+ apples?", "about 7 apples", 0.0),
        ("regex", "(yes|no)", "yes", 1.0),
    ],
)
def test_what_an_answer_earns(kind, answer, completion, value):
    assert earned(kind, answer, completion) == value


@pytest.mark.parametrize(
    ("kind", "answer"), [("exact", " "), ("numeric", "five"), ("numeric", "1 +- x"), ("regex", "("), ("code", "")]
)
def test_answers_that_cannot_be_right_are_refused(kind, answer):
    with pytest.raises(ValueError, match=r"\w"):
        comparisons[kind].check(answer)


def test_an_unknown_reward_gets_the_nearest_name():
    with pytest.raises(TalkootError, match="unknown reward 'numerical'"):
        comparisons["numerical"]


@given(st.integers(-(10**12), 10**12))
@settings(max_examples=50)
def test_numbers_with_separators_are_the_same_numbers(number):
    assert parse_number(f"{number:,}") == parse_number(str(number)) == number
    assert parse_number(number_in(f"it is {number:,}.")) == number


@given(st.text(alphabet="0123456789,./e+-x ", max_size=60))
@settings(max_examples=200)
def test_any_text_is_a_number_or_none(text):
    found = number_in(text)
    assert found in text
    parse_number(found)
    parse_number(text)


def test_hostile_numbers_cost_little():
    start = time.process_time()
    for text in ("9" * 1000, "1e" + "9" * 900, "1," * 500, "-" * 1000, "1/" * 500, "1,000" * 200):
        comparisons["numeric"].reward("5", comparisons["numeric"].extract(text))
    assert time.process_time() - start < 0.5


def test_only_patterns_that_are_sure_to_be_quick_are_matched_here():
    assert quick("[0-9]+ apples?")
    assert quick("a*b*")
    assert not quick("(a+)+")
    assert not quick("(a|a)*")
    assert not quick("a*a*a*")
    assert not quick(r"(a+)\1")
    start = time.process_time()
    assert earned("regex", "a*a*b", "a" * 1000) == 0.0
    assert time.process_time() - start < 1.0


def test_a_pattern_that_explodes_is_stopped():
    result = comparisons["regex"].reward("(a+)+b", "a" * 60)
    assert (result.value, result.reason) == (0.0, "timeout")
    assert comparisons["regex"].reward("(a+)+b", "aab").value == 1.0
    assert comparisons["regex"].reward("(a+)+b", "aa'b").reason == "wrong"
