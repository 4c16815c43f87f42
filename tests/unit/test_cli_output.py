"""What the command line prints: tables, errors as text and as JSON, and the progress of a run."""

from __future__ import annotations

import json
from types import SimpleNamespace

from talkoot.cli.output import Progress, print_table, report_error
from talkoot.core.errors import Exit, TalkootError
from talkoot.core.fold import Entry
from talkoot.core.ids import PeerId, RunId
from talkoot.core.receipt import Receipt, Task, body
from talkoot.run.records import Facts, Gone
from talkoot.train.records import Committed

PROBLEM = TalkootError("it broke", where="here", why="it was old", next="buy another", code=Exit.UNREACHABLE)


def test_a_table_is_aligned_and_carries_no_trailing_spaces(capsys):
    print_table([("a", 1), ("long name", 22)], ("who", "n"))
    assert capsys.readouterr().out == "who        n\n---------  --\na          1\nlong name  22\n"


def test_an_error_for_people_goes_to_standard_error_in_four_parts(capsys):
    report_error(PROBLEM, as_json=False)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err == "error: it broke\n  where: here\n  why:   it was old\n  next:  buy another\n"


def test_an_error_for_programs_is_one_object_with_its_exit_code(capsys):
    report_error(PROBLEM, as_json=True)
    shown = capsys.readouterr()
    parts = {"what": "it broke", "where": "here", "why": "it was old", "next": "buy another"}
    assert json.loads(shown.out) == {"error": parts, "exit_code": 3}
    assert shown.err == ""


def entry(op: str, facts: Facts, step: int) -> Entry:
    peer = PeerId("0" * 64)
    receipt = Receipt(run=RunId("r"), generation=0, step=step, peer=peer, task=Task(op=op), body=body(facts))
    return Entry(1, receipt.run, receipt, receipt.run)


def committed(step: int) -> Entry:
    facts = Committed(loss=1.5, losses=(1.5,), paths=(("alder",),), tokens=10, learning_rate=0.1, gradient_norm=1.0)
    return entry("train.commit", facts, step)


STATE = {"peers": SimpleNamespace(present={"a": 1, "b": 2})}


def test_progress_shows_losses_of_peers_and_the_last_step(capsys):
    progress = Progress(3)
    for step in range(3):
        progress(committed(step), STATE)
    progress(entry("peer.lost", Gone(peer="a", name="birch", reason="killed"), 2), STATE)
    progress.end()
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1] == "step 2: lost birch (killed)"
    assert lines[-2].startswith("step 3/3  loss 1.5000  ")
    assert "2 peers" in lines[-2]


def test_quiet_progress_says_nothing(capsys):
    progress = Progress(1, quiet=True)
    progress(committed(0), STATE)
    progress(entry("peer.lost", Gone(peer="a", name="birch", reason="killed"), 0), STATE)
    progress.end()
    assert capsys.readouterr() == ("", "")
