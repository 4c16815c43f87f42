"""Curves and lanes stay small and keep what matters."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from talkoot.serve.series import BUCKETS, TAIL, Curve, Lanes, Span, thin


def test_a_long_curve_is_bounded_and_keeps_extremes_and_tail():
    chance, curve = random.Random(1), Curve(1, 2)
    rows = [(step, chance.gauss(0, 1), chance.gauss(0, 1)) for step in range(100_000)]
    rows[41_234] = (41_234, 99.0, 0.0)
    rows[7] = (7, 0.0, -99.0)
    for row in rows:
        curve.add(row)
    assert len(curve.rows) <= 4 * BUCKETS + 2 * TAIL
    assert curve.rows[-TAIL:] == rows[-TAIL:]
    assert curve.rows[0] == rows[0]
    assert rows[41_234] in curve.rows
    assert rows[7] in curve.rows
    steps = [row[0] for row in curve.rows]
    assert steps == sorted(set(steps))


def test_a_cut_removes_exactly_the_later_steps():
    curve = Curve(1)
    for step in range(1, 51):
        curve.add((step, 1.0))
    curve.cut(20)
    assert [row[0] for row in curve.rows] == list(range(1, 21))
    curve.cut(0)
    assert curve.rows == []


@given(st.lists(st.one_of(st.none(), st.floats(-1e6, 1e6)), max_size=400))
def test_thinning_keeps_the_whole_range_and_is_stable(values: list[float | None]):
    rows = [(step, value) for step, value in enumerate(values)]
    thinned = thin(rows, (1,), buckets=8)
    known = [value for value in values if value is not None]
    if known:
        kept = [row[1] for row in thinned if row[1] is not None]
        assert (min(kept), max(kept)) == (min(known), max(known))
    assert len(thinned) <= 2 * 10 + 2
    assert thin(thinned, (1,), buckets=8) == thinned


def test_lanes_merge_instead_of_growing():
    lanes = Lanes()
    for step in range(20_000):
        for peer in "abcd":
            lanes.add(peer, Span(step * 1.0, step + 0.8, 0.4, step))
        if step % 1000 == 0:
            lanes.void(step - 3)  # however often work is undone, lanes end up small
    for peer in "abcd":
        lane = lanes[peer]
        assert len(lane.spans) <= 240
        assert lane.spans[0].start == 0.0
        assert abs(sum(span.busy for span in lane.spans) - 8000) < 1e-6
        assert [span.step for span in lane.recent] == list(range(19_988, 20_000))
