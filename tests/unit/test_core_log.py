"""The log and its fold."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from talkoot.core.errors import Exit, TalkootError
from talkoot.core.fold import START, Chapter, Entry, State, advance, chapters, fold, link, next_entry
from talkoot.core.keys import Key
from talkoot.core.log import LOG_VERSION, Log
from talkoot.core.receipt import Receipt, Signed, Task, body, sign

KEY = Key.derived("log")


class Amount(msgspec.Struct, frozen=True):
    value: int


def add(total, entry):
    value = entry.receipt.read(Amount).value
    if value < 0:
        raise ValueError("an amount is never negative")
    return (*total, value)


chapters.register("tests-amounts")(Chapter(("tests.add",), (), add))


def signed(value: int, op: str = "tests.add", key: Key = KEY) -> Signed:
    receipt = Receipt(run="r", generation=0, step=abs(value), peer=key.peer, task=Task(op=op), body=body(Amount(value)))
    return sign(receipt, key)


def filled(path: Path | None, count: int = 5) -> tuple[Log, State]:
    log, state = Log(path), State()
    for value in range(count):
        _, state = log.append(signed(value), state)
    return log, state


# -- fold ----------------------------------------------------------------------------------------------------------


def test_an_empty_state_shows_initial_values():
    assert State()["tests-amounts"] == ()
    assert State().chain == START
    with pytest.raises(TalkootError, match="unknown chapter"):
        State()["no such room"]


@settings(max_examples=30)
@given(st.lists(st.integers(0, 9), max_size=12, unique=True), st.data())
def test_replay_to_any_position_equals_the_incremental_state(values, data):
    log, state = Log(None), State()
    states = [state]
    for value in values:
        _, state = log.append(signed(value, data.draw(st.sampled_from(["tests.add", "other.op"]))), state)
        states.append(state)
    position = data.draw(st.integers(0, len(values)))
    replayed = fold(log.entries(1, position))
    assert replayed == states[position]
    assert fold(log.entries(position + 1), replayed) == state
    assert len(log) == len(values) == state.position
    log.close()


def test_folding_changes_no_earlier_state():
    log, state = filled(None)
    before = dict(state.chapters), state.position, state.chain
    _, after = log.append(signed(77), state)
    assert (dict(state.chapters), state.position, state.chain) == before
    assert after["tests-amounts"] == (0, 1, 2, 3, 4, 77)
    with pytest.raises(TypeError):
        after.chapters["tests-amounts"] = ()
    log.close()


def test_only_the_chapters_operations_are_folded():
    entry = next_entry(State(), signed(3, "tests.other"))
    assert advance(State(), entry)["tests-amounts"] == ()


def test_gaps_repeats_and_broken_chains_are_refused():
    log, state = filled(None)
    entries = list(log.entries())
    with pytest.raises(ValueError, match="receipt 3 cannot follow receipt 1"):
        fold([entries[0], entries[2]])
    with pytest.raises(ValueError, match="receipt 5 cannot follow receipt 5"):
        advance(state, entries[-1])
    second = entries[1]
    for forged in (
        Entry(2, entries[2].id, second.receipt, second.chain),
        Entry(2, second.id, second.receipt, entries[2].chain),
    ):
        with pytest.raises(ValueError, match="chain breaks at receipt 2"):
            fold([entries[0], forged])
    assert entries[1].chain == link(entries[0].chain, second.id)
    log.close()


# -- log -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["log.db", "run #1?mode=memory&x=%20y.db", "ääni.db"])
def test_a_log_is_found_again(tmp_path, name):
    path = tmp_path / name
    log, state = filled(path)
    log.close()
    assert path.exists()
    log = Log(path)
    assert fold(log.entries()) == state
    entry, state = log.append(signed(9), state)
    assert (entry.position, len(log)) == (6, 6)
    assert [one.id for one in log.signed()] == [entry.id for entry in log.entries()]
    assert [entry.position for entry in log.entries(2, 3)] == [2, 3]
    assert list(log.entries(1, 0)) == list(log.entries(7)) == []
    log.close()


def test_appending_twice_changes_nothing():
    log, state = filled(None)
    entry, after = log.append(signed(2), state)
    assert (entry.position, after, len(log)) == (3, state, 5)
    log.close()


def test_what_the_fold_refuses_never_enters(tmp_path):
    log, state = filled(tmp_path / "log")
    for bad in (signed(-1), Signed(signed(8).raw, bytes(64)), Signed(b"junk", bytes(64))):
        with pytest.raises(ValueError):
            log.append(bad, state)
    assert len(log) == 5
    log.append(signed(8), state)
    log.close()


def test_reading_while_writing(tmp_path):
    log, state = filled(tmp_path / "log")
    reader = Log(tmp_path / "log", readonly=True)
    assert fold(reader.entries()) == state
    _, state = log.append(signed(6), state)
    assert fold(reader.entries()) == state
    with pytest.raises(TalkootError, match="cannot be written") as caught:
        reader.append(signed(7), state)
    assert "may write" in caught.value.next
    reader.close()
    log.close()


def test_nothing_to_read(tmp_path):
    for path in (None, tmp_path / "absent"):
        with pytest.raises(TalkootError, match="there is no run log"):
            Log(path, readonly=True)
    assert not (tmp_path / "absent").exists()


def test_places_where_no_log_can_be(tmp_path):
    (tmp_path / "file").write_text("x")
    for path in (tmp_path, tmp_path / "no folder" / "log", tmp_path / "file" / "log"):
        with pytest.raises(TalkootError, match="cannot be opened") as caught:
            Log(path)
        assert caught.value.where == str(path)


def test_a_log_on_a_read_only_disk_is_read(tmp_path):
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs the right to mount a small file system")
    try:
        log, state = filled(tmp_path / "log")
        log.close()
        subprocess.run(["mount", "-o", "remount,ro", str(tmp_path)], check=True)
        reader = Log(tmp_path / "log", readonly=True)
        assert fold(reader.entries()) == state
        reader.close()
        with pytest.raises(TalkootError, match="cannot be opened"):
            Log(tmp_path / "other")
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def database(path, script):
    connection = sqlite3.connect(path)
    connection.executescript(script)
    connection.close()


def test_a_newer_log_is_left_alone(tmp_path):
    filled(tmp_path / "log")[0].close()
    database(tmp_path / "log", f"PRAGMA user_version={LOG_VERSION + 1}")
    before = (tmp_path / "log").read_bytes()
    with pytest.raises(TalkootError, match="newer talkoot") as caught:
        Log(tmp_path / "log")
    assert "upgrade" in caught.value.next
    assert (tmp_path / "log").read_bytes() == before


@pytest.mark.parametrize(
    "script",
    ["CREATE TABLE t (x)"]
    + [f"CREATE TABLE t (x); PRAGMA user_version={version}" for version in (1, -1)]
    + ["CREATE TABLE receipts (position INTEGER, id TEXT); PRAGMA user_version=1"],
)
@pytest.mark.parametrize("readonly", [False, True])
def test_somebody_elses_database_is_left_alone(tmp_path, script, readonly):
    database(tmp_path / "log", script)
    before = (tmp_path / "log").read_bytes()
    with pytest.raises(TalkootError, match="not a talkoot run log"):
        Log(tmp_path / "log", readonly=readonly)
    assert (tmp_path / "log").read_bytes() == before


@pytest.mark.parametrize("contents", [b"not a database at all" * 100, b"SQLite format 3\0" + bytes(200)])
def test_not_a_database(tmp_path, contents):
    (tmp_path / "log").write_bytes(contents)
    with pytest.raises(TalkootError, match="not a talkoot run log"):
        Log(tmp_path / "log")
    assert (tmp_path / "log").read_bytes() == contents


def test_an_empty_file_becomes_a_log_but_is_none_to_read(tmp_path):
    (tmp_path / "log").touch()
    with pytest.raises(TalkootError, match="not a talkoot run log"):
        Log(tmp_path / "log", readonly=True)
    log, _ = filled(tmp_path / "log")
    assert len(log) == 5
    log.close()


TAMPER = [
    ("UPDATE receipts SET raw = substr(raw, 1, length(raw) - 1) WHERE position = 3", 3),
    ("UPDATE receipts SET raw = (SELECT raw FROM receipts WHERE position = 2) WHERE position = 3", 3),
    ("UPDATE receipts SET signature = zeroblob(64) WHERE position = 3", 3),
    ("UPDATE receipts SET signature = zeroblob(3) WHERE position = 3", 3),
    ("UPDATE receipts SET chain = 'x' WHERE position = 3", 3),
    ("UPDATE receipts SET op = 'tests.other' WHERE position = 3", 3),
    ("UPDATE receipts SET step = 99 WHERE position = 3", 3),
    ("UPDATE receipts SET peer = 'x' WHERE position = 3", 3),
    ("UPDATE receipts SET id = 'x' WHERE position = 3", 3),
    ("DELETE FROM receipts WHERE position = 3", 3),
    ("DELETE FROM receipts WHERE position < 3", 1),
    ("UPDATE receipts SET position = 9 WHERE position = 5", 5),
    ("UPDATE receipts SET position = 0 WHERE position = 1", 1),
    ("UPDATE receipts SET position = position + 10; UPDATE receipts SET position = position - 9", 1),
    ("UPDATE receipts SET chain = CAST(x'ff' AS TEXT) WHERE position = 3", 3),
]


@pytest.mark.parametrize(("script", "position"), TAMPER, ids=lambda value: str(value)[:60])
def test_a_tampered_row_is_found(tmp_path, script, position):
    path = tmp_path / "log"
    filled(path)[0].close()
    database(path, script)
    log = Log(path)
    read = []
    with pytest.raises(TalkootError, match="does not verify") as caught:
        read += log.entries()
    assert caught.value.code is Exit.FAILED_CHECK
    assert caught.value.where.endswith(f"receipt {position}")
    log.close()


def test_what_precedes_a_tampered_row_is_still_read(tmp_path):
    filled(tmp_path / "log")[0].close()
    database(tmp_path / "log", TAMPER[0][0])
    log = Log(tmp_path / "log")
    assert [entry.position for entry in log.entries(1, 2)] == [1, 2]
    assert [entry.position for entry in log.entries(4)] == [4, 5]
    log.close()


def test_a_damaged_page_is_reported(tmp_path):
    path = tmp_path / "log"
    filled(path, 200)[0].close()
    contents = bytearray(path.read_bytes())
    contents[len(contents) // 2 : -4096] = b"\xff" * (len(contents) - 4096 - len(contents) // 2)
    path.write_bytes(contents)
    log = Log(path)
    with pytest.raises(TalkootError, match="does not verify"):
        list(log.entries())
    log.close()


def test_two_writers_are_told(tmp_path):
    one, state = filled(tmp_path / "log")
    two = Log(tmp_path / "log")
    one.append(signed(10), state)
    with pytest.raises(TalkootError, match="two writers"):
        two.append(signed(11), state)
    assert len(one) == 6
    one.close()
    two.close()


def test_a_state_of_another_log_is_refused(tmp_path):
    log, _ = filled(tmp_path / "log")
    other = State()
    for value in (7, 8, 9, 10, 11, 12):
        other = advance(other, next_entry(other, signed(value)))
        if other.position >= 5:  # as long, and longer
            with pytest.raises(TalkootError, match="two writers"):
                log.append(signed(50), other)
    assert len(log) == 5
    log.close()


def test_a_locked_log_says_so(tmp_path):
    log, state = filled(tmp_path / "log")
    log._database.execute("PRAGMA busy_timeout=10")
    other = sqlite3.connect(tmp_path / "log", isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    with pytest.raises(TalkootError, match="cannot be written") as caught:
        log.append(signed(9), state)
    assert "other process" in caught.value.next
    other.close()
    log.append(signed(9), state)
    log.close()


FILL = """
import resource, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
import test_core_log as tests
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
log, state = tests.filled(Path(sys.argv[1]), 0)
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
for value in range(10_000):
    try:
        _, state = log.append(tests.signed(value), state)
    except tests.TalkootError as problem:
        print(state.position, problem.what, problem.next, sep="|")
        break
"""


def test_a_full_disk_loses_nothing_that_was_acknowledged(tmp_path):
    path = tmp_path / "log"
    command = [sys.executable, "-c", FILL, str(path), str(Path(__file__).parent)]
    done = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ), check=True)
    position, what, next_ = done.stdout.strip().split("|")
    assert what == "the run log cannot be written"
    assert next_ == "free some space and run the same command again: it resumes"
    log = Log(path)
    state = fold(log.entries())
    assert state.position == int(position) > 10
    log.append(signed(20_000), state)  # and the run goes on
    log.close()


def test_no_room_for_a_new_log(tmp_path):
    script = "import sys; from talkoot.core.log import *; from pathlib import Path; Log(Path(sys.argv[1]))"
    limit = "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
    limit += "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000));"
    done = subprocess.run([sys.executable, "-c", limit + script, str(tmp_path / "log")], capture_output=True, text=True)
    assert "the run log cannot be opened" in done.stderr
    filled(tmp_path / "log")[0].close()  # what was left behind is no obstacle
