"""Sums whose bits depend on nothing but their leaves: the tree, the mixing rule, and frames on the wire."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from talkoot.core.errors import TalkootError
from talkoot.train.frames import from_frame, to_frame
from talkoot.train.mixing import mixing_rules
from talkoot.train.mixing.ddp import slice_of
from talkoot.train.mixing.rule import add
from talkoot.train.treesum import TreeSum, split
from talkoot.world.api import Blank

SIZE = 23


def leaves(count: int, seed: int = 0, size: int = SIZE) -> list[torch.Tensor]:
    """Vectors of very different magnitudes: any other order of additions shows in the last bits."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator) * 10.0 ** (i % 7 - 3) for i in range(count)]


def tree(vectors: list[torch.Tensor]) -> torch.Tensor:
    """The documented order, by recursion."""
    if len(vectors) == 1:
        return vectors[0]
    middle = 1
    while 2 * middle < len(vectors):
        middle *= 2
    return tree(vectors[:middle]) + tree(vectors[middle:])


def test_the_order_of_additions_shows_in_the_bits():
    vectors = leaves(7)
    assert not torch.equal(sum(vectors[1:], vectors[0]), tree(vectors)), "else the tests below would show nothing"


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 40), st.randoms(use_true_random=False))
def test_any_order_of_insertion_gives_the_trees_bits(count, chance):
    vectors = leaves(count)
    order = list(range(count))
    chance.shuffle(order)
    total: TreeSum[torch.Tensor] = TreeSum(count, add)
    for index in order:
        total.insert((index, index + 1), vectors[index].clone())
    assert torch.equal(total.total, tree(vectors))


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 40), st.integers(1, 6), st.randoms(use_true_random=False))
def test_any_partition_over_peers_merged_in_any_order_gives_the_trees_bits(count, peers, chance):
    vectors = leaves(count)
    partial: list[TreeSum[torch.Tensor]] = [TreeSum(count, add) for _ in range(peers)]
    for index in chance.sample(range(count), count):
        partial[chance.randrange(peers)].insert((index, index + 1), vectors[index].clone())
    parts = [part for one in partial for part in one]
    chance.shuffle(parts)
    merged: TreeSum[torch.Tensor] = TreeSum(count, add)
    for node, value in parts:
        merged.insert(node, value)
    assert torch.equal(merged.total, tree(vectors))


@given(st.integers(2, 1000), st.integers(0, 1000))
def test_the_left_child_is_the_largest_power_of_two_below_the_size(size, first):
    left, right = split((first, first + size))
    width = left[1] - left[0]
    assert (left[0], left[1], right[1]) == (first, right[0], first + size)
    assert width.bit_count() == 1
    assert width < size <= 2 * width


@pytest.mark.parametrize("node", [(0, 3), (1, 3), (2, 2), (5, 7), (3, 7), (-1, 0), (7, 8), (0, 8)])
def test_a_node_that_is_not_in_the_tree_is_refused(node):
    with pytest.raises(ValueError, match="no node"):
        TreeSum(7, add).insert(node, torch.zeros(1))


@pytest.mark.parametrize(("there", "again"), [((2, 3), (2, 3)), ((0, 4), (1, 2)), ((1, 2), (0, 4)), ((0, 7), (6, 7))])
def test_a_microbatch_counts_once(there, again):
    total: TreeSum[float] = TreeSum(7, lambda a, b: a + b)
    total.insert(there, 1.0)
    with pytest.raises(ValueError, match="already counted"):
        total.insert(again, 1.0)


def test_an_incomplete_sum_is_refused_and_says_what_it_has():
    total: TreeSum[float] = TreeSum(4, lambda a, b: a + b)
    total.insert((0, 2), 1.0)
    total.insert((3, 4), 1.0)
    with pytest.raises(ValueError, match=r"\[\(0, 2\), \(3, 4\)\]"):
        _ = total.total


