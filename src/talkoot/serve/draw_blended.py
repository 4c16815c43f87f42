"""Runs that make experts, drawn: the plan, losses by step, who knows what, and what came of it. From view to HTML."""

from __future__ import annotations

from typing import Any

from talkoot.serve.blended import perplexity
from talkoot.serve.draw import hue, step_labels, ticks
from talkoot.serve.markup import Markup, join, tag
from talkoot.serve.words import UNKNOWN, count, decimals, duration, figures

NAMED = 6  # domains in the line below the run's name
HEAT = (0.02, 0.1, 0.3, 0.8)  # nats per token above the row's best up to which a cell is shaded, ever lighter
TRAINED = {"mlp": "feed-forward layers trained", "all": "all weights trained"}
KINDS = {
    "general": "general models",
    "trial": "trials",
    "expert": "experts",
    "count": "statistics",
    "score": "comparisons",
}


def facts(view: dict[str, Any]) -> list[str]:
    """The line below the run's name."""
    told = view["blend"]
    if told["gathered"]:
        return ["a blend of experts that were trained elsewhere"]
    names = ", ".join(told["names"][:NAMED])
    more = told["domains"] - min(len(told["names"]), NAMED)
    listed = f": {names}{f' and {more} more' if more else ''}" if names else ""
    return [
        f"{told['domains']} domains{listed}",
        f"{told['allocation']} allocation" if told["allocation"] else "",
        TRAINED.get(told["trained"], ""),
        f"{', '.join(told['sizes'])} models" if told["sizes"] else "",
    ]


def progress(view: dict[str, Any]) -> Markup:
    """How far the run is."""
    told, done = view["blend"], view["progress"]
    if told["gathered"]:
        return tag("p", tag("b", "Nothing is trained here"), tag("span", "experts are added and removed"))
    jobs = told["jobs"]
    words = f"{jobs['done']:,} of {jobs['all']:,} jobs" + ("" if told["planned"] else ", then experts are planned")
    right = [*(f"{KINDS[one['kind']]} {one['done']}/{one['all']}" for one in jobs["kinds"]), duration(done["elapsed"])]
    if told["planned"] and done["eta"]:
        right.append(f"about {duration(done['eta'])} of training to go")
    bar = tag("progress", value=f"{jobs['share'] or 0.0:.4f}", max="1", aria_label="Jobs done")
    return join([tag("p", tag("b", words), tag("span", " · ".join(right))), bar])


def tiles(view: dict[str, Any]) -> Markup:
    """The headline numbers."""
    told, peers = view["blend"], view["peers"]
    if told["gathered"]:
        return Markup("")
    over = view["session"]["status"] in ("done", "interrupted", "stopped")
    kinds = {one["kind"]: one for one in told["jobs"]["kinds"]}
    trained = kinds.get("expert", {"done": 0})["done"]
    off = told["off"]
    compute = f"operations, {100 * off:+.2f} % of equal" if off is not None else "not planned yet"
    who = peers["joined"] if over else peers["present"]
    items = [
        ("Experts trained", count(trained), f"of {told['domains']}"),
        ("Best own perplexity", *_own(told["best"])),
        ("Worst own perplexity", *_own(told["worst"])),
        ("Planned compute", count(told["flops"]), compute),
        ("Tokens", count(told["tokens"]), f"in {view['progress']['step']:,} steps"),
        (
            "Peers that took part" if over else "Peers present",
            count(who),
            f"{peers['lost']} lost" if peers["lost"] else "none lost",
        ),
    ]
    return join(
        tag("div", tag("dt", name), tag("dd", value), tag("dd", note, cls="note"), cls="tile")
        for name, value, note in items
    )


def _own(one: dict[str, Any] | None) -> tuple[str, str]:
    return (_perplexity(one["loss"]), f"{one['domain']}, held out") if one else (UNKNOWN, "not judged yet")


def _perplexity(loss: float | None) -> str:
    return figures(perplexity(loss))


