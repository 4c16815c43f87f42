"""A prompt as an instruction-tuned model wants to read it: one user turn in its chat template."""

from __future__ import annotations

from pathlib import Path

from talkoot.core.errors import TalkootError
from talkoot.model.chat import Chat
from talkoot.model.tokenizer import Tokenizer

_PLACE = "\ue123the prompt\ue123"  # private-use characters: no template contains them


class ChatPrompt:
    """Text to ids with a model folder's chat template, or its begin token where there is none.

    Args:
        folder: of the model, for messages.
        tokenizer: the folder's.

    Raises:
        TalkootError: the template fails, or does not show the user's text exactly once.
    """

    def __init__(self, folder: Path, tokenizer: Tokenizer) -> None:
        self._chat = Chat(tokenizer, str(folder))
        shown = self._chat.render(_turn(_PLACE)).count(_PLACE)
        if shown != 1:
            raise TalkootError(
                "the chat template cannot be used",
                where=str(folder),
                why=f"it shows the user's text {shown} times",
                next="correct or remove the chat template in the model's folder",
            )

    def __call__(self, prompt: str) -> list[int]:
        """Ids of the whole turn."""
        return self._chat.ids(_turn(prompt))


def _turn(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]
