"""``talkoot status`` and ``replay`` of a post-training run, and the check of its log."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fixture_run import eventful as trained
from tune_tale import TuneTale, eventful, score

from talkoot.cli.status import replay, status
from talkoot.cli.status_tune import rounds_of
from talkoot.core.errors import Exit, TalkootError
from talkoot.core.log import Log


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    eventful(Log(tmp_path / "log.sqlite")).log.close()
    return tmp_path


def test_it_tells_how_far_the_run_is_and_what_came_of_it(finished: Path, capsys: pytest.CaptureFixture[str]):
    status(finished, as_json=False)
    text = capsys.readouterr().out
    assert "addition:2" in text
    assert "grpo; others' completions by ftis, vertical" in text
    assert "24 of 24" in text  # the run is over, nobody is there, and it still has done its rounds
    assert "3 of 72 rounds (4 %)" in text
    assert "all peers' states after round 24" in text
    assert "forged answer" in text
    assert "held_out" in text


def test_as_json_it_has_every_peer_s_account(finished: Path, capsys: pytest.CaptureFixture[str]):
    status(finished, as_json=True)
    view = json.loads(capsys.readouterr().out)
    assert view["round"] == view["rounds"] == 24
    assert view["alone"] == {"rounds": 3, "of": 72, "share": pytest.approx(1 / 24, rel=1e-4)}
    assert set(view["peers"]) == {"alder", "birch", "cedar"}
    assert view["peers"]["alder"]["rounds"] == 24


def test_one_peer_is_alone_and_the_status_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    tale = TuneTale(("alder",), Log(tmp_path / "log.sqlite"))
    tale.lonely_round()
    tale.log.close()
    status(tmp_path, as_json=False)
    assert "all: there is one peer" in capsys.readouterr().out


def test_before_the_first_round_there_is_a_status_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    TuneTale(log=Log(tmp_path / "log.sqlite")).log.close()
    status(tmp_path, as_json=False)
    assert "0 of 24" in capsys.readouterr().out


def test_a_peer_that_was_lost_for_good_does_not_hold_the_count_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    tale = TuneTale(("alder", "birch"), Log(tmp_path / "log.sqlite"))
    tale.round()
    tale.lose("birch", "unplugged")
    while tale.rounds["alder"] < 24:
        tale.round()
    tale.end()
    tale.log.close()
    status(tmp_path, as_json=True)
    assert json.loads(capsys.readouterr().out)["round"] == 24


def test_a_critic_and_unsampled_scores(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    tale = TuneTale(("alder",), Log(tmp_path / "log.sqlite"), critic={"kind": "aligned"})
    tale.round(evaluations=(score("held_out", 0.5, samples=0),))
    tale.log.close()
    status(tmp_path, as_json=False)
    text = capsys.readouterr().out
    assert "feedback of aligned" in text
    row = next(line for line in text.splitlines() if "held_out" in line)
    assert row.split() == ["alder", "held_out", "128", "0.500", *["-"] * 5]


@pytest.mark.parametrize("step", [1, 8, 24])
def test_replay_stops_when_all_have_done_so_many_rounds(finished: Path, step: int, capsys: pytest.CaptureFixture[str]):
    replay(finished, to=None, step=step, as_json=True)
    view = json.loads(capsys.readouterr().out)
    assert view["round"] == step
    assert min(peer["rounds"] for peer in view["peers"].values()) == step


def test_replay_of_a_round_that_was_not_done_says_how_many_were(finished: Path):
    with pytest.raises(TalkootError) as caught:
        replay(finished, to=None, step=99, as_json=True)
    assert "round 99" in caught.value.where
    assert "24 rounds are done by all" in caught.value.why


def test_a_good_log_passes_the_check(finished: Path, capsys: pytest.CaptureFixture[str]):
    status(finished, as_json=True, check=True)
    assert json.loads(capsys.readouterr().out)["findings"] == []


def test_a_bad_log_fails_the_check_with_exit_code_4(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    tale = TuneTale(("alder", "birch"), Log(tmp_path / "log.sqlite"))
    tale.round()
    tale.policies["alder"] = "0" * 64
    tale.round()
    tale.log.close()
    with pytest.raises(SystemExit) as caught:
        status(tmp_path, as_json=False, check=True)
    assert caught.value.code == Exit.FAILED_CHECK
    text = capsys.readouterr().out
    assert "1 receipt is wrong" in text
    assert "not made with the policy that its last update left" in text


def test_a_training_run_s_log_is_checked_as_such(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    trained(tmp_path, steps=10).log.close()
    with pytest.raises(SystemExit):  # this made-up run cites no work
        status(tmp_path, as_json=True, check=True)
    assert any("were not counted exactly once" in text for text in json.loads(capsys.readouterr().out)["findings"])


def test_a_peer_that_came_late_is_not_said_to_have_done_all_rounds():
    assert rounds_of({"rounds": 30, "updates": 30}) == "30"
    assert rounds_of({"rounds": 30, "updates": 1}) == "30 (did 1)"
