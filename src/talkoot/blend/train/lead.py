"""The lead of a run that makes experts: it gives free peers what is ready, and writes down what they report.

What it knows is in the log. A lost peer's job goes to the next free one, from the newest stored slice; a new session
goes on with what is not done.
"""

from __future__ import annotations

import talkoot
from talkoot.blend.train.jobs import Class, Job, first_jobs, planned_jobs, ready
from talkoot.blend.train.messages import BlendJob, Order, Told
from talkoot.blend.train.peer import step_flops
from talkoot.blend.train.records import BlendState, Done, JobState, Planned, Sliced
from talkoot.core.codec import encode
from talkoot.core.errors import Exit, TalkootError
from talkoot.core.fold import State
from talkoot.core.ids import PeerId
from talkoot.core.log import Log
from talkoot.model.config import ModelConfig
from talkoot.plan.experts import Budget, allocate, classify, fit_curve
from talkoot.run.company import Company, own_faults
from talkoot.run.journal import Journal, Observer
from talkoot.run.records import End, Facts, Resume, Start
from talkoot.world.api import FAILED, HELLO, LOST, Host, Launch, Message

PROGRAM = "talkoot.blend.train.peer:blend_peer"
STOP_AGAIN_S = 1.0


class BlendLead:
    """See the module's text.

    Args:
        world: the lead's own.
        job: what peers are told.
        configs: shapes of the models by size.
        log: an open log; what it holds is continued.
        observer: called with each new entry and the state after it.
    """

    def __init__(
        self, world: Host, job: BlendJob, configs: dict[str, ModelConfig], log: Log, observer: Observer
    ) -> None:
        self.world, self.job, self.recipe, self.configs = world, job, job.recipe, configs
        self.journal = Journal(world, log, self.recipe.seed, observer)
        self.stop_requested = False
        self.company = Company(world, self.record, self._launch, lambda: f"run {world.run}")
        self._running: dict[PeerId, Job] = {}
        self._first_session = not self.state.position

    @property
    def state(self) -> State:
        """The run's state, as folded from its log."""
        return self.journal.state

    @property
    def blended(self) -> BlendState:
        """The chapter of the state that this is about."""
        return self.state["blend"]

    def record(self, op: str, facts: Facts) -> None:
        """A receipt of the lead's own."""
        self.journal.record(op, facts, 0, 0)

    async def run(self) -> None:
        """From wherever the log says that the run is to its end.

        Raises:
            TalkootError: it cannot go on.
        """
        self._open()
        self.company.expect(self.recipe.faults if self._first_session else ())
        for name in self.recipe.names:
            self.company.start(name)
        while not self._all_done and not self.stop_requested:
            await self._hear()
        self.record("run.end", End(reason="done" if self._all_done else "interrupted"))
        for peer in self.company.members:
            await self.world.send(peer, "stop")
        self.journal.sync()

    def _open(self) -> None:
        if self._first_session:
            start = Start(
                world=self.world.kind,
                talkoot=talkoot.__version__,
                recipe=self.recipe.plain(),
                config={},
                parameters=self.configs["medium"].num_parameters(),
                stages=(),
            )
            self.record("run.start", start)
        else:
            self.record("run.resume", Resume(world=self.world.kind, talkoot=talkoot.__version__))
        self._plan()

    # -- what there is to do ----------------------------------------------------------------------------------

    @property
    def jobs(self) -> list[Job]:
        """All that are known by now."""
        planned = self.blended.planned
        return planned_jobs(self.recipe, planned.plan, planned.classes) if planned else first_jobs(self.recipe)

    @property
    def _all_done(self) -> bool:
        done = self.blended.done
        return self.blended.planned is not None and all(done.get(job.name) for job in self.jobs)

    def _plan(self) -> None:
        """Decide who gets what, as soon as everything is known that it depends on."""
        if self.blended.planned is not None:
            return
        recipe, done = self.recipe, self.blended.jobs
        waiting = [job for job in first_jobs(recipe) if not done.get(job.name, JobState()).done]
        if waiting:
            return
        curves = {}
        classes = {domain.name: domain.difficulty for domain in recipe.domains}
        if recipe.is_estimated:
            losses = {name: done[f"trial/{name}"].losses for name in classes}
            curves = {name: fit_curve([(int(t), loss) for t, loss in found.items()]) for name, found in losses.items()}
            found = classify(curves, recipe.experts.steps)
            classes = {name: given or found[name] for name, given in classes.items()}
        batch, context = recipe.experts.batch, recipe.model.context
        costs = {size: step_flops(config, batch, context) for size, config in self.configs.items()}
        budget = Budget(
            domains=classes,
            step_flops={size: costs.get(size, costs["medium"]) for size in ("small", "medium", "large")},
            steps=recipe.experts.steps,
            shift=recipe.experts.shift,
            curves=curves,
        )
        plan = allocate(recipe.experts.allocation, budget)
        planned = Planned(
            allocation=recipe.experts.allocation,
            classes=tuple(Class(name, difficulty) for name, difficulty in classes.items()),
            plan=plan,
            flops=sum(one.flops for one in plan),
            budget=budget.flops,
        )
        self.record("blend.plan", planned)

    async def _assign(self) -> None:
        """Give every free peer something to do."""
        for peer, name in list(self.company.members.items()):
            if peer in self._running:
                continue
            allowed = [domain.name for domain in self.recipe.domains if domain.peer in ("", name)]
            running = frozenset(job.name for job in self._running.values())
            jobs = self.jobs
            if not (found := ready(jobs, self.blended.done, running, allowed)):
                continue
            # A domain's own experts first at the peer that knows the text already; then whatever is ready.
            job = next((one for one in found if self._knows(name, one)), found[0])
            states = self.blended.jobs
            kept = states.get(job.name, JobState()).state
            order = Order(
                job=job,
                inputs={one: states[one].result for one in job.after},
                resume=kept if kept and kept in self.world.blobs else "",
            )
            self._running[peer] = job
            await self.world.send(peer, "order", order)

    def _knows(self, name: str, job: Job) -> bool:
        return job.kind in ("count", "score") and self.blended.jobs.get(f"expert/{job.domain}", JobState()).peer == name

    # -- hearing ----------------------------------------------------------------------------------------------

    async def _hear(self) -> None:
        patience_s = self.recipe.run.patience_s
        deadline = self.world.now() + patience_s
        while True:  # a request to stop comes from outside, without a message
            try:
                message = await self.world.receive("told", LOST, FAILED, HELLO, timeout=min(STOP_AGAIN_S, patience_s))
                break
            except TimeoutError:
                if self.stop_requested:
                    return
                if self.world.now() >= deadline:
                    raise self._standstill() from None
        try:
            await self._take(message)
        except ValueError as problem:
            if message.sender in self.company.members:
                self._strike_off(message.sender, f"its {message.topic!r} makes no sense: {problem}")
        await self._assign()

    async def _take(self, message: Message) -> None:
        match message.topic:
            case "told" if message.sender in self.company.members:
                self._write_down(message.sender, message.read(Told))
            case _ if message.topic == HELLO:
                self.company.admit(message)
            case _ if message.topic == LOST:
                if (lost := self.company.lost(message)) is not None:
                    self._strike_off(message.sender, lost[1])
            case _:
                self.company.raise_failure(message)

    def _write_down(self, peer: PeerId, told: Told) -> None:
        """Take a peer's word for its own job.

        Raises:
            ValueError: it is about something else, or what it says it stored is not there.
        """
        receipt, job = told.signed.open(), self._running.get(peer)
        if job is None or (receipt.peer, receipt.run) != (peer, self.world.run):
            raise ValueError("it is not about what this peer was asked to do")
        kind = {"blend.slice": Sliced, "blend.done": Done}.get(receipt.op)
        facts = receipt.read(kind) if kind else None
        if facts is None or facts.job != job.name or facts.steps > job.steps:
            raise ValueError(f"a {receipt.op} where one of job {job.name} belongs")
        if any(blob not in self.world.blobs for blob in receipt.outputs.values()):
            raise ValueError("what it says it stored is not in the store")
        if isinstance(facts, Done) and facts.steps != job.steps:
            raise ValueError(f"it ends after {facts.steps} of {job.steps} steps")
        before = self.blended.jobs.get(job.name, JobState()).state
        self.journal.append(told.signed)
        if before:
            self.world.blobs.drop({before} - self._wanted())
        self.company.worked(self.company.members[peer])
        if isinstance(facts, Done):
            del self._running[peer]
            self._plan()

    def _wanted(self) -> set[str]:
        """Blobs that the run may still need."""
        return {blob for job in self.blended.jobs.values() for blob in (job.state, job.result) if blob}

    def _strike_off(self, peer: PeerId, reason: str) -> None:
        name = self.company.members[peer]
        self._running.pop(peer, None)
        self.company.strike_off(peer, reason)
        if self.recipe.run.respawn:
            self.company.start(name)
        self.company.check_left(f"{name} went last: {reason}")

    def _launch(self, name: str, fresh: bool) -> Launch:
        own = own_faults(self.recipe.faults, name) if fresh and self._first_session else ()
        return Launch(
            name=name,
            program=PROGRAM,
            argument=encode(self.job),
            speed=self.recipe.peer(name).speed,
            faults=own,
            threads=self.recipe.run.threads,
        )

    def _standstill(self) -> TalkootError:
        return TalkootError(
            "the swarm stands still",
            where=f"run {self.world.run}, waiting for {', '.join(sorted(self.company.names))}",
            why=f"no peer reported anything for {self.recipe.run.patience_s:.0f} s",
            next="look at those machines; raise run.patience_s if slices really take longer",
            code=Exit.UNREACHABLE,
        )
