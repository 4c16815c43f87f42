"""A run without tensors, in virtual time: the shipping lead and peers, with stages that only know their costs.

This is how ``talkoot plan`` predicts a step's time, and how swarms of hundreds of peers are tried on one core.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec

from talkoot.core.fold import Entry, State
from talkoot.core.log import Log
from talkoot.model.config import ModelConfig
from talkoot.run.journal import OBSERVER
from talkoot.train.job import Job
from talkoot.train.leads import begin, lead_for
from talkoot.train.loop import Result, result_of
from talkoot.train.methods import check_fits, check_methods
from talkoot.train.prepare import cut_stages
from talkoot.train.recipe import Recipe
from talkoot.train.records import Committed, PeerState
from talkoot.world.api import Host
from talkoot.world.sim.simulation import Computed, LeadKilled, Simulation

NEVER = 10**9  # of train.checkpoint_every: later than any rehearsal's end


class Rehearsal(msgspec.Struct, frozen=True, kw_only=True):
    """What a rehearsal shows.

    Attributes:
        seconds: virtual time of the whole run.
        step_seconds: virtual time between the last two commits, by step.
        events: messages delivered, sleeps and computations ended.
        busy: share of its time that each peer computed, by name.
        sent_bytes: what each peer sent over the whole run, by name.
        entries: the run's log.
        computations: everything that was computed, where a diary was asked for.
    """

    result: Result
    seconds: float
    step_seconds: float
    events: int
    busy: dict[str, float]
    sent_bytes: dict[str, int]
    entries: list[Entry] = []
    computations: list[Computed] = []


def rehearse(
    recipe: Recipe,
    config: ModelConfig,
    *,
    at_commit: Callable[[Any, int], None] = lambda lead, step: None,
    started: Callable[[Simulation], None] = lambda simulation: None,
    diary: bool = False,
    free_states: bool = False,
) -> Rehearsal:
    """Run ``recipe`` on the model shape ``config`` without computing anything.

    Args:
        recipe, config: what to run.
        at_commit: called with the lead and a step when that step is in the log; it may plan disturbances.
        started: called with the simulation before anything happens in it; it may plan disturbances, too.
        diary: take down every computation.
        free_states: whoever takes a seat has its state at once.
    """
    check_methods(recipe)
    check_fits(recipe, config)
    simulation = Simulation(seed=recipe.seed, network=recipe.network, peer_flops=recipe.swarm.flops, diary=diary)
    entries: list[Entry] = []
    states = [State()]  # the latest
    busy: list[PeerState] = []  # each present peer's account, as of the end of the run
    started(simulation)

    async def main(world: Host) -> None:
        def observe(entry: Entry, state: State) -> None:
            del entries[entry.position - 1 :]  # what a lead wrote last may be lost with it
            entries.append(entry)
            if entry.receipt.op == "run.end":
                busy[:] = states[0]["peers"].present.values()
            states[0] = state
            if entry.receipt.op == "train.commit":
                at_commit(lead, entry.receipt.step)

        OBSERVER.set(observe)
        job, kind = Job(recipe=recipe, config=config, free_states=free_states), lead_for(recipe)
        lead = kind(world, job, cut_stages(config, recipe), Log(None), observer=observe)
        await begin(lead)
        await world.dismiss()

    with suppress(LeadKilled):  # its standby ended the run
        simulation.run(main)
    seconds = entries[-1].receipt.ended
    last_steps = next((e.receipt.read(Committed).steps for e in reversed(entries) if e.receipt.op == "train.commit"), 1)
    commits = [0.0] + [entry.receipt.ended for entry in entries if entry.receipt.op == "train.commit"]
    return Rehearsal(
        result=result_of(states[0], recipe.train.steps),
        seconds=seconds,
        step_seconds=(commits[-1] - commits[-2]) / max(1, last_steps),
        events=simulation.events,
        busy={peer.name: peer.busy_s / seconds for peer in busy},
        sent_bytes={peer.name: peer.sent_bytes for peer in busy},
        entries=entries,
        computations=simulation.computations,
    )
