"""Policies: models that answer prompts and learn. One protocol, several back-ends."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

from talkoot.tune.completion import Completion, Sampling

if TYPE_CHECKING:
    from torch import Tensor, nn


class TextCoder(Protocol):
    """Text to ids and back, and an identity: equal digests mean equal ids for every text."""

    vocab_size: int
    eos_ids: tuple[int, ...]

    def encode(self, text: str) -> list[int]:
        """Ids of a text, markers in it taken literally."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, without markers."""
        ...

    def digest(self) -> str:
        """Content hash, 64 hex digits."""
        ...


class Policy(Protocol):
    """A model with trainable parameters, as the tuner sees it.

    Attributes:
        coder: its tokenizer.
        max_positions: prompt and completion together are at most so long.
        size: number of all its parameters, trained or not.
    """

    max_positions: int
    size: int

    @property
    def coder(self) -> TextCoder:
        """Its tokenizer."""
        ...

    def prompt_ids(self, prompt: str) -> list[int]:
        """Ids of a prompt as the model wants to read it (begin token, chat template)."""
        ...

    def generate(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[Sequence[int]], sampling: Sampling
    ) -> list[list[Completion]]:
        """Answer each prompt once per seed in ``seeds[i]``; what a row becomes depends on prompt, seed and weights
        alone (up to rounding), not on the rest of the batch. The prompt is computed once per group.

        Raises:
            TalkootError: a prompt is too long for the model with ``max_new_tokens`` behind it.
        """
        ...

    def completion_logits(self, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]) -> Tensor:
        """Float32 logits (N, vocabulary) that predict each completion token, row after row; N tokens in
        all. Differentiable unless under ``torch.no_grad()``. No padding reaches the result."""
        ...

    def parameters(self) -> Sequence[nn.Parameter]:
        """The trainable parameters, in a fixed order."""
        ...

    def frozen(self) -> AbstractContextManager[None]:
        """Within it the model has its initial weights (reference policy, self-teacher): a LoRA adapter is switched off,
        a full model's kept copy stands in. No gradients."""
        ...

    def keep_initial(self) -> None:
        """Promise that :meth:`frozen` will be used: a full model copies its weights now (once)."""
        ...

    def state(self) -> dict[str, Tensor]:
        """Everything that training changes (not the optimizer), by name; the kept initial weights, too."""
        ...

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        """Take back what :meth:`state` gave; TalkootError when names or shapes differ."""
        ...

    def weights_hash(self) -> str:
        """Digest of the weights as they are now: equal hashes mean the same policy."""
        ...

    def export(self, folder: str) -> None:
        """Write a folder that ``transformers`` loads (a LoRA: merged)."""
        ...
