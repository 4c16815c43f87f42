"""Post-training, drawn: rewards by round, scores, who learned from whom, and how. From the view to HTML and SVG."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from talkoot.serve.draw import hue, step_labels, ticks
from talkoot.serve.markup import Markup, join, tag
from talkoot.serve.words import UNKNOWN, count, decimals, duration, figures, share, size

LEVELS = (0.0, 0.25, 0.5, 0.75, 1.0)
MOST_ROWS = 64
MOST_COLUMNS = 12  # peers whose learning is shown side by side
HEADS = (
    *("Peer", "State", "Rounds", "Reward", "Mean", "Generated", "Trained"),
    *("From others", "Alone", "Refused", "Waits", "Sent"),
)
TITLES = {
    "Reward": "mean reward of its own completions in its newest round",
    "Mean": "the same over all its rounds",
    "Generated": "tokens of its own completions",
    "Trained": "tokens that it computed gradients for",
    "From others": "groups of other peers that it learned from",
    "Alone": "rounds in which it learned from its own completions only",
    "Refused": "records and completions of others that were not used",
    "Waits": "share of its time that it waited for others' completions",
}
# The learner's figures under plain names, with how they are written; others stand under their own.
FACTS = {
    "ratio_median": ("Learner / generator, median", figures),
    "ratio_90": ("… 90 % are below", figures),
    "ratio_99": ("… 99 % are below", figures),
    "ratio_max": ("… largest", figures),
    "above_cap_share": ("Above the cap", share),
    "kl_naive": ("Divergence, log difference (nats)", figures),
    "kl_nonnegative": ("Divergence, never negative (nats)", figures),
    "kl_reference": ("From the initial policy (nats per token)", figures),
    "clipped_share": ("Tokens outside the clip", share),
    "entropy": ("Entropy (nats per token)", figures),
    "zero_sigma_share": ("Groups that all earn the same", share),
    "truncated_share": ("Completions cut off", share),
    "length_mean": ("Tokens per completion", figures),
    "reward_mean": ("Reward, everybody's", decimals),
    "own_reward_mean": ("Reward, own", decimals),
    "reward_std": ("Reward, deviation", decimals),
    "loss": ("Loss", figures),
    "grad_norm": ("Gradient norm", figures),
    "learning_rate": ("Learning rate", figures),
    "tokens": ("Tokens learned from", count),
    "own_groups": ("Own groups", count),
    "external_groups": ("Others' groups", count),
    "steps": ("Optimizer steps", count),
    "steps_skipped": ("… that moved nothing", count),
    "lessons": ("Completions with feedback", count),
    "advantage": ("Teacher above student (nats per token)", figures),
    "advantage_size": ("… size of it", figures),
    "localisation rollouts": ("Completions with a known mistake", count),
    "localisation first_wrong": ("Advantage at the first wrong token", figures),
    "localisation prefix": ("… of correct tokens before it", figures),
    "localisation prefix_blamed": ("Correct tokens that were blamed", share),
}
DROPPED, SKIPPED, FEEDBACK = "filtered_by_peer ", "skipped ", "feedback "


def facts(view: dict[str, Any]) -> list[str]:
    """The line below the run's name."""
    told = view["tune"]
    learns = f"feedback of {told['critic']}" if told["critic"] else told["algorithm"]
    n = len(told["by_peer"])
    if n == 1:
        return [told["task"], learns, "one peer, alone"]
    return [told["task"], learns, f"corrected by {told['correction']}", f"{told['split']} exchange", f"{n} peers"]


def progress(view: dict[str, Any]) -> Markup:
    """How far the run is."""
    told, done = view["tune"], view["progress"]
    number, rounds = told["round"], done["steps"]
    part = min(number / rounds, 1.0) if rounds else 0.0
    words = f"Round {number:,}" + (f" of {rounds:,}" if rounds else "")
    right = [share(part) if rounds else "", duration(done["elapsed"])]
    if told["furthest"] > number:
        right.append(f"the furthest peer is at {told['furthest']:,}")
    if done["undone"]:
        right.append(f"{done['undone']} round{'s' * (done['undone'] != 1)} undone on the way")
    if done["eta"]:
        right.append(f"about {duration(done['eta'])} to go")
    bar = tag("progress", value=f"{part:.4f}", max="1", aria_label="Rounds done")
    return join([tag("p", tag("b", words), tag("span", " · ".join(filter(None, right)))), bar])


