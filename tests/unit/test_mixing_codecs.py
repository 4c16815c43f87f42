"""How vectors travel: sizes, round trips, and bytes of strangers."""

from __future__ import annotations

import struct

import msgspec
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from talkoot.plan.mixing import BLOCK, CHUNK, message_bytes
from talkoot.train.mixing import mixing_rules, settled, wires
from talkoot.train.mixing.codecs import codecs
from talkoot.train.sections import Mixing
from talkoot.world.api import Blank

KNOBS = Mixing()
COUNTS = [0, 1, 255, 256, 257, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 77]


def values(seed: int, count: int, scale: float = 1e-3) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed)) ** 3 * scale


def travel(name: str, vector: Tensor, knobs: Mixing = KNOBS) -> Tensor:
    frame = codecs[name].encode(vector, knobs)
    return codecs[name].decode(frame, len(vector), knobs, vector.dtype, "cpu")


@pytest.mark.parametrize("name", list(codecs))
@pytest.mark.parametrize("count", COUNTS)
def test_a_frame_has_the_size_that_the_count_says(name, count):
    for density in (1 / 64, 0.3, 1.0):
        knobs = Mixing(density=density)
        frame = codecs[name].encode(values(count, count), knobs)
        expected = {
            "float32": 4 * count,
            "bfloat16": 2 * count,
            "int8": count + 4 * -(-count // BLOCK),
            "sparse": sum(
                4 + -(-14 * max(1, round(density * length)) // 8)
                for length in [CHUNK] * (count // CHUNK) + [count % CHUNK] * bool(count % CHUNK)
            ),
        }[name]
        assert len(frame) == message_bytes(name, count, density) == expected


@pytest.mark.parametrize("name", list(codecs))
def test_decoding_gives_the_type_that_was_asked_for_and_is_stable(name):
    once = travel(name, values(1, 5000).to(torch.float64))
    assert once.dtype == torch.float64
    again = travel(name, once)
    assert torch.equal(once.to(torch.float32), again.to(torch.float32))


def test_float32_keeps_every_bit_and_copies_nothing():
    vector = values(2, 1000)
    frame = codecs["float32"].encode(vector, KNOBS)
    assert torch.equal(codecs["float32"].decode(frame, 1000, KNOBS, torch.float32, "cpu"), vector)
    vector[0] = 7.0
    assert struct.unpack_from("=f", frame)[0] == 7.0
    assert isinstance(frame, memoryview)
    assert frame.readonly
    double = vector.to(torch.float64) / 3
    assert torch.equal(travel("float32", double), double.to(torch.float32).to(torch.float64))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=600))
def test_rounding_stays_within_its_bounds(numbers):
    vector = torch.tensor(numbers, dtype=torch.float32)
    near = torch.finfo(torch.float32).tiny
    assert ((travel("bfloat16", vector) - vector).abs() <= vector.abs() * 2**-8 + near).all()
    back = travel("int8", vector)
    for start in range(0, len(vector), BLOCK):
        block, read = vector[start : start + BLOCK], back[start : start + BLOCK]
        assert (read - block).abs().max() <= block.abs().max() * (0.5 / 127) * (1 + 1e-4) + near


def test_sparse_keeps_the_largest_and_nothing_else():
    vector = values(3, 2 * CHUNK + 100)
    back = travel("sparse", vector)
    for start in range(0, len(vector), CHUNK):
        chunk, read = vector[start : start + CHUNK], back[start : start + CHUNK]
        kept = max(1, round(len(chunk) / 64))
        largest = set(chunk.abs().topk(kept).indices.tolist())
        assert set(read.nonzero().flatten().tolist()) == largest
        assert (read.sign() == chunk.sign())[read != 0].all()
        assert len(read.abs().unique()) == 3  # zero, low and high


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=12), st.sampled_from([0.2, 0.5, 1.0]))
@example([1.0, 1.0, -1.0], 1.0)
@example([0.0, 0.0], 1.0)
def test_no_two_levels_are_closer_to_what_is_kept(numbers, density):
    vector, knobs = torch.tensor(numbers, dtype=torch.float32), Mixing(density=density)
    back = travel("sparse", vector, knobs)
    sizes = vector.abs().sort(descending=True).values[: max(1, round(density * len(vector)))].double()
    best = min(
        sum(float((part - part.mean()).square().sum()) for part in (sizes[:cut], sizes[cut:]) if len(part))
        for cut in range(1, len(sizes) + 1)
    )
    kept = (back.double() - vector.double()).square().sum() - vector.double().square().sum() + sizes.square().sum()
    # Rounding a level to bfloat16 adds at most its square times 2^-16 for each number.
    assert float(kept) <= best + float(sizes.square().sum()) * 2**-15 + 1e-30


@pytest.mark.parametrize("name", list(codecs))
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_refused_by_the_receiver(name, bad):
    vector = values(4, 700)
    vector[321] = bad
    with pytest.raises(ValueError, match=r"finite|not a number"):
        travel(name, vector)


@pytest.mark.parametrize("name", list(codecs))
def test_the_wrong_length_and_empty_frames_are_refused(name):
    frame = bytes(codecs[name].encode(values(5, 700), KNOBS))
    for wrong in (frame[:-1], frame + b"\0", b"", Blank(len(frame))):
        with pytest.raises(ValueError, match=r"bytes arrived|without content"):
            codecs[name].decode(wrong, 700, KNOBS, torch.float32, "cpu")


