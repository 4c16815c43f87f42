"""Parts of the view that need no memory: facts of the run, its pace, the last step's routes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from talkoot.core.ids import short
from talkoot.core.receipt import Receipt
from talkoot.run.records import Start
from talkoot.serve.series import Span, tidy
from talkoot.serve.words import UNKNOWN, clean, name_of
from talkoot.train.recipe import peer_names
from talkoot.train.records import Committed

MAX_RECIPE_ROWS = 80
MAX_STAGES = 64


def world_of(world: str) -> str:
    """``simulated`` or ``real``; anything else is called unknown rather than believed."""
    return world if world in ("simulated", "real") else "unknown"


def run_facts(receipt: Receipt, facts: Start) -> dict[str, Any]:
    """What the run is."""
    recipe = facts.recipe
    stages = [[int(first), int(last)] for first, last in facts.stages[:MAX_STAGES]]
    return {
        "name": name_of(str(recipe.get("name", "run"))),
        "id": clean(receipt.run, 64),
        "lead": short(receipt.peer),
        "world": world_of(facts.world),
        "talkoot": clean(facts.talkoot, 32),
        "model": _model(_section(recipe, "model")),
        "data": clean(str(_section(recipe, "data").get("source", "")), 80),
        "parameters": facts.parameters,
        "stages": stages,
        "steps": _positive(_section(recipe, "train").get("steps")),
        "recipe": list(_flat(recipe))[:MAX_RECIPE_ROWS],
    }


def _model(section: dict[str, Any]) -> str:
    if section.get("load"):
        return clean(str(section["load"]).rstrip("/").rpartition("/")[2], 60)
    return f"depth {clean(str(section.get('depth', '?')), 12)}"


def _section(recipe: dict[str, Any], name: str) -> dict[str, Any]:
    section = recipe.get(name)
    return section if isinstance(section, dict) else {}


def _positive(value: Any) -> int | None:
    return value if isinstance(value, int) and 0 < value < 2**53 else None


def _flat(tree: dict[str, Any], prefix: str = "", depth: int = 0) -> Any:
    for key, value in list(tree.items())[:MAX_RECIPE_ROWS]:
        if isinstance(value, dict) and value and depth < 4:
            yield from _flat(value, f"{prefix}{key}.", depth + 1)
        else:
            yield [clean(f"{prefix}{key}", 80), clean(_value(value), 120)]


def _value(value: Any) -> str:
    if value is None or value in ({}, [], ()):
        return UNKNOWN
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(_value(item) for item in value[:20])
    return f"{value:g}" if isinstance(value, float) else str(value)


def speeds(recipe: dict[str, Any]) -> dict[str, float]:
    """Relative speed by peer name, where the recipe states any."""
    swarm = _section(recipe, "swarm")
    stated = swarm.get("speeds")
    size = (_positive(swarm.get("stages")) or 0) * (_positive(swarm.get("replicas")) or 0)
    if not isinstance(stated, list | tuple) or not stated or not 0 < size <= 4096:
        return {}
    known = [float(speed) if isinstance(speed, int | float) else 1.0 for speed in stated]
    return dict(zip(peer_names(size), known + [1.0] * size, strict=False))


def pace(
    recent: Sequence[tuple[float, int, int]], step: int, steps: int | None, status: str
) -> dict[str, float | None]:
    """Tokens per second, seconds per step and seconds to go, from the latest commits."""
    speed = per_step = left = None
    if len(recent) > 1 and recent[-1][0] > recent[0][0] and recent[-1][2] > recent[0][2]:
        seconds = recent[-1][0] - recent[0][0]
        speed = (recent[-1][1] - recent[0][1]) / seconds
        per_step = seconds / (recent[-1][2] - recent[0][2])
        if steps is not None and status == "running":
            left = max(steps - step, 0) * per_step
    return {"tokens_per_s": tidy(speed), "seconds_per_step": tidy(per_step), "eta": tidy(left)}


def routes(step: int, facts: Committed, limit: int) -> dict[str, Any]:
    """Which peers each microbatch passed through; microbatches that took the same way share one entry."""
    ways: dict[tuple[str, ...], list[int]] = {}
    for index, path in enumerate(facts.paths):
        way = tuple(name_of(name) for name in path[:MAX_STAGES])
        if way in ways or len(ways) < limit:
            ways.setdefault(way, []).append(index)
    paths = [{"peers": list(way), "microbatches": taken[:256]} for way, taken in ways.items()]
    return {"step": step, "paths": paths, "microbatches": len(facts.paths)}


def band(losses: Sequence[float]) -> tuple[float | None, float | None]:
    """The smallest and the largest of the replicas' losses that are numbers."""
    known = [loss for loss in losses if math.isfinite(loss)]
    return (min(known), max(known)) if known else (None, None)


def span(work: Span) -> list[float | None]:
    """A span as ``[start, end, busy share, undone, last step]``."""
    length = work.end - work.start
    busy = min(work.busy / length, 1.0) if length > 0 and math.isfinite(work.busy) else 0.0
    return [moment(work.start), moment(work.end), round(busy, 2), int(work.void), work.step]


def moment(seconds: float) -> float:
    """A time on the run's clock, to the millisecond."""
    return round(seconds, 3)


def interval(start: float, end: float | None, now: float) -> list[float | None]:
    """An interval of presence; an open one ends now."""
    return [moment(start), moment(now if end is None else end)]
