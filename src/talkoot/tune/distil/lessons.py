"""From rollouts to lessons: ask the critic, show its hint to the teacher, find where each rollout went wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev

from talkoot.core.errors import TalkootError
from talkoot.tune.distil.critics.critic import Critic, Feedback, Rollout, advise
from talkoot.tune.distil.localise import wrong_token
from talkoot.tune.objective.scored import Sample, ScoredGroup
from talkoot.tune.policies.policy import Policy
from talkoot.tune.rewards.result import RewardResult
from talkoot.tune.tasks.task import Item, TakesHints, Task

_EPSILON = 1e-4  # as for groups without hints
PROBED = 64  # problems that a critic is tried on before the first round


@dataclass(frozen=True, slots=True)
class Lesson:
    """One rollout that the policy can learn from.

    Attributes:
        prompt: ids of the prompt as the student read it.
        hinted: ids of the prompt with the hint in it, as the teacher reads it.
        ids: the completion's tokens.
        advantage: of its reward within its group; 0 in a group of one.
        wrong: its first wrong token, where that is known.
    """

    prompt: tuple[int, ...]
    hinted: tuple[int, ...]
    ids: tuple[int, ...]
    advantage: float
    wrong: int | None


@dataclass(frozen=True, slots=True)
class Lessons:
    """Of a batch. ``cases``: how often the critic did what; ``skipped``: why rollouts were left out, and how often."""

    lessons: tuple[Lesson, ...]
    cases: dict[str, int]
    skipped: dict[str, int]


def prepare(
    task: Task,
    policy: Policy,
    critic: Critic,
    items: Sequence[Item],
    groups: Sequence[ScoredGroup],
    own_only: bool = False,
) -> Lessons:
    """Lessons from groups of rollouts (of one or more), in their order.

    Args:
        items: the problem of each group.
        own_only: leave out what others wrote (:attr:`~talkoot.tune.distil.settings.Distillation.own_only`).
    """
    pairs = [(item, group, sample) for item, group in zip(items, groups, strict=True) for sample in group.samples]
    rollouts = [Rollout(item, policy.coder.decode(sample.ids), _result(sample)) for item, _, sample in pairs]
    advantages = [value for group in groups for value in reward_advantages([s.reward for s in group.samples])]
    lessons: list[Lesson] = []
    cases, skipped = Counter[str](), Counter[str]()
    usable = [group.own or not own_only for _, group, _ in pairs]
    asked = iter(advise(critic, [rollout for rollout, use in zip(rollouts, usable, strict=True) if use]))
    feedback = [next(asked) if use else Feedback(skip="not its own") for use in usable]
    for (item, group, sample), rollout, said, advantage in zip(pairs, rollouts, feedback, advantages, strict=True):
        hinted, why = _hinted(task, policy, item, said, len(sample.ids))
        if why:
            skipped[why] += 1
            continue
        mistake = task.first_mistake(item, rollout.completion) if isinstance(task, TakesHints) else None
        wrong = wrong_token(policy.coder, sample.ids, sample.finish, mistake)
        lessons.append(Lesson(group.prompt, hinted, sample.ids, advantage, wrong))
        cases[said.case] += 1
    return Lessons(tuple(lessons), dict(cases), dict(skipped))


def check_critic(task: Task, policy: Policy, critic: Critic) -> None:
    """Try a critic on made-up answers to the first problems. One that asks a server is not tried.

    Raises:
        TalkootError: whatever is answered, it says nothing that this policy could read.
    """
    if critic.parallel > 1:
        return
    why = Counter[str]()
    for number in range(min(PROBED, task.size("train"))):
        item = task.item(task.index("train", number))
        for text, reason in ((item.solution or item.answer, "right"), ("", "wrong")):
            said = critic(Rollout(item, text, RewardResult(float(reason == "right"), reason)))
            _, skip = _hinted(task, policy, item, said, 1)
            if not skip:
                return
            why[skip] += 1
    raise TalkootError(
        "this critic has nothing to teach here",
        where=f"critic.kind, task {task.name}",
        why=f"{why.most_common(1)[0][0]}: so with each of the problems that it was tried on",
        next="take a critic that fits the task (reference: worked solutions; arithmetic: additions), and a model that "
        'can read it (model.tokenizer = "bytes", model.context)',
    )


def context_prompt(task: Task, prompt: str, context: str) -> str:
    """A prompt with a hint: in the task's own form, or, for models that read English, in words."""
    if isinstance(task, TakesHints):
        return task.context_prompt(prompt, context)
    return f"{prompt}\n\nThis may help you:\n\n{context}\n\nNow answer, from the start and in your own way."


def reward_advantages(rewards: Sequence[float]) -> list[float]:
    """GRPO's advantages of one group (arXiv 2402.03300), population deviation; 0 where nothing can be compared."""
    mean, deviation = fmean(rewards), pstdev(rewards)
    return [(reward - mean) / (deviation + _EPSILON) if deviation > 0 else 0.0 for reward in rewards]


def _hinted(task: Task, policy: Policy, item: Item, said: Feedback, length: int) -> tuple[tuple[int, ...], str]:
    """The teacher's prompt, or why there is none."""
    if not said.context:
        return (), said.skip or "empty feedback"
    try:
        ids = tuple(policy.prompt_ids(context_prompt(task, item.prompt, said.context)))
    except (TalkootError, ValueError):
        return (), "feedback outside the vocabulary"
    return (ids, "") if len(ids) + length <= policy.max_positions else ((), "feedback too long")


def _result(sample: Sample) -> RewardResult:
    reason = "right" if sample.reward >= 1 else "cut off" if sample.finish == "length" else "wrong"
    return RewardResult(sample.reward, reason)
