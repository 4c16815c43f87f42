"""Watching a run in rounds: status, progress line, view and report say what the log says, and nothing else."""

from __future__ import annotations

import io
import json
import re
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import pytest
from rounds_run import INNER_STEPS, REPLICAS, STEPS, rehearse

from talkoot.cli.output import Progress
from talkoot.cli.status import replay, status
from talkoot.core.fold import Entry, State, fold
from talkoot.core.log import Log
from talkoot.run.folder import LOG
from talkoot.run.records import Warned
from talkoot.serve.report import report_page
from talkoot.serve.view import View, view_of
from talkoot.train.records import Committed
from talkoot.train.rounds.prospects import LEAST_MEASURED
from talkoot.train.rounds.records import Rounded

ROUNDS = STEPS // INNER_STEPS


class Watched:
    """A finished rehearsal."""

    def __init__(self, folder: Path, steps: int = STEPS, lost: str = "cedar", **mixing: Any) -> None:
        self.folder, self.entries, said = folder, [], io.StringIO()
        with redirect_stderr(said):
            progress = Progress(STEPS, inner_steps=INNER_STEPS)

            def observe(entry: Entry, state: State) -> None:
                self.entries.append(entry)
                progress(entry, state)

            rehearse(folder, observe, steps, lost, **mixing)
        self.lines = said.getvalue().splitlines()
        self.rounds = [entry.receipt.read(Rounded) for entry in self.entries if entry.receipt.op == "train.round"]
        self.commits = [entry.receipt.read(Committed) for entry in self.entries if entry.receipt.op == "train.commit"]
        self.state = fold(self.entries)["mixing"]
        self.view = view_of(self.entries)
        self.parameters = self.view["run"]["parameters"]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Watched:
    return Watched(tmp_path_factory.mktemp("pairs"))


@pytest.fixture(scope="module")
def ring(tmp_path_factory: pytest.TempPathFactory) -> Watched:
    return Watched(tmp_path_factory.mktemp("ring"), rule="diloco")


def test_every_figure_about_mixing_follows_from_the_receipts_of_rounds(pairs: Watched):
    facts, rounds = pairs.view["mixing"], pairs.rounds
    alone = [one for one in rounds if one.alone and not one.partners]
    assert facts["alone"]["rounds"] == len(alone) > 0
    assert facts["alone"]["of"] == len(rounds)
    assert sum(facts["alone"]["why"].values()) == sum(len(one.alone) for one in rounds)
    assert facts["alone"]["why"]["odd"] > 0
    wait, busy = sum(one.wait_s for one in rounds), sum(one.busy_s for one in rounds)
    assert facts["idle"]["share"] == pytest.approx(wait / (wait + busy), rel=1e-4)
    sent = sum(one.sent_bytes for one in rounds)
    assert facts["sent_bytes"]["per_round"] == pytest.approx(sent / len(rounds), rel=1e-4)
    assert facts["sent_bytes"]["per_inner_step"] == pytest.approx(sent / sum(o.steps for o in rounds), rel=1e-4)
    assert facts["sent_bytes"]["expected_per_round"] == pytest.approx(4 * pairs.parameters * 4 / REPLICAS)
    assert facts["spread"]["receipts"] == sum(one.apart is not None for one in rounds)
    assert facts["spread"]["measured"] == pytest.approx(pairs.state.spread, rel=1e-4)
    assert facts["spread"]["expected"] == pytest.approx(1.3125)
    assert (facts["round"], facts["rounds"], facts["replicas"]) == (ROUNDS, ROUNDS, REPLICAS)
    for row in facts["by_replica"]:
        mine = [one for one in rounds if one.slot == row["slot"]]
        assert row["rounds"] == len(mine)
        assert row["wait_s"] == pytest.approx(sum(one.wait_s for one in mine), rel=1e-4)


