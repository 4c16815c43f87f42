"""Batched generation: each prompt is read once, its row is copied to all its samples, rows that ended leave the batch.

Works over anything that can read tokens with a cache (:class:`Reader`), so every back-end draws, stops, counts and
reports log-probabilities in the same way. A completion depends on prompt, seed and weights alone (up to rounding of the
logits), not on its company in the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from talkoot.core.errors import TalkootError
from talkoot.model.sampling import draw, uniforms
from talkoot.tune.completion import Completion, Sampling


class Reader(Protocol):
    """One batch of texts being read by a model, with its cache."""

    def start(self, tokens: Tensor, padding: Tensor | None, room: int) -> Tensor:
        """Read the prompts, int64 (P, T), of which the first ``padding`` (P,) columns are none of the text (None = no
        padding anywhere); logits (P, V) of what follows. ``room``: columns that the texts will have at most."""
        ...

    def select(self, rows: Tensor) -> None:
        """Go on with these rows, int64, in this order; a row may come several times or not at all."""
        ...

    def step(self, tokens: Tensor) -> Tensor:
        """Read one more token of each row, int64 (B,); logits (B, V) of what follows."""
        ...


def generate(
    reader: Callable[[], Reader],
    prompts: Sequence[Sequence[int]],
    seeds: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    eos_ids: Sequence[int],
    max_positions: int,
    batch_rows: int = 256,
    device: torch.device | str = "cpu",
) -> list[list[Completion]]:
    """Answer prompt ``i`` once per seed in ``seeds[i]``.

    Args:
        reader: opens a reader for the next batch; :func:`torch.no_grad` is on.
        prompts: ids, at least one each.
        seeds: see :func:`talkoot.tune.completion.sequence_seed`.
        eos_ids: tokens that end a completion, as its last one.
        max_positions: of the model.
        batch_rows: completions generated at a time; bounds the memory of caches and logits.

    Raises:
        TalkootError: a prompt is empty or too long with ``max_new_tokens`` behind it.
        ValueError: not one list of seeds per prompt.
    """
    if len(prompts) != len(seeds):
        raise ValueError(f"{len(seeds)} lists of seeds for {len(prompts)} prompts")
    for prompt in prompts:
        check_prompt(prompt, sampling.max_new_tokens, max_positions)
    answers: list[list[Completion]] = [[] for _ in prompts]
    with torch.no_grad():
        for batch in _batches(prompts, seeds, batch_rows):
            made = _Batch(reader(), batch, [prompts[number] for number, _ in batch], device).run(sampling, eos_ids)
            for (number, _), completion in zip(_rows(batch), made, strict=True):
                answers[number].append(completion)
    return answers


Share = list[tuple[int, Sequence[int]]]  # of one batch: numbers of prompts, and seeds for each


def _batches(prompts: Sequence[Sequence[int]], seeds: Sequence[Sequence[int]], limit: int) -> Iterator[Share]:
    """Shares of at most ``limit`` rows, prompts of like length together, because padding is computed in vain."""
    share: Share = []
    room = limit
    for number in sorted(range(len(prompts)), key=lambda one: len(prompts[one])):
        rest = seeds[number]
        while rest:
            part, rest = rest[:room], rest[room:]
            share.append((number, part))
            room -= len(part)
            if room == 0:
                yield share
                share, room = [], limit
    if share:
        yield share


def _rows(share: Share) -> list[tuple[int, int]]:
    return [(number, seed) for number, seeds in share for seed in seeds]


class _Batch:
    """Rows that are generated together; those that still run keep their order."""

    def __init__(self, reader: Reader, share: Share, prompts: Sequence[Sequence[int]], device: torch.device | str):
        self.reader, self.prompts, self.device = reader, prompts, device
        self.counts = [len(seeds) for _, seeds in share]
        self.seeds = [seed for _, seed in _rows(share)]

    def run(self, sampling: Sampling, eos_ids: Sequence[int]) -> list[Completion]:
        """One completion per row."""
        limit, size = sampling.max_new_tokens, len(self.seeds)
        cuts = sampling.temperature > 0 and (sampling.top_k > 0 or sampling.top_p < 1)
        ids = torch.zeros(size, limit, dtype=torch.int64, device=self.device)
        logp, kept = torch.zeros(2, size, limit, device=self.device)
        chances = uniforms(self.seeds, limit, self.device)
        ends = torch.tensor(list(eos_ids), dtype=torch.int64, device=self.device)
        stopped = torch.zeros(size, dtype=torch.int64, device=self.device)  # length with the end token; 0 = runs
        active = torch.arange(size, device=self.device)  # the rows that the reader still reads
        logits = self._start(limit)
        for number in range(limit):
            drawn = draw(logits, chances[active, number], sampling.temperature, sampling.top_k, sampling.top_p)
            ids[active, number], logp[active, number] = drawn.ids, drawn.logp
            if drawn.kept is not None:
                kept[active, number] = drawn.kept
            ended = torch.isin(drawn.ids, ends)
            stopped[active] = torch.where(ended & (stopped[active] == 0), number + 1, stopped[active])
            going = (stopped[active] == 0).nonzero()[:, 0]
            if number + 1 == limit or not len(going):
                break
            tokens = drawn.ids
            if 8 * len(going) <= 7 * len(active):  # to copy the cache costs about what an eighth of a step does
                self.reader.select(going)
                active, tokens = active[going], tokens[going]
            logits = self.reader.step(tokens)
        return _completions(ids, logp, kept if cuts else None, stopped)

    def _start(self, limit: int) -> Tensor:
        """Logits (B, V) of each row's first token; every prompt is read once."""
        longest = max(map(len, self.prompts))
        lengths = [len(one) for one in self.prompts]
        tokens = torch.tensor(
            [[0] * (longest - len(one)) + list(one) for one in self.prompts], dtype=torch.int64, device=self.device
        )
        padding = torch.tensor([longest - one for one in lengths], device=self.device)
        logits = self.reader.start(tokens, padding if min(lengths) < longest else None, longest + limit)
        groups = torch.arange(len(self.counts), device=self.device)
        rows = groups.repeat_interleave(torch.tensor(self.counts, device=self.device))
        self.reader.select(rows)
        return logits[rows]


def _completions(ids: Tensor, logp: Tensor, kept: Tensor | None, stopped: Tensor) -> list[Completion]:
    made = []
    lists = ids.tolist(), logp.tolist(), kept.tolist() if kept is not None else [[]] * len(ids), stopped.tolist()
    for row, chances, mass, end in zip(*lists, strict=True):
        length = end or len(row)
        made.append(
            Completion(
                ids=tuple(row[:length]),
                logp=tuple(chances[:length]),
                kept=tuple(mass[:length]),
                finish="stop" if end else "length",
            )
        )
    return made


def check_prompt(prompt: Sequence[int], new: int, max_positions: int) -> None:
    """Refuse, by TalkootError, a prompt that is empty or leaves no room for ``new`` tokens."""
    if not prompt:
        raise TalkootError(
            "an empty prompt cannot be answered",
            where="prompt",
            why="the model has no token to go on from",
            next="use a tokenizer with a begin token, or a prompt that is not empty",
        )
    if len(prompt) + new > max_positions:
        raise TalkootError(
            "a prompt is too long for the model",
            where="rollout.max_new_tokens",
            why=f"{len(prompt)} prompt and {new} new tokens; the model has {max_positions} positions",
            next="lower max_new_tokens, choose shorter problems, or a model with more positions",
        )
