"""Tasks with verifiable answers: addition, files, programs."""

from __future__ import annotations

from itertools import islice

import msgspec
import pytest

from talkoot.core.errors import TalkootError
from talkoot.tune.tasks import open_task
from talkoot.tune.tasks.addition import FLAWED, FLAWLESS, LETTERS, Addition, Habits
from talkoot.tune.tasks.code import KINDS
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


def test_the_hard_subset_is_demonstrated_by_the_whole_task():
    shown = list(islice(open_task("addition:2,hard", 4).demonstrations(3), 300))
    assert shown == list(islice(open_task("addition:2", 4).demonstrations(3), 300))
    assert {carries(one) for one in shown if "|" not in one.prompt} == {True, False}


def test_a_recipe_sets_habits_and_bad_ones_are_refused_at_once():
    task = open_task("addition")
    by_name = task.demonstrate(1, {"swapped": 0.5, "letters": "ab", "prefix": 2})
    by_value = task.demonstrations(1, Habits(swapped=0.5, letters="ab", prefix=2))
    assert list(islice(by_name, 20)) == list(islice(by_value, 20))
    for habits in ({"swaped": 0.5}, {"swapped": 1.5}, {"letters": "xyz"}, {"prefix": 2}, {"letters": "a", "prefix": 9}):
        with pytest.raises(TalkootError, match="habits cannot be used"):
            task.demonstrate(1, habits)


def test_hints_stand_in_the_context_slot_and_mistakes_are_found():
    task = open_task("addition")
    item = task.item(4785)
    assert task.context_prompt(item.prompt, item.solution) == item.solution + "|47+85="
    assert task.first_mistake(item, item.solution) is None
    assert task.first_mistake(item, "7+5+0=13;") == 7
    assert task.first_mistake(item, "7+5+0=12;") == 9


def written(tmp_path, *lines):
    path = tmp_path / "problems.jsonl"
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else msgspec.json.encode(line) for line in lines))
    return str(path)


def test_a_file_of_problems_is_split_by_prompt(tmp_path):
    lines = [{"prompt": f"what is {n % 150}?", "answer": n % 150, "more": "is passed over"} for n in range(200)]
    task = open_task("jsonl:" + written(tmp_path, *lines, {"prompt": "far", "answer": "x", "split": "shifted"}))
    assert (task.size("train") + task.size("held_out"), task.size("shifted")) == (200, 1)
    assert 5 < task.size("held_out") < 40
    prompts = {split: {task.item(index).prompt for index in indices(task, split)} for split in SPLITS}
    assert not prompts["train"] & prompts["held_out"]
    item = task.item(7)
    assert (item.prompt, item.answer) == ("what is 7?", "7")
    assert task.reward(item, "hm\n7", True).reason == "right"
    assert task.reward(item, "8", True).reason == "wrong"
    assert task.reward(item, "7", False).reason == "cut off"
    assert task.reward(item, "", True).reason == "no answer"
    with pytest.raises(ValueError, match="does not exist"):
        task.item(201)


def test_a_line_or_the_name_says_how_answers_are_compared(tmp_path):
    path = written(tmp_path, {"prompt": "a", "answer": "1234"}, {"prompt": "b", "answer": "x+", "reward": "regex"})
    task = open_task(f"jsonl:{path},numeric")
    assert task.reward(task.item(0), "it is 1,234.0", True).value == 1.0
    assert task.reward(task.item(1), "xxx", True).value == 1.0
    assert task.extract("it is 1,234.0") == "1234"


def test_a_file_is_named_by_its_content_and_use(tmp_path):
    path = written(tmp_path, {"prompt": "a", "answer": "1"})
    names = {open_task(f"jsonl:{path}").digest(), open_task(f"jsonl:{path},numeric").digest()}
    names.add(open_task(f"jsonl:{path}", seed=1).digest())
    copy = tmp_path / "copy.jsonl"
    copy.write_bytes((tmp_path / "problems.jsonl").read_bytes())
    assert open_task(f"jsonl:{copy}").digest() in names
    copy.write_bytes((tmp_path / "problems.jsonl").read_bytes() + b" ")
    assert open_task(f"jsonl:{copy}").digest() not in names
    assert len(names) == 3


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b"{", "truncated"),
        (b"[1]", "object"),
        (b'{"prompt": "a"}', "missing required field `answer`"),
        (b'{"prompt": "", "answer": "1"}', "prompt is empty"),
        (b'{"prompt": "a", "answer": ""}', "1 to 1000 characters"),
        (b'{"prompt": "a", "answer": "1", "split": "test"}', "must be one of train"),
        (b'{"prompt": "a", "answer": "1", "reward": "exakt"}', "must be one of code"),
        (b'{"prompt": "a", "answer": "one", "reward": "numeric"}', "no number"),
        (b'{"prompt": "a", "answer": "1", "split": "shifted"}', "another split"),
        (b'{"prompt": "' + b"a" * 300_000 + b'", "answer": "1"}', "bytes"),
    ],
)
def test_a_bad_line_is_refused_with_its_number(tmp_path, line, why):
    path = written(tmp_path, {"prompt": "a", "answer": "1"}, b"", line)
    with pytest.raises(TalkootError, match="not usable") as raised:
        open_task(f"jsonl:{path}")
    assert raised.value.where == f"{path}:3"
    assert why in raised.value.why


def test_a_file_that_is_not_there_or_empty_is_refused(tmp_path):
    with pytest.raises(TalkootError, match="cannot be read"):
        open_task(f"jsonl:{tmp_path}/nothing")
    with pytest.raises(TalkootError, match="not usable"):
        open_task("jsonl:" + written(tmp_path, b""))


def test_programming_problems_are_split_and_named():
    task = open_task("code")
    assert task.name == "code"
    prompts = {split: [task.item(index).prompt for index in indices(task, split)] for split in SPLITS}
    together = [prompt for split in SPLITS for prompt in prompts[split]]
    assert len(set(together)) == len(together)
    assert all(task.size(split) > 200 for split in SPLITS)
    assert len({open_task(name, seed).digest() for name in ("code", "code:value") for seed in (0, 1)}) == 4
    assert {character for text in together for character in text} <= set(task.alphabet)
    longest = max(len(task.item(index).solution) for index in indices(task, "shifted"))
    assert longest < task.max_new_tokens
    with pytest.raises(TalkootError, match="no programming problems") as raised:
        open_task("code:valu")
    assert raised.value.why == "did you mean 'value'?"


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_the_solution_of_a_programming_problem_is_right_when_run(kind):
    task = open_task(f"code:{kind}")
    for split in ("train", "shifted"):
        for number in range(3):
            item = task.item(task.index(split, number))
            assert task.reward(item, item.solution, True).reason == "right"
            assert task.reward(item, "print('no')", True).reason == "wrong output"
    assert task.reward(item, "print(1", False).reason == "cut off"
    assert task.reward(item, "", True).reason == "no answer"
    assert task.reward(item, "from calc import add\n" + item.solution, True).reason == "import"
