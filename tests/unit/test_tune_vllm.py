"""What the vLLM back-end says and hears, on objects of the documented shape; the engine itself is not run."""

from __future__ import annotations

from types import SimpleNamespace as Shape

import pytest

from talkoot.core.errors import TalkootError
from talkoot.tune.completion import Completion, Sampling
from talkoot.tune.policies.vllm import VllmPolicy, completion, request

EOS = (2,)


def answer(ids, logprobs, reason="stop"):
    tables = (
        None
        if logprobs is None
        else [
            {token: Shape(logprob=value, rank=1), 99: Shape(logprob=-0.1, rank=2)} if value is not None else {}
            for token, value in zip(ids, logprobs, strict=False)
        ]
    )
    return Shape(outputs=[Shape(token_ids=list(ids), logprobs=tables, finish_reason=reason)])


def test_a_request_asks_for_ids_and_the_drawn_tokens_probability():
    asked = request(Sampling(max_new_tokens=9, temperature=0.7), 2**64 - 1, EOS)
    assert asked["logprobs"] == 0
    assert asked["max_tokens"] == 9
    assert asked["temperature"] == 0.7
    assert asked["seed"] < 2**63
    assert asked["stop_token_ids"] == [2]
    assert asked["detokenize"] is False


@pytest.mark.parametrize("cut", [{"top_k": 5}, {"top_p": 0.9}])
def test_cut_off_tokens_are_refused_because_ratios_would_be_biased(cut):
    with pytest.raises(TalkootError, match="top-k and top-p"):
        request(Sampling(**cut), 1, EOS)


def test_an_answer_keeps_its_ids_and_its_end_token():
    assert completion(answer((5, 6, 2), (-1.0, -2.0, -0.5)), EOS) == Completion(
        ids=(5, 6, 2), logp=(-1.0, -2.0, -0.5), finish="stop"
    )
    assert completion(answer((5, 6), (-1.0, -2.0), "length"), EOS).finish == "length"


@pytest.mark.parametrize(
    "broken",
    [
        answer((5, 2), None),
        answer((5, 2), (-1.0,)),
        answer((5, 2), (-1.0, None)),
        answer((5, 2), (-1.0, -1.0), "abort"),
        answer((5, 6), (-1.0, -1.0), "stop"),
        answer((5, 2), (-1.0, -1.0), "length"),
    ],
)
def test_an_answer_that_lacks_something_is_an_error_and_no_probability_of_one(broken):
    with pytest.raises(TalkootError, match="cannot be used"):
        completion(broken, EOS)


class Learner:
    """Stands in for the policy that learns: an adapter, whose hash the test turns."""

    coder = Shape(eos_ids=EOS)
    max_positions = 64
    size = 1
    adapted = True
    hashed = "a"

    def weights_hash(self):
        return self.hashed

    def save_adapter(self, folder):
        self.saved = folder


def test_each_row_is_one_request_and_weights_go_over_only_when_they_changed(tmp_path, monkeypatch):
    asked = []

    class Engine:
        def generate(self, requests, parameters, use_tqdm, lora_request):
            asked.append((requests, [one["seed"] for one in parameters], lora_request))
            return [answer((one["prompt_token_ids"][0], 2), (-1.0, -0.5)) for one in requests]

        def reset_prefix_cache(self):
            pass

    module = Shape(LoRARequest=lambda *fields: fields)
    monkeypatch.setattr("talkoot.tune.policies.vllm.import_module", lambda name: module)
    learner = Learner()
    policy = VllmPolicy(learner, Engine(), Shape(SamplingParams=lambda **fields: fields), tmp_path)
    made = policy.generate([[7, 8], [9]], [[1, 2], [3]], Sampling())
    assert [[one.ids for one in group] for group in made] == [[(7, 2), (7, 2)], [(9, 2)]]
    assert asked[0][1] == [1, 2, 3]
    policy.generate([[7]], [[1]], Sampling())
    learner.hashed = "b"
    policy.generate([[7]], [[1]], Sampling())
    assert [one[2][1] for one in asked] == [1, 1, 2]
