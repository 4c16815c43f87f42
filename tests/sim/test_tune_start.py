"""What is looked at before the first round, so that it does not end a run in the middle of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_tune_kit import recipe, run

from talkoot.cli.tune import TuneProgress
from talkoot.core.errors import TalkootError
from talkoot.run.records import Warned
from talkoot.tune import tuner
from talkoot.tune.run import run_simulated

BYTES = {"model": {"tokenizer": "bytes"}}
ADDS = {"task": "addition:1", "model": {"tokenizer": "characters"}, "rollout": {"samples": 2, "max_new_tokens": 16}}


def lines(folder: Path, *more: dict[str, str]) -> str:
    """A task of twenty problems and some more; an empty line comes first."""
    path = folder / "problems.jsonl"
    found = [{"prompt": f"{number:02d}=", "answer": "1", "split": "train"} for number in range(20)]
    path.write_text("\n" + "\n".join(json.dumps(line) for line in (*found, *more)))
    return f"jsonl:{path}"


def refusal(**sections: Any) -> TalkootError:
    with pytest.raises(TalkootError) as caught:
        run(recipe(**sections))
    return caught.value


@pytest.mark.parametrize("split", ["train", "held_out", "shifted"])
@pytest.mark.parametrize(
    ("prompt", "why"), [("7" * 60, "61 prompt and 12 new tokens"), ("x=", "'x'")], ids=["long", "x"]
)
def test_a_problem_that_does_not_fit_the_model_is_named_at_the_start(tmp_path, split: str, prompt: str, why: str):
    task = lines(tmp_path, {"prompt": prompt, "answer": "1", "split": split})
    found = refusal(task=task, tune={"rounds": 2, "evaluate_every": 2})
    assert found.where.endswith("problems.jsonl:22")
    assert why in found.why


def test_a_problem_that_no_round_ever_sees_stops_nobody(tmp_path):
    task = lines(tmp_path, {"prompt": "7" * 60, "answer": "1", "split": "held_out"})
    assert run(recipe(task=task, tune={"rounds": 1})).result.finished


def test_of_a_large_file_the_longest_prompts_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(tuner, "MOST_READ", 3)
    task = lines(tmp_path, {"prompt": "7" * 60, "answer": "1", "split": "train"})
    assert refusal(task=task).where.endswith("problems.jsonl:22")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({**ADDS, "critic": {"kind": "outcome"}}, "feedback outside the vocabulary"),
        ({**BYTES, "critic": {"kind": "reference"}}, "no reference solution"),
        ({**BYTES, "critic": {"kind": "arithmetic"}}, "not an addition"),
        ({**BYTES, "critic": {"kind": "outcome"}}, "feedback too long"),  # in words it takes more than 64 bytes
    ],
)
def test_a_critic_that_has_nothing_to_teach_is_refused_at_the_start(changes: dict[str, Any], why: str):
    found = refusal(**changes)
    assert found.where.startswith("peer ")
    assert "critic.kind" in found.where
    assert why in found.why


def test_a_critic_that_can_teach_something_is_let_pass(tmp_path):
    task = lines(tmp_path, {"prompt": "99=", "answer": "1", "solution": "1", "split": "train"})
    model = {"tokenizer": "bytes", "context": 160}
    done = run(recipe(task=task, model=model, critic={"kind": "reference"}, tune={"rounds": 8}))
    reasons = {update.reason for update in (*done.updates("alder"), *done.updates("birch"))}
    assert "nothing to learn from: no reference solution" in reasons  # most of its problems have none
    warnings = [one.text for one in done.facts("run.warning", Warned)]
    assert all("nothing to learn from: no reference solution" in text for text in warnings)
    assert run(recipe(**ADDS, critic={"kind": "arithmetic"})).result.finished


def test_the_first_line_of_a_run_says_who_is_there_and_promises_no_time(capsys):
    two = recipe(tune={"rounds": 1})
    run_simulated(two, None, TuneProgress(1, two.names, quiet=False))
    said = capsys.readouterr()
    first, *rounds = (said.err + said.out).splitlines()
    assert first == "round 0: alder, birch"
    assert [("ETA" in line, line.split()[1]) for line in rounds] == [(False, "0/1"), (True, "1/1")]


def test_a_run_that_is_stopped_before_anybody_is_ready_names_nobody(capsys):
    def stop(lead: Any) -> None:
        lead.stop_requested = True

    two = recipe(tune={"rounds": 1})
    assert not run_simulated(two, None, TuneProgress(1, two.names, quiet=False), stop).finished
    said = capsys.readouterr()
    assert "round 0: \n" not in said.err + said.out
