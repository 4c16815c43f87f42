"""Problems of reasoning-gym. Skipped where it is not installed, but for the error that says so."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

from talkoot.core.errors import TalkootError
from talkoot.tune.tasks import gym, open_task
from talkoot.tune.tasks.gym import REFUSED

needed = pytest.mark.skipif(importlib.util.find_spec("reasoning_gym") is None, reason="reasoning-gym is not installed")

SAFE = ("chain_sum", "basic_arithmetic", "products", "gcd", "lcm", "count_bits", "base_conversion", "spell_backward")


def test_without_the_package_the_error_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", None)
    with pytest.raises(TalkootError, match="not installed") as raised:
        open_task("reasoning-gym:chain_sum")
    assert raised.value.next == "pip install 'talkoot[gym]'"


@needed
@pytest.mark.parametrize("name", SAFE)
def test_the_right_answer_is_rewarded_and_another_is_not(name):
    task = open_task(f"reasoning-gym:{name}", seed=2)
    item = task.item(task.index("train", 0))
    assert task.reward(item, f"well\n<answer>{item.answer}</answer>", True).reason == "right"
    assert task.reward(item, f"so\n{item.answer}", True).value == 1.0
    assert task.reward(item, item.answer, False).reason == "cut off"
    assert task.reward(item, "", True).reason == "no answer"
    assert task.reward(item, "<answer>no idea</answer>", True).value < 0.1
    assert task.extract(f"<answer>{item.answer}</answer>") == item.answer


@needed
def test_arithmetic_has_a_compact_prompt():
    task = open_task("reasoning-gym:chain_sum")
    item = task.item(task.index("train", 0))
    assert set(item.prompt) <= set("0123456789+- =")
    assert sum(int(number) for number in item.prompt.rstrip("=").replace("- ", "-").replace("+ ", "").split()) == int(
        item.answer
    )


@needed
def test_splits_share_no_prompt_even_where_there_are_few():
    task = open_task("reasoning-gym:products,min_terms=2,max_terms=2,min_digits=1,max_digits=1")
    train = {task.item(task.index("train", number)).prompt for number in range(300)}
    held_out = {task.item(task.index("held_out", number)).prompt for number in range(40)}
    assert len(train) > 40
    assert held_out
    assert not train & held_out
    assert task.size("shifted") == 0
    with pytest.raises(ValueError, match="empty"):
        task.index("shifted", 0)
    with pytest.raises(ValueError, match="does not exist"):
        task.item(2**40)


@needed
def test_the_digest_names_version_data_set_settings_and_seed(monkeypatch):
    names = ["reasoning-gym:chain_sum", "reasoning-gym:chain_sum,max_terms=3", "reasoning-gym:products"]
    digests = {open_task(name, seed).digest() for name in names for seed in (0, 1)}
    monkeypatch.setattr(gym.importlib.metadata, "version", lambda name: "9.9")
    digests.add(open_task(names[0]).digest())
    assert len(digests) == 7


@needed
def test_two_processes_build_the_same_items():
    script = (
        "from talkoot.tune.tasks import open_task\n"
        f"for name in {SAFE}:\n"
        "    task = open_task('reasoning-gym:' + name, 7)\n"
        "    print(task.digest(), [task.item(task.index('held_out', n)) for n in range(2)])\n"
    )
    said = {
        subprocess.run(
            [sys.executable, "-c", script],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
        ).stdout
        for seed in ("1", "2")
    }
    assert len(said) == 1
    assert len(said.pop().splitlines()) == len(SAFE)


@needed
@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_cannot_be_trusted_is_refused_with_the_reason(name):
    with pytest.raises(TalkootError, match="cannot be a task") as raised:
        open_task(f"reasoning-gym:{name}")
    assert raised.value.why == REFUSED[name]


@needed
def test_refused_names_exist_and_most_data_sets_are_left():
    import reasoning_gym.factory

    assert set(REFUSED) <= set(reasoning_gym.factory.DATASETS)
    assert len(set(reasoning_gym.factory.DATASETS) - set(REFUSED)) > 75


@needed
@pytest.mark.parametrize(
    ("argument", "why"),
    [
        ("chain_summ", "did you mean 'chain_sum'?"),
        ("chain_sum,max_term=3", "did you mean 'max_terms'?"),
        ("chain_sum,size=3", "sets nothing"),
        ("chain_sum,min_terms=9,max_terms=3", "max_terms"),
        ("chain_sum,max_terms=many", "not supported between"),
    ],
)
def test_what_does_not_exist_gets_the_nearest_name(argument, why):
    with pytest.raises(TalkootError) as raised:
        open_task(f"reasoning-gym:{argument}")
    assert why in raised.value.why


@needed
def test_no_scorer_that_is_left_evaluates_an_answer():
    import inspect

    import reasoning_gym.factory

    for name in sorted(set(reasoning_gym.factory.DATASETS) - set(REFUSED)):
        scorer = inspect.getsource(reasoning_gym.factory.DATASETS[name][0].score_answer)
        assert not any(word in scorer for word in ("eval(answer", "parse_expr(", "exec(", "sympify(")), name


@needed
def test_texts_that_a_scorer_does_not_expect_earn_nothing():
    for name in ("prime_factorization", "game_of_life", "codeio", "jugs", "coin_flip"):
        task = open_task(f"reasoning-gym:{name}")
        item = task.item(task.index("train", 1))
        for text in ("x", "[" * 900, "{}", "9" * 900, "1/0", "\u0664", "nan", "1e999999999", "1e-99_999_999"):
            result = task.reward(item, text, True)
            assert 0.0 <= result.value < 1.0


@needed
def test_answers_can_be_compared_as_numbers_wherever_they_stand():
    strict, numeric = open_task("reasoning-gym:chain_sum"), open_task("reasoning-gym:chain_sum,reward=numeric")
    item = numeric.item(numeric.index("train", 0))
    said = f"The answer is {item.answer}."
    assert numeric.reward(item, said, True).right
    assert not strict.reward(item, said, True).right
    assert not numeric.reward(item, f"The answer is {int(item.answer) + 1}.", True).right
    assert numeric.digest() != strict.digest()
    with pytest.raises(TalkootError, match="cannot be set up"):
        open_task("reasoning-gym:chain_sum,reward=numerik")