def mix(assignment: list[int], members: int, size: int = SIZE) -> tuple[list[torch.Tensor], int]:
    """Play the Average rule; each member's final sum, and the bytes of all frames sent."""
    rule, group = mixing_rules["ddp"], [f"peer{i}" for i in range(members)]
    count, sent = len(assignment), 0
    sums: dict[str, TreeSum[torch.Tensor]] = {peer: TreeSum(count, add) for peer in group}
    for index, vector in enumerate(leaves(count, size=size)):
        sums[group[assignment[index]]].insert((index, index + 1), vector)
    for turn in range(rule.turns if members > 1 else 0):
        outgoing = {me: rule.outgoing(turn, me, group, sums[me]) for me in group}
        wire = {  # through bytes, as between processes
            (me, to): [(node, bytes(to_frame(value))) for node, value in parts]
            for me in group
            for to, parts in outgoing[me].items()
        }
        sent += sum(len(frame) for parts in wire.values() for _, frame in parts)
        for me in group:
            received = {
                source: [(node, from_frame(frame, torch.float32, (len(frame) // 4,))) for node, frame in parts]
                for (source, to), parts in wire.items()
                if to == me
            }
            assert set(received) == set(group) - {me}
            sums[me] = rule.merge(turn, me, group, sums[me], received)
    return [sums[peer].total for peer in group], sent


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 5), st.integers(1, 17), st.randoms(use_true_random=False))
def test_whoever_computed_what_all_members_end_with_the_single_trees_bits(members, count, chance):
    idle = chance.randrange(members + 1)  # often somebody has no microbatch at all
    assignment = [chance.choice([m for m in range(members) if m != idle] or [0]) for _ in range(count)]
    expected = tree(leaves(count))
    totals, _ = mix(assignment, members)
    assert all(torch.equal(total, expected) for total in totals)


@pytest.mark.parametrize("members", [2, 3, 4, 5])
def test_vectors_shorter_than_the_group_still_mix(members):
    totals, _ = mix([0, members - 1, 0], members, size=1)
    assert all(torch.equal(total, tree(leaves(3, size=1))) for total in totals)


@pytest.mark.parametrize(("members", "blocks"), [(2, 8), (4, 8), (2, 2), (4, 4), (8, 8), (1, 4)])
def test_blocks_of_the_tree_cost_the_optimum_of_bytes(members, blocks):
    size = 840
    assignment = [index * members // blocks for index in range(blocks)]
    _, sent = mix(assignment, members, size)
    assert sent == 2 * (members - 1) * size * 4  # all members together: 2 (N - 1) / N of the vector each


def test_scattered_microbatches_cost_more_than_blocks_and_give_the_same_bits():
    (scattered, *_), more = mix([0, 1, 0, 1], 2)
    (blocks, *_), least = mix([0, 0, 1, 1], 2)
    assert more > least
    assert torch.equal(scattered, blocks)


@given(st.integers(0, 1000), st.integers(1, 9))
def test_slices_cover_the_vector_once_and_are_nearly_equal(size, count):
    slices = [slice_of(size, index, count) for index in range(count)]
    assert [index for s in slices for index in range(s.start, s.stop)] == list(range(size))
    assert max(s.stop - s.start for s in slices) - min(s.stop - s.start for s in slices) <= 1


@settings(deadline=None)
@given(st.lists(st.integers(0, 5), max_size=3), st.sampled_from([torch.float32, torch.bfloat16, torch.int64]))
def test_a_tensor_survives_the_wire_bit_for_bit(shape, dtype):
    tensor = torch.randn(shape).mul(1e6).to(dtype)
    back = from_frame(bytes(to_frame(tensor)), dtype, shape)
    assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
    assert bytes(to_frame(back)) == bytes(to_frame(tensor))


def test_nan_and_negative_zero_survive_the_wire():
    tensor = torch.tensor([float("nan"), -0.0, float("inf"), 1e-45])
    assert bytes(to_frame(from_frame(to_frame(tensor), torch.float32, (4,)))) == bytes(to_frame(tensor))


def test_a_transposed_tensor_arrives_as_it_looked():
    tensor = torch.arange(6.0).reshape(2, 3).T
    assert torch.equal(from_frame(to_frame(tensor), torch.float32, (3, 2)), tensor)


def test_what_arrives_is_a_copy_that_may_be_changed():
    frame = bytearray(b"\0" * 8)
    tensor = from_frame(frame, torch.float32, (2,))
    tensor += 1
    assert frame == b"\0" * 8


@pytest.mark.parametrize("frame", [b"", b"\0" * 15, b"\0" * 20, Blank(16)], ids=["empty", "short", "long", "blank"])
def test_a_frame_of_another_size_is_refused(frame):
    with pytest.raises(TalkootError, match="wrong size") as caught:
        from_frame(frame, torch.float32, (2, 2))
    assert "16 were expected" in caught.value.why
