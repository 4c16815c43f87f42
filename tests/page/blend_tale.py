"""A run that makes experts and never ran: a realistic log, made of real receipts, for pages."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from talkoot.blend.ledger import Added, Removed, Routed, Upcycled
from talkoot.blend.recipe import BlendRecipe, Domain, Experts, General, Model
from talkoot.blend.train.jobs import Class, Job, first_jobs, planned_jobs
from talkoot.blend.train.records import Done, Planned, Sliced
from talkoot.core.fold import START, Entry, State, link
from talkoot.core.keys import Key
from talkoot.core.log import Log
from talkoot.core.receipt import Receipt, Task, body, sign
from talkoot.plan.experts import Assigned
from talkoot.run.records import End, Gone, Joined, Resume, Start

SLICE = 10
SIZES = ("small", "medium", "large")


def recipe_of(domains: Sequence[str], difficulty: str = "", steps: int = 40) -> BlendRecipe:
    """A small recipe; without a difficulty, domains are tried first."""
    return BlendRecipe(
        name="library",
        model=Model(context=64),
        general=General(steps=20),
        experts=Experts(allocation="sizes-and-steps", steps=steps, batch=4, trial_steps=8),
        domains=tuple(Domain(name=name, source="bundled:shakespeare", difficulty=difficulty) for name in domains),
    )


class BlendTale:
    """Writes receipts one after another, with a clock of its own.

    Args:
        domains: by name.
        names: of the peers that begin.
        log: where to; None = nowhere, entries are kept anyway, whether or not a log would take them.
        recipe: replaces the whole recipe, as plain data.
    """

    def __init__(
        self,
        domains: Sequence[str] = ("plays", "python", "mail"),
        names: Sequence[str] = ("alder", "birch"),
        log: Log | None = None,
        recipe: Mapping[str, Any] | None = None,
        difficulty: str = "",
    ) -> None:
        self.log, self.domains, self.terms = log, tuple(domains), recipe_of(domains, difficulty)
        self.lead, self.now, self.state, self.chain = Key.derived("lead"), 0.0, State(), START
        self.entries: list[Entry] = []
        self.keys: dict[str, Key] = {}
        self.jobs: dict[str, Job] = {job.name: job for job in first_jobs(self.terms)}
        plain = self.terms.plain() if recipe is None else dict(recipe)
        start = Start(world="simulated", talkoot="0.1.0", recipe=plain, config={}, parameters=0, stages=())
        self.write("run.start", start)
        for name in names:
            self.join(name)

    def write(self, op: str, facts: msgspec.Struct, key: Key | None = None, step: int = 0, **times: float) -> None:
        """Append one receipt."""
        key = key or self.lead
        fields = {"started": self.now, "ended": self.now, **times}
        receipt = Receipt(
            run="tale", generation=0, step=step, peer=key.peer, task=Task(op=op), body=body(facts), **fields
        )
        signed = sign(receipt, key)
        if self.log is not None:
            _, self.state = self.log.append(signed, self.state)
        self.chain = link(self.chain, signed.id)
        self.entries.append(Entry(len(self.entries) + 1, signed.id, receipt, self.chain))

    def join(self, name: str) -> None:
        """A peer says hello."""
        key = self.keys[name] = Key.derived(name, len(self.entries))
        self.write("peer.join", Joined(peer=key.peer, name=name))

    def lose(self, name: str) -> None:
        """A peer is gone."""
        self.write("peer.lost", Gone(peer=self.keys.pop(name).peer, name=name, reason="no heartbeat for 2.5 s"))

    def slice(self, peer: str, job: str, steps: int, *, loss: float | None = None, **changes: Any) -> None:
        """A part of a job, a second of work."""
        self.now += 1.0
        times = {"started": self.now - 1.0, "ended": self.now, **changes}
        loss = 6.0 - 0.3 * math.log1p(steps) if loss is None else loss
        self.write("blend.slice", Sliced(job=job, steps=steps, loss=loss, busy_s=0.9), self.keys[peer], steps, **times)

    def done(self, peer: str, job: str, **changes: Any) -> None:
        """The end of a job."""
        steps = self.jobs[job].steps if job in self.jobs else 0
        facts = Done(job=job, steps=steps, tokens=steps * 4 * 64, flops=1e9, losses=self.losses(job), busy_s=0.2)
        facts = msgspec.structs.replace(facts, **changes)
        self.write("blend.done", facts, self.keys[peer], steps, started=self.now - 0.1)

    def losses(self, job: str) -> dict[str, float]:
        """What a job of this name would find; each expert knows its own text best, ``python`` is known by nobody."""
        kind, _, about = job.partition("/")
        if kind == "trial":
            return {"0": 6.0, "4": 5.5, "8": 5.25}
        if kind == "expert":
            return {"validation": 3.0 + 0.25 * self.domains.index(about)}
        if kind == "score":
            base = 3.0 + 0.25 * self.domains.index(about)
            return {one: base + (0.0 if one == about else 0.5) for one in self.domains}
        return {}

    def plan(self, **changes: Any) -> None:
        """The experts are planned; sizes and classes go round."""
        rows = [
            Assigned(domain, SIZES[i % 3], (30, 40, 50)[i % 3], 1e9 * (i % 3 + 1))
            for i, domain in enumerate(self.domains)
        ]
        facts = Planned(
            allocation="sizes-and-steps",
            classes=tuple(Class(one, ("easy", "medium", "hard")[i % 3]) for i, one in enumerate(self.domains)),
            plan=tuple(rows),
            flops=1.004 * 2e9 * len(rows),
            budget=2e9 * len(rows),
        )
        facts = msgspec.structs.replace(facts, **changes)
        self.write("blend.plan", facts)
        self.jobs = {job.name: job for job in planned_jobs(self.terms, facts.plan, facts.classes)}

    def whole(self, peer: str, job: str) -> None:
        """A job from its beginning to its end."""
        steps = self.jobs[job].steps
        if job.startswith(("general/", "expert/")):
            for until in range(SLICE, steps, SLICE):
                self.slice(peer, job, until)
            self.slice(peer, job, steps)
        else:
            self.now += 0.5
        self.done(peer, job)

    def resume(self) -> None:
        """The lead was started again, and peers with it."""
        self.write("run.resume", Resume(world="simulated", talkoot="0.1.0"))
        for name in list(self.keys):
            self.join(name)

    def end(self) -> None:
        """The run is over."""
        self.now += 0.1
        self.write("run.end", End(reason="done"))

    def route(self, **changes: Any) -> None:
        """A router was fitted."""
        facts = Routed(router="ab" * 32, rule="bigram", domains=self.domains, accuracy={"bigram": 0.95, "votes": 0.5})
        self.write("blend.route", msgspec.structs.replace(facts, **changes))

    def upcycle(self, **changes: Any) -> None:
        """Experts were fused."""
        facts = Upcycled(experts=self.domains, gate="token", format="mixtral", exact=True, parameters=1_200_000)
        self.write("blend.upcycle", msgspec.structs.replace(facts, **changes))

    def add(self, name: str, statistics: str = "") -> None:
        """An expert came."""
        self.write("blend.add", Added(name=name, parameters=1000, statistics=statistics))

    def remove(self, name: str) -> None:
        """An expert went."""
        self.write("blend.remove", Removed(name=name))


def planned_tale(log: Log | None = None, **how: Any) -> BlendTale:
    """General model and trials are done, experts are planned."""
    tale = BlendTale(log=log, **how)
    for job in list(tale.jobs):
        tale.whole("alder", job)
    tale.plan()
    return tale


def eventful(log: Log | None = None, **how: Any) -> BlendTale:
    """A whole run: a peer is lost within an expert that another one ends; then a router, mixtures, changes."""
    tale = planned_tale(log, **how)
    lost = f"expert/{tale.domains[-1]}"
    for at, job in enumerate(name for name in tale.jobs if name not in (lost, "general/medium")):
        if not job.startswith(("trial/", "score/")):
            tale.whole(("alder", "birch")[at % 2], job)
    tale.slice("alder", lost, SLICE)
    tale.lose("alder")
    tale.slice("birch", lost, tale.jobs[lost].steps)
    tale.done("birch", lost)
    for domain in tale.domains:
        tale.done("birch", f"score/{domain}")
    tale.end()
    tale.now += 86_400.0
    tale.route()
    tale.upcycle()
    tale.add("poems")
    tale.remove("mail")
    return tale
