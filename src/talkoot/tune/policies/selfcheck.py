"""Whether generator and trainer are the same policy: measured before anything is learned.

Importance weights and divergences are differences of two log-probabilities, one from the generator (cached, batched,
perhaps another engine), one from the trainer. Where an untouched model disagrees with itself, they measure the engine
instead of the policy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
import torch

from talkoot.core.errors import TalkootError
from talkoot.tune.completion import Completion, Sampling
from talkoot.tune.policies.policy import Policy
from talkoot.tune.policies.rollout import check_prompt


class Disagreement(msgspec.Struct, frozen=True, kw_only=True):
    """Difference of generator's and trainer's log-probability per token, in nats, without its sign.

    Attributes:
        largest: over all tokens.
        mean: over all tokens.
        tokens: how many were compared.
    """

    largest: float
    mean: float
    tokens: int


def disagreement(
    policy: Policy, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[Completion]], temperature: float
) -> Disagreement:
    """Compare what the generator said of its completions with what the trainer says of them.

    Args:
        answers: completions of each prompt, made by this policy with its present weights.
        temperature: they were sampled at; 0 counts as 1, as it does for the generator.

    Raises:
        ValueError: there is no completion.
    """
    pairs = [(prompt, one) for prompt, group in zip(prompts, answers, strict=True) for one in group]
    if not pairs:
        raise ValueError("without completions nothing can be compared")
    with torch.no_grad():
        logits = policy.completion_logits([prompt for prompt, _ in pairs], [one.ids for _, one in pairs])
        ids = torch.tensor([token for _, one in pairs for token in one.ids], device=logits.device)
        trainer = (logits / (temperature or 1.0)).log_softmax(-1).gather(1, ids[:, None])[:, 0].double().cpu()
    generator = torch.tensor([value for _, one in pairs for value in one.logp], dtype=torch.float64)
    apart = (generator - trainer).abs()
    return Disagreement(largest=float(apart.max()), mean=float(apart.mean()), tokens=len(apart))


def check_generator(
    policy: Policy,
    prompts: Sequence[Sequence[int]],
    seeds: Sequence[Sequence[int]],
    sampling: Sampling,
    tolerance: float,
) -> Disagreement:
    """Generate one batch and refuse a policy whose generator and trainer disagree.

    Args:
        prompts, seeds, sampling: as for :meth:`Policy.generate`.
        tolerance: largest difference of a token's log-probability that is let pass, in nats.

    Raises:
        TalkootError: the difference is larger, or not a number.
    """
    found = disagreement(policy, prompts, policy.generate(prompts, seeds, sampling), sampling.temperature)
    if not found.largest <= tolerance:  # NaN is refused, too
        raise TalkootError(
            "generator and trainer disagree about the same weights",
            where="the check before the first round",
            why=f"log-probabilities of {found.tokens} tokens differ by up to {found.largest:.2g} nats "
            f"(mean {found.mean:.2g}), {tolerance:.2g} are allowed",
            next="generate and train in the same number type (float32), or raise the tolerance",
        )
    return found


def check_prompts(policy: Policy, prompts: Iterable[tuple[str, str]], max_new_tokens: int) -> None:
    """Refuse the first prompt that a policy cannot read, or that leaves no room for an answer.

    Args:
        prompts: where each stands, and its text.

    Raises:
        TalkootError: there is one; it says where.
    """
    for where, prompt in prompts:
        try:
            check_prompt(policy.prompt_ids(prompt), max_new_tokens, policy.max_positions)
        except TalkootError as problem:
            raise TalkootError(problem.what, where=where, why=problem.why, next=problem.next) from problem
