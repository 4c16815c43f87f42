"""Gates that are trained really get a gradient, and nothing else moves."""

from __future__ import annotations

import pytest
import torch

from mixture_toys import experts, model, text
from talkoot.blend.mixture.assemble import assemble
from talkoot.blend.mixture.fitting import randomise_gates
from talkoot.blend.mixture.layer import route
from talkoot.blend.mixture.tuning import load_balance, tune_gates
from talkoot.core.errors import TalkootError
from talkoot.model.fit import FitSettings, next_token_loss

torch.set_num_threads(1)
HOW = FitSettings(learning_rate=3e-2, horizon=12, warmup=2)


def mixture(**choices):
    made = assemble(experts(), model(), **choices).mixture
    randomise_gates(made, 3)
    return made


def batches(count):
    return [torch.tensor([text(n, 1, 25, seed=step)[0] for n in range(3)]) for step in range(count)]


def gradient(made):
    with made.watched():
        loss = next_token_loss(made, batches(1)[0])
    gates = list(made.gate_tensors().values())
    found = torch.autograd.grad(loss, gates, allow_unused=True)
    return max(0.0 if one is None else float(one.abs().max()) for one in found)


def test_one_expert_with_weight_one_gives_the_gate_no_gradient_and_is_refused():
    made = mixture()
    assert gradient(made) == 0.0
    with pytest.raises(TalkootError, match="cannot be trained") as refused:
        tune_gates(made, batches(1), HOW)
    assert "top_k" in refused.value.next
    for gate in ("prompt", "bigram"):
        with pytest.raises(TalkootError, match="cannot be trained"):
            tune_gates(assemble(experts(), model(), gate=gate, top_k=2).mixture, batches(1), HOW)


@pytest.mark.parametrize(
    ("choices", "balance"),
    [
        ({"top_k": 2}, 0.0),
        ({"top_k": 2, "gate": "mean"}, 0.0),
        ({"renormalised": False}, 0.0),
        ({}, 0.1),
    ],
)
def test_gates_move_and_nothing_else_does(choices, balance):
    made = mixture(**choices)
    before = {name: value.detach().clone() for name, value in made.tensors().items()}
    tune_gates(made, batches(2), HOW, balance)
    moved = {name for name, value in made.tensors().items() if not torch.equal(value, before[name])}
    assert moved == set(made.gate_tensors())


def test_tuning_lowers_the_loss_and_repeats_to_the_bit():
    one, other = mixture(top_k=2), mixture(top_k=2)
    losses = tune_gates(one, batches(1) * 12, HOW)
    assert losses[-1] < losses[0] - 1e-3
    assert tune_gates(other, batches(1) * 12, HOW) == losses


def test_the_balance_term_alone_evens_out_the_load():
    made = mixture()
    with torch.no_grad():
        made.mixtures[0].gate.weight[0] += 0.2

    def imbalance():
        with torch.no_grad(), made.watched() as seen:
            made(torch.cat(batches(4))[:, :-1])
        return float(load_balance(seen))

    before = imbalance()
    tune_gates(made, batches(12), HOW, balance=1.0)
    assert imbalance() < before


def test_the_balance_term_is_one_where_the_load_is_even_and_more_where_it_is_not():
    even = route(torch.tensor([[1e-6, 0.0], [0.0, 1e-6]]), 1, True)
    assert float(load_balance([even])) == pytest.approx(1.0)
    skewed = route(torch.tensor([[4.0, 0.0], [4.0, 0.0]]), 1, True)
    assert float(load_balance([skewed])) == pytest.approx(2 * torch.tensor([4.0, 0.0]).softmax(0)[0].item())


def test_a_gate_that_learns_takes_its_experts_from_their_own_domains():
    made = mixture(top_k=2)
    with torch.no_grad():
        before = sum(float(next_token_loss(made, rows)) for rows in batches(3))
    tune_gates(made, batches(12), HOW)
    with torch.no_grad():
        assert sum(float(next_token_loss(made, rows)) for rows in batches(3)) < before
