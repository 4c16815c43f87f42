"""A tokenizer as policies see it."""

from __future__ import annotations

from collections.abc import Sequence

from talkoot.core.errors import TalkootError
from talkoot.model.tokenizer import Tokenizer


class TokenizerCoder:
    """:class:`talkoot.tune.policies.policy.TextCoder` over our own tokenizer.

    Args:
        tokenizer: with an end token, unless ``eos_ids`` names some.
        eos_ids: further tokens that end a completion, such as the model's configuration has.

    Raises:
        TalkootError: there is no end token, so nothing would ever end.
    """

    def __init__(self, tokenizer: Tokenizer, eos_ids: Sequence[int] = ()) -> None:
        own = () if tokenizer.eos_id is None else (tokenizer.eos_id,)
        self.tokenizer = tokenizer
        self.vocab_size = tokenizer.vocab_size
        # The first is the one that a learner appends; ids beyond the vocabulary are published checkpoints' padding.
        self.eos_ids = tuple(one for one in dict.fromkeys((*own, *eos_ids)) if 0 <= one < self.vocab_size)
        if not self.eos_ids:
            raise TalkootError(
                "the tokenizer has no end token",
                where="tokenizer_config.json",
                why="without eos_token no completion could end by itself",
                next="name the model's end token as eos_token, or as eos_token_id in config.json",
            )

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids)

    def digest(self) -> str:
        return self.tokenizer.digest()
