"""Writing text with a posterior ensemble: one cache per expert, and the posterior moves with every token."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from talkoot.blend.ensemble.posterior import Belief, Floats, Prior
from talkoot.blend.ensemble.priors import uniform
from talkoot.blend.ensemble.scorers import check_whole, read_text
from talkoot.core.errors import TalkootError
from talkoot.model.decoder import Cache
from talkoot.model.generate import check_request, continued
from talkoot.model.stage import Stage


class Reader(Protocol):
    """An expert that reads a text as it comes and says what may follow.

    Attributes:
        vocab_size: length of what it says.
        positions: tokens that it can read.
        eos_ids: tokens that end its texts.
    """

    vocab_size: int
    positions: int
    eos_ids: tuple[int, ...]

    def start(self, ids: Sequence[int]) -> tuple[Floats, Tensor]:
        """Begin another text: float64 log-probabilities of ids[1:], (T-1,), and of what comes next, (V,)."""
        ...

    def step(self, token: int) -> Tensor:
        """Read one token more: float64 log-probabilities of the next one, (V,)."""
        ...


class StageReader:
    """A whole model on this machine, with its cache.

    Args:
        stage: all layers of it; readers may share one.
    """

    def __init__(self, stage: Stage) -> None:
        config = check_whole(stage).config
        self.stage, self._cache = stage, Cache()
        self.vocab_size, self.positions, self.eos_ids = config.vocab_size, config.max_positions, config.eos_ids

    def start(self, ids: Sequence[int]) -> tuple[Floats, Tensor]:
        """See :class:`Reader`."""
        self._cache = Cache()
        return read_text(self.stage, ids, self._cache)

    def step(self, token: int) -> Tensor:
        """See :class:`Reader`."""
        return read_text(self.stage, [token], self._cache)[1]


class Told(NamedTuple):
    """A new token.

    Attributes:
        token: its id.
        logprob: natural logarithm of its probability under the ensemble, before temperature and cuts.
        weights: of the experts when it was drawn; 0 for those that were dropped.
    """

    token: int
    logprob: float
    weights: dict[str, float]


def stream(
    readers: Mapping[str, Reader],
    ids: Sequence[int],
    max_new_tokens: int,
    *,
    prior: Prior | None = None,
    keep: int = 0,
    after: int = 0,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    seed: int | Sequence[int] = 0,
    eos_id: int | Sequence[int] | None = None,
    stop: Sequence[Sequence[int]] = (),
) -> Iterator[Told]:
    """Continue a prompt; the posterior counts the prompt's tokens, too.

    Args:
        readers: the experts by name; they share a tokenizer.
        ids: the prompt, at least one token.
        prior: over the experts, in their order; uniform by default.
        keep: go on with so many experts, the likeliest ones, once ``after`` tokens behind the first are known; 0 = all.
            The others' caches are not extended any more.
        after: see ``keep``. One expert kept after the prompt's length is routing by likelihood.
        max_new_tokens, temperature, top_k, top_p, seed, eos_id, stop: as for ``talkoot.model.generate.stream``; by
            default the first expert's end tokens end the text.

    Raises:
        TalkootError: an argument is out of range, or the experts' vocabularies differ in size.
    """
    if not readers:
        raise ValueError("an ensemble has at least one expert")
    sizes = {name: reader.vocab_size for name, reader in readers.items()}
    if len(set(sizes.values())) > 1:
        raise TalkootError(
            "these experts cannot write together",
            where="ensemble",
            why="their vocabularies differ: " + ", ".join(f"{name} has {size} tokens" for name, size in sizes.items()),
            next="use experts that share a tokenizer, or route to one of them",
        )
    first = next(iter(readers.values()))
    prompt = torch.tensor([list(ids)], dtype=torch.int64)
    positions = min(reader.positions for reader in readers.values())
    check_request(first.vocab_size, positions, prompt, max_new_tokens, temperature, top_k, top_p)
    mixture = Mixture(readers, prior, keep, after)
    tokens = continued(
        mixture.read,
        prompt,
        max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        ends=first.eos_ids if eos_id is None else (eos_id,) if isinstance(eos_id, int) else tuple(eos_id),
        stop=stop,
    )
    for [sampled] in tokens:
        if sampled is not None:
            yield Told(sampled.token, sampled.logprob, mixture.weights)


class Mixture:
    """The ensemble as one model of what comes next.

    Args:
        readers, prior, keep, after: as for :func:`stream`.
    """

    def __init__(self, readers: Mapping[str, Reader], prior: Prior | None, keep: int, after: int) -> None:
        self._readers, self._keep, self._after = dict(readers), keep, after
        self._belief = Belief(uniform(len(readers), np.empty((0, 0))) if prior is None else prior)
        self._alive = np.isfinite(self._belief.log_weights)
        self._rows: list[Tensor] = []
        self._heard = 0  # tokens behind the first that the belief knows

    @property
    def weights(self) -> dict[str, float]:
        """Of the experts by name, for the next token."""
        return dict(zip(self._readers, self._belief.weights.tolist(), strict=True))

    def read(self, tokens: Tensor) -> Tensor:
        """The prompt (1, T) at first, then one token (1, 1) at a time: float64 log-probabilities (1, V) of the next."""
        ids = tokens[0].tolist()
        if self._rows:
            self._belief.update(np.array([float(row[ids[0]]) for row in self._rows]))
            self._heard += 1
            self._choose()
            self._rows = [
                reader.step(ids[0]) if alive else row
                for reader, alive, row in zip(self._readers.values(), self._alive, self._rows, strict=True)
            ]
        else:
            self._start(ids)
        rows = torch.stack([row for row, alive in zip(self._rows, self._alive, strict=True) if alive])
        weights = torch.from_numpy(self._belief.log_weights[self._alive])
        return (rows + weights[:, None]).logsumexp(0)[None]

    def _start(self, ids: Sequence[int]) -> None:
        readers, early = list(self._readers.values()), self._after + 1 < len(ids)
        blank = torch.zeros(readers[0].vocab_size, dtype=torch.float64)
        head = ids[: self._after + 1] if self._keep and early else ids
        begun = [
            reader.start(head) if alive else (None, blank) for reader, alive in zip(readers, self._alive, strict=True)
        ]
        self._hear([said for said, _ in begun], 0)
        self._choose()
        if len(head) < len(ids):  # those that are kept read all of it
            begun = [
                reader.start(ids) if alive else (None, blank)
                for reader, alive in zip(readers, self._alive, strict=True)
            ]
            self._hear([said for said, _ in begun], len(head) - 1)
        self._rows = [row for _, row in begun]

    def _hear(self, said: Sequence[Floats | None], start: int) -> None:
        length = max(len(one) for one in said if one is not None)
        for place in range(start, length):
            self._belief.update(np.array([0.0 if one is None else one[place] for one in said]))
        self._heard = max(self._heard, length)

    def _choose(self) -> None:
        if 0 < self._keep < int(self._alive.sum()) and self._heard >= self._after:
            self._alive = self._belief.keep(self._keep)
