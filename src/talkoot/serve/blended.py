"""What is shown of a run that makes experts: who trains what, how well each expert knows each domain, what came of it.

The sums come from the chapter ``blend`` of the state; curves of the jobs are kept beside it, and what was done to the
blend afterwards. All of it is bounded, however long the run is.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

from talkoot.blend.ledger import Added, Removed, Routed, Upcycled
from talkoot.blend.recipe import BlendRecipe
from talkoot.blend.train.jobs import Job, first_jobs, planned_jobs
from talkoot.blend.train.records import BlendState, Done, JobState, Planned, Sliced
from talkoot.core.codec import decode, encode
from talkoot.core.errors import TalkootError
from talkoot.core.fold import START, Entry, chapters
from talkoot.core.ids import Digest, short
from talkoot.core.receipt import Receipt
from talkoot.serve.events import Told
from talkoot.serve.part import Work
from talkoot.serve.series import Curve, tidy
from talkoot.serve.words import UNKNOWN, clean, count, figures, name_of

OPS = tuple(f"blend.{name}" for name in ("plan", "slice", "done", "add", "remove", "route", "upcycle"))
KINDS = ("general", "trial", "expert", "count", "score")
MAX_DOMAINS, MAX_PEERS = 64, 64  # that are listed
MAX_COLUMNS, MAX_CURVES = 24, 24  # of the cross table; jobs whose loss is drawn
MAX_CHANGES, MAX_MIXTURES, MAX_RULES = 24, 12, 24
BUCKETS, TAIL = 48, 64  # a job's curve is thinned to some 200 rows
SAYABLE = 50.0  # nats per token; whatever is above has no perplexity worth naming


def is_blending(recipe: Mapping[str, Any]) -> bool:
    """Whether a recipe is one of experts."""
    return isinstance(recipe.get("experts"), dict)


def perplexity(loss: float | None) -> float | None:
    """Of a loss in nats per token."""
    return math.exp(loss) if loss is not None and -SAYABLE < loss < SAYABLE else None


class Blended:
    """A run that makes experts, receipt by receipt; or, without domains, a blend of experts that others made.

    Attributes:
        state: the chapter ``blend``.
        ended: there is nothing to train.
    """

    key = "blend"

    def __init__(self, recipe: Mapping[str, Any]) -> None:
        self.state = BlendState(active=True)
        self.ended = not recipe.get("domains")
        self._recipe = _read(recipe)
        self._jobs = first_jobs(self._recipe) if self._recipe else []
        self._curves: dict[str, Curve] = {}
        self._until: dict[str, tuple[float, bool]] = {}  # by peer: end of its newest account; whether its job goes on
        self._changes: dict[str, Added | Removed] = {}
        self._router: Routed | None = None
        self._mixtures: list[Upcycled] = []

    @property
    def step(self) -> int:
        """Training steps that were done in all jobs."""
        return sum(job.steps for job in self.state.jobs.values())

    @property
    def steps(self) -> int | None:
        """Of all jobs; None before experts are planned."""
        return sum(job.steps for job in self._jobs) if self.state.planned and self._jobs else None

    @property
    def tokens(self) -> int:
        """That were trained on; of a job that goes on, by its steps."""
        each = self._recipe.experts.batch * self._recipe.model.context if self._recipe else 0
        return sum(job.tokens if job.done else job.steps * each for job in self.state.jobs.values())

    # -- receipts ---------------------------------------------------------------------------------------------

    def take(self, receipt: Receipt) -> list[Told]:
        """One more receipt; returns what is worth telling.

        Raises:
            ValueError: it cannot be read, or cannot follow the others.
        """
        before = self.state
        self.state = chapters["blend"].apply(before, Entry(0, Digest(""), receipt, START))
        match receipt.op:
            case "blend.plan":
                return self._plan(receipt.read(Planned))
            case "blend.slice":
                return self._slice(receipt, receipt.read(Sliced), before)
            case "blend.done":
                facts = receipt.read(Done)
                self._until[self.state.names[receipt.peer]] = receipt.ended, False
                return [*self._taken_over(facts.job, before), self._done(receipt, facts)]
            case "blend.add" | "blend.remove" | "blend.route" | "blend.upcycle":
                return [self._afterwards(receipt)]
            case "run.resume":
                self._until.clear()
        return []

    def work(self, receipt: Receipt) -> Work | None:
        """What a peer did."""
        match receipt.op:
            case "blend.slice":
                return Work(receipt.read(Sliced).busy_s)
            case "blend.done":
                return Work(receipt.read(Done).busy_s)
        return None

    def now(self) -> float | None:
        """When half of those whose job goes on have reported last: who waits for a job has nothing to report."""
        here = [told for name, told in self._until.items() if name in self.state.present and math.isfinite(told[0])]
        known = sorted(until for until, busy in here if busy) or sorted(until for until, _ in here)
        return known[(len(known) - 1) // 2] if known else None

    def _plan(self, facts: Planned) -> list[Told]:
        if self._recipe:
            try:
                self._jobs = planned_jobs(self._recipe, facts.plan, facts.classes)
            except KeyError as problem:
                raise ValueError("a plan that its own classes do not fit") from problem
        off = _off(facts)
        equal = f", {100 * off:+.2f} % of equal compute" if off is not None else ""
        return [Told("plan", f"{len(facts.plan)} experts were planned ({clean(facts.allocation, 40)}){equal}.")]

    def _slice(self, receipt: Receipt, facts: Sliced, before: BlendState) -> list[Told]:
        self._until[self.state.names[receipt.peer]] = receipt.ended, True
        if _kind(facts.job) in ("general", "expert") and (facts.job in self._curves or len(self._curves) < MAX_CURVES):
            curve = self._curves.setdefault(facts.job, Curve(1, buckets=BUCKETS, tail=TAIL))
            curve.add((facts.steps, facts.loss))
        return self._taken_over(facts.job, before)

    def _taken_over(self, name: str, before: BlendState) -> list[Told]:
        was, job = before.jobs.get(name), self.state.jobs[name]
        if was is None or was.peer == job.peer:
            return []
        text = f"{name_of(job.peer)} went on with {_what(name)} where {name_of(was.peer)} had left it, after"
        return [Told("recover", f"{text} {was.steps} steps.", own=True, mark=True)]

    def _done(self, receipt: Receipt, facts: Done) -> Told:
        who, what = name_of(self.state.names[receipt.peer]), _what(facts.job)
        match _kind(facts.job):
            case "general":
                return Told("checkpoint", f"{who} trained {what}: {facts.steps} steps.", own=True, mark=True)
            case "expert":
                held_out = figures(perplexity(facts.losses.get("validation")))
                text = f"{who} trained {what}: {facts.steps} steps, held-out perplexity {held_out}."
                return Told("checkpoint", text, own=True, mark=True)
            case "trial":
                return Told(
                    "evaluate", f"{who} tried {what} for {facts.steps} steps to see how it is learned.", own=True
                )
            case "count":
                return Told("evaluate", f"{who} counted {what}.", own=True)
        best = min(facts.losses, key=lambda name: facts.losses[name], default="")
        found = f": {name_of(best)} is best, perplexity {figures(perplexity(facts.losses[best]))}" if best else ""
        return Told("evaluate", f"{who} compared the experts on {what}{found}.", own=True)

    def _afterwards(self, receipt: Receipt) -> Told:
        """The blend was changed or used."""
        match receipt.op:
            case "blend.add" | "blend.remove":
                change = receipt.read(Added if receipt.op == "blend.add" else Removed)
                self._changes.pop(change.name, None)
                self._changes[change.name] = change
                for surplus in list(self._changes)[:-MAX_CHANGES]:
                    del self._changes[surplus]
                gone = isinstance(change, Removed)
                return Told("lost" if gone else "join", f"{name_of(change.name)} was {'removed' if gone else 'added'}.")
            case "blend.route":
                self._router = routed = receipt.read(Routed)
                reached = tidy(routed.accuracy.get(routed.rule))
                found = f", right on {100 * reached:.1f} % of held-out prompts" if reached is not None else ""
                text = f"A router of {len(routed.domains)} domains was fitted ({clean(routed.rule, 40)}){found}."
                return Told("checkpoint", text)
        fused = receipt.read(Upcycled)
        self._mixtures = [*self._mixtures, fused][-MAX_MIXTURES:]
        return Told("checkpoint", f"{len(fused.experts)} experts were fused into one ({clean(fused.format, 40)}).")

    # -- what is shown ----------------------------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any]:
        """All of it as plain data for JSON."""
        planned, rows = self.state.planned, self._domains()
        own = sorted((row["own"], row["domain"]) for row in rows if row["own"] is not None)
        ends = [{"domain": domain, "loss": tidy(loss)} for loss, domain in (own[0], own[-1])] if own else [None, None]
        return {
            **self._terms(),
            "planned": planned is not None,
            "jobs": self._progress(),
            "best": ends[0],
            "worst": ends[1],
            "flops": tidy(planned.flops) if planned else None,
            "off": _off(planned) if planned else None,
            "tokens": self.tokens,
            "rows": rows[:MAX_DOMAINS],
            "curves": sorted(
                map(self._curve, self._curves), key=lambda one: (one["slot"] is not None, one["slot"] or 0)
            ),
            "cross": self._cross(rows),
            "by_peer": self._peers(),
            "after": self._after(),
        }

    def _terms(self) -> dict[str, Any]:
        """What the recipe says."""
        recipe, planned = self._recipe, self.state.planned
        sizes = [
            size for size in ("small", "medium", "large") if planned and size in {one.size for one in planned.plan}
        ]
        return {
            "domains": len(recipe.domains) if recipe else len(planned.plan) if planned else 0,
            "names": [name_of(one.name) for one in recipe.domains[:MAX_DOMAINS]] if recipe else [],
            "allocation": clean(recipe.experts.allocation, 40) if recipe else "",
            "trained": recipe.experts.trained if recipe else "",
            "sizes": sizes,
            "gathered": self.ended,
        }

    def _progress(self) -> dict[str, Any]:
        """Jobs done of all, per kind; ``share`` also counts what is done of jobs that go on."""
        states = self.state.jobs
        known = self._jobs or [Job(name=name, kind=_kind(name), steps=job.steps) for name, job in states.items()]
        every = Counter(job.kind for job in known)
        done = Counter(job.kind for job in known if states.get(job.name, JobState()).done)
        parts = sum(_part(job, states.get(job.name, JobState())) for job in known)
        return {
            "done": done.total(),
            "all": every.total(),
            "kinds": [{"kind": kind, "done": done[kind], "all": every[kind]} for kind in KINDS if every[kind]],
            "share": tidy(parts / len(known)) if known else None,
        }

    def _domains(self) -> list[dict[str, Any]]:
        """A row per domain."""
        recipe, planned = self._recipe, self.state.planned
        plan = {one.domain: one for one in planned.plan} if planned else {}
        difficulty = {one.name: one.difficulty for one in recipe.domains} if recipe else {}
        difficulty |= {one.domain: one.difficulty for one in planned.classes} if planned else {}
        rows = []
        for slot, name in enumerate(difficulty or plan):
            job, one = self.state.jobs.get(f"expert/{name}", JobState()), plan.get(name)
            validation = job.losses.get("validation")
            scored = self.state.jobs.get(f"score/{name}", JobState()).losses
            rows.append(
                {
                    "domain": name_of(name),
                    "slot": slot,
                    "difficulty": clean(difficulty.get(name, ""), 20),
                    "size": clean(one.size, 20) if one else "",
                    "steps": job.steps,
                    "of": one.steps if one else None,
                    "flops": tidy(one.flops) if one else None,
                    "peer": name_of(job.peer) if job.peer else "",
                    "state": "done" if job.done else "under way" if job.steps else "waits",
                    "loss": tidy(validation),
                    "own": tidy(scored.get(name, validation)),
                }
            )
        return rows

    def _curve(self, name: str) -> dict[str, Any]:
        kind, _, about = name.partition("/")
        slots = {one.name: slot for slot, one in enumerate(self._recipe.domains)} if self._recipe else {}
        slot = slots.get(about) if kind == "expert" else None
        label = name_of(about) if kind == "expert" else f"general, {name_of(about)}"
        return {"name": label, "kind": kind, "slot": slot, **self._curves[name].columns(("step", "loss"))}

    def _cross(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        """Losses on held-out text: rows are domains, columns are experts."""
        scored = {
            name.partition("/")[2]: job.losses
            for name, job in self.state.jobs.items()
            if _kind(name) == "score" and job.done
        }
        order = [one.domain for one in self.state.planned.plan] if self.state.planned else sorted(scored)
        columns = order[:MAX_COLUMNS]
        table = [
            {"domain": name_of(name), "losses": [tidy(scored[name].get(one)) for one in columns], **_ends(scored[name])}
            for name in order[:MAX_DOMAINS]
            if name in scored
        ]
        more = len(order) - len(columns)
        return {"columns": [name_of(one) for one in columns], "rows": table, "more": more}

    def _peers(self) -> list[dict[str, Any]]:
        """What each peer did; a job that went from hand to hand counts for its last."""
        names = sorted(set(self.state.names.values()))[:MAX_PEERS]
        jobs: dict[str, list[tuple[str, JobState]]] = {name: [] for name in names}
        for name, job in self.state.jobs.items():
            if job.peer in jobs:
                jobs[job.peer].append((name, job))
        return [
            {
                "name": name_of(name),
                "here": name in self.state.present,
                "done": sum(job.done for _, job in own),
                "experts": [name_of(job.partition("/")[2]) for job, one in own if _kind(job) == "expert" and one.done][
                    :8
                ],
                "steps": sum(job.steps for _, job in own),
                "busy_s": tidy(sum(max(job.busy_s, 0.0) for _, job in own)),
                "doing": next((_what(job) for job, one in reversed(own) if not one.done), ""),
            }
            for name, own in jobs.items()
        ]

    def _after(self) -> dict[str, Any]:
        """What was done to the blend."""
        router = self._router
        rules = sorted(router.accuracy.items(), key=lambda item: -item[1])[:MAX_RULES] if router else []
        return {
            "changes": [_change(one) for one in self._changes.values()],
            "router": router
            and {
                "version": clean(short(router.router), 16),
                "rule": clean(router.rule, 40),
                "domains": len(router.domains),
                "accuracy": [{"rule": clean(rule, 40), "share": tidy(found)} for rule, found in rules],
            },
            "mixtures": [
                {
                    "experts": len(one.experts),
                    "gate": clean(one.gate, 40),
                    "format": clean(one.format, 40),
                    "exact": one.exact,
                    "parameters": one.parameters,
                }
                for one in self._mixtures
            ],
        }


def _read(recipe: Mapping[str, Any]) -> BlendRecipe | None:
    """The recipe as it was meant; None where this version cannot read it, or there are no domains."""
    try:
        return decode(encode(recipe), BlendRecipe)
    except (ValueError, TalkootError):
        return None


def _kind(job: str) -> str:
    return job.partition("/")[0]


def _what(job: str) -> str:
    """A job in words."""
    kind, _, about = job.partition("/")
    forms = {"general": "the general model ({})", "expert": "the expert of {}", "count": "the text of {}"}
    return forms.get(kind, "{}").format(name_of(about))


def _part(job: Job, state: JobState) -> float:
    return 1.0 if state.done else min(state.steps / job.steps, 1.0) if job.steps else 0.0


def _off(planned: Planned) -> float | None:
    """Share by which the plan costs more than the homogeneous one."""
    if not (math.isfinite(planned.flops) and 0 < planned.budget < math.inf):
        return None
    return tidy(planned.flops / planned.budget - 1)


def _ends(losses: Mapping[str, float]) -> dict[str, float | None]:
    """The lowest and the highest of all experts, also of those that are not shown."""
    return {"low": tidy(min(losses.values(), default=None)), "high": tidy(max(losses.values(), default=None))}


def _change(one: Added | Removed) -> dict[str, Any]:
    if isinstance(one, Removed):
        return {"name": name_of(one.name), "change": "removed", "note": ""}
    known = "with statistics" if one.statistics else "without statistics: no router knows it"
    return {
        "name": name_of(one.name),
        "change": "added",
        "note": f"{count(one.parameters) or UNKNOWN} parameters, {known}",
    }
