"""The facts in the receipts of experts' training, and the state that folds from them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from talkoot.blend.train.jobs import Class
from talkoot.core.fold import Chapter, Entry, chapters
from talkoot.core.receipt import Count, Seconds
from talkoot.plan.experts import Assigned
from talkoot.run.records import Facts, Gone, Joined, Start

MOST_LOSSES = 512


class Planned(Facts, frozen=True, kw_only=True):
    """``blend.plan``: who gets what. ``flops``: of all experts' training; ``budget``: of the homogeneous plan."""

    allocation: str
    classes: tuple[Class, ...]
    plan: tuple[Assigned, ...]
    flops: float
    budget: float


class Sliced(Facts, frozen=True, kw_only=True):
    """``blend.slice``: a part of a job; the state after it stands in the receipt's outputs.

    Attributes:
        job: its name.
        steps: of it that are done.
        loss: mean over the slice, nats per token.
        busy_s: seconds of work.
    """

    job: str
    steps: Count
    loss: float
    busy_s: Seconds


class Done(Facts, frozen=True, kw_only=True):
    """``blend.done``: the end of a job; its result (weights, statistics) stands in the receipt's outputs.

    Attributes:
        job, steps: which, and how many steps it took.
        tokens, flops: that were trained on; operations of it.
        losses: on held-out text: by number of steps (a trial), by expert (a score), or ``validation``.
        busy_s: seconds of work since the last slice.
    """

    job: str
    steps: Count
    tokens: Count = 0
    flops: float = 0.0
    losses: dict[str, float] = msgspec.field(default_factory=dict)
    busy_s: Seconds = 0.0


class JobState(msgspec.Struct, frozen=True):
    """A job's account. ``state``: blob of the newest slice; ``result``: of the end; ``peer``: name of who did it."""

    steps: int = 0
    state: str = ""
    result: str = ""
    done: bool = False
    loss: float | None = None
    losses: Mapping[str, float] = MappingProxyType({})
    tokens: int = 0
    flops: float = 0.0
    busy_s: float = 0.0
    peer: str = ""


class BlendState(msgspec.Struct, frozen=True):
    """The chapter ``blend``."""

    active: bool = False
    names: Mapping[str, str] = MappingProxyType({})  # of identities
    present: frozenset[str] = frozenset()  # names
    jobs: Mapping[str, JobState] = MappingProxyType({})
    planned: Planned | None = None

    @property
    def done(self) -> dict[str, bool]:
        """Whether each job that was begun is done."""
        return {name: job.done for name, job in self.jobs.items()}


def _blend(state: BlendState, entry: Entry) -> BlendState:
    receipt, replace = entry.receipt, msgspec.structs.replace
    if not state.active and receipt.op != "run.start":
        return state
    match receipt.op:
        case "run.start":
            return replace(state, active="experts" in receipt.read(Start).recipe)
        case "run.resume" | "run.end":
            return replace(state, present=frozenset())
        case "peer.join":
            joined = receipt.read(Joined)
            names = MappingProxyType({**state.names, joined.peer: joined.name})
            return replace(state, names=names, present=state.present | {joined.name})
        case "peer.lost":
            return replace(state, present=state.present - {receipt.read(Gone).name})
        case "blend.plan":
            return replace(state, planned=receipt.read(Planned))
        case "blend.slice":
            return _slice(state, entry, receipt.read(Sliced))
        case "blend.done":
            return _done(state, entry, receipt.read(Done))
    return state


def _performer(state: BlendState, entry: Entry) -> str:
    name = state.names.get(entry.receipt.peer, "")
    if name not in state.present:
        raise ValueError(f"{entry.receipt.op} comes from somebody who is not there")
    return name


def _slice(state: BlendState, entry: Entry, facts: Sliced) -> BlendState:
    name, job = _performer(state, entry), state.jobs.get(facts.job, JobState())
    if job.done or facts.steps <= job.steps or not math.isfinite(facts.loss):
        raise ValueError(
            f"{facts.job} stands at {job.steps} steps, this says {facts.steps} with a loss of {facts.loss}"
        )
    changed = msgspec.structs.replace(
        job,
        steps=facts.steps,
        state=entry.receipt.outputs.get("state", ""),
        loss=facts.loss,
        busy_s=job.busy_s + facts.busy_s,
        peer=name,
    )
    return _with(state, facts.job, changed)


def _done(state: BlendState, entry: Entry, facts: Done) -> BlendState:
    name, job = _performer(state, entry), state.jobs.get(facts.job, JobState())
    numbers = (facts.flops, *facts.losses.values())
    if job.done or facts.steps < job.steps or len(facts.losses) > MOST_LOSSES:
        raise ValueError(f"{facts.job} cannot end at {facts.steps} steps: it stands at {job.steps}")
    if not all(math.isfinite(number) for number in numbers):
        raise ValueError(f"a figure of {facts.job} is not finite")
    changed = msgspec.structs.replace(
        job,
        steps=facts.steps,
        state="",
        result=entry.receipt.outputs.get("result", ""),
        done=True,
        losses=MappingProxyType(dict(facts.losses)),
        tokens=facts.tokens,
        flops=facts.flops,
        busy_s=job.busy_s + facts.busy_s,
        peer=name,
    )
    return _with(state, facts.job, changed)


def _with(state: BlendState, name: str, job: JobState) -> BlendState:
    return msgspec.structs.replace(state, jobs=MappingProxyType({**state.jobs, name: job}))


chapters.register("blend")(Chapter(("run.start", "run.resume", "run.end", "peer.", "blend."), BlendState(), _blend))
