"""The figures that need no script: loss curve, timeline, routes. Pure functions from the view to SVG.

Positions along the width are percentages, so that a figure fits a phone as well as a desk, undistorted.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

from talkoot.serve.markup import Markup, escape, join, tag
from talkoot.serve.words import clock, duration

HUES = 6  # stages beyond this many repeat colours
LANE = 22
LAST_STEPS = 6
ROW = 46
ROWS_FILL = 230
PLOT = 100.0
GLYPHS = {
    "join": "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0",
    "seat": "M-2.5 0a2.5 2.5 0 1 0 5 0a2.5 2.5 0 1 0 -5 0",
    "lost": "M-4 -4L4 4M-4 4L4 -4",
    "checkpoint": "M0 -5L5 0L0 5L-5 0Z",
    "rollback": "M5 -5L-4 0L5 5Z",
    "recover": "M-5 0H5M0 -5V5",
    "start": "M-3 -5L5 0L-3 5Z",
}
NAMES = {
    "join": "joined",
    "seat": "took its place",
    "lost": "lost",
    "checkpoint": "checkpoint",
    "rollback": "rolled back",
    "recover": "recovered",
}


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers between ``low`` and ``high``."""
    span = high - low
    if not math.isfinite(span) or span <= 0:
        return [low]
    raw = span / about
    size = 10.0 ** math.floor(math.log10(raw))
    stride = next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= raw * 0.999)
    first = math.ceil(low / stride - 1e-9)
    return [stride * (first + index) for index in range(about * 3) if stride * (first + index) <= high + 1e-9 * span]


