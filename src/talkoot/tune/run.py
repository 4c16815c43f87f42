"""Running a tune recipe in either world, from a folder that holds everything the run is.

``RUN/`` holds ``log.sqlite`` (the receipts), ``lead.key``, ``blobs/`` (stored states) and ``lock``. The same call on a
folder with an unfinished run continues it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from talkoot.core.errors import TalkootError
from talkoot.core.fold import State, fold
from talkoot.core.log import Log
from talkoot.run.folder import (
    LOG,
    check_same_key,
    check_same_world,
    lead_key,
    next_session_s,
    stop_on_interrupt,
    stop_on_signals,
)
from talkoot.run.journal import Observer, unobserved
from talkoot.run.lock import locked
from talkoot.run.records import Start
from talkoot.tune.job import TuneJob
from talkoot.tune.lead import TuneLead
from talkoot.tune.recipe import FREE, TuneRecipe
from talkoot.world.api import Host
from talkoot.world.blobs import sweep
from talkoot.world.sim.simulation import PEER_FLOPS, Simulation

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
    from talkoot.world.real.host import RealHost
    from talkoot.world.real.peer import Settings

    with _open(recipe, folder, "real") as log:
        if (done := _finished(log, recipe)) is not None:
            return done
        key = lead_key(folder / "lead.key")
        first = next(log.entries(1, 1), None)
        check_same_key(first, key, folder / "lead.key")
        settings = Settings(
            run=first.receipt.run if first else f"{recipe.name}-{os.urandom(4).hex()}",
            name="lead",
            seed=recipe.seed,
            folder=str(folder),
            host=recipe.tune.host,
            network=recipe.network if recipe.tune.emulate else None,
            emulate_flops=None,
        )

        async def main() -> None:
            host = RealHost(settings, key, preload=PRELOAD)
            lead = TuneLead(host, TuneJob(recipe=recipe), log, observer)
            stop_on_signals(lead)
            started(lead)
            try:
                await host.ready()
                await lead.run()
            finally:
                await host.dismiss()
                await host.close()

        try:
            asyncio.run(main())
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None  # the second Ctrl-C
        return _result(fold(log.entries()), recipe)


def run_simulated(
    recipe: TuneRecipe,
    folder: Path | None,
    observer: Observer = unobserved,
    started: Callable[[TuneLead], None] = lambda lead: None,
) -> TuneResult:
    """Run the same job in virtual time, in this process, with real tensors; without a folder, in memory."""
    import torch

    with _open(recipe, folder, "simulated") as log:
        if (done := _finished(log, recipe)) is not None:
            return done
        simulation = Simulation(
            seed=recipe.seed,
            network=recipe.network,
            folder=folder,
            peer_flops=PEER_FLOPS,
            start_s=next_session_s(log),
        )
        threads = torch.get_num_threads()

        async def main(world: Host) -> None:
            lead = TuneLead(world, TuneJob(recipe=recipe), log, observer)
            started(lead)
            with stop_on_interrupt(lead):
                await lead.run()
            await world.dismiss()

        try:
            torch.set_num_threads(recipe.tune.threads)
            simulation.run(main)
        finally:
            torch.set_num_threads(threads)
        return _result(fold(log.entries()), recipe)


@contextmanager
def _open(recipe: TuneRecipe, folder: Path | None, world: str) -> Iterator[Log]:
    """Lock the folder and open the log, of this very run or empty."""
    recipe.check()
    if folder is None:
        log = Log(None)
        try:
            yield log
        finally:
            log.close()
        return
    with locked(folder):
        sweep(folder / "blobs")
        log = Log(folder / LOG)
        try:
            first = next(log.entries(1, 1), None)
            start = first.receipt.read(Start) if first else None
            check_same_world(start, world, folder)
            _check_same_run(start, recipe, folder)
            yield log
        finally:
            log.close()


def _check_same_run(start: Start | None, recipe: TuneRecipe, folder: Path) -> None:
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
    differing = sorted(
        f"{section}.{key}" if isinstance(new[section], dict) else section
        for section in new
        for key in (new[section] if isinstance(new[section], dict) else [""])
        if f"{section}.{key}".rstrip(".") not in FREE and section not in FREE
        if (old.get(section, {}).get(key) if key else old.get(section)) != (new[section][key] if key else new[section])
    )
    if differing:
        raise TalkootError(
            "this folder holds another run",
            where=str(folder),
            why=f"its recipe differs in {', '.join(differing)}",
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
