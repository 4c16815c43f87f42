"""What a bench returns: medians, bars, and files that show every contender."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from types import ModuleType

import msgspec
import pytest

from talkoot import bench
from talkoot.bench.outcome import Bar, Outcome, Row
from talkoot.core.errors import TalkootError


def outcome(*holds: bool) -> Outcome:
    rows = (Row(name="ours <1>", values=(3.0, 1.0, 2.0)), Row(name="theirs", values=(4.0, 2.0), note="published: 3"))
    bars = tuple(Bar(text="ours / theirs >= 0.5", measured=0.67, holds=each) for each in holds)
    return Outcome(name="race", claim="Ours & theirs", world="simulated", unit="tokens/s", rows=rows, bars=bars)


@pytest.mark.parametrize(("values", "median"), [((5.0,), 5.0), ((3.0, 1.0, 2.0), 2.0), ((4.0, 1.0, 2.0, 3.0), 2.5)])
def test_median(values, median):
    assert Row(name="x", values=values).median == median


@pytest.mark.parametrize(("holds", "passed"), [((), True), ((True, True), True), ((True, False), False)])
def test_an_outcome_passes_when_every_bar_holds(holds, passed):
    assert outcome(*holds).passed is passed
    assert outcome(*holds).plain()["passed"] is passed


def test_what_is_saved_is_what_was_measured_and_the_plot_names_every_contender(tmp_path):
    measured = outcome(True)
    data, plot = measured.save(tmp_path / "new" / "folder")
    assert json.loads(data.read_text()) == json.loads(json.dumps(measured.plain()))
    assert [row["median"] for row in json.loads(data.read_text())["rows"]] == [2.0, 3.0]
    drawn = [text.text for text in ET.fromstring(plot.read_text()).iter("{http://www.w3.org/2000/svg}text")]
    assert {"Ours & theirs", "ours <1>", "theirs", "2", "3"} <= set(drawn)


def test_extra_files_are_saved_beside_the_figures_and_not_among_them(tmp_path):
    measured = msgspec.structs.replace(outcome(True), extras={"race-curve.svg": "<svg/>", "race-trace.json": "[]"})
    saved = measured.save(tmp_path)
    assert [path.name for path in saved] == ["race.json", "race.svg", "race-curve.svg", "race-trace.json"]
    assert (tmp_path / "race-curve.svg").read_text() == "<svg/>"
    assert "extras" not in json.loads((tmp_path / "race.json").read_text())


def test_every_bench_loads_and_states_its_claim():
    assert {"sim-speed", "pipeline-speed"} <= set(bench.names())
    for name in bench.names():
        module = bench.load(name)
        assert isinstance(module, ModuleType)
        assert module.CLAIM.strip()
        assert callable(module.measure)


@pytest.mark.parametrize("name", ["sim_speed", "outcome", "peer-pipelining", "../cli", ""])
def test_nothing_else_is_a_bench(name):
    with pytest.raises(TalkootError) as caught:
        bench.load(name)
    assert "sim-speed" in caught.value.next
