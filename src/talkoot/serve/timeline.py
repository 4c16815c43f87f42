"""One iteration on a time axis: which microbatch was on which node when. For a browser, and for trace viewers.

Works on plain spans, whether a planner played them, a simulation ran them or a run's receipts recorded them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from talkoot.plan.playback import Phase, Span
from talkoot.serve.draw import time_ticks
from talkoot.serve.markup import Markup, join, tag
from talkoot.serve.render import static_text
from talkoot.serve.words import count, decimals, name_of, share

ROW, BOX = 26, 18  # heights in pixels
NARROWEST, WIDEST = 900, 6000  # width of the plot in pixels
DIGIT, MARGIN = 6.2, 2  # width of a digit in a box, and room beside it
COLOURS: dict[Phase, str] = {"forward": "rail_response", "loss": "cq_build_passed", "backward": "rail_animation"}
WORDS: dict[Phase, str] = {"forward": "forward", "loss": "head and loss", "backward": "backward"}


def chrome_trace(names: Sequence[str], spans: Iterable[Span], groups: Sequence[Sequence[int]] = ()) -> dict[str, Any]:
    """The spans in the Trace Event Format, which Perfetto and chrome://tracing open.

    A process per node, a complete event per span, arrows from each microbatch's visit to its next. Times are in
    microseconds.

    Args:
        names: of the nodes, by their numbers in the spans.
        groups: nodes of each stage, if known; then nodes are sorted by stage.
    """
    stage_of = {node: stage for stage, group in enumerate(groups) for node in group}
    ordered = sorted(spans, key=lambda span: (span.start_s, span.node))
    events: list[dict[str, Any]] = []
    for place, node in enumerate(_rows(names, groups)):
        about = names[node] if node not in stage_of else f"{names[node]}, stage {stage_of[node]}"
        events.append({"ph": "M", "pid": node, "tid": 0, "name": "process_name", "args": {"name": about}})
        events.append({"ph": "M", "pid": node, "tid": 0, "name": "process_sort_index", "args": {"sort_index": place}})
    for span in ordered:
        events.append(
            {
                "ph": "X",
                "pid": span.node,
                "tid": 0,
                "name": f"{span.phase} {span.microbatch}",
                "cat": span.phase,
                "ts": span.start_s * 1e6,
                "dur": (span.end_s - span.start_s) * 1e6,
                "cname": COLOURS[span.phase],
                "args": {"microbatch": span.microbatch},
            }
        )
    arrow = 0
    for number, visits in _trips(ordered).items():
        for before, after in pairwise(visits):
            arrow += 1
            for phase, node, when in (("s", before.node, before.end_s), ("f", after.node, after.start_s)):
                event = {"ph": phase, "id": arrow, "pid": node, "tid": 0, "ts": when * 1e6}
                events.append(
                    event | {"name": f"microbatch {number}", "cat": "hop"} | ({"bp": "e"} if phase == "f" else {})
                )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def timeline_html(
    title: str,
    names: Sequence[str],
    spans: Iterable[Span],
    groups: Sequence[Sequence[int]] = (),
    notes: Sequence[str] = (),
) -> str:
    """A page that needs nothing else: no scripts, no other files. Pointing at a microbatch shows its way.

    Args:
        title: heading of the page.
        names: of the nodes, by their numbers in the spans.
        groups: nodes of each stage, if known; then rows are sorted by stage.
        notes: short facts to stand under the title, after those that the spans tell.
    """
    ordered = sorted(spans, key=lambda span: (span.start_s, span.node))
    end_s = max((span.end_s for span in ordered), default=0.0)
    trips = _trips(ordered)
    facts = [f"{decimals(end_s, 2)} s", _many(len(trips), "microbatch", "es"), _many(len(names), "node", "s"), *notes]
    head = tag("div", tag("h1", title), tag("p", " · ".join(facts), cls="facts"), cls="name")
    figure = _figure(names, ordered, groups, end_s) if end_s > 0 else tag("p", "Nothing was done.", cls="empty")
    hint = "Point at a microbatch to see its way through the nodes. Boxes carry its number where there is room."
    body = tag(
        "div",
        tag("div", tag("span", "talkoot", cls="logo"), cls="brand"),
        tag("header", head, _legend(), cls="heading"),
        tag("section", figure, tag("p", hint, cls="hint"), cls="card", aria_label="Timeline"),
        cls="page trips",
    )
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    styles = Markup(static_text("page.css") + static_text("timeline.css") + _highlights(trips))
    meta = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'
    )
    inside = join([Markup(meta), tag("title", title), tag("style", styles)])
    return f'<!doctype html>\n<html lang="en"><head>{inside}</head><body>{body}</body></html>\n'


def _many(number: int, noun: str, plural: str) -> str:
    return f"{count(number)} {noun}{plural * (number != 1)}"


def _rows(names: Sequence[str], groups: Sequence[Sequence[int]]) -> list[int]:
    """Nodes from top to bottom: by stage, then those without one."""
    placed = [node for group in groups for node in group]
    return placed + [node for node in range(len(names)) if node not in set(placed)]


def _trips(spans: Sequence[Span]) -> dict[int, list[Span]]:
    """The visits of each microbatch, in order."""
    trips: dict[int, list[Span]] = {}
    for span in spans:
        trips.setdefault(span.microbatch, []).append(span)
    return dict(sorted(trips.items()))


def _figure(names: Sequence[str], spans: Sequence[Span], groups: Sequence[Sequence[int]], end_s: float) -> Markup:
    """Names on the left, which stay where they are while the plot scrolls; times above and below it."""
    rows = _rows(names, groups)
    row_of = {node: row for row, node in enumerate(rows)}
    stage_of = {node: stage for stage, group in enumerate(groups) for node in group}
    lengths = sorted(span.end_s - span.start_s for span in spans if span.phase != "loss") or [end_s]
    digits = len(str(max((span.microbatch for span in spans), default=0)))
    wanted = (digits * DIGIT + MARGIN) / max(lengths[len(lengths) // 4], 1e-9)  # pixels per second: most numbers fit
    width = min(max(wanted * end_s, NARROWEST), WIDEST)
    busy = dict.fromkeys(rows, 0.0)
    for span in spans:
        busy[span.node] += span.end_s - span.start_s
    labels = [_label(name_of(names[node]), stage_of.get(node), busy[node] / end_s) for node in rows]
    height = ROW * len(rows)
    bands = [
        tag("rect", y=ROW * row, width="100%", height=ROW, cls="band")
        for row, node in enumerate(rows)
        if stage_of.get(node, len(groups)) % 2
    ]
    times = time_ticks(end_s, max(round(width / 110), 2))
    grid = [tag("line", x1=_at(t, end_s), x2=_at(t, end_s), y2=height, cls="grid") for t in (*times, end_s)]
    ways = [_way(number, visits, row_of, end_s) for number, visits in _trips(spans).items()]
    boxes = [_box(span, names, stage_of, row_of, (width, end_s)) for span in spans]
    plot = tag(
        "svg",
        *bands,
        *grid,
        tag("svg", *ways, viewbox=f"0 0 1000 {height}", preserve="none", width="100%", height=height, cls="ways"),
        *boxes,
        height=height,
        role="img",
        aria_label=f"{len(spans)} pieces of work on {len(names)} nodes in {end_s:.2f} seconds",
    )
    stamps = [tag("text", f"{t:g} s", x=_at(t, end_s), y=14, cls="first" if t == 0 else None) for t in times]
    axis = tag("svg", *stamps, height=20, cls="axis", aria_hidden="true")
    titles = tag(
        "div", tag("small", "node"), tag("small", "stage" if groups else ""), tag("small", "busy"), cls="row head"
    )
    column = tag("div", titles, *labels, cls="rows")
    return tag(
        "div",
        column,
        tag("div", axis, plot, axis, cls="plot", style=f"min-width:{width:.0f}px"),
        cls="timeline",
        tabindex="0",
        role="region",
        aria_label="Timeline",
    )


def _label(name: str, stage: int | None, busy: float) -> Markup:
    cls = "row band" if stage is not None and stage % 2 else "row"
    return tag(
        "div",
        tag("b", name, title=name),
        tag("small", "" if stage is None else stage),
        tag("small", share(busy), title="share of the time that it works"),
        cls=cls,
    )


def _at(seconds: float, end_s: float) -> str:
    return f"{100 * seconds / end_s:.3f}%"


def _box(
    span: Span,
    names: Sequence[str],
    stage_of: dict[int, int],
    row_of: dict[int, int],
    scale: tuple[float, float],
) -> Markup:
    width, end_s = scale
    top, length = ROW * row_of[span.node] + (ROW - BOX) // 2, span.end_s - span.start_s
    where = f", stage {stage_of[span.node]}" if span.node in stage_of else ""
    words = f"microbatch {span.microbatch}: {WORDS[span.phase]}\n{name_of(names[span.node])}{where}\n"
    words += f"{span.start_s:.3f} to {span.end_s:.3f} s ({length:.3f} s)"
    share_of_width = f"{max(100 * length / end_s, 100 / width):.3f}%"
    box = tag("rect", x=_at(span.start_s, end_s), y=top, width=share_of_width, height=BOX, rx=2)
    number = str(span.microbatch)
    fits = length / end_s * width >= len(number) * DIGIT
    text = tag("text", number, x=_at((span.start_s + span.end_s) / 2, end_s), y=top + BOX - 5) if fits else None
    return tag("g", tag("title", words), box, text, cls=f"box {span.phase} m{span.microbatch}")


def _way(number: int, visits: Sequence[Span], row_of: dict[int, int], end_s: float) -> Markup:
    """The hops between visits, shown while one points at the microbatch."""
    d = ""
    for before, after in pairwise(visits):
        x0, x1 = (1000 * when / end_s for when in (before.end_s, after.start_s))
        y0, y1 = (ROW * (row_of[span.node] + 0.5) for span in (before, after))
        d += f"M{x0:.1f} {y0:g}L{x1:.1f} {y1:g}"
    return tag("path", d=d, cls=f"way m{number}", vector_effect="non-scaling-stroke")


def _highlights(trips: dict[int, list[Span]]) -> str:
    """Styles that fade all others, and show the way, of the microbatch that one points at."""
    return "".join(
        f".plot:has(.m{number}:hover) .box:not(.m{number}){{opacity:.18}}"
        f".plot:has(.m{number}:hover) .way.m{number}{{display:block}}"
        for number in trips
    )


def _legend() -> Markup:
    signs = [
        tag("li", tag("svg", tag("rect", width=14, height=14, rx=2), cls=f"box {phase}"), words)
        for phase, words in WORDS.items()
    ]
    return tag("ul", *signs, cls="legend")
