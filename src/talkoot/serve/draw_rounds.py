"""A run in rounds, drawn: how far replicas are apart, who met whom, who waited. From the view to HTML and SVG."""

from __future__ import annotations

import math
from typing import Any

from talkoot.serve.draw import hue, step_labels, ticks
from talkoot.serve.markup import Markup, join, tag
from talkoot.serve.words import UNKNOWN, decimals, duration, figures, reasons, share, size

MOST_SHOWN = 24  # replicas in the table of meetings
CELL = 26


def mixing(view: dict[str, Any]) -> Markup:
    """The card about mixing; nothing for a run by steps."""
    facts = view.get("mixing")
    if not facts:
        return Markup("")
    title = tag("div", tag("h2", "Mixing", id="h-mixing"), tag("span", _rule(facts), cls="aside"), cls="bar")
    halves = [tag("div", tag("h3", "Computing and waiting"), _waits(facts))]
    if facts["partners"] == "pair":  # else replicas are equal, or nobody can compare them
        name = "Variance between replicas, over that of a round's progress"
        halves = [tag("div", tag("h3", name), _spread(facts)), *halves]
    return join([title, tag("dl", _tiles(facts), cls="tiles"), tag("div", *halves, cls="halves" if halves[1:] else "")])


def _rule(facts: dict[str, Any]) -> str:
    replicas = f"{facts['replicas']} replica{'s' * (facts['replicas'] != 1)}"
    return f"{facts['rule']} · {replicas} · {facts['inner_steps']} inner steps per round"


def _tiles(facts: dict[str, Any]) -> Markup:
    alone, sent, spread, held = (facts[name] for name in ("alone", "sent_bytes", "spread", "held_out"))
    sided = f"{facts['one_sided']} one-sided merge{'s' * (facts['one_sided'] != 1)}"
    formula = "by formula "
    items = [
        ("Rounds alone", _alone(facts), "; ".join(filter(None, [reasons(alone["why"]), sided]))),
        (
            "Time spent waiting",
            share(facts["idle"]["share"]),
            f"{duration(facts['idle']['wait_s'])}, over all replicas",
        ),
        ("Sent per round", size(sent["per_round"]), formula + size(sent["expected_per_round"])),
        ("Sent per inner step", size(sent["per_inner_step"]), formula + size(sent["expected_per_inner_step"])),
        ("Replica spread", figures(spread["measured"]), _spread_note(facts)),
        ("Held-out loss", decimals(held["averaged"] or held["mean"]), _held_note(held)),
    ]
    return join(
        tag(
            "div",
            tag("dt", name),
            tag("dd", value),
            tag("dd", note, cls="note"),
            cls="tile alarm" if name == "Replica spread" and spread["alarm"] else "tile",
        )
        for name, value, note in items
    )


def _alone(facts: dict[str, Any]) -> str:
    return "all" if facts["partners"] == "none" else share(facts["alone"]["share"])


def _spread_note(facts: dict[str, Any]) -> str:
    expected, alarm = facts["spread"]["expected"], facts["spread"]["alarm"]
    if expected is not None:
        return f"by formula {figures(expected)}" + (": too far apart" if alarm else "")
    return _no_spread(facts)


def _no_spread(facts: dict[str, Any]) -> str:
    if facts["partners"] == "all":
        return "none: all start each round from the same weights"
    few = facts["partners"] == "pair" and facts["replicas"] < 3
    return "no formula for so few" if few else "no bound: nothing pulls them together"


def _held_note(held: dict[str, float | None]) -> str:
    if held["mean"] is None:
        return "not judged yet"
    which = f"replicas: {decimals(held['mean'])} on average, {decimals(held['best'])} at best"
    return f"averaged model; {which}" if held["averaged"] is not None else which


def _spread(facts: dict[str, Any]) -> Markup:
    """Each round's figure, the mean that goes on, the formula and the alarm, on a logarithmic scale."""
    curve, factor = facts["curve"], facts["spread"]["alarm_factor"]
    known = [value for name in ("each", "mean", "expected") for value in curve[name] if value]
    if not any(curve["mean"]):
        return tag("p", "Drawn as soon as two replicas that differ have met.", cls="empty")
    alarm = [None if value is None else factor * value for value in curve["expected"]]
    low, high = min(known) / 1.25, max(*known, *(value or 0.0 for value in alarm)) * 1.25
    right = float(max(curve["step"]))

    def up(value: float) -> float:
        return 100 * math.log(high / value) / math.log(high / low)

    def line(values: list[float | None]) -> str:
        points = [f"{100 * x / right:.2f},{up(y):.2f}" for x, y in zip(curve["step"], values, strict=True) if y]
        return "M" + "L".join(points) if points else "M0,0"

    levels, steps = log_ticks(low, high), ticks(0.0, right, 5)
    drawn = [
        ("".join(f"M0,{up(level):.2f}H100" for level in levels), "grid"),
        (line(curve["each"]), "raw"),
        (line(alarm), "alarm"),
        (line(curve["expected"]), "held"),
        (line(curve["mean"]), "smooth"),
    ]
    paths = [tag("path", d=d, cls=cls, vector_effect="non-scaling-stroke") for d, cls in drawn]
    ys = [tag("text", f"{y:g}", y=f"{up(y):.1f}%", dy="0.32em") for y in levels]
    xs = step_labels(steps, right)
    words = f"Spread of the replicas over {right:.0f} steps, now {figures(facts['spread']['measured'])}"
    plot = tag("svg", *paths, viewbox="0 0 100 100", preserve="none", cls="plot", role="img", aria_label=words)
    axes = [tag("svg", *texts, cls=cls, aria_hidden="true") for texts, cls in ((ys, "ys"), (xs, "xs"))]
    signs = [("raw", "each round"), ("smooth", "mean of the last pairs"), ("held", "formula"), ("alarm", "alarm")]
    key = tag("ul", *(tag("li", text, cls=cls) for cls, text in signs), cls="key", aria_hidden="true")
    return join([tag("div", axes[0], plot, axes[1], cls="static-chart spread"), key])