def time_ticks(end: float, about: int = 6) -> list[float]:
    """Round points in time between 0 and ``end`` seconds."""
    strides = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400)
    stride = next((stride for stride in strides if stride >= end / about), None)
    if end < about or stride is None:
        return ticks(0.0, end, about)
    return [float(stride * index) for index in range(int(end // stride) + 1)]


def loss_figure(view: dict[str, Any]) -> Markup:
    """The loss against steps: raw, smoothed and held out."""
    curve, held = view["curve"], view["held_out"]
    lows, highs = curve.get("low", []), curve.get("high", [])
    values = [value for value in (*curve["loss"], *held["loss"], *lows, *highs) if value is not None]
    if not values:
        return tag("p", "No step has been committed yet. The curve begins with the first one.", cls="empty")
    low, high = min(values), max(values)
    pad = (high - low) * 0.05 or 0.1
    low, high = low - pad, high + pad
    left, right = 0.0, float(max(*curve["step"], *held["step"], 1))

    def line(steps: list[Any], losses: list[Any]) -> str:
        points = [
            f"{(x - left) / (right - left) * PLOT:.2f},{(high - y) / (high - low) * PLOT:.2f}"
            for x, y in zip(steps, losses, strict=True)
            if y is not None
        ]
        return "M" + "L".join(points) if points else "M0,0"

    band = f"{line(curve['step'], highs)}{line(curve['step'][::-1], lows[::-1]).replace('M', 'L')}Z" if lows else "M0,0"
    levels, steps = ticks(low, high, 6), ticks(left, right, 6)
    grid = "".join(f"M0,{(high - y) / (high - low) * PLOT:.2f}H100" for y in levels)
    paths = [
        tag("path", d=d, cls=cls, vector_effect="non-scaling-stroke")
        for d, cls in (
            (grid, "grid"),
            (band, "band"),
            (line(curve["step"], curve["loss"]), "raw"),
            (line(curve["step"], curve["smooth"]), "smooth"),
            (line(held["step"], held["loss"]), "held"),
        )
    ]
    ys = [_at("text", f"{y:.4g}", y=f"{(high - y) / (high - low) * 100:.1f}%", dy="0.32em") for y in levels]
    xs = step_labels(steps, right)
    words = f"Training loss over {right:.0f} steps, between {min(values):.3g} and {max(values):.3g}"
    plot = tag("svg", *paths, viewbox="0 0 100 100", preserve="none", cls="plot", role="img", aria_label=words)
    return tag(
        "div",
        tag("svg", *ys, cls="ys", aria_hidden="true"),
        plot,
        tag("svg", *xs, cls="xs", aria_hidden="true"),
        cls="static-chart",
    )


def step_labels(steps: list[float], right: float) -> list[Markup]:
    """What stands below a curve that ends at step ``right``; at its end there is no room to the right."""
    ends = [x > 0.97 * right for x in steps]
    return [
        _at("text", f"{x:.6g}", x=f"{x / right * 100:.1f}%", y=14, cls="end" if end else None)
        for x, end in zip(steps, ends, strict=True)
    ]


def loss_key(view: dict[str, Any]) -> Markup:
    """What the lines of the loss are."""
    signs = [("raw", "each step"), ("smooth", "smoothed"), ("held", "held out")]
    if view.get("mixing"):
        signs = [("band", "all replicas"), ("raw", "each round, their mean"), *signs[1:]]
    return join(tag("li", words, cls=cls) for cls, words in signs)


def _at(name: str, text: str, **where: Any) -> Markup:
    return tag(name, text, **where)


def hue(stage: int | None) -> str:
    """The class that colours a stage."""
    return "hn" if stage is None or stage < 0 else f"h{stage % HUES}"


def timeline(view: dict[str, Any], *, last: bool = False) -> Markup:
    """Who worked when: a lane per peer, over the whole run or over the last steps."""
    lanes, end = view["timeline"]["lanes"], view["timeline"]["end"]
    if not lanes:
        return tag("p", "No peer has joined yet. Each will get a lane here.", cls="empty")
    begin = _recent_begin(lanes) if last else 0.0
    span = max(end - begin, 1e-3)
    marks = [mark for mark in view["timeline"]["marks"] if mark["seconds"] >= begin]
    if last:
        lanes = [lane for lane in lanes if any(stay[1] >= begin for stay in lane["here"])]
    shared = [mark for mark in marks if not mark["peer"]]
    rows = [_lane_row("run", "", [_glyph(mark, begin, span) for mark in shared], "shared")] if shared else []
    for lane in lanes:
        own = [mark for mark in marks if mark["peer"] == lane["peer"]]
        parts = [_stay(stay, begin, span) for stay in lane["here"]]
        parts += [_work(work, lane, begin, span, last) for work in lane["recent" if last else "spans"]]
        parts += [_glyph(mark, begin, span) for mark in own]
        stage = "" if lane["stage"] is None else f"stage {lane['stage']}"
        stage = stage if lane["slot"] is None else f"slot {lane['slot']}"
        rows.append(_lane_row(lane["name"], stage, parts, lane["state"]))
    levels = time_ticks(span)
    labels = [_at("text", clock(x), x=f"{x / span * 100:.2f}%", y=14) for x in levels]
    axis = tag("div", tag("span", cls="lane-name"), tag("svg", *labels, cls="axis", aria_hidden="true"), cls="lane")
    return join([*rows, axis])


def _recent_begin(lanes: list[dict[str, Any]]) -> float:
    recent = [work for lane in lanes for work in lane["recent"]]
    steps = sorted({work[4] for work in recent})[-LAST_STEPS:]
    return min((work[0] for work in recent if work[4] in steps), default=0.0)


def _lane_row(name: str, stage: str, parts: list[Markup | None], state: str) -> Markup:
    label = tag("span", tag("b", name), tag("small", stage), cls="lane-name")
    return tag("div", label, tag("svg", *parts, height=LANE, aria_hidden="true"), cls=f"lane {escape(state)}")


def _stay(stay: list[float], begin: float, span: float) -> Markup | None:
    x, width = _place(stay[0], stay[1], begin, span)
    return tag("rect", x=f"{x:.3f}%", width=f"{width:.3f}%", y=10, height=2, cls="stay") if width > 0 else None


def _work(work: list[Any], lane: dict[str, Any], begin: float, span: float, detailed: bool) -> Markup | None:
    x, width = _place(work[0], work[1], begin, span)
    if width <= 0:
        return None
    cls = "void" if work[3] else f"work {hue(lane['stage'] if lane['slot'] is None else lane['slot'])}"
    box = {"x": f"{x:.3f}%", "width": f"{max(width, 0.08):.3f}%", "y": 4, "height": 14}
    if not detailed:
        return tag("rect", cls=cls, opacity=f"{0.45 + 0.55 * work[2]:.2f}", **box)
    words = f"{lane['name']}, step {work[4] + 1}: {duration(work[1] - work[0])}, {work[2]:.0%} of it computing"
    done = {"x": f"{x:.3f}%", "width": f"{max(width * work[2], 0.08):.3f}%", "y": 4, "height": 14}
    return tag(
        "g",
        tag("title", words),
        tag("rect", cls=f"{cls} frame", rx=2, **box),
        tag("rect", cls=cls, rx=2, **done),
    )


def _place(start: float, end: float, begin: float, span: float) -> tuple[float, float]:
    first, last = (min(max((time - begin) / span, 0.0), 1.0) * 100 for time in (start, end))
    return first, last - first


def _glyph(mark: dict[str, Any], begin: float, span: float) -> Markup:
    x, _ = _place(mark["seconds"], mark["seconds"], begin, span)
    shape = tag("path", tag("title", mark["text"]), d=GLYPHS.get(mark["kind"], GLYPHS["seat"]))
    return tag("svg", shape, x=f"{x:.3f}%", y=11, overflow="visible", cls=f"mark {mark['kind']}")


def legend() -> Markup:
    """What the timeline's signs mean."""
    signs = [
        tag("li", tag("svg", tag("path", d=GLYPHS[kind]), viewbox="-7 -7 14 14", cls=f"mark {kind}"), words)
        for kind, words in NAMES.items()
    ]
    box = tag("rect", x=-6, y=-5, width=12, height=10, cls="void")
    undone = tag("li", tag("svg", box, viewbox="-7 -7 14 14"), "undone work")
    return tag("ul", *signs, undone, cls="legend", aria_hidden="true")


def routes(view: dict[str, Any]) -> Markup:
    """The last step's microbatches on their way through the stages."""
    paths = view["routes"]["paths"]
    if not paths:
        return tag("p", "No step has been committed yet; its routes will be drawn here.", cls="empty")
    columns = _columns(view)
    most = max(len(column) for column in columns)
    height = int(min(max(ROW * most, ROWS_FILL), 2 * ROW * most))
    spots = {
        name: ((index + 0.5) / len(columns) * 100, height * (row + 0.5) / len(column))
        for index, column in enumerate(columns)
        for row, name in enumerate(column)
    }
    used = {name for path in paths for name in path["peers"]}
    lines = [_way(path, index, len(paths), spots, height) for index, path in enumerate(paths)]
    stage_of = {row["name"]: row["stage"] for row in reversed(view["peers"]["rows"])}
    width = min(62 / len(columns), 30)
    nodes = [_node(name, spots[name], width, stage_of.get(name), name in used) for name in spots]
    heads = [
        _at("text", f"stage {index}", x=f"{(index + 0.5) / len(columns) * 100:.2f}%", y=-8, cls="head")
        for index in range(len(columns))
    ]
    words = "; ".join(f"{len(path['microbatches'])} by way of {', '.join(path['peers'])}" for path in paths[:8])
    return tag(
        "svg",
        tag("title", f"Microbatches of step {view['routes']['step']}: {words}"),
        tag("svg", *lines, viewbox=f"0 0 100 {height}", preserve="none", width="100%", height=height),
        *heads,
        *nodes,
        height=height,
        cls="ways",
        role="img",
        width=None if len(columns) <= 5 else len(columns) * 92,
    )


def _columns(view: dict[str, Any]) -> list[list[str]]:
    seats = {row["name"]: row["stage"] for row in view["peers"]["rows"] if row["state"] != "lost"}
    found: dict[str, int] = {}
    for path in view["routes"]["paths"]:
        for index, name in enumerate(path["peers"]):
            found.setdefault(name, seats[name] if seats.get(name) is not None else index)
    for name, stage in seats.items():  # those who are there but had nothing to do this time
        if stage is not None and len(found) < 96:
            found.setdefault(name, stage)
    stages = sorted(set(found.values()))
    return [[name for name, stage in found.items() if stage == wanted] for wanted in stages[:64]]


def _way(path: dict[str, Any], index: int, total: int, spots: dict[str, Any], height: int) -> Markup:
    shift = (index - (total - 1) / 2) * min(5.0, 26.0 / total)
    stops = [(x, y + shift) for x, y in (spots[name] for name in path["peers"] if name in spots)]
    if not stops:
        return Markup("")
    middle = height / 2 + shift
    stops = [(0.0, middle), *stops, (100.0, middle)]
    d = f"M{stops[0][0]:.1f} {stops[0][1]:.1f}"
    for (x0, y0), (x1, y1) in pairwise(stops):
        bend = (x0 + x1) / 2
        d += f"C{bend:.1f} {y0:.1f} {bend:.1f} {y1:.1f} {x1:.1f} {y1:.1f}"
    taken = ", ".join(str(number) for number in path["microbatches"][:12])
    words = tag("title", f"microbatch {taken}: {' → '.join(path['peers'])}")
    thick = min(1.5 + 0.75 * len(path["microbatches"]), 6)
    return tag("path", words, d=d, cls=f"way w{index % 8}", stroke_width=thick, vector_effect="non-scaling-stroke")


def _node(name: str, spot: tuple[float, float], width: float, stage: int | None, used: bool) -> Markup:
    x, y = spot
    label = name if len(name) <= 11 else name[:10] + "…"
    box = tag("rect", x=f"{x - width / 2:.2f}%", width=f"{width:.2f}%", y=y - 13, height=26, rx=13)
    text = tag("text", label, x=f"{x:.2f}%", y=y + 4)
    return tag("g", tag("title", name), box, text, cls=f"node {hue(stage)}{'' if used else ' idle'}")
