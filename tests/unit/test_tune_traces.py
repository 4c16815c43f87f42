"""Step traces of additions: written, taken apart, judged."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from talkoot.tune.tasks.traces import columns, in_context, judge, parse, total, worked

RIGHT = "7+5+0=12;4+8+1=13;132"

prompts = st.tuples(st.integers(0, 9999), st.integers(0, 9999)).map(lambda pair: f"{pair[0]}+{pair[1]}=")


def test_a_trace_goes_from_the_right_and_ends_with_the_answer():
    assert worked("47+85=") == RIGHT
    assert worked("47+85=", swapped=[True]) == "5+7+0=12;4+8+1=13;132"
    assert worked("12+30=") == "2+0+0=02;1+3+0=04;42"
    assert worked("07+5=") == "7+5+0=12;0+0+1=01;12"
    assert in_context(RIGHT, "47+85=") == RIGHT + "|47+85="


@given(prompts)
@settings(max_examples=50)
def test_what_is_worked_is_right_in_any_order_and_with_letters_in_front(prompt):
    left, right = prompt.rstrip("=").split("+")
    assert total(prompt) == str(int(left) + int(right))
    for text in (worked(prompt), worked(prompt, [True] * 4), "ab" + worked(prompt, [False, True])):
        verdict = judge(prompt, text)
        assert (verdict.status, verdict.at, verdict.correction) == ("right", len(text), "")
        assert parse(text).answer == total(prompt)
        assert len(parse(text).steps) == len(columns(prompt))


@given(prompts, st.integers(0, 60), st.booleans())
@settings(max_examples=50)
def test_a_beginning_of_a_right_trace_is_unfinished_and_its_correction_finishes_it(prompt, cut, swapped):
    text = worked(prompt, [swapped] * 4)
    part = text[: min(cut, len(text) - 1)]
    verdict = judge(prompt, part)
    assert (verdict.status, verdict.at) == ("unfinished", len(part))
    assert judge(prompt, part[: verdict.start] + verdict.correction).status == "right"


@given(prompts, st.data())
@settings(max_examples=100)
def test_a_wrong_character_is_found_where_it_stands_or_not_before_it(prompt, data):
    text = worked(prompt)
    at = data.draw(st.integers(0, len(text) - 1))
    other = data.draw(st.sampled_from([c for c in "0123456789+=;|" if c != text[at]]))
    verdict = judge(prompt, text[:at] + other + text[at + 1 :])
    assert verdict.status == "wrong"
    assert verdict.at >= at  # later only where it could have become the other order of operands
    assert verdict.start <= at
    assert judge(prompt, text[: verdict.start] + verdict.correction).status == "right"


@pytest.mark.parametrize(
    ("completion", "step", "start", "at", "correction"),
    [
        ("7+5+0=12;4+8+0=12;122", 1, 9, 13, "4+8+1=13;132"),  # a carry forgotten
        ("5+7+0=13;4+8+1=13;133", 0, 0, 7, "5+7+0=12;8+4+1=13;132"),  # a sum, in the order of the writer
        ("7+5+0=12;4+8+1=13;133", 2, 18, 20, "132"),  # the answer
        ("7+5+0=12;132", 1, 9, 9, "4+8+1=13;132"),  # a step left out
        ("7+5+0=12x4+8+1=13;132", 0, 0, 8, "7+5+0=12;4+8+1=13;132"),  # a stranger's letter in place of an end
        ("7+5+0=12;4+8+1=13;132;", 2, 18, 21, "132"),  # more than an answer
        ("what?", 0, 4, 4, "7+5+0=12;4+8+1=13;132"),
    ],
)
def test_the_first_mistake_is_named(completion, step, start, at, correction):
    verdict = judge("47+85=", completion)
    assert (verdict.status, verdict.step, verdict.start, verdict.at) == ("wrong", step, start, at)
    assert verdict.correction == correction


def test_steps_have_spans():
    trace = parse("ab7+5+0=12;nonsense;99")
    assert trace.prefix == "ab"
    assert [("ab7+5+0=12;nonsense;99"[s.start : s.stop], s.text) for s in trace.steps] == [
        ("7+5+0=12;", "7+5+0=12;"),
        ("nonsense;", "nonsense;"),
    ]
    assert (trace.answer, trace.answer_start) == ("99", 20)


@pytest.mark.parametrize("prompt", ["", "47+85", "47-85=", "a+1=", "4+5+6=", "\u0664+\u0665="])
def test_what_is_no_addition_is_refused(prompt):
    with pytest.raises(ValueError, match="no addition"):
        columns(prompt)
