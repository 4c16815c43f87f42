"""What mixing rules must do in exact arithmetic: whoever meets whom, whatever anyone's share of the work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from talkoot.train.mixing import RoundRule, mixing_rules, settled
from talkoot.train.mixing.codecs import codecs
from talkoot.train.sections import Mixing

SIZE = 300  # more than one block of int8
CLOSE = 1e-12
LOCAL = [name for name in mixing_rules if mixing_rules[name].local]
PULLED = ["noloco", "noloco-literal", "noloco-nesterov"]
COUNTERPART = {"noloco": "diloco-heavy-ball", "noloco-literal": "diloco-heavy-ball", "noloco-nesterov": "diloco"}


def rule_of(name: str) -> RoundRule:
    rule = mixing_rules[name]
    assert rule.local is True
    return rule


@dataclass
class Replica:
    slow: Tensor
    buffers: dict[str, Tensor] = field(default_factory=dict)


class Ensemble:
    """Replicas in double precision that mix without a network; each round's progress is given."""

    def __init__(self, name: str, start: Tensor, wires: Sequence[str] = (), **settings: float) -> None:
        self.rule, self.knobs = rule_of(name), settled(Mixing(rule=name, **settings))  # pyright: ignore
        zeros = [{buffer: torch.zeros_like(row) for buffer in self.rule.buffers} for row in start]
        self.wires = wires or ["exact"] * len(self.rule.contents)
        self.replicas = [Replica(row.clone(), own) for row, own in zip(start, zeros, strict=True)]

    def travel(self, vector: Tensor, name: str) -> Tensor:
        if name == "exact":
            return vector
        frame = codecs[name].encode(vector, self.knobs)
        return codecs[name].decode(frame, len(vector), self.knobs, vector.dtype, "cpu")

    def mix(self, groups: Sequence[Sequence[int]], progress: Tensor, tokens: Sequence[int] | None = None) -> Tensor:
        """One round; the mean over all replicas of their progress, each weighted as its group weighs it."""
        weighted = torch.zeros_like(progress)
        for group in groups:
            total = sum(tokens[i] for i in group) if tokens else 0
            weights = {i: tokens[i] / total * len(group) if tokens else 1.0 for i in group}
            sent, arrived = [], []
            for i in group:
                mine = self.replicas[i]
                before = mine.slow.clone()
                fast = mine.slow + progress[i]
                sent.append(self.rule.message(self.knobs, mine.slow, mine.buffers, fast, weights[i]))
                assert torch.equal(mine.slow, before)
                kept = {tensor.data_ptr() for tensor in (mine.slow, fast, *mine.buffers.values())}
                assert kept.isdisjoint(vector.data_ptr() for vector in sent[-1])  # it travels while they change
                weighted[i] = weights[i] * progress[i]
            for i, message in zip(group, sent, strict=True):
                arrived.append([self.travel(vector, name) for vector, name in zip(message, self.wires, strict=True)])
                self.rule.sent(self.knobs, self.replicas[i].buffers, message, arrived[-1])
            means = [torch.stack(vectors).mean(0) for vectors in zip(*arrived, strict=True)]
            for i in group:
                self.rule.merge(self.knobs, self.replicas[i].slow, self.replicas[i].buffers, means)
        return weighted.mean(0)

    @property
    def slow(self) -> Tensor:
        return torch.stack([replica.slow for replica in self.replicas])


def noise(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def pairing(seed: int, count: int) -> list[list[int]]:
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
    return [order[i : i + 2] for i in range(0, count, 2)]  # with an odd count, the last one is alone


def everybody(count: int) -> list[list[int]]:
    return [list(range(count))]


def test_every_rule_of_the_issue_is_there():
    wanted = {"diloco", "diloco-heavy-ball", "noloco", "noloco-literal", "noloco-nesterov", "streaming", "sparseloco"}
    assert wanted | {"epidemic", "none"} == set(LOCAL)


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from([*PULLED, "epidemic"]),
    st.integers(1, 7),
    st.integers(0, 999),
    st.lists(st.integers(1, 1000), min_size=7, max_size=7),
)
def test_the_mean_follows_the_all_reduce_whoever_meets_whom_and_whatever_they_did(name, count, seed, tokens):
    start = noise(seed, count, SIZE)
    pairs = Ensemble(name, start)
    outer = (
        {"outer_rate": 1.0, "momentum": 0.0}
        if name == "epidemic"
        else {"outer_rate": pairs.knobs.outer_rate, "momentum": pairs.knobs.momentum}
    )
    central = Ensemble(COUNTERPART.get(name, "diloco"), start.mean(0, keepdim=True), **outer)
    for step in range(6):
        done = [tokens[(i + step) % 7] for i in range(count)]
        mean = pairs.mix(pairing(seed + step, count), noise(seed + 100 + step, count, SIZE), done)
        central.mix([[0]], mean[None])
        assert (pairs.slow.mean(0) - central.slow[0]).abs().max() < CLOSE


