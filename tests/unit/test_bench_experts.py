"""What bench experts holds its ensembles against: Bayes' mixture in many digits, and the bound on regret."""

from __future__ import annotations

import numpy as np
import pytest

from talkoot.bench.experts import uniform
from talkoot.bench.peer_experts import Setting, difference_to_bayes, largest_regret, mixed, perplexity


def heard(experts: int = 3, windows: int = 2, tokens: int = 40) -> list[np.ndarray]:
    chance = np.random.default_rng(7)
    return [np.log(chance.uniform(0.001, 0.9, (windows, tokens))) for _ in range(experts)]


def test_the_posterior_is_bayes_mixture_and_a_plain_average_is_not():
    found, prior = heard(), uniform(3)
    assert difference_to_bayes(found, mixed(found, prior), prior, range(2)) < 1e-12
    average = np.log(np.mean(np.exp(found), axis=0))
    assert difference_to_bayes(found, average, prior, range(2)) > 0.01


def test_the_regret_bound_holds_for_the_posterior_and_is_noticed_where_it_is_broken():
    found, prior = heard(), uniform(3)
    assert largest_regret(found, mixed(found, prior), prior) <= 1e-9
    worst = np.min(found, axis=0)
    assert largest_regret(found, worst, prior) > 0


def test_perplexity_is_of_all_tokens_together():
    assert perplexity(np.log(np.array([[0.5, 0.125]]))) == pytest.approx(4.0)


def test_the_benchs_recipe_is_one_that_a_user_could_write():
    recipe = Setting().recipe(3)
    assert recipe.seed == 3
    assert len(recipe.domains) == 8
    assert recipe.experts.span == 240
