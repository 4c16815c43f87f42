"""A prompt as an instruction-tuned model wants to read it: in its chat template, with an answer about to begin.

Markers of the template are special tokens; the same characters inside the user's text are ordinary ones.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from talkoot.core.errors import TalkootError
from talkoot.model.tokenizer import Tokenizer

_PLACE = "\ue000the prompt\ue000"  # private-use characters: no template contains them


class ChatPrompt:
    """Text to ids with a model folder's chat template, or its begin token where there is none.

    Args:
        folder: of the model; transformers renders its template (in a sandbox).
        tokenizer: the folder's, as we read it.

    Raises:
        TalkootError: the template fails, or does not show the user's text exactly once.
    """

    def __init__(self, folder: Path, tokenizer: Tokenizer) -> None:
        from jinja2 import TemplateError
        from transformers import AutoTokenizer

        self._tokenizer = tokenizer
        theirs: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        if theirs.chat_template is None:
            first = theirs("a").input_ids[:1]
            self._before, self._after = first if first == [tokenizer.bos_id] else [], []
            self._head = self._tail = ""
            return
        turn = [{"role": "user", "content": _PLACE}]
        try:
            text = theirs.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
        except (TemplateError, ValueError, TypeError) as error:
            raise _unusable(folder, str(error)[:200]) from error
        if text.count(_PLACE) != 1:
            raise _unusable(folder, f"it shows the user's text {text.count(_PLACE)} times")
        before, after = text.split(_PLACE)
        markers = "|".join(re.escape(str(one)) for one in theirs.added_tokens_decoder.values())
        found = list(re.finditer(markers, before)) if markers else []
        behind = re.search(markers, after) if markers else None
        cut, end = found[-1].end() if found else 0, behind.start() if behind else len(after)
        # Ordinary characters around the text are encoded with it, as one piece, because tokens may reach across.
        self._before, self._head = tokenizer.encode(before[:cut], special=True), before[cut:]
        self._tail, self._after = after[:end], tokenizer.encode(after[end:], special=True)

    def __call__(self, prompt: str) -> list[int]:
        """Ids of the whole turn."""
        return [*self._before, *self._tokenizer.encode(self._head + prompt + self._tail), *self._after]


def _unusable(folder: Path, why: str) -> TalkootError:
    next = "correct or remove the chat template in the model's folder"
    return TalkootError("the chat template cannot be used", where=str(folder), why=why, next=next)
