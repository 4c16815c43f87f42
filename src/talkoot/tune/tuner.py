"""A peer's mind, without its surroundings: answer, judge, choose, learn, score. ``peer.py`` does the talking."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from talkoot.core.errors import TalkootError
from talkoot.tune import select
from talkoot.tune.assign import assignments
from talkoot.tune.assign import refill as further
from talkoot.tune.completion import Group, PromptRef, Sampling, seeds_of
from talkoot.tune.evaluate import Evaluation, evaluate
from talkoot.tune.learners import open_learner
from talkoot.tune.objective.scored import ScoredGroup
from talkoot.tune.policies.open import open_policy
from talkoot.tune.policies.policy import Policy
from talkoot.tune.policies.selfcheck import check_generator, check_prompts
from talkoot.tune.recipe import TuneRecipe
from talkoot.tune.records import Generated, Updated
from talkoot.tune.scoring import Scorer, together
from talkoot.tune.state import Counters, from_bytes, to_bytes
from talkoot.tune.tasks import open_task
from talkoot.tune.tasks.task import Listed, Task
from talkoot.tune.warm import warm_start
from talkoot.tune.wire import Record, Refused

CHECKED = 4, 2  # prompts and samples of the self-check
MOST_READ = 20_000  # prompts of a file that are read before the first round: of more, the longest
SPLITS = ("held_out", "shifted")


@dataclass(frozen=True, slots=True)
class Batch:
    """A round's own completions: as they travel, as they are learned from, their texts, and the mean reward of all that
    were made (dynamic sampling leaves some out)."""

    groups: list[Group]
    scored: list[ScoredGroup]
    texts: list[str]
    reward: float
    policy: str
    busy_s: float


@dataclass(frozen=True, slots=True)
class Learned:
    """What came of a round: the facts for the receipt (but for what only the peer knows), the weights' hash before, and
    the receipts of the others' completions that were learned from."""

    facts: Updated
    before: str
    parents: tuple[str, ...]


