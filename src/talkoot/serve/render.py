"""The page as fragments of HTML by name: the report holds them all, the live page replaces what changed."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from talkoot.serve import draw, draw_blended, draw_rounds, draw_tuned, replicas
from talkoot.serve.markup import Markup, data_block, escape, join, tag
from talkoot.serve.words import UNKNOWN, clock, count, decimals, duration, share, size

STATIC = Path(__file__).parent / "static"
STATUS = {
    "waiting": "waiting for the first receipt",
    "running": "running",
    "done": "complete",
    "interrupted": "interrupted",
    "stopped": "stopped",
}
ROUTES_HINT = "Each line is one way that microbatches took through the stages; thicker lines carried more."
WORLDS = {
    "simulated": "Virtual time and simulated links; the training itself is real.",
    "real": "Real processes, real links, real time.",
    "unknown": "The log does not say which world it ran in.",
}


def heading(view: dict[str, Any]) -> Markup:
    """The run's name, its world and its status."""
    run, session = view["run"], view["session"]
    if not run:
        words = tag("p", "The page fills as soon as the run begins.", cls="facts")
        return tag("div", tag("h1", "No run yet"), words, cls="name")
    if part := _part(view):
        facts = part.facts(view)
    else:
        facts = [run["model"], f"{count(run['parameters'])} parameters", _shape(view), run["data"]]
    status = tag("span", STATUS[session["status"]], cls=f"status {session['status']}")
    world = tag("span", run["world"], cls=f"world {run['world']}", title=WORLDS[run["world"]])
    identity = tag("span", "run ", tag("code", run["id"]), cls="id")
    return join(
        [
            tag(
                "div",
                tag("h1", run["name"]),
                tag("p", " · ".join(filter(None, facts)), cls="facts"),
                cls="name",
            ),
            tag("div", world, tag("p", status, identity, cls="state"), cls="what"),
        ]
    )


def _shape(view: dict[str, Any]) -> str:
    if view["mixing"]:
        n = view["mixing"]["replicas"]
        return f"{n} replica{'s' * (n != 1)}, mixed by {view['mixing']['rule']}"
    n = len(view["run"]["stages"])
    return f"{n} stage{'s' * (n != 1)}"


def progress(view: dict[str, Any]) -> Markup:
    """How far the run is."""
    done = view["progress"]
    steps = done["steps"]
    part = min(done["step"] / steps, 1.0) if steps else 0.0
    words = f"Step {done['step']:,}" + (f" of {steps:,}" if steps else "")
    if view["mixing"] and view["mixing"]["rounds"]:
        words = f"Round {view['mixing']['round']:,} of {view['mixing']['rounds']:,}: step" + words[4:]
    bar = tag("progress", value=f"{part:.4f}", max="1", aria_label="Steps done")
    right = share(part) if steps else ""
    if done["undone"]:
        right = f"{right} · {done['undone']} step{'s' * (done['undone'] != 1)} undone on the way"
    if done["eta"]:
        right = f"{right} · about {duration(done['eta'])} to go"
    return join([tag("p", tag("b", words), tag("span", right)), bar])


def tiles(view: dict[str, Any]) -> Markup:
    """The headline numbers."""
    done, peers = view["progress"], view["peers"]
    over = view["session"]["status"] in ("done", "interrupted", "stopped")
    who = peers["joined"] if over else peers["present"]
    lost = f"{peers['lost']} lost" if peers["lost"] else "none lost"
    pace = f"{duration(done['seconds_per_step'])} per step" if done["seconds_per_step"] else ""
    items = [
        ("Loss", decimals(done["loss"]), "nats per token"),
        ("Held-out loss", decimals(done["held_out"]), "on text never trained on"),
        ("Tokens", count(done["tokens"]), f"in {done['step']:,} steps"),
        ("Speed", count(done["tokens_per_s"]), "tokens per second"),
        ("Peers that took part" if over else "Peers present", count(who), lost),
        ("Time", duration(done["elapsed"]), pace),
    ]
    return join(
        tag("div", tag("dt", name), tag("dd", value), tag("dd", note or UNKNOWN, cls="note"), cls="tile")
        for name, value, note in items
    )


def peers(view: dict[str, Any]) -> Markup:
    """Who takes part."""
    rows = view["peers"]["rows"]
    if not rows:
        return tag("p", "Nobody has joined yet.", cls="empty")
    if view["mixing"]:
        return replicas.table(rows)
    fast = any(row["speed"] is not None for row in rows)
    names = ["Peer", "Stage", "State", "Micro\u00adbatches", "Busy", "Sent", *(["Speed"] if fast else [])]
    head = tag("tr", *(tag("th", name, scope="col", cls="n" if i > 2 else None) for i, name in enumerate(names)))
    body = join(_peer(row, fast) for row in rows[:64])
    more = f"{len(rows) - 64} more are not listed." if len(rows) > 64 else ""
    return join([tag("table", tag("thead", head), tag("tbody", body)), tag("p", more, cls="empty") if more else None])


