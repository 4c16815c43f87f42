"""Whether a folder's run and what is asked of it now are the same run; if not, nothing is touched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from msgspec import convert

from talkoot.core.codec import decode, encode
from talkoot.core.errors import TalkootError
from talkoot.core.fold import State, fold
from talkoot.core.log import Log
from talkoot.run.records import Start
from talkoot.train.recipe import Recipe, Swarm

FREE_SECTIONS = ("name", "swarm", "network", "faults")  # parts of a recipe that may differ when a run is resumed
FREE_RECOVERY = ("ladder", "copies", "guarded", "refresh_every", "failures_per_hour", "watchdog_s")  # exact either way
FREE_MIXING = ("deadline_s", "joiner_donors", "distance")
FREE_KEYS = ("steps", "checkpoint_every", "keep_checkpoints", "evaluate_every", "evaluate_batches", "patience_s")


def started_as(log: Log) -> Start | None:
    """How the log's run was started; None when the log is empty."""
    first = next(log.entries(1, 1), None)
    return None if first is None else first.receipt.read(Start)


def check_same_run(start: Start | None, recipe: Recipe, folder: Path) -> None:
    """Refuse to continue a run under a recipe that would make it another one.

    Raises:
        TalkootError: naming the keys that differ.
    """
    if start is None:
        return
    old, new = start.recipe, decode(encode(recipe), dict[str, Any])  # as the log keeps it: tuples become lists
    differing = [
        f"{section}.{key}"
        for section in new
        if section not in FREE_SECTIONS and isinstance(new[section], dict) and section in old
        for key in new[section]
        if old[section].get(key) != new[section][key]
        and key not in {"train": FREE_KEYS, "recovery": FREE_RECOVERY, "mixing": FREE_MIXING}.get(section, ())
    ]
    if old["seed"] != new["seed"]:
        differing.append("seed")
    if recipe.mixing.rule != "ddp" and _replicas(old["swarm"]) != _replicas(new["swarm"]):
        differing.append("swarm (replicas share the data by their number and names)")
    if differing:
        raise TalkootError(
            "this folder holds another run",
            where=str(folder),
            why=f"its recipe differs in {', '.join(differing)}",
            next="use the run's own recipe to continue it, or --out for a new folder",
        )


def _replicas(swarm: dict[str, Any]) -> list[str]:
    return list(convert(swarm, Swarm).peers)


def finished(log: Log, steps: int) -> State | None:
    """The log's state when its last word is that all ``steps`` are done; None when there is something to do."""
    count = len(log)
    last = next(log.entries(count, count), None) if count else None
    if last is None or last.receipt.op != "run.end":
        return None
    state = fold(log.entries())
    return state if state["run"].ended == "done" and state["train"].step >= steps else None


def check_same_tokenizer(start: Start | None, digest: str, folder: Path) -> None:
    """Refuse to continue a run with another tokenizer than the one it was started with.

    Raises:
        TalkootError: the two differ.
    """
    if start is not None and start.tokenizer != digest:
        raise TalkootError(
            "this tokenizer is not the one that the run was started with",
            where=str(folder),
            why=f"its digest is {digest[:8]}, the run's log names {start.tokenizer[:8]}",
            next="restore the run's own tokenizer folder from a backup, or start a new run with --out",
        )


def check_same_text(start: Start | None, digest: str, recipe: Recipe) -> None:
    """Refuse to continue a run on text that is not what it was started with.

    Args:
        digest: of the text's tokens as they are now.

    Raises:
        TalkootError: the two differ.
    """
    if start is not None and start.tokens != digest:
        raise TalkootError(
            "the text has changed since this run was started",
            where=recipe.data.source,
            why=f"its tokens' digest is {digest[:8]}, the run's log names {start.tokens[:8]}",
            next="restore the text as it was, or start a new run with --out",
        )
