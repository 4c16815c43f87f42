"""Where feedback puts the blame: the statistic, and which token holds a character."""

from __future__ import annotations

import pytest

from distil_toys import Letters
from talkoot.tune.distil.localise import localise, wrong_token


def test_the_statistic_is_about_the_first_wrong_tokens_and_the_correct_ones_before_them():
    found = localise([[0.1, -0.2, -5.0, 9.0], [-3.0, 7.0], [-9.0, -9.0]], [2, 0, None])
    assert found.rollouts == 2
    assert found.first_wrong == pytest.approx(-4.0)
    assert found.prefix == pytest.approx(-0.05)
    assert found.prefix_blamed == pytest.approx(0.5)


def test_without_a_known_mistake_there_is_no_number():
    found = localise([[-1.0]], [None])
    assert (found.rollouts, found.first_wrong, found.prefix, found.prefix_blamed) == (0, None, None, None)
    alone = localise([[-1.0]], [0])
    assert (alone.first_wrong, alone.prefix, alone.prefix_blamed) == (-1.0, None, None)


def test_exactly_a_tenth_of_a_nat_is_not_blame():
    assert localise([[-0.1, -0.11, 0.0]], [2]).prefix_blamed == 0.5


class Pieces(Letters):
    """Tokens of several characters."""

    pieces = ("", "ab", "c", "def")

    def decode(self, ids):
        return "".join(self.pieces[token] for token in ids)


@pytest.mark.parametrize(
    ("at", "token"), [(0, 0), (1, 0), (2, 1), (3, 2), (5, 2), (6, 3), (99, 3)], ids=lambda value: str(value)
)
def test_a_character_is_found_in_the_token_that_holds_it(at: int, token: int):
    assert wrong_token(Pieces("xyz"), (1, 2, 3, 0), "stop", at) == token


def test_a_text_that_ended_too_early_has_a_wrong_end_token_and_a_cut_one_has_none():
    letters = Letters("abc")
    ids = tuple(letters.encode("abc"))
    assert wrong_token(letters, (*ids, 0), "stop", 3) == 3
    assert wrong_token(letters, ids, "length", 3) is None
    assert wrong_token(letters, ids, "length", None) is None
    assert wrong_token(letters, ids, "length", 2) == 2