def _peer(row: dict[str, Any], fast: bool) -> Markup:
    stage = UNKNOWN if row["stage"] is None else tag("span", row["stage"], cls=f"holds {draw.hue(row['stage'])}")
    meter = UNKNOWN
    if row["busy"] is not None:
        bar = tag("rect", width=f"{row['busy'] * 100:.1f}%", height=4, rx=2)
        meter = join([tag("svg", bar, cls="meter", aria_hidden="true"), share(row["busy"])])
    cells = [
        tag("th", row["name"], tag("code", row["id"]), scope="row"),
        tag("td", stage),
        tag("td", tag("span", row["state"], cls=f"liveness {row['state']}")),
        tag("td", count(row["microbatches"]), cls="n"),
        tag("td", meter, cls="n"),
        tag("td", size(row["sent_bytes"]), cls="n"),
    ]
    if fast:
        cells.append(
            tag(
                "td",
                UNKNOWN if row["speed"] is None else f"{row['speed']:g} \N{MULTIPLICATION SIGN}",
                cls="n",
            )
        )
    return tag("tr", *cells, cls=row["state"])


def events(view: dict[str, Any]) -> Markup:
    """What happened, newest first."""
    if not view["events"]:
        return tag("li", "Nothing has happened yet.", cls="empty")
    return join(
        tag(
            "li",
            tag("time", clock(event["seconds"])),
            tag("span", event["text"]),
            cls=f"event {event['kind']}",
        )
        for event in view["events"]
    )


def proof(view: dict[str, Any]) -> Markup:
    """What was checked."""
    receipts = view["receipts"]
    if not receipts["count"]:
        return tag("p", "There is no receipt to check yet.", cls="empty")
    kinds = sorted(receipts["by_operation"].items(), key=lambda item: -item[1])
    table = tag("dl", *(tag("div", tag("dt", name), tag("dd", f"{n:,}")) for name, n in kinds), cls="kinds")
    text = f"{receipts['count']:,} receipts checked: every signature holds, and the hash chain is unbroken."
    parts = [tag("p", text, cls="checked"), _hash("Chain head", receipts["head"])]
    if view["session"]["state_hash"]:
        since = view["session"]["approximate"]
        parts.append(_hash(f"State hash at the end{f' ({since})' if since else ''}", view["session"]["state_hash"]))
    return join([*parts, table])


def _hash(name: str, value: str) -> Markup:
    return tag("p", tag("span", name), tag("code", value), cls="hash")


def problem(view: dict[str, Any]) -> Markup:
    """Why the page cannot be trusted or is not current, if it is not."""
    text = view.get("problem") or ""
    return tag("p", text, role="alert") if text else Markup("")


def recipe(view: dict[str, Any]) -> Markup:
    """The recipe, key by key."""
    rows = view["run"].get("recipe", [])
    if not rows:
        return tag("p", "No recipe is known yet.", cls="empty")
    return tag("dl", *(tag("div", tag("dt", key), tag("dd", value)) for key, value in rows), cls="recipe")


FRAGMENTS: dict[str, Callable[[dict[str, Any]], Markup]] = {
    "heading": heading,
    "problem": problem,
    "progress": progress,
    "tiles": tiles,
    "ways": lambda view: escape("Who met whom lately" if view["mixing"] else "Routes of the last step"),
    "routes": lambda view: draw_rounds.meetings(view) if view["mixing"] else draw.routes(view),
    "wayshint": lambda view: escape(draw_rounds.hint(view) if view["mixing"] else ROUTES_HINT),
    "mixing": draw_rounds.mixing,
    "timeline": draw.timeline,
    "laststeps": lambda view: draw.timeline(view, last=True),
    "peers": peers,
    "events": events,
    "proof": proof,
    "recipe": recipe,
    **draw_tuned.EMPTY,
    **draw_blended.EMPTY,
}
PARTS = {"tune": draw_tuned, "blend": draw_blended}  # kinds of run that have cards of their own


def _part(view: dict[str, Any]) -> Any:
    return next((part for key, part in PARTS.items() if view[key]), None)


def fragments(view: dict[str, Any]) -> dict[str, str]:
    """All parts of the page that change while a run goes on."""
    part = _part(view)
    makers = FRAGMENTS | part.FRAGMENTS if part else FRAGMENTS
    return {name: make(view) for name, make in makers.items()}


def chart_data(view: dict[str, Any]) -> dict[str, Any]:
    """What the interactive charts draw."""
    return {"curve": view["curve"], "held_out": view["held_out"]}


def page(view: dict[str, Any], *, head: Markup, foot: Markup, live: bool, note: str) -> str:
    """The whole document around the fragments."""
    name = view["run"].get("name", "no run yet")
    slots = {
        **fragments(view),
        "title": escape(f"{name} · talkoot"),
        "head": head,
        "foot": foot,
        "mode": escape("live" if live else "report"),
        "note": escape(note),
        "chart": draw.loss_figure(view),
        "legend": draw.legend(),
        "key": draw.loss_key(view),
        "data": data_block("data", chart_data(view)),
    }
    return re.sub(r"<!--(\w+)-->", lambda slot: slots[slot[1]], static_text("index.html"))


@cache
def static_text(name: str) -> str:
    """A file of ours that ships with the package."""
    return (STATIC / name).read_text(encoding="utf-8")