def test_blocks_refuse_negative_scales_and_numbers_out_of_range():
    frame = codecs["int8"].encode(values(6, 300), KNOBS)
    for at, change, why in (
        (0, struct.pack("=f", -1.0), "negative"),
        (0, struct.pack("=f", 3e38), "finite"),
        (8 + 17, b"\x80", "-128"),
    ):
        damaged = bytearray(frame)
        damaged[at : at + len(change)] = change
        with pytest.raises(ValueError, match=why):
            codecs["int8"].decode(damaged, 300, KNOBS, torch.float32, "cpu")


def sparse_record(low: float, high: float, words: list[int], padding: int = 0) -> bytes:
    """A record of four words, 56 bits, or of one and two bits of padding."""
    levels = b"".join(struct.pack("=f", level)[2:] for level in (low, high))
    bits = 0
    for word in words:
        bits = bits << 14 | word
    spare = -14 * len(words) % 8
    return levels + ((bits << spare) | padding).to_bytes((14 * len(words) + spare) // 8, "big")


def test_sparse_records_are_laid_out_as_documented():
    vector = torch.zeros(100)
    vector[[3, 7, 50, 99]] = torch.tensor([-1.0, 2.0, 1.0, -2.0])
    words = [3 << 2 | 0b10, 7 << 2 | 0b01, 50 << 2, 99 << 2 | 0b11]
    assert codecs["sparse"].encode(vector, Mixing(density=0.04)) == sparse_record(1.0, 2.0, words)
    assert torch.equal(travel("sparse", vector, Mixing(density=0.04)), vector)


@pytest.mark.parametrize(
    ("record", "why"),
    [
        (sparse_record(1.0, 2.0, [3 << 2, 3 << 2, 50 << 2, 99 << 2]), "ascend"),
        (sparse_record(1.0, 2.0, [7 << 2, 3 << 2, 50 << 2, 99 << 2]), "ascend"),
        (sparse_record(1.0, 2.0, [3 << 2, 7 << 2, 50 << 2, 100 << 2]), "beyond"),
        (sparse_record(2.0, 1.0, [3 << 2, 7 << 2, 50 << 2, 99 << 2]), "magnitudes"),
        (sparse_record(-1.0, 1.0, [3 << 2, 7 << 2, 50 << 2, 99 << 2]), "magnitudes"),
        (sparse_record(1.0, float("inf"), [3 << 2, 7 << 2, 50 << 2, 99 << 2]), "magnitudes"),
        (sparse_record(float("nan"), 1.0, [3 << 2, 7 << 2, 50 << 2, 99 << 2]), "magnitudes"),
    ],
)
def test_damaged_sparse_records_are_refused(record, why):
    with pytest.raises(ValueError, match=why):
        codecs["sparse"].decode(record, 100, Mixing(density=0.04), torch.float32, "cpu")


def test_padding_must_be_zero():
    knobs = Mixing(density=0.01)
    assert codecs["sparse"].decode(sparse_record(1.0, 1.0, [5 << 2]), 100, knobs, torch.float32, "cpu")[5] == 1.0
    with pytest.raises(ValueError, match="padding"):
        codecs["sparse"].decode(sparse_record(1.0, 1.0, [5 << 2], 1), 100, knobs, torch.float32, "cpu")


@settings(max_examples=100, deadline=None)
@given(st.data(), st.sampled_from(list(codecs)), st.integers(0, 300), st.sampled_from([0.004, 0.02, 1.0]))
def test_garbage_is_read_or_refused_and_nothing_else(data, name, count, density):
    knobs = Mixing(density=density)
    length = data.draw(st.sampled_from([message_bytes(name, count, density), data.draw(st.integers(0, 400))]))
    garbage = data.draw(st.binary(min_size=length, max_size=length))
    try:
        read = codecs[name].decode(garbage, count, knobs, torch.float32, "cpu")
    except ValueError:
        return
    assert len(read) == count
    assert read.isfinite().all()


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from(list(codecs)), st.sampled_from([0.004, 0.02, 1.0]))
def test_a_flipped_bit_is_read_or_refused_and_nothing_else(data, name, density):
    knobs = Mixing(density=density)
    frame = bytearray(codecs[name].encode(values(7, CHUNK + 90), knobs))
    bit = data.draw(st.integers(0, 8 * len(frame) - 1))
    frame[bit // 8] ^= 1 << bit % 8
    try:
        read = codecs[name].decode(frame, CHUNK + 90, knobs, torch.float32, "cpu")
    except ValueError:
        return
    assert read.isfinite().all()


def test_each_vector_travels_as_the_recipe_or_the_rule_says():
    def of(name: str, **chosen: str) -> tuple[str, ...]:
        rule = mixing_rules[name]
        assert rule.local is True
        return wires(rule, settled(msgspec.convert({"rule": name, **chosen}, Mixing)))

    assert of("noloco", wire="bfloat16") == ("bfloat16",)
    assert of("noloco-literal", wire="bfloat16", wire_gradient="int8") == ("int8", "bfloat16")
    assert of("diloco", wire_gradient="int8") == ("int8",)
    assert of("sparseloco") == ("sparse",)
