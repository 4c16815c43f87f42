"""What peers keep for others: any order of arrival, nothing twice, nothing that does not belong."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from talkoot.core.errors import TalkootError
from talkoot.train import keeping as module
from talkoot.train.desk import Parcel
from talkoot.train.keeping import MAX_WAITING, HandOver, Journal, Keeping, SentLog, Spool, Streamed
from talkoot.train.messages import Update
from talkoot.world.api import Frame

UPDATE = Update(0.1, 1.0)


class Noted:
    """A :class:`Kept` that writes down what it is told."""

    def __init__(self) -> None:
        self.base, self.step, self.applied = -1, -1, list[tuple[int, bytes]]()

    def begin(self, state: Sequence[Frame], step: int) -> None:
        self.step, self.applied = step, []

    def commit(self, step: int, update: Update, frames: Sequence[Frame]) -> None:
        assert step == self.step
        self.applied.append((step, bytes(frames[0])))
        self.step = step + 1

    def hand_over(self) -> HandOver:
        return HandOver(self.step, (), ())


def streamed(step: int, owner: str = "owner", generation: int = 1, attempt: int = 0) -> Streamed:
    return Streamed(step, owner, generation, attempt)


@given(st.integers(0, 10**9), st.integers(1, 5), st.integers(0, 2))
@settings(max_examples=120, deadline=None)
def test_whatever_the_order_of_arrival_each_commit_applies_its_own_gradient_once_and_in_order(seed, steps, decoys):
    chance, kept = random.Random(seed), Noted()
    keeping = Keeping(kept, 4)
    events = [("base", 2, 0)]
    for step in range(2, 2 + steps):
        events += [("gradient", step, 0), ("commit", step, 0), *(("gradient", step, d + 1) for d in range(decoys))]
    chance.shuffle(events)
    for kind, step, attempt in events:
        if kind == "base":
            keeping.begin([], 2)
        elif kind == "gradient":
            assert keeping.gradient(streamed(step, attempt=attempt), [bytes([step, attempt, 0, 0])])
        else:
            keeping.commit(streamed(step), UPDATE)
    assert kept.applied == [(step, bytes([step, 0, 0, 0])) for step in range(2, 2 + steps)]


def test_an_earlier_attempt_or_another_owner_or_generation_is_not_what_was_committed():
    kept = Noted()
    keeping = Keeping(kept, 4)
    keeping.begin([], 0)
    for wrong in (streamed(0, attempt=1), streamed(0, owner="thief"), streamed(0, generation=0)):
        keeping.gradient(wrong, [b"evil"])
    keeping.commit(streamed(0), UPDATE)
    assert kept.applied == []
    keeping.gradient(streamed(0), [b"good"])
    assert kept.applied == [(0, b"good")]


def test_what_cannot_be_a_gradient_of_the_stage_is_not_taken_and_nobody_can_fill_the_memory():
    keeping = Keeping(Noted(), 4)
    assert not keeping.gradient(streamed(0), [b"short"])
    assert not keeping.gradient(streamed(0), [b"four", b"four"])
    for step in range(3 * MAX_WAITING):
        keeping.gradient(streamed(step, "flood"), [b"evil"])
    assert len(keeping._gradients) == MAX_WAITING
    assert keeping.gradient(streamed(0), [b"good"]), "a flood takes nobody else's place"
    assert len(keeping._gradients) == MAX_WAITING + 1


@pytest.mark.parametrize("limit", [0, 10**6])
def test_a_journal_hands_over_its_state_and_all_gradients_since(limit, monkeypatch):
    monkeypatch.setattr(module, "IN_MEMORY_BYTES", limit)
    journal = Journal()
    for base in (3, 7):  # the second state makes the first one's gradients superfluous
        journal.begin([b"state", b"%d" % base], base)
        for step in range(base, base + 3):
            journal.commit(step, UPDATE, [b"g%d" % step])
        handed = journal.hand_over()
        assert (handed.step, journal.step) == (base, base + 3)
        assert [bytes(frame) for frame in handed.state] == [b"state", b"%d" % base]
        assert [bytes(frames[0]) for frames in handed.gradients] == [b"g%d" % s for s in range(base, base + 3)]


@pytest.mark.parametrize("limit", [0, 10**6])
def test_the_log_of_what_was_sent_knows_to_whom_and_forgets_what_a_snapshot_covers(limit, monkeypatch):
    monkeypatch.setattr(module, "IN_MEMORY_BYTES", limit)
    log = SentLog()
    for step in range(6):
        parcels = [Parcel(to, "forward", m, 0, [b"%d%d" % (step, m)]) for to, m in (("a", 0), ("b", 1), ("a", 2))]
        log.note(step, parcels, since=3 if step >= 3 else 0)
    assert log.of(2, frozenset("ab")) == []
    found = [(phase, m, bytes(frames[0])) for phase, m, frames in log.of(5, frozenset("a"))]
    assert found == [("forward", 0, b"50"), ("forward", 2, b"52")]
    assert [m for _, m, _ in log.of(4, frozenset("b"))] == [1]


def test_a_disk_that_does_not_take_it_is_named_with_what_to_do(monkeypatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.tempfile, "TemporaryFile", full)
    monkeypatch.setattr(module, "IN_MEMORY_BYTES", 0)
    with pytest.raises(TalkootError, match="No space left") as caught:
        Spool().put([b"frames"])
    assert "TMPDIR" in caught.value.next
