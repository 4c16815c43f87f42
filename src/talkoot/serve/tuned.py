"""What is shown of a post-training run: who learns from whom, what each peer earns and scores, and how it learns.

The sums come from the chapter ``tune`` of the state alone, so that every view of a run tells the same; curves and the
newest update of each peer are kept beside it. All of it is bounded, however long the run is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from talkoot.core.fold import START, Entry, chapters
from talkoot.core.ids import Digest
from talkoot.core.receipt import Receipt
from talkoot.run.records import Resume
from talkoot.serve.events import Told
from talkoot.serve.part import Work
from talkoot.serve.series import Curve, tidy
from talkoot.serve.words import clean, name_of
from talkoot.tune.evaluate import Evaluation
from talkoot.tune.records import Generated, Tuner, TuneState, Updated

MAX_CURVES = 24  # peers whose rewards are drawn
MAX_PEERS = 64  # that are listed
MAX_FACTS = 40  # of an update that are listed
MAX_REASONS, MAX_SPLITS = 12, 6
BUCKETS, TAIL = 48, 64  # a peer's curve is thinned to some 200 rows
HELD_OUT = "held_out"
OPS = ("tune.generate", "tune.update", "tune.view", "tune.kept", "tune.rollback")


@dataclass(slots=True)
class Recent:
    """A peer's curves and newest update; ``until``: the end of its newest receipt; seconds that all its rounds took by
    the world's clock (``spent_s``), and that it waited in them."""

    rewards: Curve = field(default_factory=lambda: Curve(1, buckets=BUCKETS, tail=TAIL))
    scores: Curve = field(default_factory=lambda: Curve(1, buckets=BUCKETS, tail=TAIL))
    update: Updated | None = None
    waited_s: float = 0.0
    spent_s: float = 0.0
    until: float = -math.inf


def is_tuning(recipe: Mapping[str, Any]) -> bool:
    """Whether a recipe is one of post-training."""
    return isinstance(recipe.get("tune"), dict)