def losses(view: dict[str, Any]) -> Markup:
    """A line per job, its training loss by its steps; dashes are general models."""
    curves = [one for one in view["blend"]["curves"] if one["step"]]
    values = [value for one in curves for value in one["loss"] if value is not None]
    if not values:
        return tag("p", "No job has reported a loss yet. The curves begin with the first slice.", cls="empty")
    right, low, high = float(max(one["step"][-1] for one in curves)), min(values), max(values)
    pad = (high - low) * 0.05 or 0.1
    low, high = low - pad, high + pad

    def up(loss: float) -> float:
        return 100 * (high - loss) / (high - low)

    levels = ticks(low, high, 6)
    paths = [
        tag("path", d="".join(f"M0,{up(y):.2f}H100" for y in levels), cls="grid", vector_effect="non-scaling-stroke")
    ]
    for one in curves:
        pairs = [(x, y) for x, y in zip(one["step"], one["loss"], strict=True) if y is not None]
        points = [f"{100 * x / right:.2f},{up(y):.2f}" for x, y in pairs]
        d = "M" + "L".join(points) if len(points) > 1 else f"M{points[0]}h0" if points else "M0,0"
        paths.append(tag("path", d=d, cls=_line(one, single=len(points) == 1), vector_effect="non-scaling-stroke"))
    ys = [tag("text", f"{y:.4g}", y=f"{up(y):.1f}%", dy="0.32em") for y in levels]
    xs = step_labels([mark for mark in ticks(0.0, right, 6) if mark == int(mark)], right)
    words = f"Training loss by step, {len(curves)} jobs, between {min(values):.3g} and {max(values):.3g}"
    plot = tag("svg", *paths, viewbox="0 0 100 100", preserve="none", cls="plot", role="img", aria_label=words)
    axes = [tag("svg", *texts, cls=cls, aria_hidden="true") for texts, cls in ((ys, "ys"), (xs, "xs"))]
    key = [tag("li", one["name"], cls=_line(one)) for one in curves]
    chart = tag("div", axes[0], plot, axes[1], cls="static-chart")
    return join([chart, tag("ul", *key, cls="key peers", aria_label="Lines: mean training loss of a slice")])


def _line(one: dict[str, Any], *, single: bool = False) -> str:
    sort = "dots" if single else "earned" if one["kind"] == "expert" else "scored"
    return f"{sort} {hue(one['slot'])}"


def plan(view: dict[str, Any]) -> Markup:
    """Who gets what: a row per domain."""
    told = view["blend"]
    names = ["Domain", "Difficulty", "Model", "State", "Peer", "Steps", "Operations", "Validation loss"]
    head = [tag("th", name, scope="col", cls="n" if i > 4 else None) for i, name in enumerate(names)]
    body = []
    for row in told["rows"]:
        of = f" of {row['of']:,}" if row["of"] is not None and row["of"] != row["steps"] else ""
        cells = [
            tag("th", tag("span", row["domain"], cls=f"dot {hue(row['slot'])}"), scope="row"),
            tag("td", row["difficulty"] or "to be tried"),
            tag("td", row["size"] or UNKNOWN),
            tag("td", row["state"]),
            tag("td", row["peer"] or UNKNOWN),
            tag("td", f"{row['steps']:,}{of}", cls="n"),
            tag("td", count(row["flops"]), cls="n"),
            tag("td", decimals(row["loss"]), cls="n"),
        ]
        body.append(tag("tr", *cells))
    if not body:
        return tag("p", "The recipe names no domain that could be read.", cls="empty")
    more = told["domains"] - len(body)
    rest = tag("p", f"{more} more are not listed.", cls="empty") if more > 0 else None
    return join([tag("table", tag("thead", tag("tr", *head)), tag("tbody", *body)), rest])


def cross(view: dict[str, Any]) -> Markup:
    """Perplexity of every expert (column) on every domain's held-out text (row)."""
    told = view["blend"]["cross"]
    if not told["rows"]:
        return tag("p", "Experts are compared as soon as all of them are trained.", cls="empty")
    head = [tag("th", "Text", scope="col"), *(tag("th", name, scope="col", cls="n") for name in told["columns"])]
    body = []
    for row in told["rows"]:
        pairs = zip(told["columns"], row["losses"], strict=True)
        cells = [tag("td", _perplexity(loss), cls=_heat(row, name, loss), title=_cell(loss)) for name, loss in pairs]
        body.append(tag("tr", tag("th", row["domain"], scope="row"), *cells))
    more = f"{told['more']} more experts are not shown." if told["more"] else ""
    table = tag("table", tag("thead", tag("tr", *head)), tag("tbody", *body), cls="cross")
    return join([table, tag("p", more, cls="empty") if more else None])


def _cell(loss: float | None) -> str | None:
    return None if loss is None else f"{decimals(loss)} nats per token"


def _heat(row: dict[str, Any], name: str, loss: float | None) -> str:
    """Darker is nearer to the row's best; ``best`` is it, ``own`` the domain's own expert."""
    if loss is None or row["low"] is None:
        return "n"
    above = loss - row["low"]
    level = next((len(HEAT) - i for i, limit in enumerate(HEAT) if above <= limit), 0)
    return " ".join(filter(None, ("n", f"heat{level}", "best" * (above <= 0), "own" * (name == row["domain"]))))


