"""A conversation as a model wants to read it: laid out by its folder's chat template, with an answer about to begin.

Templates are Jinja programs of strangers; they run in a sandbox with what transformers gives them, and so lay out the
same text. Markers of the template are special tokens; the same characters inside a message are ordinary ones.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from talkoot.core.errors import TalkootError
from talkoot.model.tokenizer import Tokenizer

Message = Mapping[str, str]  # role and content

_GUARD = "\ue000"  # in front of a stand-in for a marker that a message spells out; taken out of messages themselves
_FIRST = 0xF0000  # stand-ins: private-use characters, one per marker
_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token")


class Chat:
    """Conversations to ids, for one model.

    Args:
        tokenizer: the model's; holds the template. Without one, a lone message is a text to go on with, and
            several become a transcript.
        where: the model's folder, for messages.

    Raises:
        TalkootError: the template is no Jinja.
    """

    def __init__(self, tokenizer: Tokenizer, where: str = "the model's folder") -> None:
        self.tokenizer, self._where = tokenizer, where
        markers = sorted(tokenizer.markers, key=len, reverse=True)
        self._stand_ins = {marker: _GUARD + chr(_FIRST + number) for number, marker in enumerate(markers)}
        self._markers = re.compile("|".join(map(re.escape, markers)) or r"(?!)")
        text = _template(tokenizer)
        try:
            self._template = None if text is None else _environment().from_string(text)
        except TemplateError as error:
            raise self._unusable(str(error)) from error

    @property
    def templated(self) -> bool:
        """Whether the model brings a template."""
        return self._template is not None

    def ids(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of the conversation, up to where the answer begins.

        Raises:
            TalkootError: the template fails, or refuses these messages.
        """
        if self._template is None:
            return [*self.tokenizer.prefix, *self.tokenizer.encode(_transcript(messages))]
        masked = [{**one, "content": self._mask(one["content"])} for one in messages]
        text = self._render(masked)
        if _GUARD not in text:
            return self.tokenizer.encode(text, special=True)
        pieces, found = self._markers.split(text), [[self.tokenizer.markers[m]] for m in self._markers.findall(text)]
        plain = [self.tokenizer.encode(self._unmask(piece)) for piece in pieces]
        return list(chain.from_iterable(chain.from_iterable(zip(plain, [*found, []], strict=True))))

    def render(self, messages: Sequence[Message]) -> str:
        """The conversation as text; a marker that a message spells out looks like one here.

        Raises:
            TalkootError: as ``ids``.
        """
        return _transcript(messages) if self._template is None else self._render([dict(one) for one in messages])

    def _render(self, messages: list[dict[str, str]]) -> str:
        if self._template is None:
            return _transcript(messages)
        names = {role: _content(self.tokenizer.settings.get(role)) for role in _ROLES}
        try:  # templates ask whether tools are none, which a name that is missing would not be
            return self._template.render(
                messages=messages, tools=None, documents=None, add_generation_prompt=True, **names
            )
        except (TemplateError, ValueError, TypeError, LookupError, ArithmeticError, RecursionError) as error:
            raise self._unusable(str(error)) from error

    def _mask(self, content: str) -> str:
        return self._markers.sub(lambda found: self._stand_ins[found[0]], content.replace(_GUARD, ""))

    def _unmask(self, text: str) -> str:
        for marker, stand_in in self._stand_ins.items() if _GUARD in text else ():
            text = text.replace(stand_in, marker)
        return text

    def _unusable(self, why: str) -> TalkootError:
        return TalkootError(
            "the chat template cannot be used",
            where=self._where,
            why=why[:200],
            next="send messages in the order that the template allows, or correct it in the model's folder",
        )


def _template(tokenizer: Tokenizer) -> str | None:
    """The text beside the tokenizer, or, in older folders, the one in its settings: a text, or several by name."""
    found: Any = tokenizer.template or tokenizer.settings.get("chat_template")
    if isinstance(found, list):
        named = {one.get("name"): one.get("template") for one in found if isinstance(one, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else None


def _content(token: Any) -> str:
    return str(token.get("content", "")) if isinstance(token, dict) else token or ""


def _transcript(messages: Sequence[Message]) -> str:
    """A model without a template goes on with a text: who says what must stand in it, once there are several."""
    if len(messages) == 1:
        return messages[0]["content"]
    return "\n\n".join([*(f"{one['role']}: {one['content']}" for one in messages), "assistant:"])


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _raise, "strftime_now": _now}
    return environment


def _to_json(value: Any, indent: int | None = None, **_: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)
