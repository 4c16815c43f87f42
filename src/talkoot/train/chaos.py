"""Planned misfortune: fault files, what is still ahead of whom, storms and failure traces.

A fault strikes once. Whoever replaces a lost peer therefore gets the faults that its name still has before it: those
of later steps, and those of this one that the peer did not live to see.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from talkoot.core.plain import build, read_plain
from talkoot.train.recipe import LEAD, PHASES, Recipe, Section, check_faults
from talkoot.world.faults import LETHAL, SIGNALLED, Fault

UNUSABLE = "the chaos file cannot be used"
AFTER_COMMIT = ("commit", "idle")  # the step is in the log when a peer gets there
TAKEOVER = "assign"
STORM_PHASES = ("begin", "forward", "backward", "mix", "prepare", "commit")  # every peer passes them in every step
NOTICED_S = 2.0  # a shorter standstill may pass unnoticed


class Chaos(Section, frozen=True, kw_only=True):
    """A chaos file: one table ``[[faults]]`` for each fault, as in a recipe."""

    faults: tuple[Fault, ...] = ()


def with_chaos(recipe: Recipe, path: Path | None) -> Recipe:
    """The recipe with a chaos file's faults added to its own; without a file, the recipe.

    Raises:
        TalkootError: unreadable, broken, or a fault that could never strike; it names file, entry and the nearest name.
    """
    if path is None:
        return recipe
    chaos = build(read_plain(path, UNUSABLE), Chaos, what=UNUSABLE, where=str(path))
    check_faults(chaos.faults, recipe.swarm, f"{path}, key faults", UNUSABLE)
    return msgspec.structs.replace(recipe, faults=(*recipe.faults, *chaos.faults))


class Docket:
    """Which faults are still ahead of each name. The world that a fault strikes keeps its own copy."""

    def __init__(self, faults: Iterable[Fault]) -> None:
        self._ahead: dict[str, list[Fault]] = {}
        for fault in faults:
            for name in fault.victims:
                self._ahead.setdefault(name, []).append(fault)

    def of(self, name: str, step: int, elapsed_s: float = 0.0) -> tuple[Fault, ...]:
        """What a peer of this name is to be launched with, when ``step`` steps are committed and the run is that old.

        Faults at a time count from the launch then; those that are signals are not the peer's to strike.
        """
        kept = self._ahead.get(name, [])
        kept[:] = [fault for fault in kept if _step_of(fault) >= step or fault.phase == TAKEOVER]
        at_points = [fault for fault in kept if fault.at_s is None]
        at_times = [
            msgspec.structs.replace(fault, at_s=fault.at_s - elapsed_s)
            for fault in kept
            if fault.at_s is not None and fault.at_s > elapsed_s and fault.kind not in SIGNALLED
        ]
        return (*at_points, *at_times)

    def strike_off(self, name: str, steps: range, *, seated: bool, held: bool) -> None:
        """Take off what a lost peer's end shows to have struck.

        Args:
            name: whose.
            steps: that it may have been in, by how many had been committed.
            seated, held: whether it had a seat when it was lost, and whether it ever had one.
        """
        kept = self._ahead.get(name, [])
        due = [fault for fault in kept if held and fault.phase != TAKEOVER and _step_of(fault) in steps]
        due.sort(key=lambda f: (_step_of(f), -1 if f.phase in AFTER_COMMIT else PHASES.index(f.phase)))
        if not seated:
            due += [fault for fault in kept if fault.phase == TAKEOVER and (fault.step or 0) < steps.stop]
        killers = [fault for fault in due if _ends(fault)] or [fault for fault in due if fault.kind == "delay"]
        for fault in due[: due.index(killers[0]) + 1] if killers else ():
            kept.remove(fault)

    def resume(self, step: int) -> None:
        """The run goes on after it had come to ``step`` once: what was planned up to there, or for a time, has been."""
        for kept in self._ahead.values():
            kept[:] = [fault for fault in kept if fault.at_s is None and (fault.step or 0) > step]

    def left(self, step: int) -> list[str]:
        """In words, what was planned for steps that the run, done after ``step`` steps, never had."""
        ahead = [(name, fault) for name, faults in self._ahead.items() for fault in faults if fault.step is not None]
        return [f"{fault.kind} {name} at step {fault.step}" for name, fault in ahead if (fault.step or 0) >= step]

    def signals(self) -> list[tuple[str, Fault]]:
        """(Name, fault) of those at a time that others have to strike."""
        ahead = [(name, fault) for name, faults in self._ahead.items() for fault in faults]
        return [(name, fault) for name, fault in ahead if fault.at_s is not None and fault.kind in SIGNALLED]


def _ends(fault: Fault) -> bool:
    """Whether others take its victim for lost."""
    return fault.kind == "kill" or (fault.kind in LETHAL and not 0 < fault.seconds < NOTICED_S)


def _step_of(fault: Fault) -> float:
    """How many steps are committed when the fault strikes; never too few for one that waits for a time."""
    if fault.step is None:
        return float("inf")
    return fault.step + (fault.phase in AFTER_COMMIT)


def storm(recipe: Recipe, seed: int, *, every_step: bool = True) -> tuple[Fault, ...]:
    """Kills that no run would see by chance: every peer at least once, two neighbours at once, one while it takes over.

    Args:
        recipe: whose peers; those that join later are left alone.
        seed: of the choice.
        every_step: and somebody in each other step but the first and the last, too.

    Raises:
        ValueError: the run has too few steps for that.
    """
    chance, peers = random.Random(seed), list(recipe.swarm.peers)
    steps = list(range(1, recipe.train.steps - 1))
    pair = _neighbours(recipe, chance)
    rounds: list[tuple[str, ...]] = [(name,) for name in peers] + ([pair] if len(pair) > 1 else [])
    twice = chance.choice(peers)
    rounds.append((twice,))
    if len(steps) < len(rounds):
        raise ValueError(f"a storm over {len(peers)} peers takes {len(rounds) + 2} steps, the run has {len(steps) + 2}")
    chosen = sorted(chance.sample(steps, len(rounds)))
    kills = [
        Fault(peer=name, step=step, phase=phase)
        for step, names in zip(chosen, chance.sample(rounds, len(rounds)), strict=True)
        for phase in [chance.choice(STORM_PHASES[:-1])]  # for both of a pair the same
        for name in names
    ]
    last = max((fault for fault in kills if fault.peer == twice), key=lambda fault: fault.step or 0)
    kills.append(Fault(peer=twice, step=last.step, phase=TAKEOVER))
    if every_step:
        others = sorted(set(steps) - set(chosen))
        kills += [Fault(peer=chance.choice(peers), step=at, phase=chance.choice(STORM_PHASES)) for at in others]
    return tuple(sorted(kills, key=lambda fault: fault.step or 0))


def _neighbours(recipe: Recipe, chance: random.Random) -> tuple[str, ...]:
    """One peer of some stage and one of the next; of the only stage, one."""
    stages: list[list[str]] = [[] for _ in recipe.swarm.sizes]
    for name, stage in recipe.swarm.peers.items():
        stages[stage].append(name)
    at = chance.randrange(max(1, len(stages) - 1))
    return tuple(chance.choice(group) for group in stages[at : at + 2])


def trace(rate_per_hour: float, peers: Sequence[str], hours: float, seed: int) -> tuple[Fault, ...]:
    """Kills at the times of independent Poisson processes, in order; a trace that is keyed by seconds, not by steps.

    Args:
        rate_per_hour: expected losses of each peer in an hour.
        peers: names.
        hours: length of the trace.
        seed: of the times; a peer's do not depend on who the others are.

    Raises:
        ValueError: a rate or length that is negative or not finite.
    """
    if not 0 <= rate_per_hour < float("inf") or not 0 <= hours < float("inf"):
        raise ValueError(f"{rate_per_hour} losses per hour over {hours} hours cannot be drawn")
    kills: list[Fault] = []
    for name in peers:
        chance = random.Random(repr((seed, name)))
        at_s = 0.0
        while rate_per_hour and (at_s := at_s + chance.expovariate(rate_per_hour / 3600)) < 3600 * hours:
            kills.append(Fault(peer=name, at_s=at_s))
    return tuple(sorted(kills, key=lambda fault: (fault.at_s or 0.0, fault.peer)))


__all__ = ["LEAD", "UNUSABLE", "Chaos", "Docket", "storm", "trace", "with_chaos"]
