"""Supervised warm start: a policy learns a task's form from demonstrations before it learns from rewards.

The loss is the mean cross-entropy over the tokens of completions, end token included; prompts are only read
(Ouyang et al. 2022, section 3.4, the supervised stage).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F

from talkoot.core.errors import TalkootError
from talkoot.model.fit import FitSettings, Fitter
from talkoot.tune.policies.policy import Policy

WARMUP = 0.1  # of the steps, in which the learning rate rises; from there it falls in a line to 0
CLIP = 1.0  # largest norm of a gradient


def warm_start(
    policy: Policy,
    texts: Iterable[tuple[str, str]],
    steps: int,
    batch: int,
    learning_rate: float,
    seed: int,
) -> list[float]:
    """Train on demonstrations with AdamW (Loshchilov and Hutter 2019); deterministic.

    Args:
        texts: finitely many pairs of prompt and completion (without end token), read and encoded once; every pass over
            them has an order of its own.
        steps: of the optimizer, at least 1.
        batch: demonstrations per step, at least 1.
        learning_rate: the highest, after the warm-up.
        seed: of the orders.

    Returns:
        Loss of each step in nats per token, before that step.

    Raises:
        TalkootError: there is no demonstration, one is too long for the model, or a loss is not finite.
        ValueError: no step, or no demonstration per step.
    """
    if steps < 1 or batch < 1:
        raise ValueError(f"{steps} steps of {batch} demonstrations train nothing")
    end = policy.coder.eos_ids[0]
    pairs = [(policy.prompt_ids(prompt), [*policy.coder.encode(text), end]) for prompt, text in texts]
    _check(pairs, policy.max_positions)
    rise = max(1, round(WARMUP * steps))
    how = FitSettings(learning_rate=learning_rate, horizon=steps, warmup=rise, schedule="linear", final=0.0, clip=CLIP)
    fitter = Fitter({str(number): one for number, one in enumerate(policy.parameters())}, how)
    chance = torch.Generator().manual_seed(seed)
    waiting: list[int] = []
    losses = []
    for _ in range(steps):
        while len(waiting) < batch:
            waiting += torch.randperm(len(pairs), generator=chance).tolist()
        chosen, waiting = [pairs[number] for number in waiting[:batch]], waiting[batch:]
        logits = policy.completion_logits([prompt for prompt, _ in chosen], [ids for _, ids in chosen])
        wanted = torch.tensor([token for _, ids in chosen for token in ids], device=logits.device)
        losses.append(fitter.step(F.cross_entropy(logits, wanted)))
    return losses


def _check(pairs: list[tuple[list[int], list[int]]], max_positions: int) -> None:
    if not pairs:
        raise _bad("there is no demonstration", "choose a task with solutions")
    longest = max(len(prompt) + len(ids) for prompt, ids in pairs)
    if longest > max_positions:
        why = f"a demonstration has {longest} tokens, the model {max_positions} positions"
        raise _bad(why, "choose shorter problems, or a model with more positions")
    if not all(prompt for prompt, _ in pairs):
        raise _bad("a prompt has no token", "use a tokenizer with a begin token")


def _bad(why: str, next: str) -> TalkootError:
    return TalkootError("the policy cannot be warmed up", where="warm start", why=why, next=next)
