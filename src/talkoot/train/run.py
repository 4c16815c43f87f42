"""Running a recipe in either world, from a folder that holds everything the run is.

``RUN/`` holds ``log.sqlite`` (the receipts), ``lead.key``, ``tokenizer/``, ``tokens/``, ``checkpoints/``, ``blobs/``
and ``lock``. The same call on a folder with an unfinished run continues it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from talkoot.core.fold import fold
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
from talkoot.run.journal import OBSERVER, Observer, unobserved
from talkoot.run.lock import locked
from talkoot.train.checkpoint import FOLDER as CHECKPOINTS
from talkoot.train.job import Job
from talkoot.train.leads import AnyLead, begin, lead_for
from talkoot.train.loop import Result, result_of
from talkoot.train.methods import check_fits, check_methods
from talkoot.train.prepare import cut_stages, model_config, open_windows, prepare_tokenizer, prepare_tokens
from talkoot.train.recipe import Recipe
from talkoot.train.resume import (
    check_same_run,
    check_same_text,
    check_same_tokenizer,
    finished,
    started_as,
)
from talkoot.train.succession import Superseded
from talkoot.world.api import Host
from talkoot.world.blobs import sweep
from talkoot.world.sim.simulation import LeadKilled, Simulation

# torch.optim imports torch._dynamo at its first use: 1.5 s that every peer would spend, and a newcomer at once.
PRELOAD = ("torch", "torch._dynamo", "talkoot.train.tensors")


def run_real(
    recipe: Recipe,
    folder: Path,
    observer: Observer = unobserved,
    started: Callable[[AnyLead], None] = lambda lead: None,
) -> Result:
    """Run with one process per peer on this machine.

    Args:
        recipe: what to run.
        folder: the run's folder; made when absent, continued when not.
        observer: called with every new log entry and the state after it.
        started: called with the lead before the first step (to inject faults, for instance).
    """
    from talkoot.world.real.host import RealHost
    from talkoot.world.real.peer import Settings

    with _open(recipe, folder, "real") as (log, job, held_out, tokenizer):
        if (state := finished(log, recipe.train.steps)) is not None:
            return result_of(state, recipe.train.steps, already=True)
        key = lead_key(folder / "lead.key")
        first = next(log.entries(1, 1), None)
        check_same_key(first, key, folder / "lead.key")
        run = first.receipt.run if first else f"{recipe.name}-{os.urandom(4).hex()}"
        swarm = recipe.swarm
        settings = Settings(
            run=run,
            name="lead",
            seed=recipe.seed,
            folder=str(folder),
            host=swarm.host,
            network=recipe.network if swarm.emulate else None,
            emulate_flops=swarm.flops if swarm.emulate else None,
        )

        async def main() -> Result:
            host = RealHost(settings, key, preload=PRELOAD)
            lead = _lead(host, job, recipe, log, folder, held_out, tokenizer, observer)
            stop_on_signals(lead)
            started(lead)
            try:
                await host.ready()
                return await begin(lead)
            except Superseded:
                host.abandon()
                raise
            finally:
                await host.dismiss()
                await host.close()

        try:
            return asyncio.run(main())
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None  # the second Ctrl-C


def run_simulated(
    recipe: Recipe,
    folder: Path,
    observer: Observer = unobserved,
    started: Callable[[AnyLead], None] = lambda lead: None,
) -> Result:
    """Run the same job in virtual time, in this process, with real tensors; see :func:`run_real`."""
    import torch

    with _open(recipe, folder, "simulated") as (log, job, held_out, tokenizer):
        if (state := finished(log, recipe.train.steps)) is not None:
            return result_of(state, recipe.train.steps, already=True)
        simulation = Simulation(
            seed=recipe.seed,
            network=recipe.network,
            folder=folder,
            peer_flops=recipe.swarm.flops,
            start_s=next_session_s(log),
        )
        threads = torch.get_num_threads()

        async def main(world: Host) -> Result:
            OBSERVER.set(observer)
            lead = _lead(world, job, recipe, log, folder, held_out, tokenizer, observer)
            started(lead)
            with stop_on_interrupt(lead):
                result = await begin(lead)
            await world.dismiss()
            return result

        try:
            torch.set_num_threads(recipe.swarm.threads)
            return simulation.run(main)
        except LeadKilled:  # what its standby made of the run stands in the log
            return _result_in(folder, recipe.train.steps)
        finally:
            torch.set_num_threads(threads)


def _result_in(folder: Path, steps: int) -> Result:
    log = Log(folder / LOG, readonly=True)
    try:
        return result_of(fold(log.entries()), steps)
    finally:
        log.close()


def _lead(
    world: Host,
    job: Job,
    recipe: Recipe,
    log: Log,
    folder: Path,
    held_out: int,
    tokenizer: str,
    observer: Observer,
) -> AnyLead:
    stages = cut_stages(job.config, recipe)
    return lead_for(recipe)(world, job, stages, log, folder, held_out, tokenizer, observer)


@contextmanager
def _open(recipe: Recipe, folder: Path, world: str) -> Iterator[tuple[Log, Job, int, str]]:
    """Lock the folder, prepare what is missing, and open the log."""
    check_methods(recipe)
    with locked(folder):
        for part in (folder / "blobs", folder / CHECKPOINTS):
            sweep(part)
        log = Log(folder / LOG)
        try:
            start = started_as(log)
            check_same_world(start, world, folder)
            check_same_run(start, recipe, folder)
            tokenizer = prepare_tokenizer(recipe, folder, begun=start is not None)
            check_same_tokenizer(start, tokenizer.digest(), folder)
            tokens = prepare_tokens(recipe, tokenizer, folder)
            check_same_text(start, tokens.digest, recipe)
            config = model_config(recipe, tokenizer)
            check_fits(recipe, config)
            windows = open_windows(recipe, str(tokens.path), tokens.digest)
            held_out = min(recipe.train.evaluate_batches, windows.num_held_out_batches)
            job = Job(
                recipe=recipe,
                config=config,
                tokens=str(tokens.path),
                tokens_digest=tokens.digest,
                held_out_batches=held_out,
            )
            yield log, job, held_out, tokenizer.digest()
        finally:
            log.close()
