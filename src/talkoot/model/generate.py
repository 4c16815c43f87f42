"""Text from a model: greedy or sampled, token by token, with cached keys and values.

A row's text depends on its seed alone (``talkoot.model.sampling``), not on its company.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from talkoot.core.errors import TalkootError
from talkoot.model.decoder import Cache
from talkoot.model.initial import tensor_seed
from talkoot.model.sampling import draw, uniforms
from talkoot.model.stage import Stage


class Sampled(NamedTuple):
    """A new token and the natural logarithm of its probability under the unmodified model."""

    token: int
    logprob: float


def generate(
    stage: Stage,
    tokens: Tensor,
    max_new_tokens: int,
    *,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    seed: int | Sequence[int] = 0,
    eos_id: int | Sequence[int] | None = None,
    stop: Sequence[Sequence[int]] = (),
    layers: Sequence[int] | None = None,
) -> list[list[Sampled]]:
    """Continue each prompt; a row's list ends with its end token or stop sequence, if it met one.

    Arguments and errors are those of ``stream``.
    """
    rows: list[list[Sampled]] = [[] for _ in range(len(tokens))]
    steps = stream(
        stage,
        tokens,
        max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        eos_id=eos_id,
        stop=stop,
        layers=layers,
    )
    for step in steps:
        for row, sampled in zip(rows, step, strict=True):
            if sampled is not None:
                row.append(sampled)
    return rows


def stream(
    stage: Stage,
    tokens: Tensor,
    max_new_tokens: int,
    *,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    seed: int | Sequence[int] = 0,
    eos_id: int | Sequence[int] | None = None,
    stop: Sequence[Sequence[int]] = (),
    layers: Sequence[int] | None = None,
) -> Iterator[list[Sampled | None]]:
    """Yield one entry per prompt and new token, None for a prompt that has ended.

    Args:
        stage: a whole model.
        tokens: int64 prompts of equal length, (B, T), T at least 1.
        max_new_tokens: at most so many per prompt, and no more than the model has positions for.
        temperature: 0 takes the likeliest token; larger values flatten the distribution.
        top_k: keep only so many of the likeliest tokens.
        top_p: keep the likeliest tokens up to this probability together, above 0 and at most 1.
        seed: one per prompt, or one from which each row's is derived.
        eos_id: tokens that end a row; None for the model's own, () for none.
        stop: token sequences that end a row.
        layers: run these, in this order, embedding first and head last (``talkoot.model.depth`` gives the order for
            dead stages); None for the whole model.

    Raises:
        TalkootError: an argument is out of range.
    """
    if not stage.whole:
        why = f"the stage holds layers {stage.first} to {stage.last - 1} of {stage.config.layer_count}"
        raise _bad("stage", why, "load all layers: Stage(config, 0, config.layer_count)")
    config = stage.config
    check_request(config.vocab_size, config.max_positions, tokens, max_new_tokens, temperature, top_k, top_p)
    order, cache = _order(stage, layers), Cache()
    yield from continued(
        lambda new: _next_logits(stage, new.to(stage.device), cache, order),
        tokens,
        max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        ends=config.eos_ids if eos_id is None else (eos_id,) if isinstance(eos_id, int) else tuple(eos_id),
        stop=stop,
    )


def continued(
    read: Callable[[Tensor], Tensor],
    tokens: Tensor,
    max_new_tokens: int,
    *,
    temperature: float,
    top_k: int | None,
    top_p: float,
    seed: int | Sequence[int],
    ends: Sequence[int],
    stop: Sequence[Sequence[int]],
) -> Iterator[list[Sampled | None]]:
    """What ``stream`` does with any source of logits; the arguments are taken as right.

    Args:
        read: the prompts at first, then the newest tokens (B, 1), to logits (B, vocabulary) of what comes next.
        tokens, max_new_tokens, temperature, top_k, top_p, seed, stop: as for ``stream``.
        ends: tokens that end a row.
    """
    chances = uniforms(_seeds(seed, len(tokens)), max_new_tokens)
    stops = [list(one) for one in stop if one]
    longest = max(map(len, stops), default=0)
    tails: list[list[int]] = [[] for _ in range(len(tokens))]
    alive, step = [True] * len(tails), tokens
    for number in range(max_new_tokens):
        logits = read(step)
        chosen = draw(logits, chances[:, number], temperature, top_k or 0, top_p).ids
        logprobs = logits.log_softmax(-1).gather(1, chosen[:, None])[:, 0].tolist()
        picked = chosen.tolist()
        yield [
            Sampled(*pair) if on else None for pair, on in zip(zip(picked, logprobs, strict=True), alive, strict=True)
        ]
        for row, token in enumerate(picked):
            tails[row] = [*tails[row], token][-longest:] if longest else []
            met = token in ends or any(tails[row][-len(one) :] == one for one in stops)
            alive[row] = alive[row] and not met
        if not any(alive):
            return
        step = chosen[:, None]


@torch.no_grad()
def _next_logits(stage: Stage, tokens: Tensor, cache: Cache, order: Sequence[int]) -> Tensor:
    """Float32 logits (B, vocabulary) on the CPU after the last of these tokens.

    The head runs on the last position only: with a large vocabulary it would dominate the prompt's cost.
    """
    hidden = stage.run_layers(tokens, order[:-1], cache)
    return stage.run_layers(hidden[:, -1:], order[-1:])[:, 0].cpu()


def _order(stage: Stage, layers: Sequence[int] | None) -> tuple[int, ...]:
    head = stage.config.layers + 1
    order = tuple(range(head + 1) if layers is None else layers)
    if order[:1] != (0,) or order[-1:] != (head,) or not all(0 < index < head for index in order[1:-1]):
        why = f"{list(order)}, and the model has its embedding at 0, blocks 1 to {head - 1} and its head at {head}"
        raise _bad("layers", why, f"begin with 0, then any blocks, and end with {head}")
    return order


def _seeds(seed: int | Sequence[int], rows: int) -> list[int]:
    if isinstance(seed, int):
        return [tensor_seed(seed, f"row {row}") for row in range(rows)]
    if len(seed) != rows:
        raise _bad("seed", f"{len(seed)} seeds for {rows} prompts", "give one seed per prompt, or a single one")
    return [tensor_seed(one, "row") for one in seed]


def check_request(
    vocab_size: int,
    max_positions: int,
    tokens: Tensor,
    new: int,
    temperature: float,
    top_k: int | None,
    top_p: float,
) -> None:
    """Refuse what cannot be generated; arguments as for ``stream``.

    Raises:
        TalkootError: one of them is out of range.
    """
    if tokens.ndim != 2 or tokens.dtype != torch.int64 or tokens.numel() == 0:
        raise _bad("tokens", f"{tokens.dtype} {tuple(tokens.shape)}", "pass non-empty int64 prompts (B, T)")
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        why = f"ids from {tokens.min()} to {tokens.max()}, the model knows 0 to {vocab_size - 1}"
        raise _bad("tokens", why, "encode the prompt with the model's own tokenizer")
    if new < 1 or tokens.shape[1] + new > max_positions:
        why = f"{tokens.shape[1]} prompt and {new} new tokens, the model has {max_positions} positions"
        raise _bad("max_new_tokens", why, "ask for at least one, shorten the prompt or the answer")
    if not 0 <= temperature < float("inf"):
        raise _bad("temperature", f"{temperature} is not a finite number from 0", "use 0 for greedy, else about 1")
    if top_k is not None and top_k < 1:
        raise _bad("top_k", f"{top_k} keeps no token", "use at least 1, or None for all")
    if not 0 < top_p <= 1:
        raise _bad("top_p", f"{top_p} is not above 0 and at most 1", "use 1 for all tokens")


def _bad(name: str, why: str, next: str) -> TalkootError:
    return TalkootError(f"generation cannot use this {name}", where=f"generate({name})", why=why, next=next)
