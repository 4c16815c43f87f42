"""Critics: aligned feedback for additions, references, outcomes, a language model that may fail."""

from __future__ import annotations

import socket

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from talkoot.core.errors import TalkootError
from talkoot.tune.distil.critics import CriticSettings, Feedback, Rollout, advise, critics, open_critic
from talkoot.tune.distil.critics.openai import INSTRUCTIONS, LanguageModelCritic, messages_for, rewritten, tagged
from talkoot.tune.rewards.result import RewardResult
from talkoot.tune.tasks.task import Item
from talkoot.tune.tasks.traces import columns, judge, parse, worked

ITEM = Item(prompt="47+85=", answer="132", solution="7+5+0=12;4+8+1=13;132")
RIGHT, WRONG, CUT = RewardResult(1.0, "right"), RewardResult(0.0, "wrong"), RewardResult(0.0, "cut off")


def say(kind: str, completion: str, reward: RewardResult = WRONG, item: Item = ITEM) -> Feedback:
    return open_critic(CriticSettings(kind=kind))(Rollout(item, completion, reward))


@pytest.mark.parametrize(
    ("completion", "reward", "case", "context"),
    [
        ("7+5+0=12;4+8+1=13;132", RIGHT, "reproduced", "7+5+0=12;4+8+1=13;132"),
        ("5+7+0=12;8+4+1=13;132", RIGHT, "reproduced", "5+7+0=12;8+4+1=13;132"),
        ("7+5+0=12;132", RIGHT, "inserted", "7+5+0=12;4+8+1=13;132"),
        ("132", RIGHT, "inserted", "7+5+0=12;4+8+1=13;132"),
        ("7+5+0=12;4+8", CUT, "finished", "7+5+0=12;4+8+1=13;132"),
        ("7+5+0=12;8+4+1=1", CUT, "finished", "7+5+0=12;8+4+1=13;132"),
        ("7+5+0=12;4+8+0=12;122", WRONG, "corrected", "7+5+0=12;4+8+1=13;132"),
        ("5+7+0=12;8+4+0=12;122", WRONG, "corrected", "5+7+0=12;8+4+1=13;132"),
        ("7+5+0=13;4+8+1=13;133", WRONG, "corrected", "7+5+0=12;4+8+1=13;132"),
        ("7+5+0=12;4+8+1=13;131", WRONG, "corrected", "7+5+0=12;4+8+1=13;132"),
        ("ab7+5+0=12;4+8+0=12;122", WRONG, "corrected", "ab7+5+0=12;4+8+1=13;132"),
        ("7+5+0=12;4+8+0=12;132", RIGHT, "corrected", "7+5+0=12;4+8+1=13;132"),
        ("=;|", WRONG, "corrected", "7+5+0=12;4+8+1=13;132"),
    ],
)
def test_aligned_feedback_has_four_cases(completion: str, reward: RewardResult, case: str, context: str):
    assert say("arithmetic", completion, reward) == Feedback(context=context, case=case)


numbers = st.integers(10, 99)


@given(numbers, numbers, st.lists(st.booleans(), min_size=2, max_size=2), st.data())
@settings(max_examples=80, deadline=None)
def test_aligned_feedback_is_right_repeats_what_was_right_and_never_quotes_the_mistake(left, right, swapped, data):
    prompt = f"{left}+{right}="
    good = worked(prompt, swapped)
    at = data.draw(st.integers(0, len(good) - 1))
    bad = good[:at] + data.draw(st.sampled_from("0123456789+=;abc|")) + good[at + 1 :]
    context = say("arithmetic", bad, item=Item(prompt=prompt, answer="")).context
    verdict = judge(prompt, bad)
    assert judge(prompt, context).status == "right"
    assert context.startswith(bad[: verdict.start])
    if verdict.status == "wrong" and verdict.step < len(columns(prompt)):
        mistaken = parse(bad[verdict.start :]).steps[:1]
        assert not mistaken or context[verdict.start :].find(mistaken[0].text) != 0


def test_what_is_no_addition_is_skipped_by_name():
    assert say("arithmetic", "4", item=Item(prompt="Two and two?", answer="4")).skip == "not an addition"


def test_a_reference_is_the_same_for_all_and_its_absence_is_named():
    assert say("reference", "7+5").context == say("reference", "132", RIGHT).context == ITEM.solution
    assert say("reference", "4", item=Item(prompt="2+2=", answer="4")).skip == "no reference solution"


def test_an_outcome_gives_nothing_away():
    said = {say("outcome", text, reward).context for text, reward in (("132", RIGHT), ("1", WRONG), ("7+", CUT))}
    assert len(said) == 3
    assert not any(character.isdigit() for text in said for character in text)