@pytest.mark.parametrize(
    ("name", "wires"),
    [
        ("noloco", ["bfloat16"]),
        ("noloco", ["int8"]),
        ("noloco-literal", ["int8", "bfloat16"]),
        ("noloco-nesterov", ["bfloat16"]),
        ("epidemic", ["int8"]),
    ],
)
def test_rounding_on_the_wire_leaves_the_mean_alone(name, wires):
    start = noise(20, 5, SIZE)
    rough, exact = Ensemble(name, start, wires), Ensemble(name, start)
    for step in range(10):
        for ensemble in (rough, exact):
            ensemble.mix(pairing(step, 5), noise(step, 5, SIZE), [1, 2, 3, 4, 5])
        assert (rough.slow.mean(0) - exact.slow.mean(0)).abs().max() < CLOSE
    apart = float((rough.slow - exact.slow).std())
    assert 0 < apart < 0.05 * float(exact.slow.std(0).mean())


@pytest.mark.parametrize("name", PULLED)
def test_a_group_of_all_is_the_all_reduce(name):
    start = noise(1, 1, SIZE).repeat(5, 1)
    pairs = Ensemble(name, start)
    central = Ensemble(COUNTERPART[name], start, outer_rate=pairs.knobs.outer_rate, momentum=pairs.knobs.momentum)
    for step in range(8):
        progress, tokens = noise(step, 5, SIZE), [3, 1, 4, 1, 5]
        pairs.mix(everybody(5), progress, tokens)
        central.mix(everybody(5), progress, tokens)
        assert (pairs.slow - central.slow).abs().max() < CLOSE


def test_one_vector_does_what_two_do():
    start = noise(2, 6, SIZE)
    fused, literal = Ensemble("noloco", start, outer_rate=0.6), Ensemble("noloco-literal", start, outer_rate=0.6)
    for step in range(8):
        for ensemble in (fused, literal):
            ensemble.mix(pairing(step, 6), noise(step, 6, SIZE), [5, 1, 1, 2, 9, 4])
        assert (fused.slow - literal.slow).abs().max() < CLOSE
    assert fused.slow.std(0).mean() > 0.1  # else they agreed on nothing of interest


def test_with_equal_rate_and_pull_the_message_is_the_fast_weights_times_the_rate():
    ensemble = Ensemble("noloco", noise(3, 1, SIZE))
    fast = noise(4, SIZE)
    (message,) = ensemble.rule.message(ensemble.knobs, ensemble.replicas[0].slow, {}, fast, 1.0)
    assert torch.equal(message, fast * 0.7)


@pytest.mark.parametrize("name", [*PULLED, "epidemic"])
def test_replicas_that_are_alike_are_not_pulled(name):
    start, progress = noise(5, 1, SIZE).repeat(4, 1), noise(6, 1, SIZE).repeat(4, 1)
    ensemble = Ensemble(name, start)
    single = Ensemble(name, start[:1])
    for step in range(4):
        ensemble.mix(pairing(step, 4), progress)
        single.mix([[0]], progress[:1])
    assert (ensemble.slow - single.slow).abs().max() < CLOSE


@pytest.mark.parametrize("name", PULLED)
def test_alone_a_replica_takes_the_step_of_an_outer_optimizer(name):
    ensemble = Ensemble(name, noise(7, 1, SIZE))
    rate, momentum = ensemble.knobs.outer_rate, ensemble.knobs.momentum
    parameter = ensemble.slow[0].clone().requires_grad_(True)
    sgd = torch.optim.SGD([parameter], lr=rate, momentum=momentum, nesterov=name == "noloco-nesterov")
    for step in range(5):
        progress = noise(step, 1, SIZE)
        ensemble.mix([[0]], progress)
        parameter.grad = -progress[0]
        sgd.step()
        assert (ensemble.slow[0] - parameter.detach()).abs().max() < CLOSE


def test_a_pull_brings_replicas_together_and_no_pull_does_not():
    spreads = {}
    for pull in (0.0, 0.7):
        ensemble = Ensemble("noloco", noise(8, 8, SIZE), pull=pull)
        for step in range(30):
            ensemble.mix(pairing(step, 8), torch.zeros(8, SIZE, dtype=torch.float64))
        spreads[pull] = float(ensemble.slow.std(0).mean())
    assert spreads[0.7] < 0.02 < 0.5 < spreads[0.0]


