"""A mixture as a model: forced experts are dense experts, grouped execution, gates, caches, padding."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mixture_toys import CONTRIBUTOR, NAMES, experts, model, shape, text
from talkoot.blend.mixture.assemble import assemble
from talkoot.blend.mixture.config import MixtureConfig
from talkoot.blend.mixture.counting import count
from talkoot.blend.mixture.fitting import fit_gates, randomise_gates
from talkoot.blend.mixture.gates import gates
from talkoot.blend.mixture.layer import route, run_grouped
from talkoot.blend.mixture.model import Mixture
from talkoot.blend.router import rules
from talkoot.blend.router.router import collect
from talkoot.blend.statistics import Features
from talkoot.blend.statistics import count as count_tokens
from talkoot.core.errors import TalkootError
from talkoot.core.keys import Key
from talkoot.model.decoder import Cache
from talkoot.model.generate import generate, stream
from talkoot.model.tokenizer import Tokenizer

torch.set_num_threads(1)
LOUD = 60.0  # times the random gates, so that tokens of one text part ways


def mixture(gate="token", seed=5, **choices):
    made = assemble(experts(), model(), gate=gate, **choices).mixture
    if gates[gate].reads_tokens:
        asked = {"gate": gate, "tokenizer": "t", "contributor": CONTRIBUTOR}
        fit_gates(made, {name: count(model(), text(n), domain=name, **asked) for n, name in enumerate(NAMES)})
        return made
    randomise_gates(made, seed)
    with torch.no_grad():
        for value in made.gate_tensors().values():
            value.mul_(LOUD)
    return made


def tokens(rows=2, length=40):
    return torch.tensor(text(0, rows, length, seed=9))


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_a_forced_expert_gives_the_logits_of_the_dense_expert_to_the_bit(family):
    dense = experts(family=family)
    made = assemble(dense, model(family=family))
    assert made.exact
    for name, stage in dense.items():
        assert torch.equal(made.mixture.forced(name)(tokens()), stage(tokens()))


@torch.no_grad()
def test_a_forced_expert_shares_the_weights_of_the_mixture():
    made = mixture()
    view = made.forced("birch")
    before = view(tokens())
    made.tensors()["model.layers.0.mlp.experts.1.down_proj.weight"].zero_()
    assert not torch.equal(view(tokens()), before)
    held = {value.data_ptr() for value in made.parameters()}
    assert {value.data_ptr() for value in view.parameters()} <= held


@torch.no_grad()
@pytest.mark.parametrize("gate", ["token", "mean"])
@pytest.mark.parametrize("top_k", [1, 2])
def test_a_gate_that_always_prefers_one_expert_is_that_expert(gate, top_k):
    made = mixture(gate, top_k=top_k, bias=True)
    for name, value in made.gate_tensors().items():
        value.zero_()
        if name.endswith("gate.bias"):
            value[2] = 1000.0
    difference = (made(tokens()) - made.forced("cedar")(tokens())).abs().max()
    assert difference <= (0 if top_k == 1 else 1e-6)


@torch.no_grad()
@pytest.mark.parametrize("gate", ["naive-bayes", "bigram"])
def test_a_gate_on_tokens_scores_what_the_routers_rule_scores_for_the_same_past(gate):
    made, row = mixture(gate), tokens()[0]
    features = Features(Tokenizer.characters("".join(chr(200 + n) for n in range(62))), buckets=1 << 18)
    known = {name: count_tokens(name, text(n), features, Key()) for n, name in enumerate(NAMES)}
    rule = rules[gate](collect(known, features))
    expected = torch.stack([rule(row[: place + 1]) for place in range(len(row))])
    seen = made._positions(row[None], 0, 0, None).scores
    torch.testing.assert_close(seen[0], expected, atol=1e-4, rtol=1e-5)


def brute_force(experts, rows, chosen):
    return torch.stack([experts[int(e)](rows[n : n + 1])[0] for n, line in enumerate(chosen) for e in line])


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 12), st.integers(1, 4), st.integers(1, 3), st.integers(0, 99))
def test_grouped_execution_is_each_token_through_its_own_experts(rows, count, top_k, seed):
    chance = torch.Generator().manual_seed(seed)
    some = torch.nn.ModuleList(torch.nn.Linear(5, 5) for _ in range(count))
    x = torch.randn(rows, 5, generator=chance)
    top_k = min(top_k, count)
    chosen = torch.rand(rows, count, generator=chance).argsort(1)[:, :top_k]
    with torch.no_grad():
        torch.testing.assert_close(run_grouped(some, x, chosen), brute_force(some, x, chosen), atol=1e-6, rtol=0)


def test_an_expert_runs_only_on_the_tokens_that_were_sent_to_it():
    made = mixture()
    counts = []
    for expert in made.mixtures[0].experts:
        expert.register_forward_pre_hook(lambda module, inputs: counts.append(len(inputs[0])))
    with torch.no_grad():
        made(tokens())
    assert sum(counts) == tokens().numel()
    assert len(counts) > 1


def test_weights_are_a_softmax_of_the_chosen_scores_or_shares_of_one_over_all():
    scores = torch.tensor([[1.0, 3.0, 2.0]])
    chosen = route(scores, 2, True)
    assert chosen.chosen.tolist() == [[1, 2]]
    torch.testing.assert_close(chosen.weights, torch.tensor([[3.0, 2.0]]).softmax(-1))
    torch.testing.assert_close(route(scores, 2, False).weights, scores.softmax(-1)[:, [1, 2]])
    assert route(scores, 1, True).weights.tolist() == [[1.0]]


@torch.no_grad()
@pytest.mark.parametrize("gate", ["token", "mean", "naive-bayes", "bigram"])
@pytest.mark.parametrize("top_k", [1, 2])
def test_reading_token_by_token_gives_the_logits_of_reading_at_once(gate, top_k):
    made = mixture(gate, top_k=top_k)
    whole, cache = made(tokens()), Cache()
    ends = [(0, 7), (7, 8), (8, 30), (30, 40)]
    parts = torch.cat([made(tokens()[:, a:b], cache) for a, b in ends], 1)
    torch.testing.assert_close(parts, whole, atol=1e-5, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("gate", ["token", "mean", "naive-bayes", "bigram"])
def test_no_gate_looks_ahead(gate):
    made, changed = mixture(gate), tokens()
    changed[:, 25:] = 63 - changed[:, 25:]
    torch.testing.assert_close(made(changed)[:, :25], made(tokens())[:, :25], atol=1e-6, rtol=0)
    assert not torch.allclose(made(changed)[:, 25:], made(tokens())[:, 25:])


@torch.no_grad()
@pytest.mark.parametrize("gate", ["token", "mean", "naive-bayes", "bigram"])
def test_padding_in_front_changes_nothing_for_the_text_behind_it(gate):
    made, alone = mixture(gate), tokens(1, 20)
    padded = torch.cat([torch.full((1, 6), 7), alone], 1)
    both = torch.cat([padded, tokens(1, 26)])
    cache = Cache(padding=torch.tensor([6, 0]))
    first, second = made(both, cache), made(both[:, -1:], cache)
    lone = Cache()
    torch.testing.assert_close(first[0, 6:], made(alone, lone)[0], atol=1e-5, rtol=0)
    torch.testing.assert_close(second[0], made(alone[:, -1:], lone)[0], atol=1e-5, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("gate", ["mean", "naive-bayes", "bigram"])
def test_a_cache_that_goes_on_with_other_rows_keeps_each_texts_memory(gate):
    made, cache, swapped = mixture(gate), Cache(), Cache()
    made(tokens()[:, :20], cache)
    made(tokens()[:, :20].flip(0), swapped)
    swapped.select(torch.tensor([1, 0]))
    assert torch.equal(made(tokens()[:, 20:21], cache), made(tokens()[:, 20:21], swapped))


@torch.no_grad()
@pytest.mark.parametrize("gate", ["token", "mean", "naive-bayes", "bigram"])
def test_generation_runs_a_mixture_as_it_runs_a_dense_model(gate):
    made = mixture(gate)
    rows = generate(made, tokens(2, 8), 6, eos_id=())
    ids = tokens(2, 8)
    for step in range(6):
        ids = torch.cat([ids, made(ids)[:, -1].argmax(-1, keepdim=True)], 1)
        assert [row[step].token for row in rows] == ids[:, -1].tolist()


@torch.no_grad()
@pytest.mark.parametrize("gate", ["prompt", "oracle"])
def test_a_gate_of_whole_texts_leaves_the_choice_to_the_caller(gate):
    made = assemble(experts(), model(), gate=gate).mixture
    assert not made.gate_tensors()
    with pytest.raises(TalkootError, match="which expert"):
        made(tokens())
    assert made.forced("alder")(tokens()).isfinite().all()


def test_only_the_experts_visited_count_as_work():
    dense, made = shape(), MixtureConfig.of(shape(), NAMES, (48, 48, 48), gate="oracle")
    assert made.layer_flops(64) == dense.layer_flops(64)
    assert (
        MixtureConfig.of(shape(), NAMES, (48,) * 3, gate="oracle", top_k=2).layer_flops(64)[1]
        > dense.layer_flops(64)[1]
    )
    assert made.num_parameters() > dense.num_parameters()


def test_a_mixture_holds_as_many_numbers_as_its_config_says():
    for gate in gates:
        config = MixtureConfig.of(shape(), NAMES, (48, 32, 40), gate=gate, bias=True)
        held = Mixture(config, seed=1).tensors()
        assert {name: tuple(v.shape) for name, v in held.items()} == {
            name: size for index in range(config.layer_count) for name, size in config.layer_shapes(index).items()
        }


@pytest.mark.parametrize(
    "wrong",
    [
        {"top_k": 4},
        {"temperature": 0.0},
        {"gate": "tokn"},
        {"trunk": "mean"},
        {"experts": ("a",)},
        {"widths": (48,) * 2},
    ],
)
def test_a_shape_that_contradicts_itself_is_refused(wrong):
    given = {"experts": NAMES, "widths": (48,) * 3, **wrong}
    if len(given["experts"]) == 1:
        given["widths"] = (48,)
    with pytest.raises(TalkootError):
        MixtureConfig.of(shape(), given.pop("experts"), given.pop("widths"), **given)


def test_texts_with_unlike_experts_can_be_generated_in_turns():
    made = assemble(experts(), model(), gate="prompt").mixture
    alone = [[step[0].token for step in stream(made.forced(name), tokens(1, 8), 6, eos_id=())] for name in NAMES[:2]]
    turns = [
        [step[0].token for step in both]
        for both in zip(*(stream(made.forced(name), tokens(1, 8), 6, eos_id=()) for name in NAMES[:2]), strict=True)
    ]
    assert [list(one) for one in zip(*turns, strict=True)] == alone
