"""A post-training run as data: everything it is, in one typed tree that TOML files and flags fill in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from talkoot.core.codec import decode, encode
from talkoot.core.errors import TalkootError
from talkoot.core.plain import CORRECT, build, read_overridden
from talkoot.run.peers import check_faults, named
from talkoot.run.section import Section
from talkoot.tune.corrections.rule import Correction
from talkoot.tune.distil.critics.critic import CriticSettings
from talkoot.tune.distil.settings import Distillation
from talkoot.tune.objective.settings import Optimizer, Update
from talkoot.tune.objective.switches import Objective, make_objective
from talkoot.tune.policies.spec import ModelSpec
from talkoot.tune.sections import DEFAULT_TOKENS, Exchange, Peer, Rollout, Tune, Warm
from talkoot.tune.tasks.task import Task
from talkoot.world.faults import Fault
from talkoot.world.links import Network

UNUSABLE = "the recipe cannot be used"
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
_TURN = 'set exchange.split = "vertical", or correct this value'
PHASES = ("generate", "publish", "gather", "update", "report", "idle")


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
        check_faults(self.faults, self.names, PHASES)

    def _ranges(self) -> Iterator[tuple[str, object, bool, str]]:
        """What no section knows by itself: key, value, whether it fits, and what must hold."""
        yield "seed", self.seed, -(2**63) <= self.seed < 2**63, "a 64-bit integer"
        early = any(peer.from_round == 0 for peer in self.peers)
        rounds = [peer.from_round for peer in self.peers]
        yield "peers", rounds, early, "at least one peer that is there from round 0 on"
        how = "left alone: completions are compared at rollout.temperature"
        yield "update.temperature", self.update.temperature, self.update.temperature == 1.0, how

    @cached_property
    def _by_name(self) -> dict[str, Peer]:
        return named(self.peers)

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
        return _merged(self.model, self.peer(name).model, name, "model")

    def warm_of(self, name: str) -> Warm:
        """A peer's warm start."""
        return _merged(self.warm, self.peer(name).warm, name, "warm")

    def rollout_of(self, name: str) -> Rollout:
        """A peer's way to make completions."""
        return _merged(self.rollout, self.peer(name).rollout, name, "rollout")

    def made_objective(self, limit: int) -> Objective:
        """What is maximised: the named algorithm with the switches of ``[objective]``; completions have at most
        ``limit`` tokens."""
        return make_objective(self.objective, limit)

    def plain(self) -> dict[str, Any]:
        """The recipe as the log keeps it."""
        return decode(encode(self), dict[str, Any])

    def limit_of(self, name: str, task: Task) -> int:
        """Tokens of a peer's completions at most."""
        return self.rollout_of(name).sampling(task.max_new_tokens or DEFAULT_TOKENS).max_new_tokens

    def check(self) -> None:
        """Look up everything that is named by a name, and refuse what could never work.

        Raises:
            TalkootError: there is no such thing (the nearest name is given), or parts do not fit together.
        """
        from talkoot.tune.distil.critics import critics
        from talkoot.tune.policies.open import policy_backends
        from talkoot.tune.tasks import open_task

        task = open_task(self.task, self.seed)
        if not task.size("train"):
            raise _bad("task", f"{self.task} has no problem to train on", "add problems that are not of another split")
        _ = critics[self.critic.kind]
        least = 1 if self.critic.kind != "none" else 2
        for name in self.names:
            model, rollout = self.model_of(name), self.rollout_of(name)
            with _blaming(name if self.peer(name).model else ""):
                _ = policy_backends[model.backend]
                model.check()
            self.warm_of(name)
            self.made_objective(self.limit_of(name, task))
            if rollout.samples < least:
                why = f"it is {rollout.samples}, it must be at least 2: one has nothing to be compared with"
                with _blaming(name if self.peer(name).rollout else ""):
                    raise _bad("rollout.samples", why)
        if not self.vertical:
            self._check_horizontal()

    def _check_horizontal(self) -> None:
        """Everybody makes a share of each group, so all must be asked the same, in the same way, in the same round."""
        count, exchange, common = len(self.names), self.exchange, self.rollout_of(self.names[0])
        for name in self.names:
            if self.peer(name).from_round:
                raise _bad(f"peer {name}, key from_round", "who comes later lacks what the others have learned", _TURN)
            for key in Rollout.__struct_fields__:
                if getattr(self.rollout_of(name), key) != getattr(common, key):
                    raise _bad(f"peer {name}, key rollout.{key}", "all share the samples of the same prompts", _TURN)
        if common.samples < count:
            raise _bad("rollout.samples", f"{common.samples} samples cannot be dealt out to {count} peers", _TURN)
        for key in ("own", "external"):
            if getattr(exchange, key) != -1:
                raise _bad(f"exchange.{key}", "each group has samples of everybody, none is one's own", _TURN)
        if exchange.max_lag:
            raise _bad("exchange.max_lag", "completions of other rounds answer other prompts", _TURN)
        if self.critic.kind != "none" and self.distillation.own_only:
            why = f"{self.distillation.divergence} learns from one's own completions only"
            raise _bad("distillation.divergence", why, "take reverse, or " + _TURN)

    def doubts(self) -> Iterator[str]:
        """What is allowed and perhaps not meant, in words."""
        for name in self.names:
            rollout = self.rollout_of(name)
            if self.critic.kind == "none" and (rollout.temperature == 0 or rollout.top_k == 1):
                how = "rollout.temperature is 0" if rollout.temperature == 0 else "rollout.top_k is 1"
                yield f"{name}'s own completions of a prompt are all the same, and teach nothing: {how}"
            if (number := self.peer(name).from_round) >= self.tune.rounds:
                yield f"{name} never comes: its from_round is {number}, and the run has {self.tune.rounds} rounds"
        alike = len({encode((self.model_of(name), self.warm_of(name))) for name in self.names}) == 1
        corrected = self.critic.kind == "none" and self.correction.rule != "none"
        if not self.vertical and (corrected or not alike):
            what = "correction.rule is not none" if alike else "peers begin with other weights"
            yield f"{what}: in this horizontal exchange weights do not stay equal"


def _merged(base: Any, changes: dict[str, Any], peer: str, key: str) -> Any:
    with _blaming(peer if changes else ""):
        where = f"peer {peer}, key {key}"
        return build({**msgspec.to_builtins(base), **changes}, type(base), what=UNUSABLE, where=where)


@contextmanager
def _blaming(peer: str) -> Iterator[None]:
    """Say whose own keys a section, which does not know whose it is, refuses; empty = everybody's."""
    try:
        yield
    except TalkootError as problem:
        if peer and not problem.where.startswith("peer "):
            problem.where = f"peer {peer}, key {problem.where}"
        raise


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
