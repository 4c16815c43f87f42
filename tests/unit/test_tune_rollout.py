"""Rollouts of the native policy: what a completion depends on, what its log-probabilities mean, where it ends."""

from __future__ import annotations

import math

import pytest
import torch

from talkoot.core.errors import TalkootError
from talkoot.tune.completion import Sampling
from talkoot.tune.policies.native import NativePolicy
from talkoot.tune.policies.open import open_policy
from talkoot.tune.policies.selfcheck import check_generator, disagreement
from talkoot.tune.policies.spec import ModelSpec

ALPHABET = "0123456789+=;"
SAMPLING = Sampling(max_new_tokens=16)
PROMPTS = ["1+2=", "12+345=", "7=", "999+1="]


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def policy(**changes: object) -> NativePolicy:
    made = open_policy(ModelSpec(width=32, layers=2, heads=2, context=64, seed=5, **changes), ALPHABET)  # type: ignore[arg-type]
    assert isinstance(made, NativePolicy)
    return made


def answers(which: NativePolicy, prompts=PROMPTS, seeds=None, sampling=SAMPLING):
    seeds = seeds or [[10 * i + j for j in range(3)] for i in range(len(prompts))]
    return which.generate([which.prompt_ids(prompt) for prompt in prompts], seeds, sampling)


def near(a, b):
    assert [one.ids for one in a] == [one.ids for one in b]
    for x, y in zip(a, b, strict=True):
        assert x.logp == pytest.approx(y.logp, abs=1e-5)


def test_a_completion_does_not_depend_on_what_else_is_in_the_batch():
    which = policy()
    together = answers(which)
    for number, prompt in enumerate(PROMPTS):
        near(answers(which, [prompt], [[10 * number + j for j in range(3)]])[0], together[number])
        near(answers(which, [prompt], [[10 * number + 1]])[0], together[number][1:2])
    backwards = answers(which, PROMPTS[::-1], [[10 * i + j for j in range(3)] for i in range(4)][::-1])
    for a, b in zip(backwards[::-1], together, strict=True):
        near(a, b)


def test_a_small_batch_limit_changes_nothing():
    small = policy()
    small.batch_rows = 2
    for a, b in zip(answers(small), answers(policy()), strict=True):
        near(a, b)


def test_the_generators_log_probabilities_are_the_trainers():
    for temperature in (1.0, 0.7, 0.0):
        sampling = Sampling(max_new_tokens=16, temperature=temperature)
        which = policy()
        found = disagreement(
            which, [which.prompt_ids(p) for p in PROMPTS], answers(which, sampling=sampling), temperature
        )
        assert found.largest < 1e-5
        assert found.tokens > 30


def test_the_check_before_the_first_round_refuses_a_generator_of_other_weights(monkeypatch):
    which, other = policy(), policy()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.3)
    monkeypatch.setattr(which, "generate", other.generate)
    ids = [which.prompt_ids(prompt) for prompt in PROMPTS]
    with pytest.raises(TalkootError, match="disagree"):
        check_generator(which, ids, [[1]] * 4, SAMPLING, 0.01)


def test_a_completion_ends_with_its_end_token_or_is_cut_off():
    which = policy()
    ends = set(which.coder.eos_ids)
    for group in answers(which, seeds=[list(range(40))] * 4):
        for one in group:
            assert (one.finish == "stop") == (one.ids[-1] in ends)
            assert not ends & set(one.ids[:-1])
            assert len(one.ids) == len(one.logp)
            assert one.finish == "stop" or len(one.ids) == 16


def test_tokens_come_as_often_as_their_probability_says():
    which, prompt = policy(), "1+2="
    drawn = answers(which, [prompt], [list(range(4000))], Sampling(max_new_tokens=1))[0]
    expected: dict[int, float] = {one.ids[0]: math.exp(one.logp[0]) for one in drawn}
    for token, probability in expected.items():
        share = sum(one.ids[0] == token for one in drawn) / len(drawn)
        assert share == pytest.approx(probability, abs=5 * math.sqrt(probability / 4000))
    assert sum(expected.values()) > 0.99


def test_what_is_cut_off_is_never_drawn_and_its_mass_is_told():
    which = policy()
    for sampling in (Sampling(max_new_tokens=8, top_k=2), Sampling(max_new_tokens=8, top_p=0.3)):
        for one in answers(which, ["1+2="], [list(range(50))], sampling)[0]:
            assert len(one.kept) == len(one.ids)
            assert all(kept - logp >= -1e-6 for logp, kept in zip(one.logp, one.kept, strict=True))
    firsts = {
        one.ids[0] for one in answers(which, ["1+2="], [list(range(200))], Sampling(max_new_tokens=1, top_k=2))[0]
    }
    assert len(firsts) == 2


def test_greedy_takes_the_likeliest_token():
    which, prompt = policy(), policy().prompt_ids("1+2=")
    one = answers(which, ["1+2="], [[1]], Sampling(max_new_tokens=4, temperature=0.0))[0][0]
    with torch.no_grad():
        logits = which.completion_logits([prompt], [one.ids])
    assert logits.argmax(-1).tolist() == list(one.ids)


def test_too_long_a_prompt_is_refused_by_name():
    with pytest.raises(TalkootError):
        answers(policy(), ["1" * 60])


def test_frozen_is_the_policy_as_it_was():
    which = policy()
    which.keep_initial()
    before, ids = which.weights_hash(), [which.prompt_ids("1+2=")]
    with torch.no_grad():
        first = which.completion_logits(ids, [[2, 3]]).clone()
        for parameter in which.parameters():
            parameter.add_(0.1)
    assert which.weights_hash() != before
    with which.frozen():
        assert torch.equal(which.completion_logits(ids, [[2, 3]]), first)
    with torch.no_grad():
        assert not torch.equal(which.completion_logits(ids, [[2, 3]]), first)


def test_a_stored_policy_is_the_same_and_a_misfit_is_refused():
    which, other = policy(), policy()
    which.keep_initial()
    with torch.no_grad():
        next(iter(which.parameters())).add_(1.0)
    other.load_state(which.state())
    assert other.weights_hash() == which.weights_hash()
    with pytest.raises(TalkootError, match="does not fit"):
        other.load_state({"strange": torch.zeros(1)})


def test_padding_reaches_no_result():
    which = policy()
    prompts, completions = [which.prompt_ids(p) for p in PROMPTS], [[2, 3, 4], [5], [6, 7, 8, 9, 10], [2, 2]]
    with torch.no_grad():
        together = which.completion_logits(prompts, completions).split([3, 1, 5, 2])
        for prompt, ids, part in zip(prompts, completions, together, strict=True):
            assert torch.allclose(which.completion_logits([prompt], [ids]), part, atol=1e-5)


def test_a_template_poses_the_problem():
    plain, posed = policy(), policy(template="={prompt}")
    assert posed.prompt_ids("1+2=") == plain.prompt_ids("=1+2=")
    with pytest.raises(TalkootError, match=r"model\.template"):
        policy(template="1+1=").prompt_ids("2")
