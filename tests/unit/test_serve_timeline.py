"""The timeline: every piece of work is there, at its time and on its node; names are only text."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET

import pytest

from talkoot.plan.playback import Span, play
from talkoot.plan.published import avoiding_routes, published_problem
from talkoot.serve.timeline import chrome_trace, timeline_html

NAMES = ("Turku", "Oulu", "Pori")
SPANS = (
    Span(0, "forward", 4, 0.0, 1.0),
    Span(2, "forward", 4, 1.5, 2.5),
    Span(0, "loss", 4, 3.0, 3.25),
    Span(2, "backward", 4, 4.0, 5.5),
    Span(0, "backward", 4, 6.0, 8.0),
)


def svg(page: str) -> ET.Element:
    """The plot; it must be well-formed XML."""
    found = re.search(r'<svg height="\d+" role="img".*?</svg>(?=<svg height="20")', page, re.DOTALL)
    assert found
    return ET.fromstring(found[0])


def boxes(page: str) -> list[ET.Element]:
    return [element for element in svg(page).iter("g") if (element.get("class") or "").startswith("box ")]


def percent(text: str | None) -> float:
    assert text
    assert text.endswith("%")
    return float(text[:-1])


def test_the_trace_has_every_span_on_its_node_in_microseconds() -> None:
    trace = json.loads(json.dumps(chrome_trace(NAMES, SPANS, ((0,), (2, 1)))))
    events = trace["traceEvents"]
    work = [event for event in events if event["ph"] == "X"]
    assert [(event["pid"], event["name"], event["ts"], event["dur"]) for event in work] == [
        (0, "forward 4", 0.0, 1e6),
        (2, "forward 4", 1.5e6, 1e6),
        (0, "loss 4", 3e6, 0.25e6),
        (2, "backward 4", 4e6, 1.5e6),
        (0, "backward 4", 6e6, 2e6),
    ]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {0: "Turku, stage 0", 1: "Oulu, stage 1", 2: "Pori, stage 1"}
    order = {event["pid"]: event["args"]["sort_index"] for event in events if event["name"] == "process_sort_index"}
    assert sorted(order, key=lambda node: order[node]) == [0, 2, 1]


def test_arrows_lead_from_the_end_of_a_visit_to_the_start_of_the_next() -> None:
    events = chrome_trace(NAMES, reversed(SPANS))["traceEvents"]
    begins = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    assert begins.keys() == ends.keys()
    hops = [(begins[key]["pid"], begins[key]["ts"], ends[key]["pid"], ends[key]["ts"]) for key in sorted(begins)]
    assert hops == [(0, 1e6, 2, 1.5e6), (2, 2.5e6, 0, 3e6), (0, 3.25e6, 2, 4e6), (2, 5.5e6, 0, 6e6)]


def test_boxes_lie_where_and_when_the_work_was() -> None:
    page = timeline_html("One microbatch", NAMES, SPANS, ((0,), (2, 1)))
    found = boxes(page)
    assert len(found) == len(SPANS)
    for span, box in zip(SPANS, found, strict=True):
        rect, title = box.find("rect"), box.find("title")
        assert rect is not None
        assert title is not None
        assert percent(rect.get("x")) == pytest.approx(100 * span.start_s / 8, abs=0.01)
        assert percent(rect.get("width")) == pytest.approx(100 * (span.end_s - span.start_s) / 8, abs=0.01)
        assert float(rect.get("y") or 0) // 26 == (0 if span.node == 0 else 1)
        assert box.get("class") == f"box {span.phase} m4"
        assert title.text is not None
        assert title.text.startswith("microbatch 4: ")
        assert f"{span.start_s:.3f} to {span.end_s:.3f} s" in title.text
    assert "8.00 s · 1 microbatch · 3 nodes" in page


def test_a_whole_iteration_is_drawn_with_numbers_where_they_fit() -> None:
    problem, routes = published_problem(), avoiding_routes()
    iteration = play(problem, routes)
    found = boxes(timeline_html("Published", problem.names, iteration.spans, routes.groups))
    assert len(found) == len(iteration.spans) == 30 * 9
    written = [box for box in found if box.find("text") is not None]
    assert len(written) == 30 * 8  # all but the losses, which are too short
    assert not [box for box in written if "loss" in (box.get("class") or "")]


def test_the_page_needs_nothing_else() -> None:
    page = timeline_html("Alone", NAMES, SPANS)
    assert "<script" not in page
    assert "default-src 'none'" in page
    assert not re.findall(r'(?:src|href)="(?!data:)', page)
    assert "url(" not in page
    assert "@import" not in page


def test_names_and_titles_are_text_whatever_they_contain() -> None:
    hostile = '</title><img src=x onerror="alert(1)">'
    page = timeline_html(hostile, (hostile, "b", "c"), SPANS, notes=(hostile,))
    assert "<img" not in page
    assert "&lt;img src=x" in page


def test_an_iteration_without_work_says_so() -> None:
    assert "Nothing was done." in timeline_html("Empty", NAMES, ())
    assert [event["ph"] for event in chrome_trace(NAMES, ())["traceEvents"]] == ["M"] * 6
