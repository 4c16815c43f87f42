"""The chapter on mixing, the figures that it is held against, and the alarm."""

from __future__ import annotations

import math
from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import given
from hypothesis import settings as limits
from hypothesis import strategies as st

from talkoot.core.ids import PeerId, RunId
from talkoot.core.receipt import Receipt, Task, body
from talkoot.plan.spread import predicted_ratio
from talkoot.run.records import Facts
from talkoot.train.mixing import settled
from talkoot.train.rounds.commits import Commits
from talkoot.train.rounds.prospects import (
    ALARM,
    CALM,
    LEAST_MEASURED,
    expected_bytes,
    expected_spread,
    is_far,
)
from talkoot.train.rounds.records import REASONS, WEIGHT, Averaged, MixingState, Rounded, Viewed, mixed
from talkoot.train.sections import Mixing

NOLOCO = settled(Mixing(rule="noloco"))


def after(*facts: Facts, op: str = "train.round", state: MixingState | None = None) -> MixingState:
    """The chapter after such receipts."""
    state = state or MixingState()
    for one in facts:
        peer = PeerId("0" * 64)
        state = mixed(state, Receipt(run=RunId("r"), generation=0, step=0, peer=peer, task=Task(op=op), body=body(one)))
    return state


def rounded(slot: int = 0, **facts: object) -> Rounded:
    return msgspec.structs.replace(Rounded(slot=slot, view=1, steps=10, tokens=100, loss=2.0), **facts)


def test_sums_by_slot_add_up_to_the_sums_over_all():
    facts = [
        rounded(0, wait_s=1.0, busy_s=3.0, sent_bytes=7, partners=("birch",)),
        rounded(1, wait_s=2.0, busy_s=2.0, sent_bytes=5, alone=("odd",)),
        rounded(0, wait_s=0.5, busy_s=3.5, sent_bytes=1, alone=("late", "gone")),
    ]
    state = after(*facts)
    assert (state.rounds, state.exchanges, state.alone) == (3, 1, 2)
    assert dict(state.why) == {"odd": 1, "late": 1, "gone": 1}
    for name in ("rounds", "alone", "wait_s", "busy_s", "sent_bytes"):
        assert sum(getattr(slot, name) for slot in state.slots.values()) == getattr(state, name)
    assert state.idle == pytest.approx(3.5 / 12)
    assert (state.slots[0].steps, state.slots[0].tokens) == (20, 200)


def test_a_fragment_that_was_merged_makes_a_round_that_was_not_alone():
    state = after(rounded(partners=("birch",), alone=("late",)))
    assert (state.exchanges, state.alone, dict(state.why)) == (1, 0, {"late": 1})


@limits(max_examples=20)
@given(st.lists(st.text(max_size=200), max_size=60))
def test_reasons_are_counted_whatever_they_say_and_their_number_is_bounded(why: list[str]):
    state = after(*(rounded(alone=(one,)) for one in why))
    assert sum(state.why.values()) == len(why)
    assert len(state.why) <= REASONS + 1
    assert all(len(reason) <= 60 for reason in state.why)


def test_the_running_mean_is_a_plain_one_at_first_and_then_forgets():
    values = [float(index % 7) for index in range(30)]
    state = after(*(rounded(apart=value, progress=2.0) for value in values), rounded())
    assert state.measured == 30  # a round alone measures nothing
    assert state.apart == pytest.approx(sum(values) / 30)
    assert state.spread == pytest.approx(state.apart / 2)
    late = after(*(rounded(apart=9.0, progress=9.0) for _ in range(400)), state=state)
    assert late.apart == pytest.approx(9.0, rel=0.01)
    assert after(rounded(apart=19.0), state=late).apart - late.apart == pytest.approx(10 * WEIGHT, rel=0.01)


def test_a_replica_that_reports_no_numbers_does_not_spoil_those_of_all():
    honest = after(rounded(apart=2.0, progress=1.0, wait_s=1.0, busy_s=1.0))
    lied = after(rounded(apart=math.nan, progress=math.inf, wait_s=math.nan, busy_s=math.inf), state=honest)
    assert (lied.spread, lied.idle, lied.measured) == (2.0, 0.5, 1)


def test_names_outlive_the_view_in_which_they_were():
    first = Viewed(number=1, names=("alder", "birch"), slots=(0, 1), steps=(10, 5), since=(0, 0))
    second = Viewed(number=2, names=("alder",), slots=(0,), steps=(10,), since=(0,))
    state = after(first, second, op="train.view")
    assert state.view == second
    assert dict(state.names) == {0: "alder", 1: "birch"}


def test_a_complete_run_that_goes_on_has_no_final_model_any_more():
    done = after(Averaged(replicas=2, held_out=2.0, best=2.1, mean=2.2), op="train.average")
    assert done.averaged == 2.0
    assert after(rounded(), state=done).averaged is None


def test_expected_bytes_are_those_of_the_literature():
    def sent(rule: str, replicas: int, **more: str) -> float:
        return expected_bytes(settled(Mixing(rule=rule, **more)), 1000, replicas)

    assert sent("noloco", 8) == 4000
    assert sent("noloco", 5) == pytest.approx(4000 * 4 / 5)
    assert sent("noloco-literal", 8) == 8000
    assert sent("noloco", 8, wire="bfloat16") == 2000
    assert sent("diloco", 4) == pytest.approx(2 * 4000 * 3 / 4)
    assert sent("none", 4) == 0


def test_the_expected_spread_is_the_formulas_and_there_is_none_where_nothing_can_be_compared():
    assert expected_spread(NOLOCO, 8) == predicted_ratio("heavy-ball", 0.5, 0.7, 0.7, replicas=8)
    assert expected_spread(NOLOCO, 2) is None
    assert expected_spread(settled(Mixing(rule="noloco", pull=0.0)), 8) is None
    assert expected_spread(settled(Mixing(rule="diloco")), 8) is None
    assert expected_spread(settled(Mixing(rule="none")), 8) is None
    with pytest.raises(ValueError, match="no rule about rounds"):
        expected_spread(Mixing(), 8)


def spread_of(ratio: float, measured: int = LEAST_MEASURED) -> MixingState:
    return MixingState(apart=ratio, progress=1.0, measured=measured, rounds=100, alone=25)


def test_the_alarm_waits_for_twenty_pairs_and_lets_go_later_than_it_took_hold():
    assert is_far(spread_of(ALARM + 0.1), 1.0)
    assert not is_far(spread_of(ALARM + 0.1, LEAST_MEASURED - 1), 1.0)
    assert not is_far(spread_of(ALARM - 0.1), 1.0)
    assert is_far(spread_of(ALARM - 0.1), 1.0, already=True)
    assert not is_far(spread_of(CALM - 0.1), 1.0, already=True)
    assert not is_far(spread_of(1e9), None)


def test_the_lead_warns_once_per_crossing():
    written: list[str] = []
    lead = SimpleNamespace(
        mixing=NOLOCO,
        places=dict.fromkeys(range(8)),
        _far=False,
        record=lambda op, facts: written.append(f"{op}: {facts.text}"),
    )
    unit = expected_spread(NOLOCO, 8) or 0.0
    for times in (1.0, 2.9, 3.1, 5.0, 2.9, 3.1, 2.4, 2.9, 3.2, 3.3):
        lead.mixed = spread_of(times * unit)
        Commits._watch_spread(lead)
    assert len(written) == 2
    assert written[0].startswith("run.warning: replicas drift apart: their variance is 2.87 times")
    assert "'noloco' should keep it at 0.926; 25% of the rounds so far were alone" in written[0]