def test_no_critic_says_nothing():
    assert say("none", "132", RIGHT) == Feedback(skip="no critic")


def test_a_misspelt_critic_is_refused_with_the_nearest_name():
    with pytest.raises(TalkootError) as caught:
        open_critic(CriticSettings(kind="referense"))
    assert "'reference'" in caught.value.why
    assert {"none", "reference", "arithmetic", "outcome", "openai"} <= set(critics)


@pytest.mark.parametrize(("name", "value"), [("timeout_s", 0), ("max_tokens", 0), ("parallel", 0), ("parallel", 65)])
def test_impossible_settings_are_refused_by_name(name, value):
    with pytest.raises(TalkootError) as caught:
        CriticSettings(**{name: value})
    assert name in caught.value.where


def ask_nothing(messages: list[dict[str, str]]) -> str:
    raise TalkootError("the server does not answer", where="url", why="refused", next="start it")


def test_a_language_model_sees_problem_numbered_steps_outcome_and_reference():
    system, user = messages_for(Rollout(ITEM, "first\n\nsecond", CUT))
    assert system == {"role": "system", "content": INSTRUCTIONS}
    for part in ("47+85=", "<step_1>first</step_1>\n<step_2>second</step_2>", "cut off", "not right", ITEM.solution):
        assert part in user["content"]


def test_tags_inside_a_rollout_mean_nothing_and_its_length_is_bounded():
    assert tagged("a</step_1></attempt>b") == "<step_1>ab</step_1>"
    assert len(messages_for(Rollout(ITEM, "x" * 10**6, WRONG))[1]["content"]) < 50_000


@pytest.mark.parametrize(
    ("answer", "context"),
    [
        ("<rewritten>\nfirst\nnew\n</rewritten>", "first\nnew"),
        ("<think>maybe <rewritten>no</rewritten></think>fine: <rewritten>yes</rewritten>.", "yes"),
        ("<rewritten><step_1>one</step_1>\n<step_2>two</step_2></rewritten>", "one\ntwo"),
        ("<rewritten>it never en", ""),
        ("I refuse.", ""),
        ("", ""),
    ],
)
def test_only_the_rewritten_attempt_is_taken_from_an_answer(answer: str, context: str):
    assert rewritten(answer) == context
    said = LanguageModelCritic(lambda messages: answer)(Rollout(ITEM, "7", WRONG))
    assert said.context == context
    assert bool(said.skip) == (not context)


def test_a_failing_language_model_skips_its_samples_and_is_soon_left_alone():
    asked: list[int] = []

    def ask(messages: list[dict[str, str]]) -> str:
        asked.append(1)
        return ask_nothing(messages)

    found = advise(LanguageModelCritic(ask, parallel=2), [Rollout(ITEM, "7", WRONG)] * 20)
    assert [answer.context for answer in found] == [""] * 20
    assert found[0].skip == "critic failed: the server does not answer"
    assert found[-1].skip == "critic not asked"
    assert len(asked) == 4


def test_feedback_comes_in_the_order_of_the_rollouts_and_single_failures_do_not_stop_it():
    def ask(messages: list[dict[str, str]]) -> str:
        text = messages[1]["content"]
        return (
            ask_nothing(messages) if "<step_1>3<" in text else f"<rewritten>{text[text.index('_1>') + 3]}</rewritten>"
        )

    found = advise(LanguageModelCritic(ask, parallel=4), [Rollout(ITEM, str(n), WRONG) for n in range(10)])
    assert [answer.context for answer in found] == ["0", "1", "2", "", "4", "5", "6", "7", "8", "9"]
    assert [answer.failed for answer in found].count(True) == 1


def test_a_critic_whose_server_is_not_there_skips_its_samples_and_ends():
    with socket.socket() as taken:  # bound, but not listening: refused at once
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/v1"
        critic = open_critic(CriticSettings(kind="openai", base_url=url, model="m", timeout_s=5, key_variable=""))
        found = advise(critic, [Rollout(ITEM, "7", WRONG)] * 6)
    assert all(answer.failed and not answer.context for answer in found)
    assert found[0].skip.startswith("critic failed: ")


@pytest.mark.parametrize("missing", ["base_url", "model"])
def test_a_language_model_critic_without_address_or_model_is_refused(missing: str):
    given = {"base_url": "http://127.0.0.1:1/v1", "model": "m", missing: ""}
    with pytest.raises(TalkootError) as caught:
        open_critic(CriticSettings(kind="openai", **given))
    assert missing in caught.value.where
