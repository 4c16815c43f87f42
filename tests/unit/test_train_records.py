"""The fold of training's receipts, and what verification finds in a log that a dishonest lead wrote."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import msgspec
import pytest

from talkoot.core.errors import Exit, TalkootError
from talkoot.core.fold import State, fold
from talkoot.core.keys import Key
from talkoot.core.log import Log
from talkoot.core.receipt import Receipt, Signed, Task, body, sign
from talkoot.run.records import End, Gone, Joined, Resume, Start
from talkoot.train import records
from talkoot.train.records import Checkpointed, Committed, Evaluated, RolledBack, Seated, Worked
from talkoot.train.verify import verify

LEAD, ALDER, BIRCH = (Key.derived("records", name) for name in ("lead", "alder", "birch"))


class Writer:
    """Writes a small run's log by hand."""

    def __init__(self, path: Path | None = None, stages: int = 1) -> None:
        self.log = Log(path)
        self.state, self.stages, self.clock = State(), stages, 0.0

    def sign(self, key: Key, op: str, facts: msgspec.Struct, step: int = 0, **fields: Any) -> Signed:
        self.clock += 1.0
        task = Task(op=op)
        common = {"run": "r", "generation": 0, "started": self.clock, "ended": self.clock} | fields
        return sign(Receipt(step=step, peer=key.peer, task=task, body=body(facts), **common), key)

    def add(self, signed: Signed) -> str:
        entry, self.state = self.log.append(signed, self.state)
        return entry.id

    def write(self, op: str, facts: msgspec.Struct, step: int = 0, key: Key = LEAD, **fields: Any) -> str:
        return self.add(self.sign(key, op, facts, step, **fields))

    def begin(self) -> None:
        ranges = tuple((stage, stage + 1) for stage in range(self.stages))
        start = Start(world="simulated", talkoot="0", recipe={}, config={}, parameters=1, stages=ranges)
        self.write("run.start", start)
        for key, name in ((ALDER, "alder"), (BIRCH, "birch")):
            self.write("peer.join", Joined(peer=key.peer, name=name))
            self.write("peer.seat", Seated(peer=key.peer, name=name, stage=0, source="start"))

    def work(self, step: int, microbatches: tuple[int, ...], key: Key = ALDER, stage: int = 0, **fields: Any) -> str:
        facts = Worked(stage=stage, microbatches=microbatches, sent_bytes=7, busy_s=0.5)
        return self.write("train.step", facts, step, key, **fields)

    def commit(self, step: int, parents: tuple[str, ...], microbatches: int = 2, **fields: Any) -> str:
        return self.write("train.commit", committed(microbatches), step, parents=parents, **fields)

    def honest_step(self, step: int) -> None:
        self.commit(step, (self.work(step, (0,), ALDER), self.work(step, (1,), BIRCH)))


def committed(microbatches: int = 2) -> Committed:
    losses = tuple(1.0 + i for i in range(microbatches))
    return Committed(loss=1.5, losses=losses, paths=(), tokens=8, learning_rate=0.1, gradient_norm=1.0)


@pytest.fixture
def writer(tmp_path):
    made = Writer(tmp_path / "log.sqlite")
    made.begin()
    yield made
    made.log.close()


def faults(writer: Writer) -> tuple[str, ...]:
    return verify(writer.log.path).faults


# -- the fold --------------------------------------------------------------------------------------------------


def test_commits_count_steps_and_tokens_and_credit_the_peers(writer):
    writer.honest_step(0)
    writer.honest_step(1)
    train, peers = writer.state["train"], writer.state["peers"].present
    assert (train.step, train.tokens, train.loss) == (2, 16, 1.5)
    alder = peers[ALDER.peer]
    assert (alder.name, alder.stage, alder.busy_s, alder.microbatches, alder.sent_bytes) == ("alder", 0, 1.0, 2, 14)


@pytest.mark.parametrize("step", [1, 2, 0])
def test_a_commit_that_is_not_the_next_step_is_refused_and_changes_nothing(writer, step):
    writer.honest_step(0)
    if step == 1:
        writer.honest_step(1)
    before = writer.state
    with pytest.raises(ValueError, match="cannot be committed"):
        writer.commit(step, ())
    assert writer.state is before
    assert len(writer.log) == before.position


def test_a_stale_generation_is_refused(writer):
    writer.commit(0, (), generation=3)
    for op, facts in (
        ("train.commit", committed()),
        ("train.rollback", RolledBack(reason="")),
        ("train.checkpoint", Checkpointed(manifest="m", state_hash="", num_bytes=0)),
        ("train.evaluate", Evaluated(loss=0.0, tokens=0)),
    ):
        with pytest.raises(ValueError, match="generation 2 is stale"):
            writer.write(op, facts, 1, generation=2)
    writer.commit(1, (), generation=3)


def test_a_resume_opens_a_generation_below_which_nothing_counts(writer):
    writer.write("run.resume", Resume(world="simulated", talkoot="0"), generation=1)
    with pytest.raises(ValueError, match="stale"):
        writer.commit(0, (), generation=0)
    assert writer.state["train"].generation == 1
    assert writer.state["run"].sessions == 2


