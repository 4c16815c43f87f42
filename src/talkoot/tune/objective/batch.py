"""Groups as flat rows and tokens: no padding, and microbatches that are any subset of the rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from talkoot.tune.objective.scored import Sample, ScoredGroup

LOGITS = 2**25  # most logits of a microbatch, 128 MiB in float32
TOKENS = 4096  # most tokens of a microbatch, prompts and padding included


@dataclass(frozen=True)
class Rows:
    """All completions of a batch, group after group.

    Attributes:
        prompts, samples, peers: of each row.
    """

    prompts: list[tuple[int, ...]]
    samples: list[Sample]
    peers: list[str]

    @classmethod
    def of(cls, groups: Sequence[ScoredGroup]) -> Rows:
        """The groups' completions, checked.

        Raises:
            ValueError: a completion without tokens, or with log-probabilities missing, too many, or not finite.
        """
        for group in groups:
            for number, sample in enumerate(group.samples):
                _check(sample, f"completion {number} of a group of {group.peer}")
        flat = [(group, sample) for group in groups for sample in group.samples]
        return cls([g.prompt for g, _ in flat], [s for _, s in flat], [g.peer for g, _ in flat])

    def lengths(self) -> Tensor:
        """Tokens of each completion, (R,) int64."""
        return torch.tensor([len(sample.ids) for sample in self.samples], dtype=torch.int64)

    def microbatches(self, rows: Sequence[int], vocab_size: int, budget: int) -> list[list[int]]:
        """``rows``, sorted by length so that little is padded, in parts that fit into memory.

        Args:
            budget: tokens of a part, prompts and padding included; 0 = as many as keep its logits to 128 MiB.
        """
        return microbatches(
            {row: len(self.prompts[row]) + len(self.samples[row].ids) for row in rows}, vocab_size, budget
        )


def microbatches(widths: Mapping[int, int], vocab_size: int, budget: int) -> list[list[int]]:
    """As :meth:`Rows.microbatches`, of rows that are so many tokens wide."""
    limit = budget or min(TOKENS, max(1, LOGITS // vocab_size))
    parts: list[list[int]] = []
    for width, row in sorted((width, row) for row, width in widths.items()):  # the widest so far
        if parts and (len(parts[-1]) + 1) * width <= limit:
            parts[-1].append(row)
        else:
            parts.append([row])
    return parts


def _check(sample: Sample, where: str) -> None:
    if not sample.ids:
        raise ValueError(f"{where} has no token")
    if sample.gen_logp is not None and len(sample.gen_logp) != len(sample.ids):
        raise ValueError(f"{where} has {len(sample.gen_logp)} log-probabilities for {len(sample.ids)} tokens")
    if not math.isfinite(sample.gen_total) or not all(map(math.isfinite, sample.gen_logp or ())):
        raise ValueError(f"{where} has a log-probability that is not finite")


@dataclass(frozen=True)
class Generated:
    """What the generators said about some rows with N tokens together.

    Attributes:
        rows: which of the rows each token belongs to, (N,) int64.
        logp: (N,), 0 where the generator's tokens are unlike.
        total: of each completion, (R,).
        unlike: (R,) bool.
        lengths: (R,) int64.
    """

    rows: Tensor
    logp: Tensor
    total: Tensor
    unlike: Tensor
    lengths: Tensor

    @classmethod
    def of(cls, samples: Sequence[Sample], like: Tensor) -> Generated:
        """Of these samples, in type and place of ``like``."""
        place, kind = like.device, like.dtype
        lengths = torch.tensor([len(sample.ids) for sample in samples], device=place)
        logp = [value for s in samples for value in (s.gen_logp if s.gen_logp is not None else (0.0,) * len(s.ids))]
        return cls(
            rows=torch.repeat_interleave(torch.arange(len(samples), device=place), lengths),
            logp=torch.tensor(logp, dtype=kind, device=place),
            total=torch.tensor([sample.gen_total for sample in samples], dtype=kind, device=place),
            unlike=torch.tensor([sample.gen_logp is None for sample in samples], device=place),
            lengths=lengths,
        )


def row_sums(values: Tensor, rows: Tensor, count: int) -> Tensor:
    """Sums of ``values`` (N,) by row, (count,); the order of addition is fixed."""
    return values.new_zeros(count).index_add(0, rows, values)
