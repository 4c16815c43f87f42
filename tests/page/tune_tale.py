"""A post-training run that never ran: a realistic log, made of real receipts, for pages, status and verification."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import msgspec

from talkoot.core.fold import START, Entry, State, link
from talkoot.core.ids import digest
from talkoot.core.keys import Key
from talkoot.core.log import Log
from talkoot.core.receipt import Receipt, Signed, Task, body, sign
from talkoot.run.records import End, Gone, Joined, Resume, Start, Warned
from talkoot.tune.completion import Sampling
from talkoot.tune.evaluate import Evaluation
from talkoot.tune.records import Generated, Kept, TuneRolledBack, Updated, Viewed

RECIPE = {
    "name": "orchard",
    "seed": 0,
    "task": "addition:2",
    "tune": {"rounds": 24},
    "objective": {"algorithm": "grpo"},
    "correction": {"rule": "ftis", "gamma": 6.0},
    "exchange": {"split": "vertical", "max_lag": 0},
}


def policy(name: str, updates: int, start: int = 0) -> str:
    """The hash of a peer's weights after so many updates."""
    return digest(f"{name}/{start}/{updates}".encode(), "weights")


def score(split: str, greedy: float, samples: int = 4) -> Evaluation:
    """A made-up evaluation."""
    return Evaluation(
        split=split,
        problems=128,
        samples=samples,
        avg=greedy * 0.9,
        passed=min(1.0, greedy + 0.2),
        majority=greedy * 0.95,
        greedy=greedy,
        reward=greedy * 0.9,
        length=24.5,
        cut_off=0.01,
        reasons={"right": 10},
    )


