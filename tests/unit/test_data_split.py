"""Splitting documents: a partition without duplicates, where a document's side is its own affair."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from talkoot.data.split import spans, split_documents

texts = some.lists(some.text(max_size=40), max_size=30)


@given(texts, some.integers(0, 5))
@settings(max_examples=50, deadline=None)
def test_every_document_is_on_exactly_one_side_once(documents, seed):
    sides = split_documents(documents, seed=seed, validation=0.3, test=0.3)
    together = [text for side in sides for text in side]
    assert sorted(together) == sorted(set(documents))
    for side in sides:  # the order stays
        assert side == [text for text in dict.fromkeys(documents) if text in side]


@given(texts, texts, some.text(max_size=40), some.randoms())
@settings(max_examples=50, deadline=None)
def test_a_documents_side_depends_neither_on_the_others_nor_on_the_order(first, second, document, random):
    def place(documents):
        sides = split_documents(documents, validation=0.3, test=0.3)
        return next(number for number, side in enumerate(sides) if document in side)

    shuffled = [*second, document]
    random.shuffle(shuffled)
    assert place([document]) == place([document, *first]) == place(shuffled)


def test_shares_are_about_what_was_asked_for_and_seeds_give_other_splits():
    documents = [f"document {number}" for number in range(4000)]
    sides = split_documents(documents, validation=0.1, test=0.2)
    assert [len(side) / 4000 for side in sides] == pytest.approx([0.7, 0.1, 0.2], abs=0.02)
    other = split_documents(documents, seed=1, validation=0.1, test=0.2)
    assert len(set(sides.test) & set(other.test)) / len(sides.test) == pytest.approx(0.2, abs=0.06)


def test_shares_of_nothing_and_of_everything_but_a_little():
    assert split_documents(["a", "b"], validation=0, test=0) == (["a", "b"], [], [])
    assert split_documents([]) == ([], [], [])


@given(some.text(alphabet="ab\n", max_size=200), some.integers(1, 9))
@settings(max_examples=100, deadline=None)
def test_spans_are_contiguous_and_nothing_is_lost(text, count):
    found = list(spans(text, count))
    assert "".join(found) == text
    assert len(found) <= count
    assert all(found) or text == ""


def test_spans_are_about_equal_and_end_at_line_ends():
    text = "".join(f"line {number}\n" for number in range(1000))
    found = list(spans(text, 10))
    assert len(found) == 10
    assert all(span.endswith("\n") for span in found)
    assert max(map(len, found)) - min(map(len, found)) < 20


def test_few_long_documents_are_split_in_pieces():
    plays = ["".join(f"{name} {number}\n" for number in range(2000)) for name in ("Hamlet", "Lear")]
    sides = split_documents(plays, validation=0.2, test=0.2, pieces=50)
    assert min(map(len, sides)) >= 5
    assert sum(len(span) for side in sides for span in side) == sum(map(len, plays))


@pytest.mark.parametrize(
    ("validation", "test", "pieces"), [(-0.1, 0, 1), (0.5, 0.5, 1), (0.1, float("nan"), 1), (0.1, 0.1, 0)]
)
def test_impossible_shares_are_refused(validation, test, pieces):
    with pytest.raises(ValueError):
        split_documents(["a"], validation=validation, test=test, pieces=pieces)