class Tuner:
    """See the module's text.

    Args:
        recipe, name: the run, and which of its peers this is.
        task, policy: opened by :meth:`open`.
    """

    def __init__(self, recipe: TuneRecipe, name: str, task: Task, policy: Policy) -> None:
        self.recipe, self.name, self.task, self.policy = recipe, name, task, policy
        self.rollout = recipe.rollout_of(name)
        self.limit = recipe.limit_of(name, task)
        self.sampling: Sampling = self.rollout.sampling(self.limit)
        self.learner = open_learner(recipe, task, policy, self.sampling)
        self.scorer = Scorer(task, policy, self.limit)
        self.tokenizer, self.size = policy.coder.digest(), policy.size
        self.trainable = sum(parameter.numel() for parameter in policy.parameters())
        self.version = 0

    @classmethod
    def open(cls, recipe: TuneRecipe, name: str, *, warm: bool = True) -> Tuner:
        """Load or make the policy, and warm it up where the recipe says so (not where a stored state follows)."""
        task = open_task(recipe.task, recipe.seed)
        policy = open_policy(recipe.model_of(name), task.alphabet)
        start = recipe.warm_of(name)
        if start.steps and warm:
            warm_start(
                policy, start.texts(task, recipe.seed), start.steps, start.batch, start.learning_rate, recipe.seed
            )
        return cls(recipe, name, task, policy)

    # -- answering --------------------------------------------------------------------------------------------

    def self_check(self) -> float:
        """Largest difference in log-probability between generator and trainer.

        Raises:
            TalkootError: it is too large, a problem of a file does not fit the model, or a critic has nothing to say.
        """
        self._read_all()
        self.learner.check()
        prompts, samples = CHECKED
        numbers = range(min(prompts, self.task.size("train")))
        refs = [PromptRef(self.task.digest(), self.task.index("train", number)) for number in numbers]
        seeds = [seeds_of(self.recipe.seed, -2, ref, range(samples)) for ref in refs]
        prompt_ids = [self.policy.prompt_ids(self.task.item(ref.index).prompt) for ref in refs]
        tolerance = self.recipe.tune.tolerance
        return check_generator(self.policy, prompt_ids, seeds, self.sampling, tolerance).largest

    def _read_all(self) -> None:
        """Somebody who wrote problems down is told at the start which of them does not fit, not in round 100."""
        task, tune = self.task, self.recipe.tune
        if not isinstance(task, Listed):
            return
        sizes = {"train": task.size("train")}
        if tune.evaluate_every:
            sizes |= {split: min(tune.evaluate_items, task.size(split)) for split in SPLITS}
        used = sorted(task.index(split, number) for split, size in sizes.items() for number in range(size))
        prompts = [(task.place(index), task.item(index).prompt) for index in used]
        if len(prompts) > MOST_READ:
            prompts = sorted(prompts, key=lambda pair: -len(pair[1]))[:MOST_READ]
        check_prompts(self.policy, prompts, self.limit)

    def generate(self, round_number: int, names: Sequence[str]) -> Batch:
        """A round's completions. ``names``: who takes part, in order."""
        started = time.process_time()
        rollout, size = self.rollout, self.task.size("train")
        work = assignments(
            self.recipe.exchange.split, self.recipe.seed, round_number, names, self.name, rollout.prompts,
            rollout.samples, size,
        )  # fmt: skip
        policy = self.policy.weights_hash()
        groups = self._answer(round_number, [(one.number, one.samples) for one in work])
        scored = self.scorer.own(groups, self.name)
        if self.learner.refills and self.recipe.vertical:
            groups, scored = self._refilled(round_number, groups, scored)
        rewards = [sample.reward for group in scored for sample in group.samples]
        if self.learner.refills and self.recipe.vertical and any(map(select.informative, scored)):
            pairs = [(g, s) for g, s in zip(groups, scored, strict=True) if select.informative(s)][: rollout.prompts]
            groups, scored = [g for g, _ in pairs], [s for _, s in pairs]
        texts = [self.policy.coder.decode(one.ids) for group in groups for one in group.completions]
        mean = math.fsum(rewards) / len(rewards) if rewards else 0.0
        return Batch(groups, scored, texts, mean, policy, time.process_time() - started)

    def _answer(self, round_number: int, work: Sequence[tuple[int, Sequence[int]]]) -> list[Group]:
        name = self.task.digest()
        refs = [PromptRef(name, self.task.index("train", number)) for number, _ in work]
        prompts = [self.policy.prompt_ids(self.task.item(ref.index).prompt) for ref in refs]
        seeds = [
            seeds_of(self.recipe.seed, round_number, ref, samples) for ref, (_, samples) in zip(refs, work, strict=True)
        ]
        answers = self.policy.generate(prompts, seeds, self.sampling) if work else []
        if not all(math.isfinite(sum(one.logp)) for group in answers for one in group):
            raise self._diverged(round_number)
        return [
            Group(ref, tuple(samples), tuple(group))
            for ref, (_, samples), group in zip(refs, work, answers, strict=True)
        ]

    def _diverged(self, round_number: int) -> TalkootError:
        return TalkootError(
            "the policy has diverged",
            where=f"round {round_number}",
            why="its weights no longer give probabilities: a log-probability is not finite",
            next=f"lower optimizer.learning_rate (it is {self.recipe.optimizer.learning_rate:g}) and start anew with "
            "--out",
        )

    def _refilled(
        self, round_number: int, groups: list[Group], scored: list[ScoredGroup]
    ) -> tuple[list[Group], list[ScoredGroup]]:
        """Dynamic sampling: prompts whose answers all earn the same are replaced by others, up to a cap."""
        rollout, seen = self.rollout, {group.prompt.index for group in groups}
        for attempt in range(self.recipe.exchange.refills):
            cap = rollout.prompts * (1 + self.recipe.exchange.refills)
            wanted = select.refill(scored, rollout.prompts, cap).generate
            numbers = further(self.recipe.seed, round_number, self.name, attempt, wanted, self.task.size("train"))
            fresh = [number for number in numbers if self.task.index("train", number) not in seen]
            if not fresh:
                break
            more = self._answer(round_number, [(number, range(rollout.samples)) for number in fresh])
            groups, scored = [*groups, *more], [*scored, *self.scorer.own(more, self.name)]
            seen |= {group.prompt.index for group in more}
        return groups, scored

    def account(self, round_number: int, batch: Batch) -> Generated:
        """The facts for the receipt of a round's completions."""
        return Generated(
            round=round_number,
            task=self.task.digest(),
            tokenizer=self.tokenizer,
            policy=batch.policy,
            version=self.version,
            sampling=self.sampling,
            seed=self.recipe.seed,
            prompts=tuple(group.prompt.index for group in batch.groups),
            samples=tuple(group.samples for group in batch.groups),
            lengths=tuple(tuple(len(one.ids) for one in group.completions) for group in batch.groups),
            stopped=tuple(tuple(one.finish == "stop" for one in group.completions) for group in batch.groups),
            busy_s=batch.busy_s,
        )

    # -- learning ---------------------------------------------------------------------------------------------

    def learn(
        self, round_number: int, batch: Batch, records: Sequence[tuple[str, Record]], rejected: Counter[str]
    ) -> Learned:
        """Learn from one's own completions and from those of others.

        Args:
            records: with their senders' names.
            rejected: what was refused before, by reason; added to.
        """
        started = time.process_time()
        heard = self._judge(round_number, records, rejected)
        external = [group for _, groups in heard for group in groups]
        own, theirs = batch.scored, [] if self.learner.own_only else external
        if not self.recipe.vertical:
            merged = together(sorted([*own, *theirs], key=lambda group: group.peer))
            own, theirs = [g for g in merged if g.own], [g for g in merged if not g.own]
        chosen, counts = self._choose(round_number, own, theirs)
        parents = tuple(name for name, groups in heard if any(map(self._among(chosen), groups)))
        facts = self.learner.update(chosen)
        self.version += facts.moved
        updated = Updated(
            round=round_number,
            policy=self.policy.weights_hash(),
            version=self.version,
            reward=batch.reward,
            learned=facts.numbers,
            counts={**counts, **facts.counts},
            rejected=dict(rejected),
            solo=not parents,
            reason=facts.reason,
            evaluations=self._evaluations(round_number),
        )
        updated = msgspec.structs.replace(updated, busy_s=time.process_time() - started)
        return Learned(updated, batch.policy, parents)

    def _judge(
        self, round_number: int, records: Sequence[tuple[str, Record]], rejected: Counter[str]
    ) -> list[tuple[str, list[ScoredGroup]]]:
        """By sender's name: the receipt of its completions, and what they are worth."""
        found: list[tuple[str, list[ScoredGroup]]] = []
        for name, record in sorted(records, key=lambda pair: pair[0]):
            try:
                self.scorer.check(record, round_number, self.recipe.exchange.max_lag)
            except Refused as problem:
                rejected[problem.reason] += 1
                continue
            if groups := self.scorer.theirs(record, name, rejected):
                found.append((record.id, groups))
        return found

    def _among(self, chosen: Sequence[ScoredGroup]) -> Callable[[ScoredGroup], bool]:
        """Whether a group, or the merged one that it went into, is among those that were chosen."""
        if self.recipe.vertical:
            names = {(group.peer, group.prompt) for group in chosen}
            return lambda group: (group.peer, group.prompt) in names
        prompts = {group.prompt for group in chosen if not group.own}
        return lambda group: group.prompt in prompts

    def _choose(
        self, round_number: int, own: list[ScoredGroup], theirs: list[ScoredGroup]
    ) -> tuple[list[ScoredGroup], dict[str, int]]:
        """What this update learns from: where both sides are asked for, one makes up for what the other lacks."""
        num_own, num_external = self.recipe.exchange.own, self.recipe.exchange.external
        key = f"{self.recipe.seed}/{self.name}/{round_number}"
        if num_own > 0 and num_external > 0:
            made = select.select(own, theirs, num_own, num_external, key)
            return list(made.groups), {"own_groups": made.own, "external_groups": made.external}
        mine = own if num_own < 0 else select.select(own, [], num_own, 0, key).groups
        others = theirs if num_external < 0 else select.select([], theirs, 0, num_external, key).groups
        return [*mine, *others], {"own_groups": len(mine), "external_groups": len(others)}

    def _evaluations(self, round_number: int) -> tuple[Evaluation, ...]:
        tune = self.recipe.tune
        due = tune.evaluate_every and (round_number + 1) % tune.evaluate_every == 0
        if not tune.evaluate_every or not (due or round_number + 1 == tune.rounds):
            return ()
        return tuple(
            evaluate(
                self.policy,
                self.task,
                split,
                problems=tune.evaluate_items,
                samples=tune.evaluate_samples,
                sampling=self.sampling,
                seed=self.recipe.seed,
            )
            for split in SPLITS
            if self.task.size(split)
        )

    # -- storing ----------------------------------------------------------------------------------------------

    def to_bytes(self, rounds: int) -> bytes:
        """Everything that a resume with the same bits needs."""
        return to_bytes(self.policy.state(), self.learner.state(), Counters(rounds, self.version, self.name))

    def load(self, data: bytes, where: str) -> int:
        """Take back what :meth:`to_bytes` gave; returns the rounds done."""
        policy, learner, counters = from_bytes(data, where)
        self.policy.load_state(policy)
        self.learner.load_state(learner)
        self.version = counters.version
        return counters.round


def open_for_reading(recipe: TuneRecipe, name: str, data: bytes, where: str) -> Tuner:
    """A peer's policy from its stored state, to look at or to export."""
    if name not in recipe.names:
        raise TalkootError(
            f"the run has no peer {name!r}",
            where=where,
            why=f"its peers are {', '.join(recipe.names)}",
            next="name one",
        )
    tuner = Tuner.open(recipe, name, warm=False)
    tuner.load(data, where)
    return tuner