class TuneTale:
    """Writes receipts one after another, with a clock of its own.

    Args:
        names: of the peers that begin.
        log: where to; None = nowhere, entries are kept anyway, whether or not a log would take them.
        recipe: replaces parts of ``RECIPE``.
    """

    def __init__(
        self, names: Sequence[str] = ("alder", "birch", "cedar"), log: Log | None = None, **recipe: Any
    ) -> None:
        self.log, self.names, self.recipe = log, tuple(names), {**RECIPE, **recipe}
        self.lead, self.now, self.state = Key.derived("lead"), 0.0, State()
        self.entries: list[Entry] = []
        self.chain, self.view, self.starts = START, 0, 0
        self.keys: dict[str, Key] = {}
        self.since: dict[str, int] = {}
        self.rounds: dict[str, int] = {}
        self.policies: dict[str, str] = {}
        self.chance = random.Random(7)
        start = Start(world="simulated", talkoot="0.1.0", recipe=self.recipe, config={}, parameters=0, stages=())
        self.write("run.start", start)
        for name in self.names:
            self.join(name)
        self.publish()

    def write(self, op: str, facts: msgspec.Struct, key: Key | None = None, step: int = 0, **more: Any) -> str:
        """Append one receipt; returns its id."""
        key = key or self.lead
        inputs = more.pop("inputs", {})
        fields = {"started": self.now, "ended": self.now, **more}
        task = Task(op=op, inputs=inputs)
        receipt = Receipt(run="tale", generation=0, step=step, peer=key.peer, task=task, body=body(facts), **fields)
        signed: Signed = sign(receipt, key)
        if self.log is not None:
            _, self.state = self.log.append(signed, self.state)
        self.chain = link(self.chain, signed.id)
        self.entries.append(Entry(len(self.entries) + 1, signed.id, receipt, self.chain))
        return signed.id

    def join(self, name: str, since: int = 0) -> None:
        """A peer says hello, with a key of its own."""
        self.starts += 1
        key = self.keys[name] = Key.derived(name, self.starts)
        self.since[name] = self.rounds[name] = since
        self.policies[name] = policy(name, since, self.starts)
        self.now += 0.1
        self.write("peer.join", Joined(peer=key.peer, name=name))

    def publish(self) -> None:
        """Say who takes part."""
        self.view += 1
        places = tuple((name, self.since[name]) for name in sorted(self.keys))
        self.write("tune.view", Viewed(number=self.view, places=places, until=self.recipe["tune"]["rounds"]))

    def lose(self, name: str, reason: str) -> None:
        """A peer is gone."""
        key = self.keys.pop(name)
        self.write("peer.lost", Gone(peer=key.peer, name=name, reason=reason))
        self.publish()

    def generate(self, name: str, **changes: Any) -> str:
        """The account of a round's completions; returns its id."""
        number = self.rounds[name]
        facts = Generated(
            round=number,
            task="t" * 64,
            tokenizer="k" * 64,
            policy=self.policies[name],
            version=number,
            sampling=Sampling(max_new_tokens=32),
            seed=0,
            prompts=(1, 2),
            samples=((0, 1), (0, 1)),
            lengths=((20, 30), (24, 26)),
            stopped=((True, True), (True, False)),
            busy_s=0.4,
        )
        facts = msgspec.structs.replace(facts, **changes)
        times = {"started": self.now, "ended": self.now + 0.4}
        return self.write("tune.generate", facts, self.keys[name], number, inputs={"policy": facts.policy}, **times)

    def update(self, name: str, parents: Sequence[str], times: dict[str, Any] | None = None, **changes: Any) -> str:
        """The account of what a round taught; returns its id. ``parents``: the own completions' first."""
        number, before = self.rounds[name], self.policies[name]
        after = policy(name, number + 1, self.starts)
        slot = self.names.index(name) if name in self.names else 0
        reward = 0.9 - 0.5 * math.exp(-number / (6 + 3 * slot)) + self.chance.uniform(-0.03, 0.03)
        facts = Updated(
            round=number,
            policy=after,
            version=number + 1,
            reward=reward,
            learned={
                "loss": 0.0123,
                "grad_norm": 0.71,
                "ratio_median": 1.0,
                "ratio_99": 1.8 + slot,
                "above_cap_share": 0.03 * slot,
                "kl_naive": 1.25,
                "kl_nonnegative": 1.5,
                "filtered_by_peer birch": 0.125,
                "entropy": 0.31,
                "zero_sigma_share": 0.25,
                "truncated_share": 0.02,
                "moon phase": 0.75,
            },
            counts={"tokens": 190, "own_groups": 2, "external_groups": 2 * (len(parents) - 1), "skipped all_equal": 1},
            solo=len(parents) < 2,
            busy_s=0.5,
            sent_bytes=1600,
            waited_s=0.2 * (2 - min(slot, 2)),
        )
        facts = msgspec.structs.replace(facts, **changes)
        times = {"started": self.now, "ended": self.now + 1.2} | (times or {})
        more = {"inputs": {"policy": before}, "outputs": {"policy": facts.policy}, "parents": tuple(parents)}
        done = self.write("tune.update", facts, self.keys[name], number, **times, **more)
        self.rounds[name], self.policies[name] = number + 1, facts.policy
        return done

    def round(self, **changes: Any) -> None:
        """Everybody that is there does one."""
        due = min(self.rounds[name] for name in self.keys)
        here = [name for name in sorted(self.keys) if self.rounds[name] == due]
        made = {name: self.generate(name) for name in here}
        for name in here:
            others = [made[other] for other in here if other != name]
            self.update(name, [made[name], *others], **changes)
        self.now += 1.3

    def evaluated_round(self, greedy: float) -> None:
        """The same, with scores."""
        made = {name: self.generate(name) for name in sorted(self.keys)}
        for at, name in enumerate(made):
            scores = (
                score(split, greedy - 0.1 * n - 0.06 * at) for n, split in enumerate(("train", "held_out", "shifted"))
            )
            parents = [made[name], *(made[other] for other in made if other != name)]
            self.update(name, parents, evaluations=tuple(scores))
        self.now += 1.3

    def lonely_round(self) -> None:
        """Everybody learns from its own completions only: nothing of the others came."""
        for name in sorted(self.keys):
            absent = tuple(other for other in sorted(self.keys) if other != name)
            self.update(name, [self.generate(name)], absent=absent)
        self.now += 1.3

    def keep(self) -> None:
        """All states are stored."""
        for name in sorted(self.keys):
            blob = digest(f"{name}{self.rounds[name]}".encode(), "blob")
            self.write("tune.kept", Kept(name=name, round=self.rounds[name], blob=blob, num_bytes=1000))

    def resume(self, to: int) -> None:
        """The lead was killed and is started again; everybody goes back to round ``to``."""
        self.write("run.resume", Resume(world="simulated", talkoot="0.1.0", steps=self.recipe["tune"]["rounds"]))
        self.write("tune.rollback", TuneRolledBack(round=to, reason="the lead was started again"))
        self.keys = {}
        for name in self.names:
            self.join(name, to)
        self.publish()

    def warn(self, text: str) -> None:
        """The lead warns."""
        self.write("run.warning", Warned(text=text))

    def end(self, reason: str = "done") -> None:
        """The run is over."""
        self.now += 0.1
        self.write("run.end", End(reason=reason))


def eventful(log: Log | None = None, rounds: int = 24, *, finished: bool = True) -> TuneTale:
    """A whole run of three peers: one is lost and comes back, the lead is killed once, one learns alone for a while."""
    tale = TuneTale(log=log)
    third = rounds // 3
    for number in range(third):
        tale.evaluated_round(0.4) if number == 3 else tale.round()
    tale.keep()
    tale.lose("cedar", "no heartbeat for 2.5 s")
    tale.round(rejected={"bad signature or form": 1, "of another round": 2}, absent=("cedar",))
    tale.round()
    tale.lose("birch", "the process ended with signal 9")
    tale.round()
    tale.warn("the critic answers slowly")
    tale.resume(third)
    while (number := tale.rounds["alder"]) < rounds - (0 if finished else third):
        if number in (13, rounds - 1):
            tale.evaluated_round(0.75 + number / 200)
        elif number == third + 2:
            tale.lonely_round()
        else:
            tale.round(rejected={"forged answer": 1} if number % 5 == 0 else {})
    if finished:
        tale.keep()
        tale.end()
    return tale