def test_held_out_losses_of_replicas_and_of_their_mean_are_all_there(pairs: Watched):
    held, final = pairs.view["mixing"]["held_out"], pairs.state.final
    assert final.replicas == REPLICAS
    assert held == pytest.approx({"averaged": final.held_out, "mean": final.mean, "best": final.best}, rel=1e-5)
    each = [row["held_out"] for row in pairs.view["mixing"]["by_replica"]]
    assert min(each) == pytest.approx(held["best"], rel=1e-4)
    assert sum(each) / len(each) == pytest.approx(held["mean"], rel=1e-4)
    before = View().advance_all(e for e in pairs.entries if e.position < _position(pairs, "train.average"))
    assert before.snapshot()["mixing"]["held_out"]["averaged"] is None
    assert before.snapshot()["mixing"]["held_out"]["mean"] == pytest.approx(held["mean"], rel=1e-4)


def test_the_curve_is_drawn_over_steps_with_a_band_of_all_replicas(pairs: Watched):
    curve = pairs.view["curve"]
    assert curve["step"] == [INNER_STEPS * (index + 1) for index in range(ROUNDS)]
    assert pairs.view["progress"]["step"] == STEPS
    for index, commit in enumerate(pairs.commits):
        assert curve["low"][index] == pytest.approx(min(commit.losses), rel=1e-5)
        assert curve["high"][index] == pytest.approx(max(commit.losses), rel=1e-5)
        assert curve["low"][index] <= curve["loss"][index] <= curve["high"][index]
    assert abs(curve["smooth"][-1] - curve["loss"][-1]) < 0.1 * (curve["loss"][0] - curve["loss"][-1])
    assert pairs.view["held_out"]["step"] == [12, 24, 36]


def test_the_curve_of_the_spread_ends_at_what_the_state_says(pairs: Watched):
    curve = pairs.view["mixing"]["curve"]
    assert curve["step"] == sorted(set(curve["step"]))
    assert curve["step"][-1] == STEPS
    assert curve["mean"][-1] == pytest.approx(pairs.state.spread, rel=1e-4)
    five, four = 1.3125, 0.572727  # while one was gone, four were left
    assert all(value == pytest.approx(five) or value == pytest.approx(four, rel=1e-4) for value in curve["expected"])


def test_meetings_are_mutual_and_rounds_without_one_are_on_the_diagonal(pairs: Watched):
    met = pairs.view["mixing"]["met"]
    assert met["rounds"] == ROUNDS
    found = {(met["names"][row], met["names"][column]): n for row, column, n in met["pairs"]}
    counted: dict[tuple[str, str], int] = {}
    for one in pairs.rounds:
        for partner in one.partners:
            pair = (met["names"][one.slot], partner)
            counted[pair] = counted.get(pair, 0) + 1
    assert found == counted
    assert sum(met["alone"]) == sum(not one.partners for one in pairs.rounds)
    assert sum(met["of"]) == len(pairs.rounds)


def test_the_table_of_peers_tells_slots_rounds_and_inner_steps(pairs: Watched):
    rows = {(row["name"], row["state"] == "lost"): row for row in pairs.view["peers"]["rows"]}
    assert {name for name, _ in rows} == {"alder", "birch", "cedar", "dogwood", "elm"}
    assert rows["birch", False]["steps_per_round"] == INNER_STEPS // 2
    assert rows["alder", False]["steps_per_round"] == INNER_STEPS
    assert rows["alder", False]["tokens_per_s"] == pytest.approx(2 * rows["birch", False]["tokens_per_s"], rel=0.1)
    before, after = rows["cedar", True], rows["cedar", False]
    assert before["slot"] == after["slot"] == 2
    assert before["rounds"] + after["rounds"] == sum(one.slot == 2 for one in pairs.rounds)
    lanes = {(lane["name"], lane["state"] == "lost"): lane for lane in pairs.view["timeline"]["lanes"]}
    for key, lane in lanes.items():
        assert lane["slot"] == rows[key]["slot"]
        assert lane["spans"]
        assert all(one[1] <= other[0] for one, other in zip(lane["spans"], lane["spans"][1:], strict=False))


