"""A tiny differentiable policy for tests of objectives: logits are a function of the token before and of the place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from talkoot.tune.objective.scored import Sample, ScoredGroup


class Coder:
    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size


class TablePolicy:
    """Logits (row before, token) + (place, token), in float64. ``pad`` puts rows of padding around every completion,
    on one side or the other, and cuts them off again, as a back-end that pads would."""

    max_positions = 64

    def __init__(self, seed: int = 0, vocab_size: int = 5, pad: str = "none") -> None:
        generator = torch.Generator().manual_seed(seed)
        self.coder, self.pad = Coder(vocab_size), pad
        shapes = ((vocab_size, vocab_size), (16, vocab_size))
        self.before, self.place = (
            nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64)) for shape in shapes
        )
        self.initial: list[Tensor] | None = None
        self.calls = 0

    def completion_logits(self, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]) -> Tensor:
        self.calls += 1
        width, rows = max(map(len, completions)), []
        for prompt, ids in zip(prompts, completions, strict=True):
            before = torch.tensor([prompt[-1], *ids[:-1]])
            logits = self.before[before] + self.place[: len(ids)]
            blank = logits.new_full((width - len(ids), self.coder.vocab_size), float("nan"))
            if self.pad == "left":
                logits = torch.cat([blank, logits])[width - len(ids) :]
            elif self.pad == "right":
                logits = torch.cat([logits, blank])[: len(ids)]
            rows.append(logits)
        return torch.cat(rows)

    def parameters(self) -> list[nn.Parameter]:
        return [self.before, self.place]

    def keep_initial(self) -> None:
        self.initial = [parameter.detach().clone() for parameter in self.parameters()]

    @contextmanager
    def frozen(self) -> Iterator[None]:
        now = [parameter.detach().clone() for parameter in self.parameters()]
        with torch.no_grad():
            for parameter, value in zip(self.parameters(), self.initial or now, strict=True):
                parameter.copy_(value)
            yield
            for parameter, value in zip(self.parameters(), now, strict=True):
                parameter.copy_(value)


@torch.no_grad()
def scored_by(policy: TablePolicy, prompt: Sequence[int], ids: Sequence[int]) -> tuple[float, ...]:
    logits = policy.completion_logits([prompt], [ids])
    return tuple(logits.log_softmax(-1)[range(len(ids)), list(ids)].tolist())


def group(
    generator: TablePolicy,
    rewards: Sequence[float],
    lengths: Sequence[int],
    *,
    seed: int = 0,
    peer: str = "alder",
    own: bool = True,
    finish: Sequence[str] | None = None,
    unlike: bool = False,
) -> ScoredGroup:
    """Completions of random tokens, with the log-probabilities that ``generator`` gives them."""
    chance = torch.Generator().manual_seed(seed)
    prompt = (seed % generator.coder.vocab_size, 1)
    samples = []
    for number, (reward, length) in enumerate(zip(rewards, lengths, strict=True)):
        ids = tuple(torch.randint(generator.coder.vocab_size, (length,), generator=chance).tolist())
        logp = scored_by(generator, prompt, ids)
        ended = finish[number] if finish else "stop"
        samples.append(Sample(ids, reward, ended, None if unlike else logp, sum(logp)))
    return ScoredGroup(prompt, tuple(samples), peer, own)