def tiles(view: dict[str, Any]) -> Markup:
    """The headline numbers."""
    told, peers = view["tune"], view["peers"]
    over = view["session"]["status"] in ("done", "interrupted", "stopped")
    alone, single = told["alone"], len(told["by_peer"]) < 2
    refused = f"{count(told['refused'])} refused" if told["refused"] else "nothing refused"
    items = [
        ("Reward", decimals(told["reward"]["mean"]), _between(told["reward"], "newest rounds")),
        ("Held out, greedy", share(told["greedy"]["mean"]), _between(told["greedy"], "right", share)),
        ("Tokens generated", count(told["generated"]), f"{count(told['trained'])} trained on"),
        ("Groups from others", count(told["external"]), refused),
        (
            "Rounds alone",
            share(alone["share"]),
            "there is one peer" if single else f"{alone['rounds']} of {alone['of']}",
        ),
        (
            "Peers that took part" if over else "Peers present",
            count(len(told["by_peer"]) if over else peers["present"]),
            f"{peers['lost']} lost" if peers["lost"] else "none lost",
        ),
    ]
    warn = bool(alone["rounds"]) and not single
    return join(
        tag(
            "div",
            tag("dt", name),
            tag("dd", value),
            tag("dd", note, cls="note"),
            cls="tile caution" if warn and name == "Rounds alone" else "tile",
        )
        for name, value, note in items
    )


def _between(spread: dict[str, float | None], what: str, form: Any = decimals) -> str:
    if spread["mean"] is None:
        return "not judged yet"
    low, high = form(spread["low"]), form(spread["high"])
    return f"mean of peers, {what}" if low == high else f"{low} to {high}, {what}"


def rewards(view: dict[str, Any]) -> Markup:
    """A line per peer, its reward by round; dashes and dots are its held-out greedy accuracy."""
    peers = [peer for peer in view["tune"]["by_peer"] if peer["rewards"]["round"]]
    if not peers:
        return tag("p", "No round is over yet. The curves begin with the first one.", cls="empty")
    right = float(max(peer["rewards"]["round"][-1] for peer in peers))

    def points(x: Iterable[float], y: Iterable[float | None]) -> list[str]:
        return [f"{100 * a / right:.2f},{_up(b):.2f}" for a, b in zip(x, y, strict=True) if b is not None]

    drawn = [("".join(f"M0,{_up(level):.2f}H100" for level in LEVELS), "grid")]
    for peer in peers:
        earned, scored = peer["rewards"], peer["held_out"]
        drawn.append(("M" + "L".join(points(earned["round"], earned["reward"])), f"earned {hue(peer['slot'])}"))
        if dots := points(scored["round"], scored["greedy"]):
            drawn.append(("M" + "L".join(dots), f"scored {hue(peer['slot'])}"))
            drawn.append(("".join(f"M{dot}h0" for dot in dots), f"dots {hue(peer['slot'])}"))
    paths = [tag("path", d=d, cls=cls, vector_effect="non-scaling-stroke") for d, cls in drawn]
    ys = [tag("text", f"{y:g}", y=f"{_up(y):.1f}%", dy="0.32em") for y in LEVELS]
    xs = step_labels([mark for mark in ticks(0.0, right, 6) if mark == int(mark)], right)
    newest = ", ".join(f"{peer['name']} {decimals(peer['reward'])}" for peer in peers[:8])
    words = f"Reward by round up to round {right:.0f}; newest: {newest}"
    plot = tag("svg", *paths, viewbox="0 0 100 100", preserve="none", cls="plot", role="img", aria_label=words)
    axes = [tag("svg", *texts, cls=cls, aria_hidden="true") for texts, cls in ((ys, "ys"), (xs, "xs"))]
    return join([tag("div", axes[0], plot, axes[1], cls="static-chart"), _key(peers)])


def _up(share_of_one: float) -> float:
    """Where between the top (0) and the bottom (100) a share stands; a line at 1 keeps its full width."""
    return 100 * (1.03 - share_of_one) / 1.05