def test_status_is_a_readable_block_and_its_json_carries_the_same(pairs: Watched, capsys: pytest.CaptureFixture[str]):
    status(pairs.folder, as_json=False)
    text = capsys.readouterr().out
    assert re.search(r"^round +9 of 9 \(step 36 of 36\)$", text, re.M)
    assert re.search(r"^mixing +noloco, 5 replicas, 4 inner steps per round$", text, re.M)
    assert re.search(r"^alone +\d+ of \d+ rounds \(\d+ %\): .*odd one out", text, re.M)
    assert re.search(r"^replica spread +[\d.]+ times the variance of a round's progress; by formula 1.31$", text, re.M)
    assert re.search(r"^held-out loss +[\d.]+ averaged model; replicas [\d.]+ on average, [\d.]+ at best$", text, re.M)
    assert re.search(r"^birch +1 +9 ", text, re.M)
    for internal in ("norms", "blended", "exact", "generation", "None", "()"):
        assert internal not in text
    status(pairs.folder, as_json=True)
    facts = json.loads(capsys.readouterr().out)["mixing"]
    shown = pairs.view["mixing"]
    assert facts == {key: shown[key] for key in facts}


def test_a_point_of_the_past_has_a_status_too(pairs: Watched, capsys: pytest.CaptureFixture[str]):
    replay(pairs.folder, to=None, step=4, as_json=False)
    text = capsys.readouterr().out
    assert "1 of 9 (step 4 of 36)" in text
    assert "under way" in text
    assert "not judged yet" in text
    replay(pairs.folder, to=1, step=None, as_json=False)
    assert "not measured yet" in capsys.readouterr().out


def test_the_progress_line_counts_rounds_and_replicas(pairs: Watched):
    line = next(line for line in pairs.lines if line.startswith("round 9/9"))
    assert re.match(r"round 9/9 \(step 36/36\)  loss [\d.]+  [\d,]+ tokens/s  5 replicas  ETA 0 s$", line)
    assert any(line.startswith("the final model is the mean of 5 replicas: held-out loss ") for line in pairs.lines)
    assert any(re.match(r"step 12: mean held-out loss of the replicas [\d.]+$", line) for line in pairs.lines)
    assert any(line.endswith("cedar takes part (from start)") for line in pairs.lines)
    assert not any("stage" in line for line in pairs.lines)


def test_the_report_has_the_card_the_squares_and_no_routes(pairs: Watched):
    text = report_page(pairs.view)
    assert "Round 9 of 9: step 36 of 36" in text
    assert "5 replicas, mixed by noloco" in text
    assert text.count('class="alone"') == REPLICAS
    assert "Who met whom in the last 9 rounds" in text
    assert "Routes of the last step" not in text
    assert 'class="band"' in text
    assert "NaN" not in text


def test_where_all_mix_with_all_nothing_is_said_of_spread_or_meetings(
    ring: Watched, capsys: pytest.CaptureFixture[str]
):
    facts, text = ring.view["mixing"], report_page(ring.view)
    assert facts["spread"]["expected"] is None
    assert facts["spread"]["measured"] is None
    assert facts["alone"]["rounds"] == 0
    assert "Every round, all replicas mix with all." in text
    assert 'class="meetings"' not in text
    status(ring.folder, as_json=False)
    shown = capsys.readouterr().out
    assert "all replicas start each round from the same weights" in shown
    assert "\nalone" not in shown


def test_a_log_bit_by_bit_gives_the_same_view(pairs: Watched):
    view = View()
    for entry in pairs.entries:
        view.advance(entry)
        view.snapshot()
    assert view.snapshot() == pairs.view
    log = Log(pairs.folder / LOG, readonly=True)
    assert view_of(log.entries()) == pairs.view
    log.close()


def test_replicas_that_drift_apart_are_warned_of_once_and_others_are_not(tmp_path: Path):
    weak = Watched(tmp_path / "weak", 64, "", pull=0.02, inner_steps=2)
    warnings = [entry.receipt for entry in weak.entries if entry.receipt.op == "run.warning"]
    assert [receipt.read(Warned).text.split(":")[0] for receipt in warnings] == ["replicas drift apart"]
    assert weak.view["mixing"]["spread"]["alarm"]
    assert "too far apart" in report_page(weak.view)
    usual = Watched(tmp_path / "usual", 96, "", inner_steps=8)
    assert usual.view["mixing"]["spread"]["receipts"] >= LEAST_MEASURED
    assert not any(entry.receipt.op == "run.warning" for entry in usual.entries)
    assert not usual.view["mixing"]["spread"]["alarm"]


def _position(run: Watched, op: str) -> int:
    return next(entry.position for entry in run.entries if entry.receipt.op == op)
