"""Leading a run whose peers work by themselves, in either world: one process per peer, or all in virtual time."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import msgspec

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
from talkoot.run.lock import locked
from talkoot.run.records import Start
from talkoot.world.api import Host
from talkoot.world.blobs import sweep
from talkoot.world.links import Network
from talkoot.world.sim.simulation import PEER_FLOPS, Simulation


class Leads(Protocol):
    """A lead that can be run, and asked to stop."""

    stop_requested: bool

    async def run(self) -> None:
        """To the end."""
        ...


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where a run takes place.

    Attributes:
        name: what its id begins with.
        seed: of everything that is random.
        folder: of the run; None = in memory, in virtual time only.
        host: address that peers listen on.
        network: the links of a rehearsal; for real, those that real ones are held back to; None = not at all.
        threads: compute threads of a rehearsal.
        preload: modules that every peer process finds loaded.
    """

    name: str
    seed: int
    folder: Path | None
    host: str = "127.0.0.1"
    network: Network | None = None
    threads: int = 1
    preload: tuple[str, ...] = ()


@contextmanager
def open_log(folder: Path | None, world: str, check: Callable[[Start | None], None]) -> Iterator[Log]:
    """Lock a run's folder and open its log.

    Args:
        check: refuses to go on with what the log holds (None: it is empty).
    """
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
            check(start)
            yield log
        finally:
            log.close()


def lead_real(place: Place, log: Log, make: Callable[[Host], Leads]) -> None:
    """Run with one process per peer on this machine.

    Args:
        make: the lead, in its world.

    Raises:
        KeyboardInterrupt: Ctrl-C came twice.
    """
    from talkoot.world.real.host import RealHost
    from talkoot.world.real.peer import Settings

    if place.folder is None:
        raise ValueError("a real run needs a folder")
    key = lead_key(place.folder / "lead.key")
    first = next(log.entries(1, 1), None)
    check_same_key(first, key, place.folder / "lead.key")
    settings = Settings(
        run=first.receipt.run if first else f"{place.name}-{os.urandom(4).hex()}",
        name="lead",
        seed=place.seed,
        folder=str(place.folder),
        host=place.host,
        network=place.network,
        emulate_flops=None,
    )

    async def main() -> None:
        host = RealHost(settings, key, preload=place.preload)
        lead = make(host)
        stop_on_signals(lead)
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


def lead_simulated(place: Place, log: Log, make: Callable[[Host], Leads]) -> None:
    """Run the same in virtual time, in this process, with real tensors."""
    import torch

    simulation = Simulation(
        seed=place.seed,
        network=place.network,
        folder=place.folder,
        peer_flops=PEER_FLOPS,
        start_s=next_session_s(log),
    )
    threads = torch.get_num_threads()

    async def main(world: Host) -> None:
        lead = make(world)
        with stop_on_interrupt(lead):
            await lead.run()
        await world.dismiss()

    try:
        torch.set_num_threads(place.threads)
        simulation.run(main)
    finally:
        torch.set_num_threads(threads)


def differing(old: dict[str, object], new: dict[str, object], free: Sequence[str]) -> list[str]:
    """Keys (``section.key``) in which two recipes differ and must not; ``free`` ones, or whole sections, may."""
    found: list[str] = []
    for section, value in new.items():
        before = old.get(section)
        if section in free:
            continue
        if isinstance(value, dict) and isinstance(before, dict):
            keys = [key for key in value if f"{section}.{key}" not in free and before.get(key) != value[key]]
            found += [f"{section}.{key}" for key in keys]
        elif before != value:
            found.append(section)
    return sorted(found)
