"""A policy of a few hundred parameters for tests of self-distillation: its next token depends on all before it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class Letters:
    """One token per character; 0 ends."""

    eos_ids = (0,)

    def __init__(self, alphabet: str) -> None:
        self.alphabet, self.vocab_size = alphabet, len(alphabet) + 1

    def encode(self, text: str) -> list[int]:
        return [self.alphabet.index(character) + 1 for character in text]  # ValueError for strangers

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self.alphabet[token - 1] for token in ids if token)

    def digest(self) -> str:
        return "0" * 64


class Toy:
    """Logits from a fading mean of the embeddings of all tokens before; implements what learners need of a policy."""

    max_positions = 200

    def __init__(self, alphabet: str, seed: int = 0, width: int = 8) -> None:
        self.coder = Letters(alphabet)
        rng = torch.Generator().manual_seed(seed)
        self.tokens = nn.Parameter(torch.randn(self.coder.vocab_size, width, generator=rng))
        self.head = nn.Parameter(torch.randn(width, self.coder.vocab_size, generator=rng))
        self.initial: list[Tensor] = []
        self.calls: list[int] = []  # rows of each call

    def prompt_ids(self, prompt: str) -> list[int]:
        return self.coder.encode(prompt)

    def completion_logits(self, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]) -> Tensor:
        self.calls.append(len(prompts))
        rows = []
        for prompt, completion in zip(prompts, completions, strict=True):
            hidden = torch.zeros(self.tokens.shape[1])
            for position, token in enumerate((*prompt, *completion)):
                if position >= len(prompt):
                    rows.append(hidden @ self.head)
                hidden = 0.7 * hidden + self.tokens[token]
        return torch.stack(rows)

    def parameters(self) -> list[nn.Parameter]:
        return [self.tokens, self.head]

    def keep_initial(self) -> None:
        self.initial = self.initial or [parameter.detach().clone() for parameter in self.parameters()]

    @contextmanager
    def frozen(self) -> Iterator[None]:
        present = [parameter.detach().clone() for parameter in self.parameters()]
        self._put(self.initial)
        try:
            yield
        finally:
            self._put(present)

    def _put(self, values: Sequence[Tensor]) -> None:
        with torch.no_grad():
            for parameter, value in zip(self.parameters(), values, strict=True):
                parameter.copy_(value)
