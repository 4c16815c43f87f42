"""A run that never ran: a realistic log, made of real receipts, for pages to show."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from talkoot.core.fold import State
from talkoot.core.keys import Key
from talkoot.core.log import Log
from talkoot.core.receipt import Receipt, Task, body, sign
from talkoot.train import records

TOKENS = 4096


@dataclass
class Peer:
    """A peer of the made-up run."""

    name: str
    stage: int
    key: Key
    speed: float = 1.0


@dataclass
class Story:
    """Writes receipts one after another, with a clock of its own."""

    log: Log
    steps: int = 120
    world: str = "simulated"
    start: float = 0.0
    seed: int = 7
    step: int = 0
    generation: int = 0
    peers: list[Peer] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.lead = Key.derived("lead", self.seed)
        self.chance = random.Random(self.seed)
        self.now, self.state = self.start, State()

    def write(
        self,
        op: str,
        facts: msgspec.Struct,
        *,
        key: Key | None = None,
        step: int | None = None,
        took: float = 0.0,
    ) -> None:
        """Append one receipt; it ends now and took ``took`` seconds."""
        key = key or self.lead
        receipt = Receipt(
            run=f"demo-{self.seed}",
            generation=self.generation,
            step=self.step if step is None else step,
            peer=key.peer,
            task=Task(op=op),
            body=body(facts),
            started=self.now - took,
            ended=self.now,
            cost=took,
        )
        _, self.state = self.log.append(sign(receipt, key), self.state)

    def begin(self, name: str = "neighbours", recipe: dict | None = None) -> None:
        """``run.start``."""
        swarm = {"stages": 3, "replicas": 2, "speeds": [1.0, 1.0, 0.5], "respawn": True}
        train = {"steps": self.steps, "microbatches": 8, "learning_rate": 0.003, "schedule": "cosine"}
        data = {"source": "bundled:shakespeare", "tokenizer": "bpe:1024"}
        plain = {"name": name, "seed": 0, "data": data, "model": {"depth": 6}, "train": train, "swarm": swarm}
        facts = records.Start(
            world=self.world,
            talkoot="0.1.0",
            recipe=recipe or plain,
            config={"width": 384},
            parameters=4_812_288,
            stages=((0, 2), (2, 4), (4, 6)),
        )
        self.write("run.start", facts)

    def join(self, name: str, stage: int, source: str = "the seed", speed: float = 1.0) -> Peer:
        """A peer says hello and takes a stage."""
        peer = Peer(name, stage, Key.derived(name, self.seed, len(self.peers), self.step), speed)
        self.peers.append(peer)
        self.write("peer.join", records.Joined(peer=peer.key.peer, name=name))
        self.now += 0.2
        self.write("peer.seat", records.Seated(peer=peer.key.peer, name=name, stage=stage, source=source))
        return peer

    def lose(self, name: str, reason: str) -> None:
        """A peer is gone."""
        peer = next(peer for peer in self.peers if peer.name == name)
        self.peers.remove(peer)
        self.write("peer.lost", records.Gone(peer=peer.key.peer, name=name, reason=reason))

    def loss_at(self, step: int) -> float:
        """A plausible loss."""
        return 1.9 + 4.9 * math.exp(-step / (self.steps / 4.5)) + self.chance.gauss(0, 0.09)

    def commit(self, loss: float | None = None) -> None:
        """All peers work, then the step is committed."""
        stages = sorted({peer.stage for peer in self.peers})
        at = {stage: [peer for peer in self.peers if peer.stage == stage] for stage in stages}
        ways = [[self.chance.choice(at[stage]) for stage in stages] for _ in range(8)]
        span = 0.9 + 0.25 * self.chance.random()
        self.now += span
        for peer in self.peers:
            mine = tuple(index for index, way in enumerate(ways) if peer in way)
            busy = min(span * 0.95, (0.08 + 0.13 * len(mine)) / peer.speed)
            facts = records.Worked(stage=peer.stage, microbatches=mine, sent_bytes=len(mine) * 393_216, busy_s=busy)
            self.write("train.step", facts, key=peer.key, took=span * (0.8 + 0.2 * self.chance.random()))
        value = self.loss_at(self.step) if loss is None else loss
        rate = 0.003 * min((self.step + 1) / 12, 0.55 + 0.45 * math.cos(math.pi * self.step / self.steps))
        facts = records.Committed(
            loss=value,
            losses=tuple(value + self.chance.gauss(0, 0.05) for _ in ways),
            paths=tuple(tuple(peer.name for peer in way) for way in ways),
            tokens=TOKENS,
            learning_rate=rate,
            gradient_norm=0.4 + 1.6 * math.exp(-self.step / 18) + 0.15 * self.chance.random(),
        )
        self.write("train.commit", facts)
        self.step += 1

    def evaluate(self) -> None:
        """``train.evaluate``."""
        loss = self.loss_at(self.step) + 0.12
        self.write("train.evaluate", records.Evaluated(loss=loss, tokens=8 * TOKENS))

    def checkpoint(self) -> None:
        """``train.checkpoint``."""
        facts = records.Checkpointed(manifest="a" * 64, state_hash="b" * 64, num_bytes=57_747_456)
        self.write("train.checkpoint", facts)

    def roll_back(self, step: int, reason: str) -> None:
        """``train.rollback``."""
        self.generation += 1
        self.step = step
        self.write("train.rollback", records.RolledBack(reason=reason))

    def recover(self, rung: str, lost: str, pause: float) -> None:
        """``train.recover``."""
        self.now += pause
        self.write("train.recover", records.Recovered(rung=rung, lost=(lost,), pause_s=pause))

    def run_to(self, step: int, each: Callable[[], None] = lambda: None) -> None:
        """Commit up to ``step`` with an evaluation every 15 and a checkpoint every 30 steps."""
        while self.step < step:
            self.commit()
            if self.step % 15 == 0:
                self.evaluate()
            if self.step % 30 == 0:
                self.checkpoint()
            each()


def crew(story: Story) -> None:
    """Six peers on three stages."""
    for index, name in enumerate(("alder", "birch", "cedar", "dogwood", "elm", "fir")):
        story.join(name, index // 2, speed=0.5 if name == "cedar" else 1.0)


def eventful(folder: Path, *, steps: int = 120, finished: bool = True) -> Story:
    """A whole run with a lost peer, its replacement, a rollback and checkpoints; the log stays open."""
    folder.mkdir(parents=True, exist_ok=True)
    story = Story(Log(folder / "log.sqlite"), steps=steps)
    story.begin()
    crew(story)
    story.run_to(steps * 2 // 5)
    story.lose("dogwood", "no heartbeat for 2.5 s")
    story.recover("replica", "dogwood", 0.8)
    story.run_to(steps // 2)
    story.join("dogwood", 1, "cedar's replica")
    story.run_to(steps * 7 // 12)
    story.lose("elm", "the process ended with signal 9")
    story.lose("fir", "the process ended with signal 9")
    story.roll_back(steps // 2, "stage 2 had no survivor")
    story.recover("checkpoint", "elm", 4.0)
    story.join("gum", 2, "the checkpoint")
    story.join("hazel", 2, "the checkpoint")
    story.run_to(steps if finished else steps * 3 // 4)
    if finished:
        story.write("run.end", records.End(reason="done", state_hash="c" * 64))
    return story