def test_a_rollback_goes_back_and_only_back(writer):
    for step in range(5):
        writer.honest_step(step)
    with pytest.raises(ValueError, match="goes back"):
        writer.write("train.rollback", RolledBack(reason=""), 6)
    writer.write("train.rollback", RolledBack(reason=""), 2, generation=1)
    train = writer.state["train"]
    assert (train.step, train.tokens, train.rollbacks, train.generation) == (2, 16, 1, 1)
    with pytest.raises(ValueError, match="the next one is 2"):
        writer.commit(5, (), generation=1)


def test_after_a_rollback_the_newest_snapshot_is_one_that_was_not_passed_over(writer):
    for step in range(6):
        writer.honest_step(step)
        if step in (1, 3):
            facts = Checkpointed(manifest=f"m{step + 1}", state_hash="h", num_bytes=1)
            writer.write("train.checkpoint", facts, step + 1)
    assert (writer.state["train"].checkpoint, writer.state["train"].manifest) == (4, "m4")
    writer.write("train.rollback", RolledBack(reason=""), 4)
    assert (writer.state["train"].checkpoint, writer.state["train"].manifest) == (4, "m4")
    writer.write("train.rollback", RolledBack(reason="damaged"), 2)
    assert writer.state["train"].checkpoint == 2
    writer.write("train.rollback", RolledBack(reason="damaged too"), 0)
    assert writer.state["train"].checkpoint is None


def test_a_run_starts_once(writer):
    with pytest.raises(ValueError, match="starts once"):
        writer.begin()


@pytest.mark.parametrize("op", ["run.pause", "run.startle"])
def test_an_unknown_operation_of_the_run_is_refused(writer, op):
    with pytest.raises(ValueError, match="unknown operation"):
        writer.write(op, End(reason=""))


def test_a_room_that_does_not_exist_yet_changes_no_chapter_of_ours(writer):
    before = {name: writer.state[name] for name in ("run", "peers", "train")}
    writer.write("pay.transfer", End(reason=""))
    assert {name: writer.state[name] for name in before} == before


def test_facts_of_another_shape_are_refused(writer):
    with pytest.raises(ValueError, match="Committed"):
        writer.write("train.commit", End(reason="x"))


def test_work_of_somebody_who_is_not_there_is_refused(writer):
    writer.write("peer.lost", Gone(peer=BIRCH.peer, name="birch", reason=""))
    with pytest.raises(ValueError, match="not in this run"):
        writer.work(0, (0,), BIRCH)
    assert (writer.state["peers"].joined, writer.state["peers"].lost) == (2, 1)


@pytest.mark.parametrize("op", ["run.end", "run.resume"])
def test_peers_do_not_outlive_their_lead(writer, op):
    facts = End(reason="done", state_hash="h") if op == "run.end" else Resume(world="real", talkoot="1")
    writer.write(op, facts, generation=1)
    assert dict(writer.state["peers"].present) == {}
    assert writer.state["run"].ended == ("done" if op == "run.end" else "")


def test_the_fold_of_the_stored_log_is_the_state_of_its_writer(writer):
    writer.honest_step(0)
    assert fold(writer.log.entries()) == writer.state


def test_facts_in_the_log_may_not_be_changed():
    assert all(
        kind.__struct_config__.frozen
        for kind in vars(records).values()
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct)
    )


# -- verification ----------------------------------------------------------------------------------------------


def test_an_honest_log_has_no_faults(writer):
    for step in range(3):
        writer.honest_step(step)
    writer.write("peer.lost", Gone(peer=BIRCH.peer, name="birch", reason=""))
    writer.write("peer.join", Joined(peer=BIRCH.peer, name="birch"))
    writer.write("peer.seat", Seated(peer=BIRCH.peer, name="birch", stage=0, source="replica"))
    writer.write("train.rollback", RolledBack(reason=""), 1)
    writer.honest_step(1)
    found = verify(writer.log.path)
    assert (found.faults, found.steps, found.lost, found.replaced) == ((), 2, ("birch",), ("birch",))
    assert found.receipts == len(writer.log)


def test_abandoned_work_that_no_commit_cites_is_no_fault(writer):
    writer.work(0, (0, 1))
    writer.honest_step(0)
    assert faults(writer) == ()


def test_a_microbatch_that_two_peers_counted_is_found(writer):
    writer.commit(0, (writer.work(0, (0, 1)), writer.work(0, (1,), BIRCH)))
    assert faults(writer) == ("step 0, stage 0: microbatches [1] were not counted exactly once",)


def test_a_microbatch_that_nobody_counted_is_found(writer):
    writer.commit(0, (writer.work(0, (0,)), writer.work(0, (2,), BIRCH)), microbatches=3)
    assert faults(writer) == ("step 0, stage 0: microbatches [1] were not counted exactly once",)


def test_a_microbatch_that_does_not_exist_is_found(writer):
    writer.commit(0, (writer.work(0, (0, 1, 7)),))
    assert faults(writer) == ("step 0, stage 0: microbatches [7] were not counted exactly once",)