def test_averaging_pairs_is_the_plain_mean_and_moves_by_tokens():
    start, progress = noise(9, 2, SIZE), noise(10, 2, SIZE)
    plain, weighted = Ensemble("epidemic", start), Ensemble("epidemic", start)
    plain.mix([[0, 1]], progress)
    assert (plain.slow - (start + progress).mean(0)).abs().max() < CLOSE
    weighted.mix([[0, 1]], progress, [3, 1])
    expected = start.mean(0) + 0.75 * progress[0] + 0.25 * progress[1]
    assert (weighted.slow - expected).abs().max() < CLOSE


def test_without_mixing_the_slow_weights_become_the_fast_ones_bit_for_bit():
    start, progress = noise(11, 3, SIZE), noise(12, 3, SIZE)
    ensemble = Ensemble("none", start)
    ensemble.mix([[0], [1], [2]], progress)
    assert torch.equal(ensemble.slow, start + progress)
    assert rule_of("none").partners == "none"


def test_streaming_is_the_same_update_with_other_defaults():
    start, progress = noise(13, 1, SIZE).repeat(3, 1), noise(14, 3, SIZE)
    stream, plain = Ensemble("streaming", start), Ensemble("diloco", start, outer_rate=0.4)
    for ensemble in (stream, plain):
        for _ in range(3):
            ensemble.mix(everybody(3), progress)
    assert torch.equal(stream.slow, plain.slow)
    assert (stream.knobs.fragments, stream.knobs.overlap, stream.knobs.keep) == (3, 5, 0.5)
    assert (plain.knobs.fragments, plain.knobs.overlap, plain.knobs.keep) == (1, 0, 0.0)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 999), st.sampled_from([1 / 64, 0.1, 1.0]), st.sampled_from([0.0, 0.9, 1.0]))
def test_what_sparse_messages_leave_out_is_kept_for_later(seed, density, feedback):
    rule, knobs = rule_of("sparseloco"), settled(Mixing(rule="sparseloco", density=density, feedback=feedback))
    size, slow = 5000, noise(seed, 5000)
    buffers, sent, came_in = {"residual": torch.zeros_like(slow)}, torch.zeros_like(slow), torch.zeros_like(slow)
    for step in range(4):
        progress = noise(seed + step, size)
        came_in = feedback * came_in + progress
        vectors = rule.message(knobs, slow, buffers, slow + progress, 1.0)
        frame = codecs[rule.codec].encode(vectors[0], knobs)
        arrived = codecs[rule.codec].decode(frame, size, knobs, torch.float64, "cpu")
        rule.sent(knobs, buffers, vectors, [arrived])
        sent = feedback * sent + arrived
        assert (sent + buffers["residual"] - came_in).abs().max() < CLOSE * 10
        assert torch.linalg.vector_norm(buffers["residual"]) < torch.linalg.vector_norm(vectors[0])


def test_a_sparse_message_moves_the_weights_by_the_mean_of_what_arrived():
    rule, knobs = rule_of("sparseloco"), settled(Mixing(rule="sparseloco"))
    slow, mean = noise(15, SIZE), noise(16, SIZE)
    moved = slow.clone()
    rule.merge(knobs, moved, {"residual": torch.zeros(SIZE)}, [mean])
    assert torch.equal(moved, slow + mean)
    assert rule.gather


@pytest.mark.parametrize("name", LOCAL)
def test_a_rule_works_on_fragments_as_on_the_whole(name):
    start, progress = noise(17, 2, SIZE), noise(18, 2, SIZE)
    whole, parts = (
        Ensemble(name, start),
        [Ensemble(name, start[:, cut]) for cut in (slice(0, 100), slice(100, SIZE))],
    )
    group = [[0], [1]] if whole.rule.partners == "none" else [[0, 1]]
    for _ in range(3):
        whole.mix(group, progress)
        for part, cut in zip(parts, (slice(0, 100), slice(100, SIZE)), strict=True):
            part.mix(group, progress[:, cut])
    assert (whole.slow - torch.cat([part.slow for part in parts], 1)).abs().max() < CLOSE


@pytest.mark.parametrize("name", [name for name in LOCAL if rule_of(name).defaults])
def test_a_rule_with_open_settings_says_so(name):
    rule = rule_of(name)
    buffers = {buffer: torch.zeros(SIZE) for buffer in rule.buffers}
    with pytest.raises(ValueError, match="open"):
        rule.merge(Mixing(rule=name), torch.zeros(SIZE), buffers, [torch.zeros(SIZE)] * len(rule.contents))
