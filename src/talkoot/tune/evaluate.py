"""How good a policy is at a task: the usual measures, with fixed problems and fixed seeds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import msgspec

from talkoot.core.errors import TalkootError
from talkoot.tune.completion import Completion, PromptRef, Sampling, seeds_of
from talkoot.tune.policies.policy import Policy
from talkoot.tune.tasks.task import Item, Task

ROUND = -1  # in the addresses of an evaluation's draws: no round of training has this number
BATCH = 256  # completions that are generated together


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """Measures of one policy on one split; shares are from 0 to 1.

    Attributes:
        avg: Avg@n: mean share of a problem's samples that are right.
        passed: Pass@n: share of the problems with a right sample.
        majority: Maj@n: share of the problems whose most frequent answer is right; a tie for first counts as wrong, and
            samples that give no answer or were cut off have no vote.
        greedy: share of the problems solved by taking the likeliest token each time.
        reward: mean reward of the samples (differs from ``avg`` where a task pays in part).
        length: mean tokens of a sample, the end token included.
        cut_off: share of the samples that reached the limit.
        reasons: how often each reason was given for a sample's reward.
    """

    split: str
    problems: int
    samples: int
    avg: float
    passed: float
    majority: float
    greedy: float
    reward: float
    length: float
    cut_off: float
    reasons: dict[str, int]


class _Judged(msgspec.Struct, frozen=True):
    """One problem's samples after their rewards."""

    values: list[float]
    right: list[bool]
    votes: list[str]
    reasons: list[str]


def evaluate(
    policy: Policy, task: Task, split: str, *, problems: int = 128, samples: int = 4, sampling: Sampling, seed: int = 0
) -> Evaluation:
    """Answer the first ``problems`` of a split (all, where it has fewer), ``samples`` times each and once greedily.

    Args:
        sampling: how samples are drawn; greedy answers take its limit only.
        seed: of the draws; the same seed, weights and problems give the same result.

    Raises:
        TalkootError: the split is empty.
        ValueError: no problem or no sample is asked for.
    """
    if min(problems, samples) < 1:
        raise ValueError(f"{problems} problems with {samples} samples each cannot be evaluated")
    count = min(problems, task.size(split))
    if count == 0:
        raise TalkootError(
            f"{task.name} has no {split} problems to evaluate",
            where=f"the split {split} of {task.name}",
            why="it is empty",
            next="evaluate another split",
        )
    indices = [task.index(split, number) for number in range(count)]
    name = task.digest()
    seeds = [seeds_of(seed, ROUND, PromptRef(name, index), range(samples)) for index in indices]
    items = [task.item(index) for index in indices]
    drawn = list(_answers(policy, items, seeds, sampling))
    greedy = Sampling(max_new_tokens=sampling.max_new_tokens, temperature=0.0)
    likeliest = list(_answers(policy, items, [[0]] * count, greedy))
    judged = [_judge(policy, task, item, group) for item, group in zip(items, drawn, strict=True)]
    best = [_judge(policy, task, item, group).right[0] for item, group in zip(items, likeliest, strict=True)]
    completions = [completion for group in drawn for completion in group]
    return Evaluation(
        split=split,
        problems=count,
        samples=samples,
        avg=sum(sum(one.right) for one in judged) / len(completions),
        passed=sum(any(one.right) for one in judged) / count,
        majority=sum(map(_majority_is_right, judged)) / count,
        greedy=sum(best) / count,
        reward=sum(sum(one.values) for one in judged) / len(completions),
        length=sum(len(completion.ids) for completion in completions) / len(completions),
        cut_off=sum(completion.finish == "length" for completion in completions) / len(completions),
        reasons=dict(sorted(Counter(reason for one in judged for reason in one.reasons).items())),
    )


def _answers(
    policy: Policy, items: Sequence[Item], seeds: Sequence[Sequence[int]], sampling: Sampling
) -> Iterator[list[Completion]]:
    """Completions of each item, generated in batches of bounded size."""
    step = max(1, BATCH // len(seeds[0]))
    for start in range(0, len(items), step):
        prompts = [policy.prompt_ids(item.prompt) for item in items[start : start + step]]
        yield from policy.generate(prompts, seeds[start : start + step], sampling)


def _judge(policy: Policy, task: Task, item: Item, group: Sequence[Completion]) -> _Judged:
    judged = _Judged([], [], [], [])
    for completion in group:
        text, finished = policy.coder.decode(completion.ids), completion.finish == "stop"
        result = task.reward(item, text, finished)
        judged.values.append(result.value)
        judged.right.append(result.right)
        judged.votes.append(task.extract(text) if finished else "")
        judged.reasons.append(result.reason)
    return judged


def _majority_is_right(judged: _Judged) -> bool:
    """Whether one answer has more votes than each other, and is right."""
    leading = Counter(vote for vote in judged.votes if vote).most_common(2)
    if not leading or (len(leading) == 2 and leading[0][1] == leading[1][1]):
        return False
    return any(right for vote, right in zip(judged.votes, judged.right, strict=True) if vote == leading[0][0])
