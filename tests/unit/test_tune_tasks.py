"""Tasks with verifiable answers: addition, files, programs."""

from __future__ import annotations

from itertools import islice

import pytest

from talkoot.core.errors import TalkootError
from talkoot.tune.tasks import open_task
from talkoot.tune.tasks.addition import FLAWED, FLAWLESS, LETTERS, Addition, Habits
from talkoot.tune.tasks.traces import judge, parse

SPLITS = ("train", "held_out", "shifted")


def indices(task, split):
    return [task.index(split, number) for number in range(task.size(split))]


@pytest.mark.parametrize("name", ["addition", "addition:1", "addition:2,hard", "addition:3", "addition:6,hard"])
def test_no_prompt_is_in_two_splits_or_twice_in_one(name):
    task = open_task(name, seed=1)
    prompts = {split: [task.item(index).prompt for index in indices(task, split)] for split in SPLITS}
    together = [prompt for split in SPLITS for prompt in prompts[split]]
    assert len(set(together)) == len(together)
    assert all(task.size(split) > 0 for split in SPLITS)
    assert all(task.split_of(index) == split for split in SPLITS for index in indices(task, split))


def test_two_digits_have_all_their_items():
    task = open_task("addition:2")
    assert task.name == "addition:2"
    assert task.size("train") + task.size("held_out") == 90 * 90
    assert 700 < task.size("held_out") < 920
    assert task.index("train", task.size("train") + 3) == task.index("train", 3)
    with pytest.raises(ValueError, match="no split 'test'"):
        task.size("test")
    with pytest.raises(ValueError, match="does not exist"):
        task.item(10**4)


def test_hard_items_carry_everywhere_and_are_split_as_in_the_whole_task():
    whole, hard = open_task("addition:2", seed=3), open_task("addition:2,hard", seed=3)
    held_out = set(indices(whole, "held_out"))
    for index in indices(hard, "held_out"):
        assert index in held_out
        assert all(step.text[6] == "1" for step in parse(hard.item(index).solution).steps)
    easy = next(index for index in indices(whole, "train") if index not in set(indices(hard, "train")))
    with pytest.raises(ValueError, match="carries"):
        hard.item(easy)


def test_the_seed_shuffles_and_the_digest_names_everything():
    one, again, other = (Addition(seed=seed) for seed in (1, 1, 2))
    assert indices(one, "train") == indices(again, "train") != indices(other, "train")
    names = ["addition:2", "addition:3", "addition:2,hard"]
    digests = {open_task(name, seed).digest() for name in names for seed in (0, 1)}
    assert len(digests) == 6
    assert one.digest() == again.digest()
    # Fixed for good: whoever changes what the items are must change the version in the digest.
    whole = open_task("addition:2")
    assert [whole.item(whole.index("train", n)).prompt for n in range(3)] == ["62+58=", "41+55=", "51+21="]


@pytest.mark.parametrize(
    ("completion", "finished", "value", "reason"),
    [
        ("7+5+0=12;4+8+1=13;132", True, 1.0, "right"),
        ("132", True, 1.0, "right"),
        ("7+5+0=12;4+8+0=12;122", True, 0.0, "wrong"),
        ("0132", True, 0.0, "wrong"),
        ("7+5+0=12;4+8+1=13;", True, 0.0, "no answer"),
        ("", True, 0.0, "no answer"),
        ("7+5+0=12;4+8+1=13;132", False, 0.0, "cut off"),
    ],
)
def test_a_sum_is_rewarded_for_its_answer(completion, finished, value, reason):
    task = open_task("addition")
    item = task.item(4785)
    assert (item.prompt, item.answer) == ("47+85=", "132")
    earned = task.reward(item, completion, finished)
    assert (earned.value, earned.reason) == (value, reason)


@pytest.mark.parametrize("argument", ["0", "7", "two", "2,easy", "-1"])
def test_an_addition_that_cannot_be_is_refused(argument):
    with pytest.raises(TalkootError, match="cannot be set"):
        open_task(f"addition:{argument}")


def test_an_unknown_task_gets_the_nearest_name():
    with pytest.raises(TalkootError, match="unknown task 'adition'") as raised:
        open_task("adition:2")
    assert "did you mean 'addition'?" in raised.value.why


def test_demonstrations_have_the_flaws_that_were_asked_for():
    task = open_task("addition", seed=5)
    shown = list(islice(task.demonstrations(seed=1), 4000))
    assert shown == list(islice(task.demonstrations(seed=1), 4000))
    assert shown != list(islice(task.demonstrations(seed=2), 4000))
    in_context = [one for one in shown if "|" in one.prompt]
    assert 0.32 < len(in_context) / len(shown) < 0.38
    assert all(one.prompt.split("|")[0] == one.completion for one in in_context)
    assert all(judge(one.prompt.split("|")[1], one.completion).status == "right" for one in in_context)
    alone = [one for one in shown if "|" not in one.prompt]
    carrying = [one for one in alone if carries(one)]
    wrong = [one for one in carrying if judge(one.prompt, one.completion).status == "wrong"]
    assert 0.65 < len(wrong) / len(carrying) < 0.78
    plain = [one for one in alone if not carries(one)]
    assert 0.01 < sum(judge(o.prompt, o.completion).status == "wrong" for o in plain) / len(plain) < 0.08
    held_out = {task.item(index).prompt for index in indices(task, "held_out")}
    assert not held_out & {one.prompt.split("|")[-1] for one in shown}
    # Mistakes are carried on: what the steps say is what the answer says.
    for one in alone[:200]:
        steps = parse(one.completion).steps
        said = steps[-1].text[6:8] + steps[0].text[7]
        assert str(int(said)) == parse(one.completion).answer


def carries(one):
    return int(one.prompt[1]) + int(one.prompt[4]) >= 10


def test_habits_tell_two_demonstrators_apart():
    task = open_task("addition")
    letters = list(islice(task.demonstrations(1, Habits(letters="kl", prefix=4, swapped=1.0)), 50))
    assert all(len(parse(one.completion).prefix) == 4 for one in letters)
    assert {letter for one in letters for letter in parse(one.completion).prefix} == set("kl") < set(LETTERS)
    right = list(islice(task.demonstrations(1, FLAWLESS), 200))
    assert all(judge(one.prompt.split("|")[-1], one.completion).status == "right" for one in right)
    assert FLAWED.swapped == 0.2
    used = {character for one in letters + right for character in one.prompt + one.completion}
    assert used <= set(task.alphabet)
    assert max(len(one.completion) for one in letters) < task.max_new_tokens
