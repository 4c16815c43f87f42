"""Posterior ensembles: equal to Bayes' rule by hand, never far behind the best expert, and proper probabilities."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some

from ensemble_toys import VOCABULARY, Absent, Table, model
from talkoot.blend.ensemble import (
    Belief,
    PosteriorEnsemble,
    Prior,
    StageReader,
    StageScorer,
    evidence,
    mix,
    open_stages,
    prior_from,
    priors,
    stream,
)
from talkoot.blend.folder import Blend, Expert
from talkoot.core.errors import TalkootError
from talkoot.model.generate import stream as stream_one
from talkoot.model.huggingface import save_folder
from talkoot.model.tokenizer import Tokenizer

log_probabilities = some.floats(-20, -1e-6)


@some.composite
def problems(draw) -> tuple[np.ndarray, Prior]:
    """Log-probabilities (K, N) and a prior."""
    experts, count = draw(some.integers(1, 5)), draw(some.integers(0, 12))
    heard = [[draw(log_probabilities) for _ in range(count)] for _ in range(experts)]
    weights = np.array([draw(some.floats(0.01, 1)) for _ in range(experts)])
    return np.array(heard).reshape(experts, count), Prior(np.log(weights / weights.sum()))


def by_hand(heard: np.ndarray, prior: Prior) -> tuple[np.ndarray, np.ndarray]:
    """Bayes' mixture in exact fractions: probabilities of the tokens, and weights before each and after all."""
    experts, count = heard.shape
    joint = [Fraction(math.exp(one)) for one in prior.log_weights]
    probabilities, weights = [], []
    for place in range(count + 1):
        total = sum(joint)
        weights.append([float(one / total) for one in joint])
        if place < count:
            joint = [one * Fraction(math.exp(heard[k, place])) for k, one in enumerate(joint)]
            probabilities.append(float(sum(joint) / total))
    return np.array(probabilities), np.array(weights).reshape(count + 1, experts)


# --- the arithmetic


@given(problems())
@settings(max_examples=60, deadline=None)
def test_the_mixture_equals_bayes_rule_by_hand(problem):
    heard, prior = problem
    found, (probabilities, weights) = mix(heard, prior), by_hand(heard, prior)
    assert np.exp(found.log_probs) == pytest.approx(probabilities, rel=1e-10, abs=0)
    assert found.weights == pytest.approx(weights, rel=1e-10, abs=1e-300)


@given(problems())
@settings(max_examples=100, deadline=None)
def test_no_expert_is_ever_better_by_more_than_its_prior_says(problem):
    heard, prior = problem
    ours = -mix(heard, prior).log_probs.sum()
    for theirs, log_weight in zip(-heard.sum(axis=1), prior.log_weights, strict=True):
        assert ours <= theirs - log_weight + 1e-9


@given(problems(), some.integers(1, 5), some.integers(0, 12))
@settings(max_examples=60, deadline=None)
def test_token_by_token_it_is_the_same(problem, keep, after):
    heard, prior = problem
    belief, whole = Belief(prior), mix(heard, prior, keep=keep, after=after)
    for place in range(heard.shape[1] + 1):
        if place == after:
            belief.keep(keep)
        assert belief.weights == pytest.approx(whole.weights[place], abs=1e-12)
        if place < heard.shape[1]:
            belief.update(heard[:, place])


@given(problems(), some.integers(1, 5), some.integers(0, 12))
@settings(max_examples=60, deadline=None)
def test_dropping_leaves_so_many_renormalised_and_does_not_hear_the_others(problem, keep, after):
    heard, prior = problem
    found = mix(heard, prior, keep=keep, after=after)
    assert found.weights.sum(axis=1) == pytest.approx(1, abs=1e-12)
    assert (np.count_nonzero(found.weights[after:], axis=1) <= keep).all()
    everybody = mix(heard, prior)
    assert found.log_probs[:after] == pytest.approx(everybody.log_probs[:after], abs=1e-12)
    if after < len(found.weights):
        dropped = found.weights[after] == 0
        deaf = heard.copy()
        deaf[dropped, after:] = -1.0
        assert mix(deaf, prior, keep=keep, after=after).log_probs == pytest.approx(found.log_probs, abs=1e-12)
        assert everybody.weights[after][~dropped].min() >= everybody.weights[after][dropped].max(initial=0) - 1e-12