def _key(peers: list[dict[str, Any]]) -> Markup:
    named = [tag("li", peer["name"], cls=hue(peer["slot"])) for peer in peers]
    held = [tag("li", "held out, greedy", cls="scored")] if any(peer["held_out"]["round"] for peer in peers) else []
    return tag("ul", *named, *held, cls="key peers", aria_label="Lines: mean reward of a peer's own completions")


def scores(view: dict[str, Any]) -> Markup:
    """What each peer scored when it was last evaluated."""
    rows = [(peer, one) for peer in view["tune"]["by_peer"][:MOST_ROWS] for one in peer["scores"]]
    if not rows:
        return tag("p", "Nobody has been evaluated yet.", cls="empty")
    sampled = any(one["avg"] is not None for _, one in rows)
    names = ["Peer", "Split", "Greedy", *(["Avg", "Any", "Most"] if sampled else [])]
    titles = {
        "Greedy": "right when the likeliest token is taken each time",
        "Avg": "mean share of a problem's samples that are right",
        "Any": "problems with a right sample",
        "Most": "problems whose most frequent answer is right",
    }
    head = [tag("th", n, scope="col", title=titles.get(n), cls="n" if i > 1 else None) for i, n in enumerate(names)]
    body = []
    for peer, one in rows:
        known = ("greedy", "avg", "passed", "majority") if sampled else ("greedy",)
        name = tag("th", tag("span", peer["name"], cls=f"dot {hue(peer['slot'])}"), scope="row")
        split = tag("td", one["split"], title=f"{one['problems']} problems, {one['samples']} samples of each")
        body.append(tag("tr", name, split, *(tag("td", share(one[key]), cls="n") for key in known)))
    return tag("table", tag("thead", tag("tr", *head)), tag("tbody", *body))


def peers(view: dict[str, Any]) -> Markup:
    """Who takes part, and what came of it."""
    rows = view["tune"]["by_peer"]
    if not rows:
        return tag("p", "Nobody has joined yet.", cls="empty")
    state = {row["name"]: row["state"] for row in reversed(view["peers"]["rows"])}  # of several starts, the newest
    many = len(rows) > 1
    head = [tag("th", n, scope="col", title=TITLES.get(n), cls="n" if i > 1 else None) for i, n in enumerate(HEADS)]
    body = tag(
        "tbody", *(_peer(row, "present" if row["here"] else state.get(row["name"], "left"), many) for row in rows)
    )
    return tag("table", tag("thead", tag("tr", *head)), body)


def _peer(row: dict[str, Any], state: str, many: bool) -> Markup:
    now = (
        tag("span", "alone", cls="alone-now", title=_absent(row)) if row["alone_now"] and many and row["here"] else None
    )
    why = "; ".join(f"{reason}: {number}" for reason, number in row["refused"].items())
    bar = tag("rect", width=f"{(row['waiting'] or 0.0) * 100:.1f}%", height=4, rx=2)
    meter = join([tag("svg", bar, cls="meter", aria_hidden="true"), share(row["waiting"])])
    lonely = row["alone"] and many
    cells = [
        tag("th", tag("span", row["name"], cls=f"dot {hue(row['slot'])}"), scope="row"),
        tag("td", tag("span", state, cls=f"liveness {state}"), now),
        tag("td", count(row["rounds"]), cls="n"),
        tag("td", decimals(row["reward"]), cls="n"),
        tag("td", decimals(row["mean_reward"]), cls="n"),
        tag("td", count(row["generated"]), cls="n"),
        tag("td", count(row["trained"]), cls="n"),
        tag("td", count(row["external"]), cls="n"),
        tag("td", count(row["alone"]), cls="n lonely" if lonely else "n"),
        tag("td", count(sum(row["refused"].values())), cls="n", title=why or None),
        tag("td", UNKNOWN if row["waiting"] is None else meter, cls="n"),
        tag("td", size(row["sent_bytes"]), cls="n"),
    ]
    return tag("tr", *cells, cls=state)


def _absent(row: dict[str, Any]) -> str:
    return f"nothing came from {', '.join(row['absent'])}" if row["absent"] else "learned from its own completions only"


