"""Running a tune recipe in either world, from a folder that holds everything the run is.

``RUN/`` holds ``log.sqlite`` (the receipts), ``lead.key``, ``blobs/`` (stored states) and ``lock``. The same call on a
folder with an unfinished run continues it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from talkoot.core.errors import TalkootError
from talkoot.core.fold import State, fold
from talkoot.core.log import Log
from talkoot.run.journal import Observer, unobserved
from talkoot.run.records import Start
from talkoot.run.worlds import Place, differing, lead_real, lead_simulated, open_log
from talkoot.tune.job import TuneJob
from talkoot.tune.lead import TuneLead
from talkoot.tune.recipe import FREE, TuneRecipe
from talkoot.world.api import Host

PRELOAD = ("torch", "torch._dynamo", "talkoot.tune.tuner")


class TuneResult(msgspec.Struct, frozen=True, kw_only=True):
    """How a run ended.

    Attributes:
        finished: all rounds are done; ``already``: they were before.
        round: rounds that everybody has done.
        peers: each one's account (``talkoot.tune.records.Tuner``), as plain data.
    """

    finished: bool
    already: bool
    round: int
    peers: dict[str, Any]


def run_real(
    recipe: TuneRecipe,
    folder: Path,
    observer: Observer = unobserved,
    started: Callable[[TuneLead], None] = lambda lead: None,
) -> TuneResult:
    """Run with one process per peer on this machine.

    Args:
        recipe: what to run.
        folder: the run's folder; made when absent, continued when not.
        observer: called with every new log entry and the state after it.
        started: called with the lead before the first round (to inject faults, for instance).
    """
    return _run(recipe, folder, observer, started, "real")


def run_simulated(
    recipe: TuneRecipe,
    folder: Path | None,
    observer: Observer = unobserved,
    started: Callable[[TuneLead], None] = lambda lead: None,
) -> TuneResult:
    """Run the same job in virtual time, in this process, with real tensors; without a folder, in memory."""
    return _run(recipe, folder, observer, started, "simulated")


def _run(
    recipe: TuneRecipe, folder: Path | None, observer: Observer, started: Callable[[TuneLead], None], world: str
) -> TuneResult:
    recipe.check()
    real = world == "real"

    def make(host: Host) -> TuneLead:
        lead = TuneLead(host, TuneJob(recipe=recipe), log, observer)
        started(lead)
        return lead

    with open_log(folder, world, lambda start: _check_same_run(start, recipe, folder)) as log:
        if (done := _finished(log, recipe)) is not None:
            return done
        place = Place(
            name=recipe.name,
            seed=recipe.seed,
            folder=folder,
            host=recipe.tune.host,
            network=recipe.network if recipe.tune.emulate or not real else None,
            threads=recipe.tune.threads,
            preload=PRELOAD,
        )
        (lead_real if real else lead_simulated)(place, log, make)
        return _result(fold(log.entries()), recipe)


def _check_same_run(start: Start | None, recipe: TuneRecipe, folder: Path | None) -> None:
    if start is None:
        return
    old, new = start.recipe, recipe.plain()
    if "tune" not in old:
        raise TalkootError(
            "this folder holds a training run",
            where=str(folder),
            why="it was made by `talkoot train`",
            next="name another folder with --out",
        )
    changed = differing(old, new, FREE)
    if changed:
        raise TalkootError(
            "this folder holds another run",
            where=str(folder),
            why=f"its recipe differs in {', '.join(changed)}",
            next="use the run's own recipe to continue it, or --out for a new folder",
        )


def _finished(log: Log, recipe: TuneRecipe) -> TuneResult | None:
    """The result when the log's last word is that all rounds are done; None when there is something to do."""
    count = len(log)
    last = next(log.entries(count, count), None) if count else None
    if last is None or last.receipt.op != "run.end":
        return None
    result = _result(fold(log.entries()), recipe)
    return msgspec.structs.replace(result, already=True) if result.finished else None


def _result(state: State, recipe: TuneRecipe) -> TuneResult:
    tuned = state["tune"]
    rounds = tuned.round
    plain = {name: msgspec.to_builtins(peer, enc_hook=dict) for name, peer in tuned.peers.items()}
    return TuneResult(finished=rounds >= recipe.tune.rounds, already=False, round=rounds, peers=plain)
