"""Who may lead a run: what the log accepts, what a majority is, and whose lock may be taken."""

from __future__ import annotations

import fcntl

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from talkoot.core.errors import TalkootError
from talkoot.core.fold import State, next_entry
from talkoot.core.ids import PeerId
from talkoot.core.keys import Key
from talkoot.core.log import Log
from talkoot.core.receipt import Receipt, Signed, Task, body, sign
from talkoot.run.lock import LOCK, holder, locked, seized
from talkoot.run.records import Appointed, End, Facts, Resume, Start, Succeeded, Warned
from talkoot.train.succession import is_half, is_more_than_half
from talkoot.train.verify import examine

FOUNDER, STANDBY, STRANGER = (Key.derived("succession", name) for name in ("founder", "standby", "stranger"))
START = Start(world="real", talkoot="0", recipe={"train": {"steps": 3}}, config={}, parameters=1, stages=((0, 1),))
NAMED = Appointed(peer=STANDBY.peer, name="standby")
SUCCEEDED = Succeeded(name="standby", former=FOUNDER.peer, peers=())


class Writer:
    """A log that several keys write to."""

    def __init__(self) -> None:
        self.log, self.state = Log(None), State()

    def sign(self, key: Key, op: str, facts: Facts, generation: int = 0) -> Signed:
        task, clock = Task(op=op), float(self.state.position)
        receipt = Receipt(
            run="r", generation=generation, step=0, peer=key.peer, task=task, body=body(facts), started=clock
        )
        return sign(receipt, key)

    def write(self, key: Key, op: str, facts: Facts, generation: int = 0) -> None:
        _, self.state = self.log.append(self.sign(key, op, facts, generation), self.state)


@pytest.fixture
def writer():
    writer = Writer()
    writer.write(FOUNDER, "run.start", START)
    yield writer
    writer.log.close()


def test_the_named_standby_may_succeed_and_leads_then(writer):
    writer.write(FOUNDER, "run.standby", NAMED)
    writer.write(STANDBY, "run.succeed", SUCCEEDED, 1)
    writer.write(STANDBY, "run.warning", Warned(text="."), 1)
    run = writer.state["run"]
    assert (run.lead, run.founder, run.heir, run.successions) == (STANDBY.peer, FOUNDER.peer, "", 1)


def test_nobody_succeeds_who_was_not_named(writer):
    with pytest.raises(ValueError, match="was not named"):
        writer.write(STANDBY, "run.succeed", SUCCEEDED, 1)
    writer.write(FOUNDER, "run.standby", NAMED)
    with pytest.raises(ValueError, match="was not named"):
        writer.write(STRANGER, "run.succeed", SUCCEEDED, 1)


def test_a_log_with_a_forged_succession_does_not_verify(writer):
    forged = next_entry(writer.state, writer.sign(STRANGER, "run.succeed", SUCCEEDED, 1))
    with pytest.raises(ValueError, match="was not named"):
        examine([*writer.log.entries(), forged])


def test_nobody_names_a_standby_but_the_lead(writer):
    with pytest.raises(ValueError, match="is the lead's to state"):
        writer.write(STANDBY, "run.standby", NAMED)


def test_a_standby_that_was_dismissed_cannot_succeed(writer):
    writer.write(FOUNDER, "run.standby", NAMED)
    writer.write(FOUNDER, "run.standby", Appointed(peer="", name="standby", reason="lost"))
    with pytest.raises(ValueError, match="was not named"):
        writer.write(STANDBY, "run.succeed", SUCCEEDED, 1)


def test_a_succession_needs_a_new_generation_and_the_right_predecessor(writer):
    writer.write(FOUNDER, "run.standby", NAMED)
    with pytest.raises(ValueError, match="under a new generation"):
        writer.write(STANDBY, "run.succeed", SUCCEEDED, 0)
    with pytest.raises(ValueError, match="was not named"):
        writer.write(STANDBY, "run.succeed", Succeeded(name="standby", former=STRANGER.peer, peers=()), 1)


def test_a_lead_that_was_succeeded_states_nothing_any_more(writer):
    writer.write(FOUNDER, "run.standby", NAMED)
    writer.write(STANDBY, "run.succeed", SUCCEEDED, 1)
    with pytest.raises(ValueError, match="is the lead's to state"):
        writer.write(FOUNDER, "run.end", End(reason="done"), 1)


def test_a_run_is_resumed_by_who_began_it_or_leads_it_and_then_has_no_standby(writer):
    writer.write(FOUNDER, "run.standby", NAMED)
    with pytest.raises(ValueError, match="did not begin"):
        writer.write(STRANGER, "run.resume", Resume(world="real", talkoot="0"), 1)
    writer.write(FOUNDER, "run.resume", Resume(world="real", talkoot="0"), 1)
    assert writer.state["run"].heir == ""
    with pytest.raises(ValueError, match="was not named"):
        writer.write(STANDBY, "run.succeed", SUCCEEDED, 2)


PEERS = [PeerId(f"{number:064x}") for number in range(9)]


@settings(max_examples=200)
@given(seated=st.sets(st.sampled_from(PEERS)), pledged=st.sets(st.sampled_from(PEERS)), data=st.data())
def test_a_lead_and_its_standby_cannot_both_have_enough_peers(seated, pledged, data):
    votes = data.draw(st.sets(st.sampled_from(PEERS)).map(lambda some: some - pledged))  # nobody does both
    assert not (is_more_than_half(pledged, frozenset(seated)) and is_half(votes, frozenset(seated)))


@given(seated=st.sets(st.sampled_from(PEERS), min_size=1), data=st.data())
def test_either_of_them_goes_on_when_only_the_other_is_lost(seated, data):
    lost = data.draw(st.sampled_from(sorted(seated)))
    assert is_more_than_half(seated, frozenset(seated))
    assert is_half(seated, frozenset(seated))
    assert is_half(seated - {lost}, frozenset(seated)) or len(seated) == 1


def test_a_lock_is_taken_from_the_process_that_was_named_and_from_no_other(tmp_path):
    with locked(tmp_path):
        mine = holder(tmp_path)
        with pytest.raises(TalkootError, match="already going on"), seized(tmp_path, int(mine) + 1):
            pass
        with seized(tmp_path, int(mine)):
            assert holder(tmp_path) == mine  # the same process here, with another lock
            with (tmp_path / LOCK).open() as file, pytest.raises(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            assert [path.name for path in tmp_path.iterdir()] == [LOCK]
    assert holder(tmp_path) == ""