def test_thousands_of_tokens_do_not_underflow():
    heard = np.full((2, 50_000), -9.0)
    heard[1] = -9.01
    found = mix(heard, Prior(np.log([0.5, 0.5])))
    assert found.weights[-1] == pytest.approx([1, 0], abs=1e-12)
    assert found.log_probs.sum() == pytest.approx(-450_000 + math.log(0.5), rel=1e-12)


def test_an_expert_that_the_prior_rules_out_stays_out():
    found = mix(np.array([[-9.0, -9.0], [-0.1, -0.1]]), Prior(np.array([0.0, -np.inf])))
    assert found.log_probs.tolist() == [-9.0, -9.0]
    assert found.weights[:, 1].tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("heard", "log_prior"),
    [
        ([[-1.0, -np.inf]], [0.0]),
        ([[-1.0, np.nan]], [0.0]),
        ([[-1.0]], [0.0, 0.0]),
        ([-1.0], [0.0]),
        ([[-1.0]], [-np.inf]),
    ],
)
def test_what_cannot_be_mixed_is_refused(heard, log_prior):
    with pytest.raises(ValueError):
        mix(np.array(heard), Prior(np.array(log_prior)))


# --- priors


def test_the_simple_prior_averages_probabilities_whatever_was_said():
    heard = np.log([[0.5, 0.1], [0.1, 0.1]])
    found = mix(heard, priors["simple"](2, np.empty((0, 2))))
    assert np.exp(found.log_probs) == pytest.approx([0.3, 0.1])
    assert found.weights.tolist() == [[0.5, 0.5]] * 3


def test_the_cached_prior_is_the_decayed_sum_of_posteriors():
    rows = (
        np.log([[0.8, 0.2], [0.1, 0.9], [0.5, 0.5]]) - 700
    )  # the texts are long, and no float holds their probability
    found = np.exp(priors["cached"](2, rows).log_weights)
    expected = 0.3 * np.array([0.8, 0.2]) + 0.09 * np.array([0.1, 0.9]) + 0.027 * np.array([0.5, 0.5])
    assert found == pytest.approx(expected / expected.sum(), rel=1e-12)


def test_the_cached_prior_looks_at_a_hundred_texts_and_rules_nobody_out():
    rows = np.zeros((101, 2))
    rows[:, 1] = -5000.0
    rows[100] = [-5000.0, 0.0]
    found = priors["cached"](2, rows)
    assert np.isfinite(found.log_weights).all()
    assert found.log_weights.tolist() == priors["cached"](2, rows[:100]).log_weights.tolist()


def test_the_cached_prior_needs_held_out_text():
    with pytest.raises(TalkootError, match="held-out"):
        prior_from("cached", {"a": Table([1.0])})
    with pytest.raises(TalkootError, match="unknown prior 'cashed'"):
        prior_from("cashed", {"a": Table([1.0])})


def test_priors_are_made_from_the_experts_own_word_on_held_out_text():
    scorers = {"a": Table([0.9, 0.1]), "b": Table([0.5, 0.5])}
    assert evidence(scorers, [[0, 0, 0], [0, 1]]) == pytest.approx(np.log([[0.81, 0.25], [0.1, 0.5]]))
    found = np.exp(prior_from("cached", scorers, [[0, 0, 0]]).log_weights)
    assert found == pytest.approx([0.81 / 1.06, 0.25 / 1.06])
    assert np.exp(prior_from("uniform", scorers).log_weights) == pytest.approx([0.5, 0.5])


