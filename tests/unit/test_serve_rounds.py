"""Pictures of a run in rounds: scales, squares, words; and recipes and receipts from strangers."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET

import msgspec
import pytest
from hypothesis import given
from hypothesis import settings as limits
from hypothesis import strategies as st

from talkoot.core.fold import State
from talkoot.core.keys import Key
from talkoot.core.log import Log
from talkoot.core.receipt import Receipt, Task, body, sign
from talkoot.model.config import ModelConfig
from talkoot.serve.draw_rounds import log_ticks, meetings, mixing
from talkoot.serve.report import report_page
from talkoot.serve.rounds import terms_of
from talkoot.serve.view import view_of
from talkoot.serve.words import clock, duration, figures, reasons
from talkoot.train import records
from talkoot.train.rounds.records import Averaged, Kept, Rounded, Viewed

CONFIG = {"vocab_size": 257, "width": 32, "layers": 1, "heads": 2, "kv_heads": 2, "head_dim": 16, "hidden": 64}
HOSTILE = "</svg><script>alert(1)</script>"


@limits(max_examples=60)
@given(st.floats(1e-9, 1e6), st.floats(1.05, 1e9))
def test_a_logarithmic_scale_has_a_few_round_numbers_within_it(low: float, factor: float):
    high = low * factor
    found = log_ticks(low, high)
    assert 1 <= len(found) <= 14
    assert found == sorted(found)
    assert all(low <= level <= high for level in found)


def test_words_for_rounds():
    assert figures(0.012345) == "0.0123"
    assert figures(187.4) == "187"
    assert figures(1234567.0) == "1230000"
    assert reasons({"odd": 9, "late": 2, "odd words": 1}) == "odd one out 9, partner late 2, odd words 1"
    assert [duration(x) for x in (0.00036, 0.0042, 0.12)] == ["0.36 ms", "4.2 ms", "120 ms"]
    assert clock(0.0271) == "0.027 s"


def start(**mixing_section: object) -> records.Start:
    recipe = {"name": "r", "train": {"steps": 40}, "mixing": mixing_section}
    return records.Start(world="simulated", talkoot="0", recipe=recipe, config={}, parameters=1, stages=((0, 3),))


@pytest.mark.parametrize(
    "section",
    [{"rule": "ddp"}, {}, {"rule": "magic"}, {"rule": 3}, {"inner_steps": "x"}, {"rule": "noloco", "inner_steps": 0}],
)
def test_a_run_by_steps_or_a_recipe_that_cannot_be_read_has_no_terms(section: dict):
    assert terms_of(start(**section)) is None
    assert (
        terms_of(records.Start(world="", talkoot="", recipe={"mixing": 3}, config={}, parameters=0, stages=())) is None
    )


def test_a_key_that_only_another_version_knows_does_not_hide_what_kind_of_run_it_is():
    told = start(rule="noloco", inner_steps=7, moonlight=True)
    terms = terms_of(msgspec.structs.replace(told, config=CONFIG))
    assert terms is not None
    assert terms.mixing.inner_steps == 7


class Tale:
    """A made-up run in rounds of four replicas, whose names are up to the test."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.log, self.lead, self.now, self.state = Log(None), Key.derived("lead"), 0.0, State()
        self.keys = [Key.derived(name, index) for index, name in enumerate(names)]
        facts = records.Start(
            world="simulated",
            talkoot="0",
            recipe={"name": "tale", "train": {"steps": 40}, "mixing": {"rule": "noloco", "inner_steps": 10}},
            config=CONFIG,
            parameters=1,
            stages=((0, 3),),
        )
        self.write("run.start", facts)
        for key, name in zip(self.keys, names, strict=True):
            self.write("peer.join", records.Joined(peer=key.peer, name=name))
        slots = tuple(range(len(names)))
        view = Viewed(number=1, names=names, slots=slots, steps=(10,) * len(names), since=(0,) * len(names))
        self.write("train.view", view)

    def write(self, op: str, facts: records.Facts, key: Key | None = None, step: int = 0) -> None:
        key = key or self.lead
        began, self.now = self.now, self.now + 0.5
        receipt = Receipt(
            run="tale",
            generation=0,
            step=step,
            peer=key.peer,
            task=Task(op=op),
            body=body(facts),
            started=began,
            ended=self.now,
        )
        _, self.state = self.log.append(sign(receipt, key), self.state)

    def round(self, slot: int, step: int = 0, **facts: object) -> None:
        told = Rounded(slot=slot, view=1, steps=10, tokens=100, loss=2.0, wait_s=0.1, busy_s=0.3, **facts)
        self.write("train.round", told, self.keys[slot], step)

    def commit(self, step: int) -> None:
        facts = records.Committed(
            loss=2.0,
            losses=(1.9, 2.1),
            paths=(),
            tokens=400,
            learning_rate=0.1,
            gradient_norm=1.0,
            steps=10,
        )
        self.write("train.commit", facts, step=step)

    def shown(self) -> dict:
        view = view_of(self.log.entries())
        json.dumps(view, allow_nan=False)
        return view


