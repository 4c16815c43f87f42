"""What the recovery bench takes for granted, checked with real tensors in the simulated world.

That exact rungs leave no trace, by equal state hashes; and that training in one process through a history of lost
stages is what a swarm does that loses them, by equal losses.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import msgspec

from talkoot.bench.peer_lost_stages import Setting, Way, follow
from talkoot.core.fold import Entry
from talkoot.core.log import Log
from talkoot.data import TokenFile
from talkoot.model.tokenizer import Tokenizer
from talkoot.run.records import Gone
from talkoot.train.job import Job
from talkoot.train.lead import Lead
from talkoot.train.loop import Result, train
from talkoot.train.prepare import cut_stages, open_windows, prepare_tokens
from talkoot.train.recipe import Data, Model, Recipe, Recovery, Swarm, Train
from talkoot.train.records import Committed
from talkoot.world.api import Host
from talkoot.world.faults import Fault
from talkoot.world.sim.simulation import Simulation

STEPS = 6
PERIOD = 2  # of snapshots, which replaying begins at
STRUCK = ((2, 2, "backward"), (5, 4, "forward"))  # stage, step and phase of each death


def recipe_of(setting: Setting, recovery: Recovery, *, struck: bool, swapped: bool = False) -> Recipe:
    """The small model's run in a ring of one peer per stage."""
    swarm = Swarm(
        layout="ring",
        groups=(1,) * len(setting.cut),
        cut=(0, *(setting.blocks,) * setting.relays),
    )
    names = list(swarm.peers)
    return Recipe(
        data=Data(tokenizer="bytes"),
        model=Model(depth=setting.config.layers, context=setting.context, device="cpu"),
        train=Train(
            steps=STEPS,
            microbatches=setting.microbatches,
            microbatch_size=setting.samples,
            planner="swapped" if swapped else "straight",
            learning_rate=2e-3,
            schedule="constant-decay",
            decay=0.0,
            warmup=3,
            checkpoint_every=PERIOD if "replay" in recovery.ladder else 0,
            evaluate_every=0,
        ),
        recovery=recovery,
        swarm=swarm,
        faults=tuple(Fault(peer=names[s], step=step, phase=phase) for s, step, phase in STRUCK) if struck else (),
    )


@cache
def _text() -> TokenFile:
    """The bundled text as the runtime packs it; the folder goes with the process."""
    folder = Path(_folder().name)
    return prepare_tokens(Recipe(data=Data(tokenizer="bytes")), Tokenizer.bytes(), folder)


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="talkoot-bench-")


def swarm_run(setting: Setting, recipe: Recipe) -> tuple[Result, list[Entry]]:
    """Train in virtual time with real tensors."""
    tokens = _text()
    job = Job(recipe=recipe, config=setting.config, tokens=str(tokens.path), tokens_digest=tokens.digest)
    simulation = Simulation(seed=recipe.seed, network=recipe.network, peer_flops=recipe.swarm.flops)
    log = Log(None)

    async def main(world: Host) -> Result:
        result = await train(Lead(world, job, cut_stages(job.config, recipe), log))
        await world.dismiss()
        return result

    return simulation.run(main), list(log.entries())


def _small(setting: Setting) -> Setting:
    return msgspec.structs.replace(setting, vocabulary=Tokenizer.bytes().vocab_size)


def exact_rungs(setting: Setting, ladders: Sequence[tuple[str, ...]], streams: Sequence[str]) -> dict[str, bool]:
    """For each ladder, whether a run that loses two stages ends with the state of one that loses none."""
    setting, equal = _small(setting), dict[str, bool]()
    for stream in streams:
        rounded = Recovery(stream="bfloat16" if stream == "bfloat16" else "float32")
        calm, _ = swarm_run(setting, recipe_of(setting, rounded, struck=False))
        for ladder in ladders:
            recovery = msgspec.structs.replace(rounded, ladder=ladder)
            hurt, entries = swarm_run(setting, recipe_of(setting, recovery, struck=True))
            gone = sum(entry.receipt.op == "peer.lost" for entry in entries)
            equal[f"{ladder[0]}, {stream}"] = gone == len(STRUCK) and hurt.state_hash == calm.state_hash != ""
    return equal


def same_trajectory(setting: Setting, recovery: Recovery, *, swapped: bool) -> bool:
    """Whether the bench's trainer has the very losses of a swarm that loses two stages and blends them."""
    setting = _small(setting)
    recipe = recipe_of(setting, recovery, struck=True, swapped=swapped)
    _, entries = swarm_run(setting, recipe)
    losses = [entry.receipt.read(Committed).losses for entry in entries if entry.receipt.op == "train.commit"]
    homes = recipe.swarm.peers
    lost = {
        entry.receipt.step: (homes[entry.receipt.read(Gone).name],)
        for entry in entries
        if entry.receipt.op == "peer.lost"
    }
    windows = open_windows(recipe, str(_text().path))
    way = Way(swapped=swapped, recovery=recovery)
    return (
        len(lost) == len(STRUCK)
        and list(follow(setting, recipe.train, way, recipe.seed, lost, windows=windows).losses) == losses
    )