def peers(view: dict[str, Any]) -> Markup:
    """Who takes part, and what each did."""
    rows = view["blend"]["by_peer"]
    if not rows:
        return tag("p", "Nobody has joined yet.", cls="empty")
    state = {row["name"]: row["state"] for row in reversed(view["peers"]["rows"])}  # of several starts, the newest
    names = ["Peer", "State", "Works on", "Experts", "Jobs", "Steps", "Computed"]
    head = [tag("th", name, scope="col", cls="n" if i > 3 else None) for i, name in enumerate(names)]
    body = []
    for row in rows:
        now = "present" if row["here"] else state.get(row["name"], "left")
        cells = [
            tag("th", row["name"], scope="row"),
            tag("td", tag("span", now, cls=f"liveness {now}")),
            tag("td", (row["doing"] if row["here"] else "") or UNKNOWN),
            tag("td", ", ".join(row["experts"]) or UNKNOWN),
            tag("td", count(row["done"]), cls="n"),
            tag("td", count(row["steps"]), cls="n"),
            tag("td", duration(row["busy_s"]), cls="n"),
        ]
        body.append(tag("tr", *cells, cls=now))
    return tag("table", tag("thead", tag("tr", *head)), tag("tbody", *body))


def afterwards(view: dict[str, Any]) -> Markup:
    """What was done to the blend: its router, its mixtures, experts that came and went."""
    told = view["blend"]["after"]
    parts: list[Markup] = []
    if router := told["router"]:
        line = f"{router['rule']}, {router['domains']} domains, version {router['version']}"
        rows = [
            tag(
                "div",
                tag("dt", one["rule"] + (" (used)" if one["rule"] == router["rule"] else "")),
                tag("dd", f"{100 * one['share']:.1f} %" if one["share"] is not None else UNKNOWN),
            )
            for one in router["accuracy"]
        ]
        hint = tag("p", "Right on held-out prompts, by rule:", cls="hint") if rows else None
        parts += [tag("h3", "Router"), tag("p", line), join([hint, tag("dl", *rows, cls="kinds") if rows else None])]
    if told["mixtures"]:
        parts += [tag("h3", "Mixtures"), tag("ul", *(tag("li", _mixture(one)) for one in told["mixtures"]))]
    if told["changes"]:
        rows = [
            tag("li", tag("b", one["name"]), f" {one['change']}", f" ({one['note']})" if one["note"] else "")
            for one in told["changes"]
        ]
        parts += [tag("h3", "Experts that came and went"), tag("ul", *rows)]
    if not parts:
        return tag("p", "Nothing yet. Routers, mixtures and further experts are listed here.", cls="empty")
    return tag("div", *parts, cls="afterwards")


def _mixture(one: dict[str, Any]) -> str:
    exact = "forced to one expert it is that expert to the bit" if one["exact"] else "it only resembles its experts"
    what = f"{one['experts']} experts as {one['format']}, gate {one['gate']}"
    return f"{what}, {count(one['parameters'])} parameters: {exact}"


def _table(title: str, content: Markup) -> Markup:
    box = tag("div", content, cls="table", tabindex="0", role="region", aria_label=title)
    return join([tag("div", tag("h2", title), cls="bar"), box])


def overview(view: dict[str, Any]) -> Markup:
    """The card with the curves."""
    if view["blend"]["gathered"]:
        return Markup("")
    return join(
        [tag("div", tag("h2", "Training loss of each job"), cls="bar"), tag("div", losses(view), cls="chart rewards")]
    )


def assigned(view: dict[str, Any]) -> Markup:
    """The card with the plan."""
    if view["blend"]["gathered"]:
        return Markup("")
    return _table("Who gets what", plan(view))


def known(view: dict[str, Any]) -> Markup:
    """The card with the cross table."""
    if view["blend"]["gathered"]:
        return Markup("")
    text = "Rows are held-out texts, columns are experts. Darker is nearer to the row's best, which is bold"
    hint = tag("p", f"{text}; a domain's own expert is underlined.", cls="hint")
    return join([_table("Perplexity on held-out text", cross(view)), hint if view["blend"]["cross"]["rows"] else None])


def made(view: dict[str, Any]) -> Markup:
    """The card about what came afterwards."""
    return join([tag("div", tag("h2", "What was made of it"), cls="bar"), afterwards(view)])


def nothing(view: dict[str, Any]) -> Markup:
    """What does not exist in runs of this kind, or only there."""
    return Markup("")


CARDS = {"blended": overview, "crossed": known, "assigned": assigned, "made": made}
EMPTY = dict.fromkeys(CARDS, nothing)
FRAGMENTS = {
    "progress": progress,
    "tiles": tiles,
    "peers": peers,
    **CARDS,
    **dict.fromkeys(("ways", "routes", "wayshint", "mixing", "laststeps"), nothing),
}
