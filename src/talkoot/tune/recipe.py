"""A post-training run as data: everything it is, in one typed tree that TOML files and flags fill in."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from talkoot.core.codec import decode, encode
from talkoot.core.errors import TalkootError, nearest
from talkoot.core.plain import CORRECT, build, read_overridden
from talkoot.run.section import Section, peer_names
from talkoot.tune.assign import Split
from talkoot.tune.completion import Sampling
from talkoot.tune.corrections.rule import Correction
from talkoot.tune.distil.critics.critic import CriticSettings
from talkoot.tune.distil.settings import Distillation
from talkoot.tune.objective.settings import Optimizer, Update
from talkoot.tune.objective.switches import Objective, make_objective
from talkoot.tune.policies.spec import ModelSpec
from talkoot.tune.tasks.task import Demonstrates, Task, demonstrations
from talkoot.world.faults import Fault
from talkoot.world.links import Network

UNUSABLE = "the recipe cannot be used"
MOST_DEMONSTRATIONS = 32768
MOST_PEERS = 256
# What may differ when a run is resumed.
FREE = (
    "name",
    "network",
    "faults",
    "tune.rounds",
    "tune.checkpoint_every",
    "tune.evaluate_every",
    "tune.patience_s",
    "tune.host",
    "tune.threads",
    "tune.respawn",
    "tune.emulate",
    "exchange.wait_s",
    "critic",
)
PHASES = ("generate", "publish", "gather", "update", "report", "idle")


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

    def texts(self, task: Task, seed: int) -> Iterable[tuple[str, str]]:
        """Prompts and completions to learn from.

        Raises:
            TalkootError: the task has no worked solutions.
        """
        if isinstance(task, Demonstrates):
            return islice(task.demonstrate(seed, self.habits), min(self.steps * self.batch, MOST_DEMONSTRATIONS))
        return islice(demonstrations(task), min(task.size("train"), MOST_DEMONSTRATIONS))


class Peer(Section, frozen=True, kw_only=True):
    """One peer, and what is different with it.

    Attributes:
        name: empty = a tree's.
        speed: of its processor in a rehearsal, 1 = unhindered.
        count: so many peers like this one; their names are numbered.
        from_round: it comes when somebody has done so many rounds.
        model, warm, rollout: its own keys of those sections.
    """

    name: str = ""
    speed: float = 1.0
    count: int = 1
    from_round: int = 0
    model: dict[str, Any] = msgspec.field(default_factory=dict)
    warm: dict[str, Any] = msgspec.field(default_factory=dict)
    rollout: dict[str, Any] = msgspec.field(default_factory=dict)


class TuneRecipe(Section, frozen=True, kw_only=True, dict=True):
    """A whole run."""

    name: str = "tune"
    seed: int = 0
    task: str = "addition:2"
    tune: Tune = Tune()
    rollout: Rollout = Rollout()
    exchange: Exchange = Exchange()
    objective: dict[str, Any] = msgspec.field(default_factory=dict)
    correction: Correction = Correction()
    optimizer: Optimizer = Optimizer()
    update: Update = Update()
    critic: CriticSettings = CriticSettings()
    distillation: Distillation = Distillation()
    model: ModelSpec = ModelSpec()
    warm: Warm = Warm()
    peers: tuple[Peer, ...] = (Peer(),)
    network: Network = Network()
    faults: tuple[Fault, ...] = ()

    def __post_init__(self) -> None:
        for key, value, fits, rule in self._ranges():
            if not fits:
                raise _bad(key, f"it is {value}, it must be {rule}")
        if len(set(self.names)) != len(self.names):
            raise _bad("peers", f"two of {', '.join(self.names)} have the same name")
        for index, fault in enumerate(self.faults):
            for name in fault.victims:
                if name not in self.names:
                    raise _bad(f"faults[{index}].peer", f"there is no peer {name!r}; {nearest(name, self.names)}")
            if fault.at_s is None and (fault.step is None or fault.phase not in PHASES):
                raise _bad(
                    f"faults[{index}].phase", f"there is no phase {fault.phase!r}; {nearest(fault.phase, PHASES)}"
                )

    def _ranges(self) -> Iterator[tuple[str, object, bool, str]]:
        tune, rollout, exchange = self.tune, self.rollout, self.exchange
        yield "seed", self.seed, -(2**63) <= self.seed < 2**63, "a 64-bit integer"
        for name in ("rounds", "threads", "evaluate_samples"):
            yield f"tune.{name}", getattr(tune, name), getattr(tune, name) >= 1, "at least 1"
        for name in ("evaluate_every", "checkpoint_every"):
            yield f"tune.{name}", getattr(tune, name), getattr(tune, name) >= 0, "at least 0"
        yield "tune.evaluate_items", tune.evaluate_items, tune.evaluate_items >= 1, "at least 1"
        yield "tune.tolerance", tune.tolerance, 0 < tune.tolerance < math.inf, "above 0"
        yield "tune.patience_s", tune.patience_s, 0 < tune.patience_s < math.inf, "above 0"
        yield "rollout.prompts", rollout.prompts, rollout.prompts >= 1, "at least 1"
        least = 1 if self.critic.kind != "none" else 2
        why = f"at least {least}" + (": a group of one has nothing to compare" if least > 1 else "")
        yield "rollout.samples", rollout.samples, rollout.samples >= least, why
        for name in ("own", "external"):
            yield (
                f"exchange.{name}",
                getattr(exchange, name),
                getattr(exchange, name) >= -1,
                "at least 0, or -1 for all",
            )
        yield "exchange.wait_s", exchange.wait_s, 0 <= exchange.wait_s < math.inf, "at least 0"
        yield "exchange.max_lag", exchange.max_lag, exchange.max_lag >= 0, "at least 0"
        yield "exchange.refills", exchange.refills, exchange.refills >= 0, "at least 0"
        yield "warm.steps", self.warm.steps, self.warm.steps >= 0, "at least 0"
        early = any(peer.from_round == 0 for peer in self.peers)
        yield (
            "peers",
            [peer.from_round for peer in self.peers],
            early,
            "at least one peer that is there from round 0 on",
        )
        yield "peers", len(self.names), 1 <= len(self.names) <= MOST_PEERS, f"1 to {MOST_PEERS} peers"
        for name in self.names:
            plain = (
                name == "".join(name.split()) and name.isprintable() and not set(name) & set("/\\") and name != "lead"
            )
            yield "peers.name", repr(name), plain, 'without blanks and slashes, and "lead" is taken'
        for index, peer in enumerate(self.peers):
            yield f"peers[{index}].speed", peer.speed, 0 < peer.speed <= 1, "in (0, 1], 1 = unhindered"
            yield f"peers[{index}].from_round", peer.from_round, peer.from_round >= 0, "at least 0"
            yield f"peers[{index}].count", peer.count, peer.count >= 1, "at least 1"

    @cached_property
    def _by_name(self) -> dict[str, Peer]:
        spare = iter(peer_names(sum(peer.count for peer in self.peers)))
        found: dict[str, Peer] = {}
        for peer in self.peers:
            for number in range(peer.count):
                name = (peer.name + (str(number + 1) if peer.count > 1 else "")) or next(spare)
                if name in found:
                    raise _bad("peers", f"two peers are called {name!r}")
                found[name] = peer
        return found

    @property
    def names(self) -> tuple[str, ...]:
        """All peers' names, in the recipe's order."""
        return tuple(self._by_name)

    @property
    def vertical(self) -> bool:
        """Whether every peer answers prompts of its own."""
        return self.exchange.split == "vertical"

    def peer(self, name: str) -> Peer:
        """A peer's entry."""
        return self._by_name[name]

    def model_of(self, name: str) -> ModelSpec:
        """A peer's model: its own keys on top of ``[model]``."""
        return _merged(self.model, self.peer(name).model, f"peer {name}, key model")

    def warm_of(self, name: str) -> Warm:
        """A peer's warm start."""
        return _merged(self.warm, self.peer(name).warm, f"peer {name}, key warm")

    def rollout_of(self, name: str) -> Rollout:
        """A peer's way to make completions."""
        return _merged(self.rollout, self.peer(name).rollout, f"peer {name}, key rollout")

    def made_objective(self, limit: int) -> Objective:
        """What is maximised: the named algorithm with the switches of ``[objective]``; completions have at most
        ``limit`` tokens."""
        return make_objective(self.objective, limit)

    def plain(self) -> dict[str, Any]:
        """The recipe as the log keeps it."""
        return decode(encode(self), dict[str, Any])

    def check(self) -> None:
        """Look up everything that is named by a name.

        Raises:
            TalkootError: there is no such thing; the nearest name is given.
        """
        from talkoot.tune.distil.critics import critics
        from talkoot.tune.tasks import open_task

        task = open_task(self.task, self.seed)
        _ = critics[self.critic.kind]
        for name in self.names:
            self.model_of(name)
            self.warm_of(name)
            own = self.rollout_of(name)
            self.made_objective(own.sampling(task.max_new_tokens or 64).max_new_tokens)
            if own.samples != self.rollout.samples and not self.vertical:
                raise _bad(f"peers.{name}.rollout.samples", "in a horizontal exchange all groups have the same size")


def _merged(base: Any, changes: dict[str, Any], where: str) -> Any:
    if not changes:
        return base
    return build({**msgspec.to_builtins(base), **changes}, type(base), what=UNUSABLE, where=where)


def load_tune_recipe(
    path: Path | None, overrides: tuple[str, ...] = (), default: Mapping[str, Any] = MappingProxyType({})
) -> TuneRecipe:
    """Read a TOML recipe and apply ``section.key=value`` overrides.

    Args:
        default: what stands in for a file.

    Raises:
        TalkootError: unreadable file, broken TOML, an unknown key or a wrong type.
    """
    tree = read_overridden(path, overrides, UNUSABLE, default)
    return build(tree, TuneRecipe, what=UNUSABLE, where="the command line" if path is None else str(path))


def _bad(where: str, why: str, next: str = CORRECT) -> TalkootError:
    return TalkootError(UNUSABLE, where=where, why=why, next=next)