# --- scoring


def test_the_probabilities_of_all_texts_sum_to_one():
    ensemble = PosteriorEnsemble({"a": Table([0.7, 0.2, 0.1]), "b": Table([0.1, 0.1, 0.8])})
    total = sum(math.exp(ensemble.score([0, *text]).log_probs.sum()) for text in itertools.product(range(3), repeat=5))
    assert total == pytest.approx(1, abs=1e-12)


def test_dropped_experts_are_not_asked_for_the_rest():
    scorers = {"a": Table([0.9, 0.1]), "b": Table([0.1, 0.9]), "c": Table([0.5, 0.5])}
    scored = PosteriorEnsemble(scorers, keep=1, after=3).score([0] * 50)
    assert [one.asked for one in scorers.values()] == [[4, 50], [4], [4]]
    assert scored.after.tolist() == [1, 0, 0]
    assert scored.log_probs[3:] == pytest.approx(np.log(0.9))
    heard = np.stack([np.full(49, math.log(one)) for one in (0.9, 0.1, 0.5)])
    assert scored.log_probs == pytest.approx(mix(heard, Prior(np.log([1 / 3] * 3)), keep=1, after=3).log_probs)


def test_an_expert_that_is_gone_is_left_out_and_named():
    table = Table([0.9, 0.1])
    scored = PosteriorEnsemble({"a": Absent(), "b": table, "c": Table([0.5, 0.5])}).score([0, 0, 1])
    alone = PosteriorEnsemble({"b": table, "c": Table([0.5, 0.5])}).score([0, 0, 1])
    assert scored.gone == {"a": "its peer is lost"}
    assert scored.log_probs == pytest.approx(alone.log_probs, rel=1e-14)
    assert scored.weights[:, 1:] == pytest.approx(alone.weights, rel=1e-14)
    assert scored.weights[:, 0].tolist() == [0, 0]


def test_when_the_chosen_expert_is_lost_the_next_best_is_asked():
    second = Table([0.5, 0.5])
    scorers = {"chosen": Absent(longest=3), "second": second, "third": Table([0.1, 0.9])}
    scored = PosteriorEnsemble(scorers, keep=1, after=2).score([0] * 10)
    assert scored.gone == {"chosen": "its peer is lost"}
    assert second.asked == [3, 10]
    assert scored.after.tolist() == [0, 1, 0]
    assert scored.log_probs[2:] == pytest.approx(np.log(0.5))


def test_more_may_be_kept_than_are_left():
    scorers = {"a": Absent(), "b": Table([0.9, 0.1]), "c": Absent(longest=2), "d": Absent()}
    scored = PosteriorEnsemble(scorers, keep=2, after=1).score([0, 0, 1])
    assert sorted(scored.gone) == ["a", "c", "d"]
    assert scored.log_probs == pytest.approx(np.log([0.9, 0.1]))


def test_nobody_left_is_an_error_that_says_who_and_why():
    with pytest.raises(TalkootError) as caught:
        PosteriorEnsemble({"a": Absent(), "b": Absent()}).score([0, 1])
    assert "a: its peer is lost; b: its peer is lost" in caught.value.why


def test_wrong_calls_are_refused():
    for arguments in ({"scorers": {}}, {"scorers": {"a": Table([1])}, "keep": -1}):
        with pytest.raises(ValueError):
            PosteriorEnsemble(**arguments)
    with pytest.raises(ValueError):
        PosteriorEnsemble({"a": Table([1])}, Prior(np.log([0.5, 0.5])))


# --- models


TEXT = [4, 100, 30, 7, 7, 200, 41]


