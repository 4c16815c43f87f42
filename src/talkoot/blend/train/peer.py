"""A peer that trains experts: take an order, work on it slice by slice, give an account of each, ask for no more.

It exchanges nothing with other peers. What it has after a slice is stored, so that whoever takes the job over goes on
from there with the same bits.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from talkoot.blend.folder import TOKENIZER
from talkoot.blend.train.learner import Learner, from_bytes, held_out_loss
from talkoot.blend.train.messages import BlendJob, Order, Told
from talkoot.blend.train.records import Done, Sliced
from talkoot.blend.train.texts import documents, domain_tokens, general_tokens
from talkoot.core.codec import decode
from talkoot.core.ids import PeerId
from talkoot.core.receipt import Receipt, Task, body, sign
from talkoot.data import TokenFile
from talkoot.model.config import ModelConfig
from talkoot.model.stage import Stage
from talkoot.model.tokenizer import Tokenizer
from talkoot.run.greeting import say_hello
from talkoot.run.records import Facts
from talkoot.world.api import LOST, World

HELLO_AGAIN_S = 2.0
TRAIN_FACTOR = 3  # operations of a training step, in those of its forward pass
COUNT_FLOPS = 1e3  # per token counted: tokenising it


class Stopped(Exception):
    """The lead says that this is the end."""


async def blend_peer(world: World, argument: bytes) -> None:
    """The program of every peer."""
    with suppress(Stopped):
        await BlendPeer(world, decode(argument, BlendJob)).run()


class BlendPeer:
    """See the module's text."""

    def __init__(self, world: World, job: BlendJob) -> None:
        self.world, self.recipe, self.folder = world, job.recipe, Path(job.folder)
        if world.lead is None:
            raise ValueError("a peer that nobody launched has no lead")
        self.lead: PeerId = world.lead
        self.tokenizer = Tokenizer.load(self.folder / TOKENIZER)
        self.configs = job.recipe.configs(self.tokenizer.vocab_size, self.tokenizer.bos_id, self.tokenizer.eos_id or 0)
        self._works: dict[str, Callable[[Order], Any]] = {
            "general": self._train,
            "trial": self._try,
            "expert": self._train,
            "count": self._count,
            "score": self._score,
        }

    async def run(self) -> None:
        """Until the lead says stop."""
        message = await say_hello(self.world, self.lead, ("order", "stop"), HELLO_AGAIN_S)
        while message.topic == "order":
            order = message.read(Order)
            await self.world.reached(order.job.steps, "begin")
            await self._works[order.job.kind](order)
            message = await self.world.receive("order", "stop", LOST)
            while message.topic == LOST and message.sender != self.lead:
                message = await self.world.receive("order", "stop", LOST)

    # -- kinds of work ----------------------------------------------------------------------------------------

    async def _train(self, order: Order) -> None:
        """A general model or an expert, in slices."""
        job, world, recipe = order.job, self.world, self.recipe
        learner, tokens = await self._open(order)
        flops = self._step_flops(job.size)
        while learner.steps < job.steps:
            self._check_stop()
            until = min(job.steps, learner.steps + recipe.experts.checkpoint_every)
            started, busy = world.now(), time.process_time()
            slice_ = lambda until=until: learner.advance(tokens.tokens, until)  # noqa: E731
            loss = await world.compute(slice_, flops * (until - learner.steps))
            state = world.blobs.put(learner.state())
            facts = Sliced(job=job.name, steps=until, loss=loss, busy_s=time.process_time() - busy)
            await world.reached(until, "slice")
            await self._tell("blend.slice", order, facts, {"state": state}, started)
        started, busy = world.now(), time.process_time()
        losses = {"validation": await self._held_out(job.domain, learner.stage, "validation")} if job.domain else {}
        blob = world.blobs.put(learner.result())
        trained = job.steps * recipe.experts.batch * recipe.model.context
        facts = Done(
            job=job.name,
            steps=job.steps,
            tokens=trained,
            flops=flops * job.steps,
            losses=losses,
            busy_s=time.process_time() - busy,
        )
        await self._tell("blend.done", order, facts, {"result": blob}, started)

    async def _try(self, order: Order) -> None:
        """A few steps on a domain, and the held-out loss before, between and after them."""
        job, world = order.job, self.world
        learner, tokens = await self._open(order)
        started, busy = world.now(), time.process_time()
        losses: dict[str, float] = {}
        for until in sorted({0, job.steps // 4, job.steps // 2, job.steps}):
            self._check_stop()
            if until:
                await world.compute(
                    lambda until=until: learner.advance(tokens.tokens, until),
                    self._step_flops(job.size) * (until - learner.steps),
                )
            losses[str(until)] = await self._held_out(job.domain, learner.stage, "validation")
        facts = Done(
            job=job.name,
            steps=job.steps,
            tokens=job.steps * self.recipe.experts.batch * self.recipe.model.context,
            flops=self._step_flops(job.size) * job.steps,
            losses=losses,
            busy_s=time.process_time() - busy,
        )
        await self._tell("blend.done", order, facts, {}, started)

    async def _count(self, order: Order) -> None:
        """The statistics of a domain's text, for a router; signed by this peer."""
        from talkoot.blend.train.counting import counted

        started, busy = self.world.now(), time.process_time()
        domain = order.job.domain
        texts = documents(self.recipe, domain, "train")
        work = lambda: counted(domain, texts, self.tokenizer, self.world.key)  # noqa: E731
        blob = self.world.blobs.put(await self.world.compute(work, COUNT_FLOPS * sum(map(len, texts))))
        facts = Done(job=order.job.name, steps=0, busy_s=time.process_time() - busy)
        await self._tell("blend.done", order, facts, {"result": blob}, started)

    async def _score(self, order: Order) -> None:
        """Every expert's loss on a domain's held-out text: what a cross table is made of."""
        started, busy = self.world.now(), time.process_time()
        losses: dict[str, float] = {}
        for name, blob in sorted(order.inputs.items()):
            self._check_stop()
            weights = from_bytes(self.world.blobs.get(blob))[0]
            config = self._config_of(weights)
            stage = Stage(config, 0, config.layer_count)
            stage.load(weights)
            losses[name.removeprefix("expert/")] = await self._held_out(order.job.domain, stage, "test")
        facts = Done(job=order.job.name, steps=0, losses=losses, busy_s=time.process_time() - busy)
        await self._tell("blend.done", order, facts, {}, started)

    # -- parts ------------------------------------------------------------------------------------------------

    async def _open(self, order: Order) -> tuple[Learner, TokenFile]:
        job, blobs = order.job, self.world.blobs
        start = blobs.get(order.inputs[job.start]) if job.start else b""
        learner = await self.world.compute(lambda: Learner(self.recipe, job, self.configs[job.size], start), 0.0)
        if order.resume:
            learner.load(blobs.get(order.resume))
        if job.kind == "general":
            return learner, general_tokens(self.recipe, self.tokenizer, self.folder)
        return learner, domain_tokens(self.recipe, job.domain, "train", self.tokenizer, self.folder)

    async def _held_out(self, domain: str, stage: Stage, part: str) -> float:
        windows, context = self.recipe.experts.evaluate_windows, self.recipe.model.context
        tokens = domain_tokens(self.recipe, domain, part, self.tokenizer, self.folder).tokens
        flops = stage.config.flops_per_token(context) * windows * context
        return await self.world.compute(lambda: held_out_loss(stage, tokens, context, windows), float(flops))

    def _step_flops(self, size: str) -> float:
        return step_flops(self.configs[size], self.recipe.experts.batch, self.recipe.model.context)

    def _config_of(self, weights: dict[str, Any]) -> ModelConfig:
        wide = weights["model.layers.0.mlp.gate_proj.weight"].shape[0], len(weights)
        for config in self.configs.values():
            names = sum(len(config.layer_shapes(index)) for index in range(config.layer_count))
            if (config.hidden, names) == wide:
                return config
        raise ValueError("an expert has none of the recipe's shapes")

    def _check_stop(self) -> None:
        if self.world.pending("stop"):
            raise Stopped

    async def _tell(self, op: str, order: Order, facts: Facts, outputs: dict[str, str], started: float) -> None:
        """Sign an account of what was done, and send it."""
        world = self.world
        receipt = Receipt(
            run=world.run,
            generation=0,
            step=getattr(facts, "steps", 0),
            peer=world.me,
            task=Task(op=op, inputs=order.inputs, seed=self.recipe.seed),
            outputs=outputs,
            body=body(facts),
            cost=getattr(facts, "busy_s", 0.0),
            started=started,
            ended=world.now(),
        )
        await world.send(self.lead, "told", Told(sign(receipt, world.key)))
        await world.reached(receipt.step, "end")


def step_flops(config: ModelConfig, batch: int, context: int) -> float:
    """Operations of one training step."""
    return float(TRAIN_FACTOR * config.flops_per_token(context) * batch * context)
