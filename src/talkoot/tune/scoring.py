"""From a record to what a learner learns from: whose word counts for what.

Checks go from cheap to dear: form and signature (``wire``), belonging (round, task, tokenizer), each completion's own
sanity, then the reward, worked out here. Whatever fails is left out under a reason that is counted; nothing is kept
with a reward of 0 in its place, because a policy would learn to avoid what it never said, and unlearn the rest with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from talkoot.core.errors import TalkootError
from talkoot.tune.completion import Completion, Group
from talkoot.tune.objective.scored import Sample, ScoredGroup
from talkoot.tune.policies.policy import Policy
from talkoot.tune.tasks.task import Item, Task
from talkoot.tune.wire import Record, Refused

MAX_STRETCH = 4  # how many times more tokens a completion may take in the reader's tokenizer than in the writer's


class Scorer:
    """Turns groups of completions into scored groups in the learner's own tokens.

    Args:
        task: whose prompts and rewards count.
        policy: the learner.
        limit: tokens of a completion at most; somebody else may write longer ones, which are left out alone.
    """

    def __init__(self, task: Task, policy: Policy, limit: int) -> None:
        self._task, self._policy, self._limit = task, policy, limit
        self._digest, self._tokenizer = task.digest(), policy.coder.digest()

    def own(self, groups: Sequence[Group], name: str) -> list[ScoredGroup]:
        """One's own completions, scored."""
        return [self._group(group, None, name, Counter(), own=True) for group in groups]

    def check(self, record: Record, round_number: int, lag: int) -> None:
        """Whether a record belongs here.

        Raises:
            Refused: it is about another task, too old, too new, or its tokens cannot be read.
        """
        facts = record.facts
        if facts.task != self._digest:
            raise Refused("another task", f"{facts.task[:8]}, this run's is {self._digest[:8]}")
        if not round_number - lag <= facts.round <= round_number + lag:
            raise Refused("of another round", f"round {facts.round}, this is {round_number}")
        if facts.tokenizer != self._tokenizer and record.texts is None:
            raise Refused("another tokenizer", f"{facts.tokenizer[:8]} without texts, here it is {self._tokenizer[:8]}")

    def theirs(self, record: Record, name: str, rejected: Counter[str]) -> list[ScoredGroup]:
        """Somebody else's completions, scored; what is unusable is left out and counted in ``rejected``."""
        unlike = record.facts.tokenizer != self._tokenizer
        found: list[ScoredGroup] = []
        for number, group in enumerate(record.groups):
            texts = record.texts[number] if unlike and record.texts is not None else None
            try:
                scored = self._group(group, texts, name, rejected)
            except Refused as problem:
                rejected[problem.reason] += len(group.completions)
                continue
            if scored.samples:
                found.append(scored)
        return found

    def _group(
        self, group: Group, texts: Sequence[str] | None, name: str, rejected: Counter[str], *, own: bool = False
    ) -> ScoredGroup:
        try:
            item = self._task.item(group.prompt.index)
        except ValueError as problem:
            raise Refused("unknown prompt", str(problem)) from problem
        try:
            prompt = tuple(self._policy.prompt_ids(item.prompt))
        except TalkootError as problem:
            raise Refused("outside the vocabulary", problem.why) from problem
        room = self._policy.max_positions - len(prompt)
        samples: list[Sample] = []
        for number, completion in enumerate(group.completions):
            try:
                samples.append(self._sample(item, completion, None if texts is None else texts[number], room))
            except Refused as problem:
                if own:
                    raise
                rejected[problem.reason] += 1
        return ScoredGroup(prompt, tuple(samples), name, own, group.prompt.index)

    def _sample(self, item: Item, completion: Completion, text: str | None, room: int) -> Sample:
        """``room``: positions that the learner's model has behind the prompt."""
        coder, finished, length = self._policy.coder, completion.finish == "stop", len(completion.ids)
        if text is None and length > min(self._limit, room):
            raise Refused("too long", f"{length} tokens where {min(self._limit, room)} are allowed")
        try:
            completion.check(coder.vocab_size if text is None else 2**31, length)
        except ValueError as problem:
            raise Refused("not sane", str(problem)) from problem
        total = float(sum(completion.logp))
        if text is None:
            ids, logp = completion.ids, completion.logp
            if finished != (ids[-1] in coder.eos_ids) or any(one in coder.eos_ids for one in ids[:-1]):
                raise Refused("not sane", "its end token is not where it ends")
            text = coder.decode(ids)
        else:
            ids, logp = self._encoded(text, finished, min(MAX_STRETCH * self._limit, room)), None
        reward = self._task.reward(item, text, finished)
        return Sample(ids, reward.value, completion.finish, logp, total)

    def _encoded(self, text: str, finished: bool, most: int) -> tuple[int, ...]:
        """A stranger's text in one's own tokens."""
        coder = self._policy.coder
        try:
            ids = [*coder.encode(text), *(coder.eos_ids[:1] if finished else ())]
        except TalkootError as problem:
            raise Refused("outside the vocabulary", problem.why) from problem
        if not 1 <= len(ids) <= most:
            raise Refused("too long", f"{len(ids)} tokens in one's own tokenizer")
        return tuple(ids)


def together(groups: Sequence[ScoredGroup]) -> list[ScoredGroup]:
    """Groups of the same prompt as one, in the order of the prompts' first appearance (horizontal exchange)."""
    merged: dict[tuple[int, ...], list[ScoredGroup]] = {}
    for group in groups:
        merged.setdefault(group.prompt, []).append(group)
    return [
        parts[0]
        if len(parts) == 1
        else ScoredGroup(prompt, tuple(s for part in parts for s in part.samples), "several", False, parts[0].index)
        for prompt, parts in merged.items()
    ]