def test_the_model_s_size_is_taken_from_its_configuration():
    tale = Tale(("a", "b", "c", "d"))
    values = sum(ModelConfig(**CONFIG).layer_parameters())
    assert tale.shown()["mixing"]["sent_bytes"]["expected_per_round"] == 4 * values


def test_squares_are_as_dark_as_two_met_often():
    tale = Tale(("a", "b", "c", "d"))
    for step in (0, 10, 20):
        tale.round(0, step, partners=("b",), apart=1e-6, progress=1e-6)
        tale.round(1, step, partners=("a",), apart=1e-6, progress=1e-6)
        tale.round(2, step, alone=("late",))
        tale.commit(step)
    view = tale.shown()
    assert view["mixing"]["alone"] == {
        "rounds": 3,
        "of": 9,
        "share": pytest.approx(1 / 3, rel=1e-4),
        "why": {"late": 3},
    }
    picture = ET.fromstring(meetings(view))
    titles = {g.find("title").text: g.find("rect").get("fill-opacity") for g in picture.iter("g")}
    assert titles["a met b: 3"] == "1.00"
    assert titles["a met c: 0"] == "0.00"
    assert titles["c: 3 of 3 rounds alone"] == "1.00"
    assert titles["d: 0 of 0 rounds alone"] == "0.00"


def test_before_the_first_round_the_card_says_so():
    tale = Tale(("a", "b", "c", "d"))
    view = tale.shown()
    assert "Nobody has reported a round yet" in mixing(view)
    assert "No round is over yet" in meetings(view)
    tale.round(0, partners=("b",), apart=0.0, progress=1e-6)  # all begin alike
    tale.commit(0)
    assert "Drawn as soon as two replicas that differ have met" in mixing(tale.shown())


def test_going_back_takes_rounds_off_the_curve_and_out_of_the_squares():
    tale = Tale(("a", "b", "c", "d"))
    for step in (0, 10, 20):
        tale.round(0, step, partners=("b",), apart=1e-6, progress=1e-6)
        tale.commit(step)
    tale.write("train.rollback", records.RolledBack(reason="all were lost at once"), step=10)
    view = tale.shown()
    assert view["mixing"]["curve"]["step"] == [10]
    assert view["curve"]["step"] == [10]
    assert view["mixing"]["met"]["pairs"] == [[0, 1, 1]]
    assert view["mixing"]["round"] == 1


def test_stored_states_and_the_final_model_are_told_as_events():
    tale = Tale(("a", "b"))
    tale.write("train.kept", Kept(round=3, blobs=((0, "a" * 64),)))
    tale.write("train.average", Averaged(replicas=2, held_out=2.0, best=2.1, mean=2.25))
    tale.write("train.evaluate", records.Evaluated(loss=2.0, tokens=10), step=40)
    texts = [event["text"] for event in tale.shown()["events"]]
    assert "All replicas stored their states after round 3." in texts
    sentence = (
        "The final model is the mean of 2 replicas: held-out loss 2.0000; theirs 2.2500 on average, 2.1000 at best."
    )
    assert sentence in texts
    assert "Held-out loss of the averaged model after 40 steps: 2.0000." in texts


def test_what_strangers_write_stays_text():
    tale = Tale((HOSTILE, "b", "c", "d"))
    tale.round(0, partners=(HOSTILE, "nobody"), alone=(HOSTILE * 9,), apart=float("nan"), progress=float("inf"))
    tale.round(1, partners=(HOSTILE,), apart=1e-300, progress=1e300, held_out=float("nan"))
    tale.commit(0)
    text = report_page(tale.shown())
    assert "<script>alert" not in text
    assert not re.search(r"\b(nan|inf)\b", text.split("</style>")[-1].split("<script")[0])


def test_many_replicas_make_a_page_of_bounded_size():
    tale = Tale(tuple(f"peer{index}" for index in range(90)))
    for index in range(90):
        tale.round(index, partners=(f"peer{89 - index}",), apart=1e-6, progress=1e-6)
    tale.commit(0)
    view = tale.shown()
    assert len(view["mixing"]["by_replica"]) == len(view["mixing"]["met"]["names"]) == 64
    assert len(report_page(view)) < 500_000