def test_a_stage_without_any_work_is_found(tmp_path):
    writer = Writer(tmp_path / "log.sqlite", stages=2)
    writer.begin()
    writer.commit(0, (writer.work(0, (0, 1)),))
    assert faults(writer) == ("step 0, stage 1: microbatches [0, 1] were not counted exactly once",)
    writer.log.close()


def test_work_of_a_stage_that_does_not_exist_is_found(writer):
    writer.commit(0, (writer.work(0, (0, 1)), writer.work(0, (0,), BIRCH, stage=4)))
    assert faults(writer) == ("step 0 cites work of stage 4",)


def test_after_a_resume_with_another_cut_its_stages_count(writer):
    writer.honest_step(0)
    writer.write("run.resume", Resume(world="real", talkoot="0", stages=((0, 1), (1, 2))), generation=1)
    for key, name in ((ALDER, "alder"), (BIRCH, "birch")):
        writer.write("peer.join", Joined(peer=key.peer, name=name), generation=1)
    work = (writer.work(1, (0, 1), generation=1), writer.work(1, (0, 1), BIRCH, stage=1, generation=1))
    writer.commit(1, work, generation=1)
    assert faults(writer) == ()


def test_a_receipt_cited_by_two_commits_is_found(writer):
    work = (writer.work(0, (0, 1)),)
    writer.commit(0, work)
    writer.commit(1, work)
    assert "step 1 cites receipts that are unknown or already counted" in faults(writer)


def test_a_receipt_cited_twice_by_one_commit_is_found(writer):
    work = writer.work(0, (0, 1))
    writer.commit(0, (work, work))
    assert faults(writer) == ("step 0 cites receipts that are unknown or already counted",)


def test_a_citation_of_something_that_is_not_work_is_found(writer):
    writer.commit(0, (writer.work(0, (0, 1)), "0" * 64))
    assert faults(writer) == ("step 0 cites receipts that are unknown or already counted",)


def test_work_of_another_step_is_found(writer):
    writer.commit(0, (writer.work(1, (0, 1)),))
    assert faults(writer) == ("step 0 cites work of step 1",)


def test_what_is_the_leads_to_state_is_refused_from_anybody_else(writer):
    for op, facts in (("train.rollback", RolledBack(reason="r")), ("run.end", End(reason="done"))):
        with pytest.raises(ValueError, match="is the lead's to state"):
            writer.write(op, facts, key=ALDER)


def test_nothing_is_stated_before_the_start(tmp_path):
    writer = Writer(tmp_path / "log.sqlite")
    with pytest.raises(ValueError, match="is the lead's to state"):
        writer.commit(0, ())
    writer.log.close()


def edit(path: Path, statement: str, *values: object) -> None:
    database = sqlite3.connect(path)
    with database:
        assert database.execute(statement, values).rowcount == 1
    database.close()


def test_a_forged_signature_is_found(writer):
    writer.honest_step(0)
    last = len(writer.log)
    signature = next(writer.log.signed(last, last)).signature
    edit(
        writer.log.path,
        "UPDATE receipts SET signature=? WHERE position=?",
        bytes([signature[0] ^ 1]) + signature[1:],
        last,
    )
    with pytest.raises(TalkootError, match="does not verify") as caught:
        verify(writer.log.path)
    assert caught.value.code == Exit.FAILED_CHECK


def test_a_receipt_that_somebody_else_signed_is_refused_when_it_comes(writer):
    facts = Worked(stage=0, microbatches=(0,), sent_bytes=0, busy_s=0.0)
    mine = writer.sign(ALDER, "train.step", facts)
    with pytest.raises(ValueError, match="signature"):
        writer.add(Signed(mine.raw, BIRCH.sign(mine.raw)))


@pytest.mark.parametrize("position", [3, 6])
def test_a_receipt_taken_out_of_the_log_is_found(writer, position):
    writer.honest_step(0)
    edit(writer.log.path, "DELETE FROM receipts WHERE position=?", position)
    with pytest.raises(TalkootError, match="does not verify"):
        verify(writer.log.path)


def test_a_log_whose_chain_holds_and_whose_fold_does_not_is_refused_as_untrustworthy(writer):
    """Only whoever holds the lead's key and edits the file can make one: here the second commit skips a step."""
    from talkoot.core.fold import next_entry

    writer.honest_step(0)
    signed = writer.sign(LEAD, "train.commit", committed(), 5)
    entry = next_entry(writer.state, signed)
    row = (entry.position, entry.id, "train.commit", 5, LEAD.peer, entry.chain, signed.raw, signed.signature)
    edit(writer.log.path, "INSERT INTO receipts VALUES (?,?,?,?,?,?,?,?)", *row)
    with pytest.raises(TalkootError, match="does not verify") as caught:
        verify(writer.log.path)
    assert "step 5 cannot be committed" in caught.value.why
    assert caught.value.code == Exit.FAILED_CHECK


def test_a_missing_log_is_named(tmp_path):
    with pytest.raises(TalkootError, match="no run log"):
        verify(tmp_path / "log.sqlite")
