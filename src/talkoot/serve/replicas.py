"""The peers' table of a run in rounds."""

from __future__ import annotations

from typing import Any

from talkoot.serve.draw import hue
from talkoot.serve.markup import Markup, join, tag
from talkoot.serve.words import UNKNOWN, count, decimals, share, size

MOST_ROWS = 64
NAMES = ("Peer", "Slot", "State", "Rounds", "Steps", "Waits", "Sent", "Tokens/s", "Held out")
TITLES = {
    "Slot": "its share of the data",
    "Steps": "inner steps per round",
    "Tokens/s": "while it computes",
    "Held out": "newest loss on text never trained on, nats per token",
}


def table(rows: list[dict[str, Any]]) -> Markup:
    """The rows of ``view["peers"]``."""
    heads = [
        tag("th", name, scope="col", title=TITLES.get(name), cls="n" if i > 2 else None) for i, name in enumerate(NAMES)
    ]
    more = f"{len(rows) - MOST_ROWS} more are not listed." if len(rows) > MOST_ROWS else ""
    body = tag("tbody", join(_row(row) for row in rows[:MOST_ROWS]))
    whole = tag("table", tag("thead", tag("tr", *heads)), body)
    return join([whole, tag("p", more, cls="empty") if more else None])


def _row(row: dict[str, Any]) -> Markup:
    slot, waiting = row["slot"], row.get("waiting")
    stated = None if row["speed"] is None else f"stated speed {row['speed']:g}"
    bar = tag("rect", width=f"{(waiting or 0.0) * 100:.1f}%", height=4, rx=2)
    meter = join([tag("svg", bar, cls="meter", aria_hidden="true"), share(waiting)])
    cells = [
        tag("th", row["name"], tag("code", row["id"]), scope="row"),
        tag("td", UNKNOWN if slot is None else tag("span", slot, cls=f"holds {hue(slot)}")),
        tag("td", tag("span", row["state"], cls=f"liveness {row['state']}")),
        tag("td", count(row.get("rounds")), cls="n"),
        tag("td", count(row.get("steps_per_round")), cls="n"),
        tag("td", UNKNOWN if waiting is None else meter, cls="n"),
        tag("td", size(row["sent_bytes"]), cls="n"),
        tag("td", count(row.get("tokens_per_s")), cls="n", title=stated),
        tag("td", decimals(row.get("held_out")), cls="n"),
    ]
    return tag("tr", *cells, cls=row["state"])
