"""What the server itself knows of a model: its tokenizer and its chat template, not its weights."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from talkoot.model.chat import Chat, Message
from talkoot.model.tokenizer import Tokenizer
from talkoot.serve.api.models import Source

Prompt = str | Sequence[Message]  # a text to go on with, or a conversation


class Voice:
    """How a model is spoken to.

    Args:
        folder: of the model.
    """

    def __init__(self, folder: Path) -> None:
        self.tokenizer = Tokenizer.load(folder)
        self.digest = self.tokenizer.digest()
        self.chat = Chat(self.tokenizer, str(folder))

    def ids(self, prompt: Prompt) -> list[int]:
        """A prompt's tokens, at least one.

        Raises:
            TalkootError: the model's template refuses the conversation, or its alphabet the text.
        """
        if isinstance(prompt, str):
            ids = [*self.tokenizer.prefix, *self.tokenizer.encode(prompt)]
        else:
            ids = self.chat.ids(prompt)
        return ids or [self._blank]

    @property
    def _blank(self) -> int:
        """What stands for nothing: the end of the text before, or the first token there is."""
        return next((one for one in (self.tokenizer.bos_id, self.tokenizer.eos_id) if one is not None), 0)

    @property
    def ends(self) -> tuple[int, ...]:
        """The tokenizer's own idea of what ends an answer."""
        return () if self.tokenizer.eos_id is None else (self.tokenizer.eos_id,)


class Voices:
    """Voices by model, each read once.

    Args:
        aside: runs work that takes a while where nobody waits for it but the caller.
    """

    def __init__(self, aside: Callable[[Callable[[], Any]], Awaitable[Any]]) -> None:
        self.aside = aside
        self._known: dict[tuple[str, str], Voice] = {}

    async def of(self, source: Source) -> Voice:
        """The voice of a model; of an ensemble, the one that its members share.

        Raises:
            TalkootError: its folder holds no usable tokenizer or template.
        """
        key = source.folders[0], source.stamp
        if key not in self._known:
            voice = await self.aside(lambda: Voice(Path(source.folders[0])))
            self._known[key] = voice
        return self._known[key]

    def keep(self, sources: Sequence[Source]) -> None:
        """Forget all others."""
        kept = {(source.folders[0], source.stamp) for source in sources}
        self._known = {key: voice for key, voice in self._known.items() if key in kept}
