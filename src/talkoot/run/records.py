"""The facts in receipts about the run itself, and what folds from them: what it is, and who leads it."""

from __future__ import annotations

from typing import Any

import msgspec

from talkoot.core.fold import Chapter, Entry, chapters


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all bodies."""


class Start(Facts, frozen=True, kw_only=True):
    """``run.start``: what this run is. ``recipe`` and ``config`` are plain data, as read."""

    world: str
    talkoot: str
    recipe: dict[str, Any]
    config: dict[str, Any]
    parameters: int
    stages: tuple[tuple[int, int], ...]
    tokens: str = ""
    tokenizer: str = ""


class Resume(Facts, frozen=True, kw_only=True):
    """``run.resume``: the lead was started again.

    Attributes:
        stages, steps: the cut and the number of steps that hold from here on; empty and 0 = as before.
    """

    world: str
    talkoot: str
    stages: tuple[tuple[int, int], ...] = ()
    steps: int = 0


class End(Facts, frozen=True, kw_only=True):
    """``run.end``: the lead stopped; ``reason`` is ``done``, ``interrupted`` or an error."""

    reason: str
    state_hash: str = ""


class Appointed(Facts, frozen=True, kw_only=True):
    """``run.standby``: if the lead is lost, this identity may succeed it; empty = nobody may, for ``reason``."""

    peer: str
    name: str
    reason: str = ""


class Succeeded(Facts, frozen=True, kw_only=True):
    """``run.succeed``: the standby leads from here on, and the peers kept what they hold.

    Attributes:
        name: of the standby.
        former: the lead that was lost.
        peers: identities of those who said that they lost it, too.
    """

    name: str
    former: str
    peers: tuple[str, ...]


class Warned(Facts, frozen=True, kw_only=True):
    """``run.warning``: something the user should know and nothing that stops the run."""

    text: str


class Joined(Facts, frozen=True, kw_only=True):
    """``peer.join``: a peer said hello."""

    peer: str
    name: str


class Gone(Facts, frozen=True, kw_only=True):
    """``peer.lost``: a peer is no longer there."""

    peer: str
    name: str
    reason: str


class RunState(msgspec.Struct, frozen=True):
    """The chapter ``run``; ``founder`` began it, ``lead`` leads it now, and ``heir`` may succeed."""

    start: Start | None = None
    world: str = ""
    founder: str = ""
    lead: str = ""
    heir: str = ""
    successions: int = 0
    sessions: int = 0
    steps: int = 0
    ended: str = ""
    state_hash: str = ""


OTHERS = (
    "run.start",
    "run.resume",
    "run.succeed",
    "train.step",
    "train.round",
    "tune.generate",
    "tune.update",
    "blend.slice",
    "blend.done",
)  # not only the lead's to state


def _run(state: RunState, entry: Entry) -> RunState:
    receipt, replace = entry.receipt, msgspec.structs.replace
    if receipt.op not in OTHERS and receipt.peer != state.lead:
        raise ValueError(f"{receipt.op} is the lead's to state, not {receipt.peer[:8]}'s")
    if not receipt.op.startswith("run."):
        return state
    match receipt.op:
        case "run.start":
            if state.start is not None:
                raise ValueError("a run starts once")
            facts = receipt.read(Start)
            steps = facts.recipe.get("train", {}).get("steps", 0) or facts.recipe.get("tune", {}).get("rounds", 0)
            return RunState(
                start=facts, world=facts.world, founder=receipt.peer, lead=receipt.peer, sessions=1, steps=steps
            )
        case "run.resume":
            if receipt.peer not in (state.founder, state.lead):
                raise ValueError(f"{receipt.peer[:8]} cannot resume a run that it did not begin")
            facts = receipt.read(Resume)
            return replace(
                state,
                world=facts.world,
                lead=receipt.peer,
                heir="",
                sessions=state.sessions + 1,
                steps=facts.steps or state.steps,
                ended="",
            )
        case "run.standby":
            return replace(state, heir=receipt.read(Appointed).peer)
        case "run.succeed":
            facts = receipt.read(Succeeded)
            if receipt.peer != state.heir or facts.former != state.lead:
                raise ValueError(f"{receipt.peer[:8]} was not named to succeed {facts.former[:8]}")
            return replace(state, lead=receipt.peer, heir="", successions=state.successions + 1, ended="")
        case "run.end":
            facts = receipt.read(End)
            return replace(state, ended=facts.reason, state_hash=facts.state_hash or state.state_hash)
        case "run.warning":
            return state
    raise ValueError(f"unknown operation {receipt.op}")


chapters.register("run")(Chapter(("run.", "peer.", "train.", "tune.", "blend.", "state."), RunState(), _run))