def health(view: dict[str, Any]) -> Markup:
    """How each peer learns: the figures of its newest update side by side, then what was refused and why."""
    rows = [peer for peer in view["tune"]["by_peer"] if peer["learned"]]
    if not rows:
        return tag("p", "Nobody has learned yet.", cls="empty")
    shown = rows[:MOST_COLUMNS]
    keys = list(dict.fromkeys(key for peer in shown for key in peer["learned"]))
    order = {key: place for place, key in enumerate(FACTS)}
    keys.sort(key=lambda key: order["above_cap_share"] if key.startswith(DROPPED) else order.get(key, len(order)))
    head = [tag("th", "In its newest round", scope="col"), *(tag("th", p["name"], scope="col", cls="n") for p in shown)]
    body = []
    for key in keys:
        name, form = _fact(key)
        told = [form(peer["learned"][key]) if key in peer["learned"] else UNKNOWN for peer in shown]
        body.append(tag("tr", tag("th", name, scope="row", title=key), *(tag("td", text, cls="n") for text in told)))
    if any(peer["stuck"] for peer in shown):
        cells = (tag("td", peer["stuck"] or UNKNOWN, cls="n") for peer in shown)
        body.insert(0, tag("tr", tag("th", "Did not change, because", scope="row"), *cells, cls="stuck"))
    more = f"{len(rows) - MOST_COLUMNS} more are not shown." if len(rows) > MOST_COLUMNS else ""
    table = tag("table", tag("thead", tag("tr", *head)), tag("tbody", *body))
    return join([table, tag("p", more, cls="empty") if more else None])


def _fact(key: str) -> tuple[str, Any]:
    """A figure's plain name, and how it is written."""
    if key.startswith(DROPPED):
        return f"Dropped by the correction, from {key[len(DROPPED) :]}", share
    if key.startswith(SKIPPED):
        return f"Skipped: {key[len(SKIPPED) :].replace('_', ' ')}", count
    if key.startswith(FEEDBACK):
        return f"Feedback: {key[len(FEEDBACK) :].replace('_', ' ')}", count
    return FACTS.get(key, (key.replace("_", " "), figures))


def refused(view: dict[str, Any]) -> Markup:
    """Which records and completions of others were not used, and why."""
    rows = [(peer, why, n) for peer in view["tune"]["by_peer"] for why, n in peer["refused"].items()][:MOST_ROWS]
    if not rows:
        return tag("p", "Nothing of others was refused.", cls="empty")
    head = tag(
        "tr", tag("th", "By", scope="col"), tag("th", "Because it was", scope="col"), tag("th", "Times", cls="n")
    )
    body = [
        tag("tr", tag("th", p["name"], scope="row"), tag("td", why), tag("td", count(n), cls="n")) for p, why, n in rows
    ]
    return tag("table", tag("thead", head), tag("tbody", *body))


def section(view: dict[str, Any]) -> Markup:
    """The card about learning."""
    left = tag("div", health(view), cls="table", tabindex="0", role="region", aria_label="How each peer learns")
    right = tag("div", tag("h3", "Refused"), tag("div", refused(view), cls="table"))
    title = tag("div", tag("h2", "How they learn"), cls="bar")
    return join([title, tag("div", left, right, cls="halves")])


def overview(view: dict[str, Any]) -> Markup:
    """The card with the curves."""
    title = tag("div", tag("h2", "Reward by round"), cls="bar")
    return join([title, tag("div", rewards(view), cls="chart rewards")])


def scoreboard(view: dict[str, Any]) -> Markup:
    """The card with the newest scores."""
    table = tag("div", scores(view), cls="table", tabindex="0", role="region", aria_label="Newest scores")
    return join([tag("div", tag("h2", "Newest scores"), cls="bar"), table])


def nothing(view: dict[str, Any]) -> Markup:
    """What does not exist in post-training, or only there."""
    return Markup("")


CARDS = {"tuned": overview, "scored": scoreboard, "learning": section}
EMPTY = dict.fromkeys(CARDS, nothing)
FRAGMENTS = {
    "progress": progress,
    "tiles": tiles,
    "peers": peers,
    **CARDS,
    **dict.fromkeys(("ways", "routes", "wayshint", "mixing"), nothing),
}