def log_ticks(low: float, high: float) -> list[float]:
    """Round numbers between two positive ones, about evenly far apart in their logarithm; few of them."""
    decades = math.log10(high / low)
    digits = (1, 2, 5) if decades < 2.5 else (1,)
    stride = max(1, round(decades / 6))
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found = [digit * 10.0**power for power in powers if power % stride == 0 for digit in digits]
    return [level for level in found if low <= level <= high] or [low]


def _waits(facts: dict[str, Any]) -> Markup:
    """A bar per replica: computing, then waiting, in proportion to the longest one's time."""
    rows = facts["by_replica"]
    longest = max((row["wait_s"] + row["busy_s"] for row in rows), default=0.0)
    if not longest:
        return tag("p", "Nobody has reported a round yet.", cls="empty")
    bars = []
    for row in rows:
        busy, wait = (100 * row[name] / longest for name in ("busy_s", "wait_s"))
        words = f"{row['name']}: {duration(row['busy_s'])} computing, {duration(row['wait_s'])} waiting"
        parts = [
            tag("rect", width=f"{busy:.2f}%", y=4, height=12, rx=2, cls=f"work {hue(row['slot'])}"),
            tag("rect", x=f"{busy:.2f}%", width=f"{wait:.2f}%", y=4, height=12, cls="waits"),
        ]
        of = row["wait_s"] + row["busy_s"]
        idle = f"waits {share(row['wait_s'] / of)}" if of else UNKNOWN
        bar = tag("svg", tag("title", words), *parts, height=20)
        bars.append(tag("div", tag("b", row["name"]), bar, tag("small", idle), cls="spent"))
    return tag("div", *bars, cls="spents", tabindex="0", role="region", aria_label="Computing and waiting")


def meetings(view: dict[str, Any]) -> Markup:
    """A square for each two replicas, the darker the more often they met in the last rounds; the diagonal is alone."""
    facts = view["mixing"]
    met = facts["met"]
    names, rounds = met["names"][:MOST_SHOWN], met["rounds"]
    if facts["partners"] != "pair":
        everybody = "Every round, all replicas mix with all." if facts["partners"] == "all" else "They never meet."
        return tag("p", everybody, cls="empty")
    if not names or not rounds:
        return tag("p", "No round is over yet; meetings will be drawn here.", cls="empty")
    pairs = {(row, column): n for row, column, n in met["pairs"]}
    most = max([*pairs.values(), 1])
    cells = []
    for row, name in enumerate(names):
        for column, other in enumerate(names):
            n = met["alone"][row] if row == column else pairs.get((row, column), 0)
            text = f"{name}: {n} of {met['of'][row]} rounds alone" if row == column else f"{name} met {other}: {n}"
            where = {"x": column * CELL + 1, "y": row * CELL + 1, "width": CELL - 2, "height": CELL - 2, "rx": 4}
            full = min(n / most, 1.0)
            box = tag("rect", cls="alone" if row == column else "met", fill_opacity=f"{full:.2f}", **where)
            figure = tag("text", n, x=(column + 0.5) * CELL, y=(row + 0.5) * CELL + 4) if n else None
            cells.append(tag("g", tag("title", text), box, figure, cls="strong" if full > 0.55 else None))
    side = CELL * len(names)
    left, top = 84, 60
    rows = [tag("text", _short(n), x=-8, y=(i + 0.5) * CELL + 4, cls="row") for i, n in enumerate(names)]
    heads = [
        tag("text", _short(n), transform=f"translate({(i + 0.5) * CELL + 4:g} -8) rotate(-45)", cls="column")
        for i, n in enumerate(names)
    ]
    words = f"Who met whom in the last {rounds} rounds"
    return tag(
        "svg",
        *rows,
        *heads,
        *cells,
        viewbox=f"{-left} {-top} {side + left + 34} {side + top + 4}",
        width=side + left + 34,
        height=side + top + 4,
        cls="meetings",
        role="img",
        aria_label=words,
    )


def hint(view: dict[str, Any]) -> str:
    """What the table of meetings shows."""
    if view["mixing"]["partners"] != "pair":
        return ""
    return f"Meetings in the last {view['mixing']['met']['rounds']} rounds; the diagonal counts rounds alone."


def _short(name: str) -> str:
    return name if len(name) <= 10 else name[:9] + "…"
