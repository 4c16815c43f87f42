"""Experts as sources of log-probabilities: one number per token is all that scoring needs of them.

So experts of any width and depth go together, as long as they share a tokenizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from talkoot.blend.ensemble.posterior import Floats
from talkoot.core.errors import TalkootError
from talkoot.model.decoder import Cache
from talkoot.model.stage import Stage

_MOST_LOGITS = 1 << 23  # numbers of float64 held at a time


class Gone(Exception):
    """An expert cannot answer (its peer is lost, silent or talks nonsense); its text is for people."""


class TokenScorer(Protocol):
    """An expert, as far as scoring goes."""

    def log_probs(self, ids: Sequence[int]) -> Floats:
        """Natural log-probabilities (T-1,), float64, finite: of each token but the first, given those before it.

        A prefix's values are the first of the whole text's. Raises :class:`Gone` when the expert cannot answer.
        """
        ...


class StageScorer:
    """A whole model on this machine.

    Args:
        stage: all layers of it.
    """

    def __init__(self, stage: Stage) -> None:
        self.stage = check_whole(stage)

    def log_probs(self, ids: Sequence[int]) -> Floats:
        """See :class:`TokenScorer`.

        Raises:
            TalkootError: more tokens than the model has positions for, ids that it does not know, or none.
        """
        return read_text(self.stage, ids, None)[0]


def check_whole(stage: Stage) -> Stage:
    """The stage.

    Raises:
        TalkootError: it is a part of a model.
    """
    if not stage.whole:
        raise TalkootError(
            "an expert is a whole model",
            where="ensemble",
            why=f"the stage holds layers {stage.first} to {stage.last - 1} of {stage.config.layer_count}",
            next="load all layers: load_model(folder)",
        )
    return stage


@torch.no_grad()
def read_text(stage: Stage, ids: Sequence[int], cache: Cache | None) -> tuple[Floats, Tensor]:
    """How likely each token was, and what may come next.

    The head runs on a few positions at a time: with a large vocabulary a long text's logits are large.

    Args:
        stage: a whole model.
        ids: T tokens, at least one.
        cache: receives the tokens' keys and values; may hold those before them.

    Returns:
        Float64 log-probabilities: (T-1,) of the tokens but the first, and (V,) of the next one.
    """
    tokens, config = torch.tensor(list(ids), dtype=torch.int64), stage.config
    if not len(tokens) or tokens.min() < 0 or tokens.max() >= config.vocab_size:
        raise TalkootError(
            "an expert cannot read this text",
            where="ensemble",
            why=f"it holds ids outside 0 to {config.vocab_size - 1}" if len(tokens) else "it is empty",
            next="encode at least one token with the experts' common tokenizer",
        )
    tokens = tokens.to(stage.device)
    hidden = stage.run_layers(tokens[None], range(config.layers + 1), cache)
    rows = max(1, _MOST_LOGITS // config.vocab_size)
    found, row = list[Tensor](), tokens.new_empty(0, dtype=torch.float64)
    for start in range(0, len(tokens), rows):
        logits = stage.run_layers(hidden[:, start : start + rows], (config.layers + 1,))[0]
        log_probs = logits.double().log_softmax(-1)
        after = tokens[start + 1 : start + 1 + rows]
        found.append(log_probs[: len(after)].gather(1, after[:, None])[:, 0])
        row = log_probs[-1]
    return np.asarray(torch.cat(found).cpu().numpy(), np.float64), row.cpu()
