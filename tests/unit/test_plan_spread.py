"""The spread of replicas that mix in random groups, against closed forms and against chance."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from talkoot.core.errors import TalkootError
from talkoot.plan.spread import (
    LAWS,
    best_pull,
    check,
    contraction,
    is_stable,
    largest_pull,
    nearest_stable,
    predicted_ratio,
)

MOMENTUM = st.floats(0, 0.95)


def limit(alpha: float, n: int) -> float:
    """The largest stable pull by heavy ball, in closed form."""
    return 2 * (1 - alpha**2) / (1 - alpha + 2 * alpha / n)


class Ensemble:
    """Independent ensembles of replicas of one weight, moved by the rules themselves; what is left over is a group."""

    def __init__(self, law: str, alpha: float, gamma: float, n: int, replicas: int, ensembles: int) -> None:
        self.law, self.alpha, self.gamma, self.n = law, alpha, gamma, n
        self.chance, shape = np.random.default_rng(1), (ensembles, replicas)
        self.weight, self.momentum = self.chance.standard_normal(shape), np.zeros(shape)

    def round(self, beta: float, progress: np.ndarray) -> None:
        order = self.chance.random(self.weight.shape).argsort(1)
        order += np.arange(len(order))[:, None] * order.shape[1]
        whole = order.shape[1] // self.n * self.n
        for groups in (order[:, :whole].reshape(-1, self.n).T, order[:, whole:].T):
            if groups.size:
                self.mix(groups, beta, progress.reshape(-1))

    def mix(self, groups: np.ndarray, beta: float, progress: np.ndarray) -> None:
        """Move the members of groups, (size, groups)."""
        weight, momentum = self.weight.reshape(-1), self.momentum.reshape(-1)
        old = weight[groups]
        moved = beta * progress[groups].mean(0) - self.gamma * (old - old.mean(0))
        momentum[groups] = self.alpha * momentum[groups] + moved
        look_ahead = moved + self.alpha * momentum[groups]
        weight[groups] = old + (look_ahead if self.law == "nesterov" else momentum[groups])

    def variance(self) -> float:
        return float(self.weight.var(1, ddof=1).mean())


@settings(max_examples=40, deadline=None)
@given(alpha=MOMENTUM, n=st.integers(2, 9))
def test_heavy_ball_is_stable_up_to_the_closed_form(alpha, n):
    assert largest_pull("heavy-ball", alpha, n) == pytest.approx(limit(alpha, n), rel=1e-6)
    assert best_pull("heavy-ball", alpha, n) == pytest.approx(limit(alpha, n) / 2, rel=1e-4)


@settings(max_examples=40, deadline=None)
@given(alpha=MOMENTUM, beta=st.floats(0.1, 2), share=st.floats(0.05, 0.95), n=st.integers(2, 9))
def test_heavy_balls_spread_is_the_closed_form(alpha, beta, share, n):
    gamma, k = share * limit(alpha, n), (n - 1) / n
    closed = beta**2 * (1 + alpha) / (n * gamma * k * (2 * (1 - alpha**2) - gamma * (1 - alpha + 2 * alpha / n)))
    assert predicted_ratio("heavy-ball", alpha, beta, gamma, n) == pytest.approx(closed, rel=1e-6)


@pytest.mark.parametrize(
    ("law", "alpha", "most", "best", "ratio"),
    [
        ("heavy-ball", 0.3, 1.82, 0.91, 0.77),
        ("heavy-ball", 0.5, 1.50, 0.75, 1.31),
        ("heavy-ball", 0.7, 1.02, 0.51, 3.20),
        ("heavy-ball", 0.9, 0.38, 0.19, 25.8),
        ("nesterov", 0.7, 1.09, 0.575, 2.6),
        ("nesterov", 0.9, 0.845, 0.485, 6.6),
    ],
)
def test_the_table_of_pairs(law, alpha, most, best, ratio):
    assert largest_pull(law, alpha) == pytest.approx(most, rel=0.005)
    assert best_pull(law, alpha) == pytest.approx(best, rel=0.005)
    assert predicted_ratio(law, alpha, 0.7, best) == pytest.approx(ratio, rel=0.025)


def test_known_contractions_of_pairs():
    assert contraction("heavy-ball", 0, 1) == pytest.approx(0.5)
    assert contraction("average", 0, 1) == pytest.approx(0.5)
    assert contraction("heavy-ball", 0.5, 0.7) == pytest.approx(0.70, abs=0.001)
    assert contraction("heavy-ball", 0.5, 0.3) == pytest.approx(0.625)
    assert min(contraction("heavy-ball", 0.5, pull / 100) for pull in range(5, 150)) == pytest.approx(0.625, abs=1e-3)


def test_averaging_pairs_keeps_the_variance_of_one_rounds_progress():
    assert predicted_ratio("average", 0, 1, 1) == pytest.approx(1)


@pytest.mark.parametrize(
    ("law", "alpha", "gamma", "n"),
    [
        ("heavy-ball", 0.5, 0.7, 2),
        ("heavy-ball", 0.9, 0.7, 2),  # flies apart
        ("heavy-ball", 0.7, 0.9, 4),
        ("nesterov", 0.9, 0.485, 2),
        ("nesterov", 0.7, 1.3, 2),  # flies apart
        ("average", 0.0, 1.0, 2),
    ],
)
def test_an_ensemble_without_progress_contracts_as_predicted(law, alpha, gamma, n):
    ensemble = Ensemble(law, alpha, gamma, n, 2048, 8)
    still = np.zeros_like(ensemble.weight)
    for _ in range(4):  # until what fades faster has faded
        ensemble.round(0.0, still)
    before = ensemble.variance()
    for _ in range(16):
        ensemble.round(0.0, still)
    assert (ensemble.variance() / before) ** (1 / 16) == pytest.approx(contraction(law, alpha, gamma, n), rel=0.02)


@pytest.mark.parametrize(
    ("law", "alpha", "gamma", "n", "replicas"),
    [
        ("heavy-ball", 0.5, 0.7, 2, 4),
        ("heavy-ball", 0.5, 0.7, 2, 5),
        ("heavy-ball", 0.5, 0.7, 3, 8),
        ("nesterov", 0.9, 0.485, 2, 8),
        ("nesterov", 0.7, 0.575, 2, 1024),
    ],
)
def test_progress_keeps_up_the_predicted_spread_among_few_and_many(law, alpha, gamma, n, replicas):
    ensemble, seen = Ensemble(law, alpha, gamma, n, replicas, 8192 // replicas), []
    for round in range(300):
        ensemble.round(0.7, ensemble.chance.standard_normal(ensemble.weight.shape) + 3.0)
        if round >= 60:
            seen.append(ensemble.variance())
    assert np.mean(seen) == pytest.approx(predicted_ratio(law, alpha, 0.7, gamma, n, replicas=replicas), rel=0.02)


@settings(max_examples=60, deadline=None)
@given(law=st.sampled_from(LAWS), alpha=MOMENTUM, share=st.floats(0.01, 1), n=st.integers(2, 5), few=st.integers(5, 40))
def test_what_is_stable_among_many_is_stable_among_few(law, alpha, share, n, few):
    alpha = 0.0 if law == "average" else alpha
    pull = share * largest_pull(law, alpha, n)
    assert contraction(law, alpha, pull, n, replicas=few) < 1 + 1e-9


@settings(max_examples=40, deadline=None)
@given(law=st.sampled_from(LAWS), alpha=MOMENTUM, pull=st.floats(0.01, 3), n=st.integers(2, 5))
def test_exactly_what_diverges_is_refused_and_the_advice_is_stable(law, alpha, pull, n):
    alpha = 0.0 if law == "average" else alpha
    stable = nearest_stable(law, alpha, pull, n)
    assert 0 < stable.pull <= pull
    assert is_stable(law, alpha, stable.pull, n)
    if stable.momentum is not None:
        assert is_stable(law, min(stable.momentum, alpha), pull, n)
    if is_stable(law, alpha, pull, n):
        check(law, alpha, 0.7, pull, n)
        assert predicted_ratio(law, alpha, 0.7, pull, n) < math.inf
    else:
        with pytest.raises(TalkootError, match=r"mixing\.pull"):
            check(law, alpha, 0.7, pull, n)
        assert predicted_ratio(law, alpha, 0.7, pull, n) == math.inf


def test_the_refusal_names_key_factor_and_the_nearest_stable_values():
    with pytest.raises(TalkootError) as refused:
        check("heavy-ball", 0.9, 0.7, 0.7)
    problem = refused.value
    assert problem.where == "the recipe, key mixing.pull"
    assert "factor of 1.1 per round" in problem.why
    assert problem.next == "set mixing.pull to at most 0.342, or mixing.momentum to at most 0.781"
    check("heavy-ball", 0.9, 0.7, 0.342)
    check("heavy-ball", 0.781, 0.7, 0.7)


def test_no_pull_at_all_is_an_ablation_and_a_push_is_refused():
    check("heavy-ball", 0.5, 0.7, 0.0)
    assert not is_stable("heavy-ball", 0.5, 0.0)
    assert predicted_ratio("heavy-ball", 0.5, 0.7, 0.0) == math.inf
    with pytest.raises(TalkootError, match=r"at most 0\.75"):
        check("heavy-ball", 0.5, 0.7, -0.1)


@pytest.mark.parametrize(
    ("law", "alpha", "pull", "n", "replicas"),
    [
        ("heavy-bell", 0.5, 0.7, 2, None),
        ("nesterov", 1.0, 0.7, 2, None),
        ("nesterov", 0.5, math.nan, 2, None),
        ("average", 0.5, 1.0, 2, None),
        ("nesterov", 0.5, 0.7, 1, None),
        ("nesterov", 0.5, 0.7, 3, 2),
    ],
)
def test_nonsense_is_refused(law, alpha, pull, n, replicas):
    with pytest.raises(ValueError, match=r"law|no group"):
        contraction(law, alpha, pull, n, replicas=replicas)