def test_models_of_unlike_width_and_depth_are_mixed_as_by_hand():
    stages = [model(number) for number in range(3)]
    scored = PosteriorEnsemble({str(number): StageScorer(stage) for number, stage in enumerate(stages)}).score(TEXT)
    with torch.no_grad():
        rows = [stage(torch.tensor([TEXT]))[0, :-1].double().softmax(-1) for stage in stages]
    heard = np.stack([row.gather(1, torch.tensor(TEXT[1:])[:, None])[:, 0].log().numpy() for row in rows])
    probabilities, weights = by_hand(heard, Prior(np.log([1 / 3] * 3)))
    assert np.exp(scored.log_probs) == pytest.approx(probabilities, rel=1e-6)  # two float32 forward passes
    assert scored.weights == pytest.approx(weights[:-1], rel=1e-5)
    ours = np.stack([StageScorer(stage).log_probs(TEXT) for stage in stages])
    assert np.exp(scored.log_probs) == pytest.approx(by_hand(ours, Prior(np.log([1 / 3] * 3)))[0], rel=1e-10)


def test_a_long_texts_head_runs_in_pieces_and_the_numbers_stay(monkeypatch):
    scorer = StageScorer(model(1))
    whole = scorer.log_probs(TEXT)
    monkeypatch.setattr("talkoot.blend.ensemble.scorers._MOST_LOGITS", 2 * VOCABULARY)
    assert scorer.log_probs(TEXT) == pytest.approx(whole, abs=1e-6)
    assert scorer.log_probs([5]).shape == (0,)


@pytest.mark.parametrize("text", [[], [VOCABULARY], [-1], [3] * 65])
def test_a_text_that_a_model_cannot_read_is_refused(text):
    with pytest.raises(TalkootError):
        StageScorer(model(0)).log_probs(text)


def readers(count: int = 3) -> dict[str, StageReader]:
    return {str(number): StageReader(model(number)) for number in range(count)}


def test_one_expert_writes_what_it_writes_alone():
    settings = {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "seed": 5, "eos_id": ()}
    told = list(stream({"a": StageReader(model(1))}, TEXT, 20, **settings))
    alone = [step[0] for step in stream_one(model(1), torch.tensor([TEXT]), 20, **settings)]
    assert [one.token for one in told] == [one.token for one in alone]
    assert [one.logprob for one in told] == pytest.approx([one.logprob for one in alone], abs=1e-5)
    assert {one.weights["a"] for one in told} == {1.0}


@pytest.mark.parametrize(("keep", "after"), [(0, 0), (1, 3), (2, 3), (2, 6), (1, 9), (2, 0), (1, 100)])
def test_what_is_written_has_the_probability_that_scoring_gives_it(keep, after):
    told = list(stream(readers(), TEXT, 12, keep=keep, after=after, temperature=1.0, seed=3, eos_id=()))
    ids = [*TEXT, *(one.token for one in told)]
    scorers = {str(number): StageScorer(model(number)) for number in range(3)}
    scored = PosteriorEnsemble(scorers, keep=keep, after=after).score(ids)
    written = slice(len(TEXT) - 1, None)
    assert [one.logprob for one in told] == pytest.approx(scored.log_probs[written].tolist(), abs=1e-4)
    weights = np.array([list(one.weights.values()) for one in told])
    assert weights == pytest.approx(scored.weights[written], abs=1e-4)
    assert len({one.token for one in told}) > 3


def test_probabilities_sum_to_one_over_the_vocabulary():
    from talkoot.blend.ensemble.generation import Mixture

    mixture = Mixture(readers(), None, keep=0, after=0)
    row = mixture.read(torch.tensor([TEXT]))
    for token in (9, 200):
        assert row.shape == (1, VOCABULARY)
        assert row.dtype == torch.float64
        assert float(row.exp().sum()) == pytest.approx(1, abs=1e-12)
        row = mixture.read(torch.tensor([[token]]))


