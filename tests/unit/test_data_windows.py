"""Batches by address: every window once per epoch, no state, nothing of the held-out part in training."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from talkoot.core.errors import TalkootError
from talkoot.data import Windows


def counting(n: int) -> np.ndarray:
    return np.arange(n, dtype=np.uint32)  # token = position, so that contents tell where they came from


@settings(max_examples=50, deadline=None)
@given(
    length=st.integers(1, 9),
    batch=st.integers(1, 5),
    per_step=st.integers(1, 4),
    windows=st.integers(5, 40),
    seed=st.integers(-(2**70), 2**70),
)
def test_every_window_comes_once_per_epoch(length, batch, per_step, windows, seed):
    data = Windows(counting(windows * length + 1), length=length, batch=batch, seed=seed, held_out=0)
    assert data.num_windows == windows
    steps = -(-2 * windows // (batch * per_step))
    rows = np.concatenate([data.train(s, m, per_step) for s in range(steps) for m in range(per_step)])
    starts = rows[:, 0] // length
    for epoch in range(2):
        assert sorted(starts[epoch * windows : (epoch + 1) * windows]) == list(range(windows))
    np.testing.assert_array_equal(rows, (starts * length)[:, None] + np.arange(length + 1))


@settings(max_examples=50, deadline=None)
@given(total=st.integers(400, 3000), length=st.integers(1, 12), fraction=st.floats(0.1, 0.9), seed=st.integers())
def test_training_never_reads_a_held_out_token(total, length, fraction, seed):
    data = Windows(counting(total), length=length, batch=3, seed=seed, held_out=fraction)
    held = np.concatenate([data.held_out(i) for i in range(data.num_held_out_batches)])
    assert data.num_held_out_batches >= 1
    seen = {data.window_index(p) for p in range(data.num_windows)}
    assert max(seen) * length + length < held.min()
    assert held.max() < total
    assert total - held.max() <= 3 * length + length  # at most a part of a batch is left over


def test_shape_type_and_ownership():
    tokens = counting(1000).astype(np.uint16)
    data = Windows(tokens, length=8, batch=4, seed=1)
    for batch in (data.train(3, 1, 2), data.held_out(0)):
        assert batch.shape == (4, 9)
        assert batch.dtype == np.int64
        batch[:] = 0
    np.testing.assert_array_equal(tokens, np.arange(1000))


def test_addresses_need_no_history():
    one, other = (Windows(counting(5000), length=8, batch=4, seed=9) for _ in range(2))
    late = one.train(1_000_000, 2, 3)
    for step in range(5):
        other.train(step, 0, 3)
    np.testing.assert_array_equal(other.train(1_000_000, 2, 3), late)


def test_position_not_split_decides():
    """Position 24 is the same window whether the swarm has 1, 2 or 3 microbatches a step."""
    data = Windows(counting(5000), length=8, batch=4, seed=9)
    first = data.train(6, 0, 1)
    np.testing.assert_array_equal(first, data.train(3, 0, 2))
    np.testing.assert_array_equal(first, data.train(2, 0, 3))


def test_order_differs_by_seed_and_by_epoch():
    data = Windows(counting(5000), length=8, batch=4, seed=9)
    other = Windows(counting(5000), length=8, batch=4, seed=10)
    n = data.num_windows
    first = [data.window_index(p) for p in range(n)]
    assert first != [other.window_index(p) for p in range(n)]
    assert first != [data.window_index(n + p) for p in range(n)]
    np.testing.assert_array_equal(data.held_out(0), other.held_out(0))


def test_golden_order_never_changes():
    """Recorded runs name their data by this order."""
    data = Windows(counting(901), length=9, batch=2, seed=2026, held_out=0)
    assert [data.window_index(p) for p in (0, 1, 2, 3, 99, 100, 10**9)] == [88, 73, 60, 64, 84, 21, 22]


def test_addresses_that_do_not_exist():
    data = Windows(counting(1000), length=8, batch=4, seed=1)
    for step, microbatch, per_step in [(-1, 0, 1), (0, 1, 1), (0, -1, 2), (0, 0, 0)]:
        with pytest.raises(ValueError, match="no batch at step"):
            data.train(step, microbatch, per_step)
    for index in (-1, data.num_held_out_batches):
        with pytest.raises(ValueError, match="no held-out batch"):
            data.held_out(index)
    with pytest.raises(ValueError, match="1-D integer"):
        Windows(np.zeros((2, 2), np.int64), length=1, batch=1, seed=0)


def test_too_little_held_out_text_says_what_to_change(tmp_path):
    (tmp_path / "tokens.bin").write_bytes(counting(1000).astype("<u2").tobytes())
    tokens = np.memmap(tmp_path / "tokens.bin", "<u2", "r")
    with pytest.raises(TalkootError) as caught:
        Windows(tokens, length=16, batch=4, seed=0)
    error = caught.value
    assert error.what == "too little text: 1,000 tokens found, 1,301 needed"
    assert error.where == str(tmp_path / "tokens.bin")
    assert error.why == "a held-out batch of 4 x 16 takes 65 tokens, and the held-out part has 50"
    assert "shorten the context to 12;" in error.next
    assert "lower the batch to 3;" in error.next
    assert "set held_out to 0.065;" in error.next
    assert "set held_out to 0 " in error.next


@pytest.mark.parametrize(("length", "batch", "held_out", "total"), [(12, 4, 0.05, 1000), (16, 3, 0.05, 1000)])
def test_the_advice_works(length, batch, held_out, total):
    assert Windows(counting(total), length=length, batch=batch, seed=0, held_out=held_out).num_windows
    assert Windows(counting(1301), length=16, batch=4, seed=0).num_held_out_batches == 1
    assert Windows(counting(1000), length=16, batch=4, seed=0, held_out=0.065).num_held_out_batches == 1
    assert Windows(counting(1000), length=16, batch=4, seed=0, held_out=0).num_held_out_batches == 0


@pytest.mark.parametrize("total", [0, 1, 60])
def test_too_little_training_text(total):
    with pytest.raises(TalkootError, match="too little text") as caught:
        Windows(counting(total), length=16, batch=4, seed=0, held_out=0)
    assert "training part has" in caught.value.why
    assert "give at least 66 tokens" in caught.value.next
    assert "held_out" not in caught.value.next


@pytest.mark.parametrize("setting", [{"length": 0}, {"batch": 0}, {"length": 1.5}, {"held_out": 1}, {"held_out": -0.1}])
def test_impossible_settings_name_themselves(setting):
    with pytest.raises(TalkootError) as caught:
        Windows(counting(1000), **({"length": 8, "batch": 4, "seed": 0} | setting))
    name, value = next(iter(setting.items()))
    assert f"{name} = {value}" in caught.value.what
    assert name in caught.value.where
    assert "must be" in caught.value.why
    assert name in caught.value.next
