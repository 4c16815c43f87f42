"""Speed of the simulated world: events per second of a training run without tensors, and how it grows with peers."""

from __future__ import annotations

import time

from talkoot.bench.outcome import Bar, Options, Outcome, Row
from talkoot.model.config import ModelConfig
from talkoot.train.recipe import Model, Recipe, Swarm, Train
from talkoot.train.rehearse import rehearse
from talkoot.world.links import Link, Network

CLAIM = "A swarm of 20 to 200 peers rehearses on one core"
BAR = 20_000
GOAL = 50_000


def recipe(peers: int, steps: int, seed: int) -> Recipe:
    """``peers`` peers in stages of five replicas, eight microbatches per replica."""
    replicas = 5
    return Recipe(
        seed=seed,
        model=Model(depth=max(4, peers // replicas), context=128),
        train=Train(steps=steps, microbatches=8 * replicas, microbatch_size=4, checkpoint_every=0, evaluate_every=0),
        swarm=Swarm(stages=peers // replicas, replicas=replicas),
        network=Network(default=Link(latency_s=0.03, bytes_per_s=12.5e6, jitter_s=0.005)),
    )


def measure(options: Options) -> Outcome:
    """Events per CPU-second at 20, 50, 100 and 200 peers."""
    sizes = (20, 100) if options.quick else (20, 50, 100, 200)
    rows = []
    for peers in sizes:
        rates = []
        for seed in range(options.seeds):
            job = recipe(peers, 3 if options.quick else 10, seed)
            config = ModelConfig.from_depth(job.model.depth, 1024)
            started = time.process_time()
            rehearsal = rehearse(job, config)
            rates.append(rehearsal.events / (time.process_time() - started))
        rows.append(Row(name=f"{peers} peers", values=tuple(rates), note=f"goal {GOAL:,}"))
    first, last = rows[0].median, rows[-1].median
    return Outcome(
        name="sim-speed",
        claim=CLAIM,
        world="simulated, without tensors",
        unit="events per CPU-second, one core",
        rows=tuple(rows),
        bars=(
            Bar(text=f"{rows[0].name}: >= {BAR:,} events/s", measured=first, holds=first >= BAR),
            Bar(
                text=f"linear in peers: rate at {rows[-1].name} / rate at {rows[0].name} >= 0.5",
                measured=last / first,
                holds=last / first >= 0.5,
            ),
        ),
        notes=("an event is a message delivered, a sleep or a computation ended",),
    )
