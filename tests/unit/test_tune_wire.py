"""Completions on their way: what travels, what is believed, and what is refused under which name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from talkoot.core.ids import PeerId, RunId
from talkoot.core.keys import Key
from talkoot.core.receipt import Signed, sign
from talkoot.tune.completion import Completion, Group, PromptRef, Sampling, sequence_seed
from talkoot.tune.gather import Inbox
from talkoot.tune.messages import Rollouts
from talkoot.tune.records import Generated
from talkoot.tune.wire import BYTES_PER_TOKEN, Limits, Refused, pack, unpack
from talkoot.world.api import Message, World

RUN = RunId("run-1")
LIMITS = Limits(groups=4, samples=4, tokens=8)
KEY = Key()


def world(key: Key = KEY, run: str = RUN) -> World:
    return cast("World", SimpleNamespace(run=run, me=key.peer, key=key, now=lambda: 5.0))


def account(groups: list[Group], **changes: Any) -> Generated:
    facts = Generated(
        round=3,
        task="t" * 64,
        tokenizer="k" * 64,
        policy="p" * 64,
        version=3,
        sampling=Sampling(),
        seed=7,
        prompts=tuple(group.prompt.index for group in groups),
        samples=tuple(group.samples for group in groups),
        lengths=tuple(tuple(len(c.ids) for c in group.completions) for group in groups),
        stopped=tuple(tuple(c.finish == "stop" for c in group.completions) for group in groups),
    )
    return msgspec.structs.replace(facts, **changes)


def completion(*ids: int, stop: bool = True) -> Completion:
    return Completion(ids, tuple(-0.5 * (1 + i) for i in range(len(ids))), "stop" if stop else "length")


GROUPS = [
    Group(PromptRef("t" * 64, 11), (0, 1), (completion(4, 5, 1), completion(6, 1))),
    Group(PromptRef("t" * 64, 12), (0,), (completion(9, 9, 9, 9, stop=False),)),
]


def packed(groups: list[Group] = GROUPS, texts: list[str] | None = None, key: Key = KEY, **changes: Any) -> Any:
    return pack(world(key), 3, account(groups, **changes), groups, texts, 1.0)


def read(signed: Signed, frames: list[bytes], limits: Limits = LIMITS, sender: PeerId = KEY.peer) -> Any:
    return unpack(signed, frames, sender, RUN, limits)


def test_what_was_packed_comes_out_again():
    record = read(*packed())
    assert record.groups == GROUPS
    assert record.texts is None
    assert record.facts.tokens == 9


def test_a_token_costs_eight_bytes():
    _, frames = packed()
    assert sum(map(len, frames)) == 9 * BYTES_PER_TOKEN


def test_texts_travel_where_somebody_needs_them():
    texts = ["1+1=2", "", "né"]
    assert read(*packed(texts=texts)).texts == [["1+1=2", ""], ["né"]]


@given(st.data())
@settings(max_examples=30)
def test_any_batch_survives_the_way(data: st.DataObject):
    lengths = data.draw(st.lists(st.lists(st.integers(1, 8), min_size=1, max_size=4), min_size=1, max_size=4))
    groups = [
        Group(
            PromptRef("t" * 64, index),
            tuple(range(len(row))),
            tuple(
                Completion(
                    tuple(data.draw(st.lists(st.integers(0, 2**31 - 1), min_size=n, max_size=n))),
                    tuple(data.draw(st.lists(st.floats(-50, 0, width=32), min_size=n, max_size=n))),
                    data.draw(st.sampled_from(["stop", "length"])),
                )
                for n in row
            ),
        )
        for index, row in enumerate(lengths)
    ]
    assert read(*packed(groups)).groups == groups


@pytest.mark.parametrize("kind", [0, 1])
def test_an_altered_frame_is_refused(kind: int):
    signed, frames = packed()
    frames[kind] = bytes([frames[kind][0] ^ 1]) + frames[kind][1:]
    with pytest.raises(Refused, match="altered on the way"):
        read(signed, frames)


def test_an_altered_account_is_refused():
    signed, frames = packed()
    with pytest.raises(Refused, match="bad signature"):
        read(Signed(signed.raw.replace(b"\x0b", b"\x0d", 1), signed.signature), frames)


def test_somebody_elses_record_is_refused():
    signed, frames = packed(key=Key())
    with pytest.raises(Refused, match="of another peer or run"):
        read(signed, frames)


def test_another_operation_under_a_good_signature_is_refused():
    signed, frames = packed()
    receipt = signed.open()
    other = msgspec.structs.replace(receipt, task=msgspec.structs.replace(receipt.task, op="tune.update"))
    with pytest.raises(Refused, match="of another peer or run"):
        read(sign(other, KEY), frames)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"prompts": (11,)}, "length mismatch"),
        ({"prompts": (11, 11)}, "duplicate"),
        ({"samples": ((0, 0), (0,))}, "duplicate"),
        ({"samples": ((0,), (0,))}, "length mismatch"),
        ({"lengths": ((3, 2), (5,))}, "length mismatch"),
        ({"lengths": ((3, 0), (4,))}, "too long"),
        ({"lengths": ((3, 2), (9,))}, "too long"),
        ({"prompts": (), "samples": (), "lengths": (), "stopped": ()}, "too long"),
    ],
)
def test_an_account_that_does_not_fit_its_frames_is_refused(changes: dict[str, Any], reason: str):
    with pytest.raises(Refused) as refused:
        read(*packed(**changes))
    assert refused.value.reason == reason


@pytest.mark.parametrize("limits", [Limits(1, 4, 8), Limits(4, 1, 8), Limits(4, 4, 3)])
def test_more_than_the_recipe_allows_is_refused(limits: Limits):
    with pytest.raises(Refused):
        read(*packed(), limits=limits)


@pytest.mark.parametrize("frames", [[], [b""], [b"", b"", b"", b""]])
def test_missing_log_probabilities_are_refused(frames: list[bytes]):
    signed, _ = packed()
    with pytest.raises(Refused, match="length mismatch"):
        read(signed, frames)


@pytest.mark.parametrize("texts", [b"a\0b\0", b"a\0b\0c\0d", b"a\0b\0\xff\0", b"x" * 2000])
def test_texts_that_do_not_fit_are_refused(texts: bytes):
    from talkoot.core.ids import digest

    signed, frames = packed(texts=["a", "b", "c"])
    receipt = signed.open()
    outputs = {**receipt.outputs, "texts": digest(texts, "frame")}
    with pytest.raises(Refused):
        read(sign(msgspec.structs.replace(receipt, outputs=outputs), KEY), [*frames[:2], texts])


@pytest.mark.parametrize(
    ("one", "why"),
    [
        (Completion((1, 2), (-0.1,), "stop"), "log-probabilities for"),
        (Completion((1, 2), (-0.1, float("nan")), "stop"), "not finite"),
        (Completion((1, 2), (-0.1, float("-inf")), "stop"), "not finite"),
        (Completion((1, 2), (-0.1, 0.5), "stop"), "above 0"),
        (Completion((1, 40), (-0.1, -0.1), "stop"), "outside the vocabulary"),
        (Completion((), (), "stop"), "tokens where"),
        (Completion((1,) * 9, (-0.1,) * 9, "stop"), "tokens where"),
    ],
)
def test_a_completion_that_no_generator_makes_is_refused(one: Completion, why: str):
    with pytest.raises(ValueError, match=why):
        one.check(vocab_size=28, limit=8)


def test_each_sequence_has_randomness_of_its_own():
    seeds = {
        sequence_seed(run, number, PromptRef(task, index), sample)
        for run in (0, 1)
        for number in (0, 1)
        for task in ("a", "b")
        for index in (0, 1)
        for sample in (0, 1)
    }
    assert len(seeds) == 32


# -- the inbox ------------------------------------------------------------------------------------------------


def message(round_number: int = 3, key: Key = KEY) -> Message:
    signed, frames = pack(world(key), round_number, account(GROUPS, round=round_number), GROUPS, None, 1.0)
    return Message(key.peer, "rollouts", 0, round_number, msgspec.msgpack.encode(Rollouts(signed)), frames)


def inbox() -> Inbox:
    return Inbox(RUN, LIMITS)


def test_a_record_is_taken_once():
    box = inbox()
    box.put(message(), 3, 0, {KEY.peer})
    assert [record.facts.round for record in box.take(3, 0)] == [3]
    assert box.take(3, 0) == []


def test_a_replayed_record_brings_nothing():
    box = inbox()
    box.put(message(), 3, 1, {KEY.peer})
    box.put(message(), 3, 1, {KEY.peer})
    box.take(3, 1)
    box.put(message(), 4, 1, {KEY.peer})
    assert box.take(4, 1) == []
    assert box.rejected == {"replayed": 2}


def test_strangers_and_other_rounds_are_counted():
    box = inbox()
    box.put(message(), 3, 0, set())
    box.put(message(2), 3, 0, {KEY.peer})
    assert box.rejected == {"of a stranger": 1, "of another round": 1}
    assert box.heard_of(KEY.peer, 2)


def test_who_runs_far_ahead_is_neither_followed_nor_blamed():
    box = inbox()
    box.put(message(30), 3, 2, {KEY.peer})
    assert not box.rejected
    assert box.take(3, 2) == []
    assert not box.heard_of(KEY.peer, 3)
    assert box.missing(3, [KEY.peer]) == []


def test_whose_newer_record_was_used_is_not_absent_in_the_rounds_before_it():
    box = inbox()
    for number in (3, 5):
        box.put(message(number), 3, 2, {KEY.peer})
    assert [record.facts.round for record in box.take(3, 2)] == [5]
    assert [box.heard_of(KEY.peer, number) for number in (4, 5, 6)] == [True, True, False]


def test_a_record_that_is_no_record_is_counted():
    box = inbox()
    box.put(Message(KEY.peer, "rollouts", 0, 3, b"\xc1", []), 3, 0, {KEY.peer})
    assert box.rejected == {"bad signature or form": 1}


def test_with_some_lag_the_newest_record_counts():
    box = inbox()
    for number in (2, 3):
        box.put(message(number), 3, 1, {KEY.peer})
    assert [record.facts.round for record in box.take(3, 1)] == [3]


def test_who_is_gone_is_not_waited_for():
    box, other = inbox(), Key().peer
    assert box.missing(3, [KEY.peer, other]) == [KEY.peer, other]
    box.put(message(), 3, 0, {KEY.peer})
    box.gone.add(other)
    assert box.missing(3, [KEY.peer, other]) == []


def test_the_inbox_is_bounded_however_much_somebody_sends():
    box = inbox()
    for number in range(3, 40):
        box.put(message(number), 3, 50, {KEY.peer})
    assert len(box._kept) <= 5