def test_dropped_experts_read_no_further():
    class Counting(StageReader):
        steps = 0

        def step(self, token):
            self.steps += 1
            return super().step(token)

    experts = {str(number): Counting(model(number)) for number in range(3)}
    told = list(stream(experts, TEXT, 8, keep=1, after=2, eos_id=()))
    assert sorted(one.steps for one in experts.values()) == [0, 0, 7]
    assert sorted(told[0].weights.values()) == [0, 0, 1]


def test_end_tokens_and_stop_sequences_end_the_text():
    greedy = [one.token for one in stream(readers(), TEXT, 12, eos_id=())]
    until = greedy.index(greedy[5]) + 1
    assert [one.token for one in stream(readers(), TEXT, 12, eos_id=greedy[5])] == greedy[:until]
    assert [one.token for one in stream(readers(), TEXT, 12, eos_id=(), stop=[greedy[4:6]])][-2:] == greedy[4:6]


def test_experts_with_other_vocabularies_cannot_write_together():
    with pytest.raises(TalkootError, match="cannot write together") as caught:
        next(stream({"a": StageReader(model(0)), "b": StageReader(model(0, vocab_size=300))}, TEXT, 5))
    assert "a has 258 tokens, b has 300 tokens" in caught.value.why


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"ids": []}, "tokens"),
        ({"ids": [VOCABULARY]}, "tokens"),
        ({"max_new_tokens": 60}, "max_new_tokens"),
        ({"temperature": -1.0}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
    ],
)
def test_requests_out_of_range_are_refused(arguments, name):
    with pytest.raises(TalkootError) as caught:
        list(stream(readers(2), **{"ids": TEXT, "max_new_tokens": 3, **arguments}))
    assert name in caught.value.what


def blend_of(folder, tokenizers) -> Blend:
    """A blend of as many experts as there are tokenizers."""
    blend = Blend.open_or_new(folder / "blend")
    for number, tokenizer in enumerate(tokenizers):
        stage = model(number)
        save_folder(folder / str(number), stage.config, stage.tensors(), tokenizer)
        size = sum(tensor.numel() for tensor in stage.tensors().values())
        blend.put(Expert(name=f"e{number}", model=str(folder / str(number)), parameters=size, tokenizer="?"))
    return blend


def test_the_experts_of_a_blend_are_opened_by_name(tmp_path):
    blend = blend_of(tmp_path, [Tokenizer.bytes()] * 3)
    stages = open_stages(blend, ["e2", "e0"])
    assert list(stages) == ["e2", "e0"]
    assert list(open_stages(blend)) == ["e0", "e1", "e2"]
    expected = PosteriorEnsemble({"e2": StageScorer(model(2)), "e0": StageScorer(model(0))}).score(TEXT)
    found = PosteriorEnsemble({name: StageScorer(stage) for name, stage in stages.items()}).score(TEXT)
    assert found.log_probs.tolist() == expected.log_probs.tolist()
    with pytest.raises(TalkootError, match="there is no expert 'e9'"):
        open_stages(blend, ["e9"])


def test_unlike_tokenizers_are_refused_with_what_differs_before_a_tensor_is_read(tmp_path):
    other = Tokenizer.bytes()
    content = other.content.replace('"<|end|>"', '"<|over|>"')
    renamed = Tokenizer(content, {**other.settings, "eos_token": "<|over|>"})
    blend = blend_of(tmp_path, [Tokenizer.bytes(), Tokenizer.bytes(), renamed])
    (tmp_path / "0" / "model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(TalkootError, match="unlike tokenizers") as caught:
        open_stages(blend)
    assert caught.value.where == "e0 and e2"
    assert caught.value.why == (
        "0 tokens have another id, 2 are in one of them only: "
        "'<|end|>' is only in the first, '<|over|>' is only in the second"
    )


def test_the_smallest_context_of_the_experts_is_the_ensembles():
    experts = {"long": StageReader(model(0)), "short": StageReader(model(1, positions=16))}
    with pytest.raises(TalkootError, match="max_new_tokens"):
        next(stream(experts, TEXT, 12))
