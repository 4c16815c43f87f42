"""What was done to a blend, as receipts in its log: behind those of the training, or in a log of its own."""

from __future__ import annotations

import time
from pathlib import Path

import talkoot
from talkoot.core.fold import fold
from talkoot.core.ids import RunId
from talkoot.core.keys import Key
from talkoot.core.log import Log
from talkoot.core.receipt import Receipt, Task, body, sign
from talkoot.run.folder import LOG, check_same_key, lead_key, next_session_s
from talkoot.run.records import Facts, Start
from talkoot.world.sim.identity import simulated_key


class Added(Facts, frozen=True, kw_only=True):
    """``blend.add``: an expert came. ``statistics``: digest of its domain's; empty without any."""

    name: str
    parameters: int
    statistics: str = ""


class Removed(Facts, frozen=True, kw_only=True):
    """``blend.remove``: an expert went."""

    name: str


class Routed(Facts, frozen=True, kw_only=True):
    """``blend.route``: a router was fitted.

    Attributes:
        router: its version. ``rule``: by which it decides.
        domains: that it knows; ``accuracy``: of each rule that was tried, on held-out prompts.
    """

    router: str
    rule: str
    domains: tuple[str, ...]
    accuracy: dict[str, float]


class Upcycled(Facts, frozen=True, kw_only=True):
    """``blend.upcycle``: experts were fused. ``exact``: forced to one expert, the mixture is that expert to the bit."""

    experts: tuple[str, ...]
    gate: str
    format: str
    exact: bool
    parameters: int


def key_of(folder: Path) -> Key:
    """The key that signs for a blend; a new one where nothing was begun.

    Raises:
        TalkootError: it is not the one that began the log.
    """
    first = None
    if (folder / LOG).exists():
        log = Log(folder / LOG, readonly=True)
        try:
            first = next(log.entries(1, 1), None)
        finally:
            log.close()
    if first is not None and (start := first.receipt.read(Start)).world == "simulated":
        return simulated_key(int(start.recipe.get("seed", 0)), "lead")
    key = lead_key(folder / "lead.key")
    check_same_key(first, key, folder / "lead.key")
    return key


def record(folder: Path, key: Key, op: str, facts: Facts) -> None:
    """Write down what was done, signed by the blend's key. The caller holds the folder's lock.

    Raises:
        TalkootError: the log cannot be written.
    """
    log = Log(folder / LOG)
    try:
        first = next(log.entries(1, 1), None)
        simulated = first is not None and first.receipt.read(Start).world == "simulated"
        now = next_session_s(log) if simulated else time.time()
        run = RunId(first.receipt.run) if first else RunId(f"blend-{key.peer[:8]}")
        state = fold(log.entries())
        start = Start(
            world="real", talkoot=talkoot.__version__, recipe={"experts": {}}, config={}, parameters=0, stages=()
        )
        for name, said in ([] if first else [("run.start", start)]) + [(op, facts)]:
            receipt = Receipt(
                run=run,
                generation=0,
                step=0,
                peer=key.peer,
                task=Task(op=name),
                body=body(said),
                started=now,
                ended=now,
            )
            _, state = log.append(sign(receipt, key), state)
        log.sync()
    finally:
        log.close()