def terms(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """What the recipe says about the learning, in words."""

    def of(section: str, key: str, default: Any) -> Any:
        part = recipe.get(section)
        return part.get(key, default) if isinstance(part, dict) else default

    critic = str(of("critic", "kind", "none"))
    rounds = of("tune", "rounds", None)
    return {
        "task": clean(str(recipe.get("task", "")), 80),
        "critic": "" if critic == "none" else clean(critic, 40),
        "algorithm": clean(str(of("objective", "algorithm", "grpo")), 40),
        "correction": clean(str(of("correction", "rule", "ftis")), 40),
        "split": clean(str(of("exchange", "split", "vertical")), 20),
        "rounds": rounds if isinstance(rounds, int) and 0 < rounds < 2**53 else None,
    }


class Tuned:
    """A post-training run, receipt by receipt.

    Attributes:
        terms: what the recipe says.
        state: the chapter ``tune``.
        steps: rounds that the run is to have.
    """

    key = "tune"
    ended = False

    def __init__(self, recipe: Mapping[str, Any]) -> None:
        self.terms, self.state = terms(recipe), TuneState(active=True)
        self.steps: int | None = self.terms["rounds"]
        self._recent: dict[str, Recent] = {}

    @property
    def step(self) -> int:
        """Rounds that all peers are done with."""
        return self.state.round

    @property
    def tokens(self) -> int:
        """That peers generated."""
        return sum(peer.generated for peer in self.state.peers.values())

    def take(self, receipt: Receipt) -> list[Told]:
        """One more receipt of the chapter's operations; returns what is worth telling.

        Raises:
            ValueError: it cannot be read, or cannot follow the others.
        """
        before = self.state
        self.state = chapters["tune"].apply(before, Entry(0, Digest(""), receipt, START))
        match receipt.op:
            case "run.resume":
                self.steps = receipt.read(Resume).steps or self.steps
            case "tune.generate":
                self._since(receipt).until = receipt.ended
                receipt.read(Generated)
            case "tune.update":
                return list(self._update(receipt, receipt.read(Updated)))
            case "tune.kept":
                return self._kept(before)
            case "tune.rollback":
                self._roll_back()
        return []

    def work(self, receipt: Receipt) -> Work | None:
        """What a peer did."""
        match receipt.op:
            case "tune.generate":
                return Work(receipt.read(Generated).busy_s)
            case "tune.update":
                facts = receipt.read(Updated)
                return Work(facts.busy_s, facts.sent_bytes)
        return None

    def now(self) -> float | None:
        """When half of the present peers have reported last: no single one can move the clock; None = nobody has."""
        here = [
            self._recent[name].until for name, peer in self.state.peers.items() if peer.present and name in self._recent
        ]
        known = sorted(until for until in here if math.isfinite(until))
        return known[(len(known) - 1) // 2] if known else None

    def _since(self, receipt: Receipt) -> Recent:
        return self._recent.setdefault(self.state.names[receipt.peer], Recent())

    def _update(self, receipt: Receipt, facts: Updated) -> Iterable[Told]:
        raw = self.state.names[receipt.peer]
        name, recent = name_of(raw), self._since(receipt)
        before, done = recent.update, facts.round + 1
        recent.update, recent.until = facts, max(recent.until, receipt.ended)
        spent_s = max(receipt.ended - receipt.started, 0.0)
        recent.spent_s += spent_s
        recent.waited_s += min(max(facts.waited_s, 0.0), spent_s)
        recent.rewards.add((done, facts.reward))
        if facts.solo and len(self.state.peers) > 1 and not (before and before.solo):
            absent = ", ".join(map(name_of, facts.absent[:6]))
            why = f"nothing came from {absent}" if absent else "nothing of the others' could be used"
            yield Told("alone", f"{name} learned alone in round {done}: {why}.", own=True)
        if facts.reason and not (before and before.reason):
            yield Told("problem", f"{name} did not change in round {done}: {clean(facts.reason, 120)}.")
        scores = facts.evaluations[:MAX_SPLITS]
        for one in scores:
            if one.split == HELD_OUT:
                recent.scores.add((done, tidy(one.greedy)))
        if scores:
            told = ", ".join(f"{100 * one.greedy:.1f} % {_plain(one.split)}" for one in scores)
            yield Told("evaluate", f"{name} after {done} rounds, greedily right: {told}.")

    def _kept(self, before: TuneState) -> list[Told]:
        done, told = _stored(self.state), _stored(before)
        if done <= told:
            return []
        return [Told("checkpoint", f"All peers stored their states after round {done}.", mark=True)]

    def _roll_back(self) -> None:
        for name, recent in self._recent.items():
            rounds = self.state.peers[name].rounds
            recent.rewards.cut(rounds)
            recent.scores.cut(rounds)

    def snapshot(self) -> dict[str, Any]:
        """All of it as plain data for JSON."""
        peers = dict(sorted(self.state.peers.items())[:MAX_PEERS])
        rows = [self._peer(slot, name, peer) for slot, (name, peer) in enumerate(peers.items())]
        return {**summary(self.terms, self.state), "by_peer": rows}

    def _peer(self, slot: int, name: str, peer: Tuner) -> dict[str, Any]:
        recent = self._recent.get(name, Recent())
        update = recent.update
        drawn = slot < MAX_CURVES
        return {
            "name": name_of(name),
            "slot": slot,
            "here": peer.present,
            "rounds": peer.rounds,
            "reward": tidy(peer.reward),
            "mean_reward": tidy(peer.rewards / peer.updates) if peer.updates else None,
            "generated": peer.generated,
            "trained": peer.trained,
            "external": peer.external,
            "alone": peer.alone,
            "alone_now": bool(update and update.solo),
            "absent": [name_of(one) for one in update.absent[:6]] if update else [],
            "refused": _most(peer.rejected),
            "waiting": tidy(recent.waited_s / recent.spent_s) if recent.spent_s > 0 else None,
            "sent_bytes": peer.sent_bytes,
            "policy": clean(peer.policy, 12),
            "scores": [_score(one) for one in peer.evaluations[:MAX_SPLITS]],
            "learned": _learned(update),
            "stuck": clean(update.reason, 120) if update else "",
            "rewards": recent.rewards.columns(("round", "reward")) if drawn else {"round": [], "reward": []},
            "held_out": recent.scores.columns(("round", "greedy")) if drawn else {"round": [], "greedy": []},
        }


def summary(told: Mapping[str, Any], state: TuneState) -> dict[str, Any]:
    """What holds for all peers together. ``told``: what the recipe says (:func:`terms`)."""
    peers = list(state.peers.values())
    rewards = [peer.reward for peer in peers if peer.reward is not None]
    greedy = [one.greedy for peer in peers for one in peer.evaluations if one.split == HELD_OUT]
    rounds = sum(peer.updates for peer in peers)
    alone = sum(peer.alone for peer in peers)
    return {
        **told,
        "round": state.round,
        "furthest": state.furthest,
        "reward": _spread(rewards),
        "greedy": _spread(greedy),
        "generated": sum(peer.generated for peer in peers),
        "trained": sum(peer.trained for peer in peers),
        "external": sum(peer.external for peer in peers),
        "refused": sum(sum(peer.rejected.values()) for peer in peers),
        "alone": {"rounds": alone, "of": rounds, "share": tidy(alone / rounds) if rounds else None},
        "stored": _stored(state),
    }


def _spread(values: list[float]) -> dict[str, float | None]:
    known = [value for value in values if math.isfinite(value)]
    if not known:
        return {"mean": None, "low": None, "high": None}
    return {"mean": tidy(sum(known) / len(known)), "low": tidy(min(known)), "high": tidy(max(known))}


def _stored(state: TuneState) -> int:
    """The newest round after which the states of all peers are stored, or of those that are here; 0 = there is none."""
    peers = [peer for peer in state.peers.values() if peer.present] or list(state.peers.values())
    stored = [{number for number, _ in peer.kept} for peer in peers]
    return max(set.intersection(*stored), default=0) if stored else 0


def _most(reasons: Mapping[str, int]) -> dict[str, int]:
    """The most frequent reasons, the others together."""
    ordered = sorted(reasons.items(), key=lambda item: (-item[1], item[0]))
    found = {clean(reason, 60): number for reason, number in ordered[:MAX_REASONS]}
    rest = sum(number for _, number in ordered[MAX_REASONS:])
    return found | ({"(others)": rest} if rest else {})


def _learned(update: Updated | None) -> dict[str, float | None]:
    """The learner's own figures of the newest round, numbers and counts, by their own names."""
    if update is None:
        return {}
    both = {**update.learned, **update.counts}
    return {clean(key, 60): tidy(value) for key, value in list(both.items())[:MAX_FACTS]}


def _score(one: Evaluation) -> dict[str, Any]:
    return {
        "split": _plain(one.split),
        "problems": one.problems,
        "samples": one.samples,
        "greedy": tidy(one.greedy),
        "avg": tidy(one.avg) if one.samples else None,
        "passed": tidy(one.passed) if one.samples else None,
        "majority": tidy(one.majority) if one.samples else None,
        "length": tidy(one.length) if one.samples else None,
    }


def _plain(split: str) -> str:
    return clean(split, 30).replace("_", " ")
