"""The parts of a post-training recipe that are about the run, its rounds and its peers, each with its own rules."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import islice
from typing import Any

import msgspec

from talkoot.run.peers import PeerEntry
from talkoot.run.section import Rule, Section
from talkoot.tune.assign import Split
from talkoot.tune.completion import Sampling
from talkoot.tune.tasks.task import Demonstrates, Task, demonstrations

MOST_DEMONSTRATIONS = 32768
MOST_COMPLETIONS = 2**16  # groups of a round, and completions of a group
DEFAULT_TOKENS = 64  # of a completion, where neither recipe nor task say


class Tune(Section, frozen=True, kw_only=True):
    """The run.

    Attributes:
        rounds: each is one generation and one update.
        evaluate_every, evaluate_items, evaluate_samples: scores on held-out and shifted problems every so many rounds
            (0 = never) and at the end; so many problems; samples of each beside the greedy answer.
        checkpoint_every: a peer stores its state every so many rounds (0 = only at the end).
        patience_s: seconds without any report after which the run gives up.
        respawn: start lost peers again.
        threads: compute threads per peer.
        host: address that peers listen on.
        emulate: hold the real links back to those of ``network``.
        tolerance: how far generator and trainer may disagree about a token's log-probability, in nats, at the start.
    """

    rounds: int = 30
    evaluate_every: int = 10
    evaluate_items: int = 128
    evaluate_samples: int = 4
    checkpoint_every: int = 10
    patience_s: float = 600.0
    respawn: bool = True
    threads: int = 1
    host: str = "127.0.0.1"
    emulate: bool = False
    tolerance: float = 0.05

    def rules(self) -> Iterable[Rule]:
        for name in ("rounds", "evaluate_items", "evaluate_samples"):
            yield name, getattr(self, name) >= 1, "at least 1"
        for name in ("evaluate_every", "checkpoint_every"):
            yield name, getattr(self, name) >= 0, "at least 0"
        yield "threads", 1 <= self.threads <= 1024, "from 1 to 1024"
        for name in ("tolerance", "patience_s"):
            yield name, 0 < getattr(self, name) < math.inf, "a finite number above 0"


class Rollout(Section, frozen=True, kw_only=True):
    """How completions are made in a round.

    Attributes:
        prompts: groups per peer (``vertical``) or of all together (``horizontal``).
        samples: completions per group.
        max_new_tokens: 0 = what the task says.
        temperature, top_k, top_p: see :class:`~talkoot.tune.completion.Sampling`.
    """

    prompts: int = 16
    samples: int = 12
    max_new_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def rules(self) -> Iterable[Rule]:
        for name in ("prompts", "samples"):
            yield name, 1 <= getattr(self, name) <= MOST_COMPLETIONS, f"from 1 to {MOST_COMPLETIONS}"
        self.sampling(1)  # has rules of its own

    def sampling(self, max_new_tokens: int) -> Sampling:
        """The same for the generator; ``max_new_tokens`` stands in where none is set."""
        return Sampling(
            max_new_tokens=self.max_new_tokens or max_new_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
        )


class Exchange(Section, frozen=True, kw_only=True):
    """What peers learn from each other.

    Attributes:
        split: ``vertical``: every peer answers prompts of its own choice; ``horizontal``: all answer the same ones and
            share their samples (for peers with the same model: then it is data parallelism without gradients).
        own, external: groups that an update uses, of one's own and of others; -1 = all (SAPO's mix, arXiv 2509.08721).
        wait_s: seconds to wait for the others' completions of the same round; 0 = never: take what has come.
        max_lag: rounds that others' completions may be away from one's own.
        refills: with ``objective.dynamic_sampling``, how often a round is filled up with further prompts.
    """

    split: Split = "vertical"
    own: int = -1
    external: int = -1
    wait_s: float = 120.0
    max_lag: int = 0
    refills: int = 2

    def rules(self) -> Iterable[Rule]:
        for name in ("own", "external"):
            yield name, getattr(self, name) >= -1, "at least 0, or -1 for all"
        yield "own", (self.own, self.external) != (0, 0), "above 0 where external is 0, or nothing is learned from"
        yield "wait_s", 0 <= self.wait_s < math.inf, "a finite number from 0"
        yield "max_lag", self.max_lag >= 0, "at least 0"
        yield "refills", 0 <= self.refills <= 100, "from 0 to 100"


class Warm(Section, frozen=True, kw_only=True):
    """Supervised steps on the task's demonstrations before the first round, for models that start from nothing.

    Attributes:
        steps: 0 = none.
        batch, learning_rate: sequences per step, and Adam's rate.
        habits: how the demonstrations are flawed, as the task has it (``[warm.habits]``); empty = the task's own way.
    """

    steps: int = 0
    batch: int = 128
    learning_rate: float = 2e-3
    habits: dict[str, Any] = msgspec.field(default_factory=dict)

    def rules(self) -> Iterable[Rule]:
        yield "steps", self.steps >= 0, "at least 0"
        yield "batch", 1 <= self.batch <= MOST_DEMONSTRATIONS, f"from 1 to {MOST_DEMONSTRATIONS}"
        yield "learning_rate", 0 < self.learning_rate < math.inf, "a finite number above 0"

    def texts(self, task: Task, seed: int) -> Iterable[tuple[str, str]]:
        """Prompts and completions to learn from.

        Raises:
            TalkootError: the task has no worked solutions.
        """
        if isinstance(task, Demonstrates):
            return islice(task.demonstrate(seed, self.habits), min(self.steps * self.batch, MOST_DEMONSTRATIONS))
        return islice(demonstrations(task), min(task.size("train"), MOST_DEMONSTRATIONS))


class Peer(PeerEntry, frozen=True, kw_only=True):
    """One peer, and what is different with it.

    Attributes:
        from_round: it comes when somebody has done so many rounds.
        model, warm, rollout: its own keys of those sections.
    """

    from_round: int = 0
    model: dict[str, Any] = msgspec.field(default_factory=dict)
    warm: dict[str, Any] = msgspec.field(default_factory=dict)
    rollout: dict[str, Any] = msgspec.field(default_factory=dict)

    def rules(self) -> Iterable[Rule]:
        yield from super().rules()
        yield "from_round", self.from_round >= 0, "at least 0"
