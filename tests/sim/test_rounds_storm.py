"""Random misfortune upon random swarms of replicas: whatever happens, the run ends and its log accounts for it."""

from __future__ import annotations

import random
from typing import Any

import pytest
from test_rounds_kit import NAMES, Fault, Joiner, check, simulate, tiny

from talkoot.train.recipe import Recipe
from talkoot.train.records import RolledBack
from talkoot.train.rounds import joining
from talkoot.train.rounds.lead import RoundLead
from talkoot.world.links import Link
from talkoot.world.sim.simulation import Simulation

SEEDS = (*range(12), 15, 23, 34, 37, 148)  # the last ones found something
KINDS = ("kill", "kill", "kill", "stop", "delay", "corrupt", "partition")
PHASES = ("assign", "begin", "forward", "mix", "idle", "give")
RULES = ("noloco", "noloco", "noloco-literal", "diloco", "streaming", "sparseloco", "none")


def storm(seed: int) -> tuple[Recipe, Any]:
    """A random recipe, and hits at random times on whoever bears the name then (a replacement, for instance)."""
    chance = random.Random(seed)
    rule, replicas = chance.choice(RULES), chance.choice([2, 3, 4])
    joiners = tuple(Joiner(name=name, step=chance.randrange(20)) for name in ("elm", "fir")[: chance.randrange(3)])
    names = [*NAMES[:replicas], *(joiner.name for joiner in joiners)]
    faults = tuple(
        Fault(
            peer=chance.choice(names),
            step=chance.randrange(30),
            phase=chance.choice(PHASES),
            kind=chance.choice(KINDS),
            seconds=chance.choice([0.0, 0.3, 2.0, 6.0]),
        )
        for _ in range(chance.randrange(6))
    )
    mixing: dict[str, Any] = {"joiner_donors": chance.choice([1, 2])}
    if rule in ("noloco", "streaming"):
        mixing |= {"fragments": chance.choice([1, 2]), "overlap": chance.choice([0, 1, 2])}
    if rule in ("diloco", "streaming"):
        mixing["collective"] = chance.choice(["ring", "tree", "direct"])
    link = Link(
        latency_s=chance.choice([0.0005, 0.02]),
        bytes_per_s=chance.choice([1e6, 1e8]),
        jitter_s=chance.choice([0.0, 0.03]),
        loss=chance.choice([0.0, 0.1]),
    )
    flops = {"flops": chance.choice([1e7, 1e8])}
    every = chance.choice([0, 9])
    recipe = tiny(
        replicas, faults, rounds=14, inner=3, rule=rule, joiners=joiners, mixing=mixing, swarm=flops, link=link,
        checkpoint_every=every,
    )  # fmt: skip
    horizon = chance.choice([0.1, 1.0, 4.0])
    hits = [(chance.random() * horizon, chance.choice(names), chance.choice(KINDS[:4])) for _ in range(3)]

    def arrange(lead: RoundLead, simulation: Simulation) -> None:
        def hit(name: str, kind: str) -> None:
            body = simulation._by_name.get(name)
            if body is not None and body.alive:
                (simulation.kill if kind == "kill" else simulation.freeze)(body)

        for at_s, name, kind in hits:
            simulation.loop.call_later(at_s, hit, name, kind)

    return recipe, arrange


@pytest.mark.parametrize("seed", SEEDS)
def test_a_storm_is_survived_and_accounted_for(seed, monkeypatch, tmp_path):
    monkeypatch.setattr(joining, "CHUNK_BYTES", 8192)
    recipe, arrange = storm(seed)
    run = simulate(recipe, tmp_path, started=arrange)
    check(run, longest_s=200.0)
    if recipe.mixing.rule in ("diloco", "sparseloco") and not run.facts("train.rollback", RolledBack):
        assert {len(found) for found in run.ends().values()} == {1}
